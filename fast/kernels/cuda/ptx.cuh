// All PTX instructions of the kernels, one function each; src/canon/testing/cuda_emulation.h defines them for a CPU.
//
// Shared memory has 32-bit byte addresses. A 32-bit register holds two 16-bit values, the first in the lower half.
#pragma once

#ifdef CANON_EMULATED
#define DEVICE inline
#else
#define DEVICE __device__ __forceinline__

using int64 = long long;
using uint32 = unsigned int;

// --- threads ---

// The mask proves that no index is negative, so divisions become shifts.
DEVICE int thread_index() { return threadIdx.x & 1023; }

// Read again, so that the first one needs no register meanwhile.
DEVICE int thread_index_again() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index & 1023;
}

DEVICE int cta_index() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

// Wait for all threads of the CTA, and see their earlier writes to shared memory.
DEVICE void cta_barrier() { __syncthreads(); }

// Wait until `threads` threads (whole warps, this one included) have arrived. Barrier 0 is `cta_barrier`.
DEVICE void wait_at_barrier(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrive without waiting. Waiting threads see this one's earlier writes.
DEVICE void arrive_at_barrier(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEVICE void warp_barrier() { __syncwarp(); }

// Return x of the lane whose index differs in `bits`.
DEVICE float shuffle_xor(float x, int bits) { return __shfl_xor_sync(0xffffffffu, x, bits); }

DEVICE bool all_lanes(bool condition) { return __all_sync(0xffffffffu, condition); }

// --- memory ---

// Return the address of the dynamic shared memory, a multiple of 1024.
DEVICE uint32 shared_memory() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    unsigned long long address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(dynamic_shared));
    return (uint32)address;
}

// Begin to copy 16 bytes from global to shared memory, or write zeros if not `valid`, without reading `source`.
DEVICE void copy_16_bytes(uint32 target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
                 : "memory");
}

DEVICE void copy_4_bytes(uint32 target, const void* source, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(valid ? 4 : 0)
                 : "memory");
}

// Close the group of copies since the last group.
DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for all but the newest NEWEST groups of this thread. Other threads see them after a barrier.
template <int NEWEST>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
}

// Read one or four numbers that no kernel in flight writes.
DEVICE int read_constant(const int* source) {
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(source));
    return x;
}

DEVICE float read_constant(const float* source) { return __ldg(source); }

DEVICE void read_constants(int (&x)[4], const int* source) {
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(source));
}

DEVICE void read_shared(float (&x)[2], uint32 address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}

DEVICE void read_shared(int (&x)[2], uint32 address) {
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
}

DEVICE void read_shared(uint32 (&x)[4], uint32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

DEVICE void write_shared(uint32 address, uint32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

DEVICE void write_shared(uint32 address, const uint32 (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Write 16 or 8 bytes to an address that is a multiple of that.
DEVICE void write_global(void* target, const uint32 (&x)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

DEVICE void write_global(void* target, float x, float y) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(x), "f"(y) : "memory");
}

// --- matrices ---

// Load four 8 x 8 matrices of 16-bit elements. Lane 8 i + r gives the address of row r of matrix i, 16 bytes. Lane l receives
// in x[i] the elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1).
DEVICE void load_matrices(uint32 (&x)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// The same, transposed: lane l receives (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
DEVICE void load_transposed_matrices(uint32 (&x)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

#if CANON_BF16
#define CANON_MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#define CANON_PACK "cvt.rn.bf16x2.f32 "
#else
#define CANON_MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#define CANON_PACK "cvt.rn.f16x2.f32 "
#endif

// c (16 x 8) += a (16 x 16) b (16 x 8). Fragments: mma.cuh.
DEVICE void mma(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm(CANON_MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- numbers ---

// Return x (lower half) and y, rounded to 16 bits.
DEVICE uint32 pack(float x, float y) {
    uint32 pair;
    asm(CANON_PACK "%0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

// Return the 16-bit number in the lower half.
DEVICE float unpack(uint32 pair) {
    float x;
#if CANON_BF16
    x = __uint_as_float(pair << 16);
#else
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(x) : "r"(pair));
#endif
    return x;
}

// Return 2^x. Subnormal results are 0; 2^-inf is 0.
DEVICE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float logarithm_2(float x) { return log2f(x); }

DEVICE float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }

DEVICE float larger(float x, float y) { return fmaxf(x, y); }

DEVICE float infinity() { return __int_as_float(0x7f800000); }

DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }

#endif  // CANON_EMULATED
