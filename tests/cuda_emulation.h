// The functions of fast/kernels/cuda/ptx.cuh for a CPU. It is included before a kernel, in place of the PTX instructions.
//
// A CTA runs at a time. Its threads are fibers: one runs until it waits for its warp or for a barrier. The first warp, or the
// last one, runs ahead of the others as far as barriers permit, so a missing barrier shows as a wrong result. Asynchronous
// copies arrive as late as the program permits. Shared memory is NaN at first.
#pragma once
#define CANON_EMULATED
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <ucontext.h>
#include <vector>

using int64 = long long;
using uint32 = unsigned int;

struct Copy {
    uint32 target;
    const void* source;
    int bytes;  // 0: write zeros
    int size;
};

struct Fiber {
    int index;
    bool done = false, started = false;
    const unsigned* waits_for = nullptr;  // this counter must differ from `seen`
    unsigned seen = 0;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
    ucontext_t context;
    jmp_buf place;
    std::vector<char> stack = std::vector<char>(128 << 10);
};

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
};

struct Warp {
    Barrier barrier;
    uint32 words[2][32][8];  // operands of the lanes, in two buffers that alternate
    unsigned exchanges[32] = {};
};

struct Cta {
    int index;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::map<int, Barrier> barriers;
    std::vector<unsigned char> shared;
};

static Cta* cta;
static Fiber* fiber;
static jmp_buf scheduler;
static std::function<void()> body;

inline void fail(const char* reason) {
    std::fprintf(stderr, "thread %d of CTA %d: %s\n", fiber ? fiber->index : -1, cta->index, reason);
    std::abort();
}

// --- threads ---

inline int thread_index() { return fiber->index; }
inline int cta_index() { return cta->index; }
inline Warp& own_warp() { return cta->warps[fiber->index / 32]; }

__attribute__((noinline)) inline void wait_at(Barrier& barrier, int threads) {
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    fiber->waits_for = &barrier.generation;
    fiber->seen = barrier.generation;
    if (!_setjmp(fiber->place)) _longjmp(scheduler, 1);
}

inline void warp_barrier() { wait_at(own_warp().barrier, 32); }
inline void named_barrier(int barrier, int threads) { wait_at(cta->barriers[barrier], threads); }
inline void cta_barrier() { wait_at(cta->barriers[0], (int)cta->fibers.size()); }

// Exchange `count` words with the other lanes. Return the words of all lanes.
inline const uint32 (*exchange(const uint32* words, int count))[8] {
    Warp& warp = own_warp();
    int lane = fiber->index % 32;
    auto& buffer = warp.words[warp.exchanges[lane]++ % 2];
    std::memcpy(buffer[lane], words, 4 * count);
    warp_barrier();
    return buffer;
}

