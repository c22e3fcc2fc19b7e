// The functions of fast/kernels/cuda/ptx.cuh for a CPU. It is included before a kernel, in place of the PTX instructions.
// cuda_emulation.cpp runs the threads, and does the work of a warp.
#pragma once
#define CANON_EMULATED
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

#include <math.h>
#include <string.h>

using int64 = long long;
using uint32 = unsigned int;

// --- cuda_emulation.cpp ---

int thread_index();
int cta_index();
void cta_barrier();
void wait_at_barrier(int barrier, int threads);
void arrive_at_barrier(int barrier, int threads);
void warp_barrier();
float shuffle_xor(float x, int bits);
bool all_lanes(bool condition);
const void* shared_source(uint32 address, int bytes);  // the memory of an address, checked
void* shared_target(uint32 address, int bytes);
const void* checked(const void* source, int size);  // the address, if it is a multiple of `size`
void begin_copy(uint32 target, const void* source, bool valid, int size);
void close_copies();
void wait_for_groups(int newest);
float unpack_16(uint32 pair, bool bf16);
uint32 round_16(float x, bool bf16);
void load_four(uint32 (&x)[4], uint32 address, bool transposed);
void mma_16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, bool bf16);

// --- the functions of ptx.cuh ---

inline int thread_index_again() { return thread_index(); }

inline uint32 shared_memory() { return 1024; }
inline void copy_16_bytes(uint32 target, const void* source, bool valid) { begin_copy(target, source, valid, 16); }
inline void copy_4_bytes(uint32 target, const void* source, bool valid) { begin_copy(target, source, valid, 4); }

template <int NEWEST>
inline void wait_for_copies() {
    wait_for_groups(NEWEST);
}

inline int read_constant(const int* source) { return *source; }
inline float read_constant(const float* source) { return *source; }
inline void read_constants(int (&x)[4], const int* source) { memcpy(x, checked(source, 16), 16); }
inline void read_shared(float (&x)[2], uint32 address) { memcpy(x, shared_source(address, 8), 8); }
inline void read_shared(int (&x)[2], uint32 address) { memcpy(x, shared_source(address, 8), 8); }
inline void read_shared(uint32 (&x)[4], uint32 address) { memcpy(x, shared_source(address, 16), 16); }
inline void write_shared(uint32 address, uint32 x) { memcpy(shared_target(address, 4), &x, 4); }
inline void write_shared(uint32 address, const uint32 (&x)[4]) { memcpy(shared_target(address, 16), x, 16); }
inline void write_global(void* target, const uint32 (&x)[4]) { memcpy((void*)checked(target, 16), x, 16); }

inline void write_global(void* target, float x, float y) {
    const float both[2] = {x, y};
    memcpy((void*)checked(target, 8), both, 8);
}

inline float unpack(uint32 pair) { return unpack_16(pair, CANON_BF16); }
inline uint32 pack(float x, float y) { return round_16(x, CANON_BF16) | round_16(y, CANON_BF16) << 16; }
inline float power_of_2(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
inline float logarithm_2(float x) { return log2f(x); }
inline float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
inline float larger(float x, float y) { return fmaxf(x, y); }
inline float infinity() { return INFINITY; }
inline float not_a_number() { return NAN; }

inline void load_matrices(uint32 (&x)[4], uint32 address) { load_four(x, address, false); }
inline void load_transposed_matrices(uint32 (&x)[4], uint32 address) { load_four(x, address, true); }

inline void mma(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) { mma_16(c, a, b0, b1, CANON_BF16); }

// Run `kernel` in a grid of CTAs. The last warps run first if `backwards`. Return null, or a fault of the kernel.
const char* launch(void (*kernel)(const void*), const void* p, int ctas, int threads, int shared_bytes, bool backwards);