inline float as_float(uint32 bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint32 as_bits(float x) {
    uint32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

__attribute__((noinline)) inline float shuffle_xor(float x, int bits) {
    uint32 word = as_bits(x);
    return as_float(exchange(&word, 1)[(fiber->index % 32) ^ bits][0]);
}

__attribute__((noinline)) inline bool all_lanes(bool condition) {
    uint32 word = condition;
    auto words = exchange(&word, 1);
    for (int lane = 0; lane < 32; ++lane)
        if (!words[lane][0]) return false;
    return true;
}

// --- memory ---

inline uint32 shared_memory() { return 1024; }

inline void* shared(uint32 address, int bytes) {
    if (address < 1024 || address - 1024 + bytes > cta->shared.size()) fail("address outside shared memory");
    if (address % bytes) fail("misaligned address in shared memory");
    return cta->shared.data() + address - 1024;
}

inline void begin_copy(uint32 target, const void* source, bool valid, int size) {
    if (valid && (unsigned long long)source % size) fail("misaligned copy");
    shared(target, size);
    fiber->open.push_back({target, source, valid ? size : 0, size});
}

inline void copy_16_bytes(uint32 target, const void* source, bool valid) { begin_copy(target, source, valid, 16); }
inline void copy_4_bytes(uint32 target, const void* source, bool valid) { begin_copy(target, source, valid, 4); }

inline void close_copies() {
    fiber->groups.push_back(fiber->open);
    fiber->open.clear();
}

template <int NEWEST>
inline void wait_for_copies() {
    while ((int)fiber->groups.size() > NEWEST) {
        for (const Copy& copy : fiber->groups.front()) {
            std::memset(shared(copy.target, copy.size), 0, copy.size);
            std::memcpy(shared(copy.target, copy.size), copy.source, copy.bytes);
        }
        fiber->groups.pop_front();
    }
}

inline int read_constant(const int* source) { return *source; }
inline float read_constant(const float* source) { return *source; }

inline void read_constants(int (&x)[4], const int* source) {
    if ((unsigned long long)source % 16) fail("misaligned read");
    std::memcpy(x, source, 16);
}

inline void read_shared(float (&x)[2], uint32 address) { std::memcpy(x, shared(address, 8), 8); }
inline void read_shared(uint32 (&x)[4], uint32 address) { std::memcpy(x, shared(address, 16), 16); }
inline void write_shared(uint32 address, uint32 x) { std::memcpy(shared(address, 4), &x, 4); }
inline void write_shared(uint32 address, const uint32 (&x)[4]) { std::memcpy(shared(address, 16), x, 16); }

inline void write_global(void* target, const uint32 (&x)[4]) {
    if ((unsigned long long)target % 16) fail("misaligned write");
    std::memcpy(target, x, 16);
}

inline void write_global(void* target, float x, float y) {
    if ((unsigned long long)target % 8) fail("misaligned write");
    const float both[2] = {x, y};
    std::memcpy(target, both, 8);
}

// --- numbers ---

#if CANON_BF16
inline float unpack(uint32 pair) { return as_float(pair << 16); }

inline uint32 round_16(float x) {
    uint32 bits = as_bits(x);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
inline float unpack(uint32 pair) {
    _Float16 x;
    std::memcpy(&x, &pair, 2);
    return x;
}

inline uint32 round_16(float x) {
    _Float16 rounded = (_Float16)x;
    unsigned short bits;
    std::memcpy(&bits, &rounded, 2);
    return bits;
}
#endif

inline uint32 pack(float x, float y) { return round_16(x) | round_16(y) << 16; }
inline float power_of_2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }
inline float logarithm_2(float x) { return std::log2(x); }
inline float multiply_add(float x, float y, float z) { return std::fma(x, y, z); }
inline float larger(float x, float y) { return std::fmax(x, y); }
inline float infinity() { return INFINITY; }
inline float not_a_number() { return NAN; }

// --- matrices ---

__attribute__((noinline)) inline void load_four(uint32 (&x)[4], uint32 address, bool transposed) {
    shared(address, 16);
    auto words = exchange(&address, 1);
    int lane = fiber->index % 32, g = lane / 4, t = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
        unsigned short pair[2];
        for (int e = 0; e < 2; ++e) {
            int row = transposed ? t + e : g, column = transposed ? g : t + e;
            std::memcpy(pair + e, shared(words[8 * i + row][0] + 2 * column, 2), 2);
        }
        x[i] = pair[0] | (uint32)pair[1] << 16;
    }
}

inline void load_matrices(uint32 (&x)[4], uint32 address) { load_four(x, address, false); }
inline void load_transposed_matrices(uint32 (&x)[4], uint32 address) { load_four(x, address, true); }

__attribute__((noinline)) inline void mma(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    const uint32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    auto lanes = exchange(words, 6);
    int lane = fiber->index % 32, g = lane / 4, t = lane % 4;
    for (int t2 = 0; t2 < 4; ++t2)
        for (int high = 0; high < 2; ++high) {  // columns 2 t2 + 8 high and the next one of A
            const uint32* left = lanes[4 * g + t2];
            for (int e = 0; e < 2; ++e)
                for (int half = 0; half < 2; ++half)
                    for (int column = 0; column < 2; ++column) {
                        uint32 right = lanes[4 * (2 * t + column) + t2][4 + high];
                        c[2 * half + column] += unpack(left[2 * high + half] >> 16 * e) * unpack(right >> 16 * e);
                    }
        }
}

// --- launch ---

inline void enter_fiber() {
    body();
    fiber->done = true;
    _longjmp(scheduler, 1);
}

// Run the fiber until it waits.
inline void resume(Fiber& next) {
    fiber = &next;
    next.waits_for = nullptr;
    if (!_setjmp(scheduler)) {
        if (next.started) _longjmp(next.place, 1);
        next.started = true;
        getcontext(&next.context);
        next.context.uc_stack.ss_sp = next.stack.data();
        next.context.uc_stack.ss_size = next.stack.size();
        next.context.uc_link = nullptr;
        makecontext(&next.context, enter_fiber, 0);
        setcontext(&next.context);
    }
}

// Run the lanes of one warp until all wait for other warps. Return whether one of them ran.
inline bool run_warp(int warp) {
    bool any = false;
    for (bool progress = true; progress;) {
        progress = false;
        for (int lane = 0; lane < 32; ++lane) {
            Fiber& next = cta->fibers[32 * warp + lane];
            if (next.done || (next.waits_for && *next.waits_for == next.seen)) continue;
            resume(next);
            any = progress = true;
        }
    }
    return any;
}

// Run `kernel` in a grid of CTAs. The last warps run first if `backwards`.
inline void launch(const std::function<void()>& kernel, int ctas, int threads, int shared_bytes, bool backwards) {
    body = kernel;
    for (int index = 0; index < ctas; ++index) {
        Cta current;
        cta = &current;
        current.index = index;
        current.fibers.resize(threads);
        current.warps.resize(threads / 32);
        current.shared.assign(shared_bytes, 0xff);
        for (int i = 0; i < threads; ++i) current.fibers[i].index = i;
        for (bool progress = true; progress;) {
            progress = false;
            for (int i = 0; i < threads / 32 && !progress; ++i) progress = run_warp(backwards ? threads / 32 - 1 - i : i);
        }
        for (const Fiber& each : current.fibers) {
            fiber = &current.fibers[each.index];
            if (!each.done) fail("waits for ever at a barrier");
            if (!each.open.empty() || !each.groups.empty()) fail("ends with copies in flight");
        }
    }
}
