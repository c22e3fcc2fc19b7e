// Threads of a CTA as fibers, for cuda_emulation.h.
//
// One CTA runs at a time. A fiber runs until it waits for its warp or for a barrier. The first warp, or the last one, runs
// ahead of the others as far as barriers permit, so a missing barrier shows as a wrong result. Asynchronous copies arrive as
// late as the program permits. Shared memory is NaN at first. A race in shared memory is a fault: cuda_races.h.
#include <ucontext.h>

#include <csetjmp>
#include <cstdio>
#include <deque>
#include <map>
#include <vector>

#define CANON_BF16 0  // of the inline functions of the header: not used here
#include "cuda_emulation.h"
#include "cuda_races.h"

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
    Clock arriving, arrived_before;  // of this generation so far, and of the last complete one
};

struct Warp {
    Barrier barrier, meeting;  // the second one exchanges registers and orders no memory
    uint32 words[2][32][8];  // operands of the lanes, in two buffers that alternate
    unsigned exchanges[32] = {};
};

struct Cta {
    int index;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::map<int, Barrier> barriers;
    std::vector<unsigned char> shared;
    std::vector<Races> races;  // one
};

constexpr int SWITCHES = 3000000;  // of the fibers of a CTA: more than any test needs

static Cta* cta;
static Fiber* fiber;
static jmp_buf scheduler, failed;
static void (*body)(const void*);
static const void* argument;
static char message[200];
static int switches;

[[noreturn]] static void fail(const char* reason) {
    std::snprintf(message, sizeof message, "thread %d of CTA %d: %s", fiber->index, cta->index, reason);
    _longjmp(failed, 1);
}

// --- threads ---

int thread_index() { return fiber->index; }
int cta_index() { return cta->index; }
static Warp& own_warp() { return cta->warps[fiber->index / 32]; }

static Races& races() { return cta->races[0]; }
static Clock& own_clock() { return races().clocks[fiber->index]; }

// Return whether this is the last one of `threads` threads. A barrier that orders memory takes the clock of each.
static bool arrive_at(Barrier& barrier, int threads, bool orders = true) {
    if (orders) {
        join(barrier.arriving, own_clock());
        ++own_clock()[fiber->index];
    }
    if (++barrier.arrived < threads) return false;
    barrier.arrived = 0;
    barrier.arrived_before.swap(barrier.arriving);
    barrier.arriving.clear();
    ++barrier.generation;
    return true;
}

static void wait_at(Barrier& barrier, int threads, bool orders = true) {
    if (!arrive_at(barrier, threads, orders)) {
        fiber->waits_for = &barrier.generation;
        fiber->seen = barrier.generation;
        if (!_setjmp(fiber->place)) _longjmp(scheduler, 1);
    }
    if (orders) join(own_clock(), barrier.arrived_before);
}

void warp_barrier() { wait_at(own_warp().barrier, 32); }
void wait_at_barrier(int barrier, int threads) { wait_at(cta->barriers[barrier], threads); }
void arrive_at_barrier(int barrier, int threads) { arrive_at(cta->barriers[barrier], threads); }
void cta_barrier() { wait_at(cta->barriers[0], (int)cta->fibers.size()); }

// Exchange `count` words with the other lanes. Return the words of all lanes.
static const uint32 (*exchange(const uint32* words, int count))[8] {
    Warp& warp = own_warp();
    int lane = fiber->index % 32;
    auto& buffer = warp.words[warp.exchanges[lane]++ % 2];
    memcpy(buffer[lane], words, 4 * count);
    wait_at(warp.meeting, 32, false);
    return buffer;
}

static float as_float(uint32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static uint32 as_bits(float x) {
    uint32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}

float shuffle_xor(float x, int bits) {
    uint32 word = as_bits(x);
    return as_float(exchange(&word, 1)[(fiber->index % 32) ^ bits][0]);
}

bool all_lanes(bool condition) {
    uint32 word = condition;
    auto words = exchange(&word, 1);
    for (int lane = 0; lane < 32; ++lane)
        if (!words[lane][0]) return false;
    return true;
}

// --- memory ---

static void* shared(uint32 address, int bytes) {
    if (address < 1024 || address - 1024 + bytes > cta->shared.size()) fail("address outside shared memory");
    if (address % bytes) fail("misaligned address in shared memory");
    return cta->shared.data() + address - 1024;
}

const void* shared_source(uint32 address, int bytes) {
    void* memory = shared(address, bytes);
    if (const char* fault = races().read(fiber->index, address - 1024, bytes)) fail(fault);
    return memory;
}

void* shared_target(uint32 address, int bytes) {
    void* memory = shared(address, bytes);
    if (const char* fault = races().write(fiber->index, address - 1024, bytes)) fail(fault);
    return memory;
}

const void* checked(const void* source, int size) {
    if ((unsigned long long)source % size) fail("misaligned address in global memory");
    return source;
}

void begin_copy(uint32 target, const void* source, bool valid, int size) {
    shared(target, size);
    if (const char* fault = races().begin_copy(fiber->index, target - 1024, size)) fail(fault);
    fiber->open.push_back({target, valid ? checked(source, size) : source, valid ? size : 0, size});
}

void close_copies() {
    fiber->groups.push_back(fiber->open);
    fiber->open.clear();
}

void wait_for_groups(int newest) {
    while ((int)fiber->groups.size() > newest) {
        for (const Copy& copy : fiber->groups.front()) {
            memset(shared(copy.target, copy.size), 0, copy.size);
            memcpy(shared(copy.target, copy.size), copy.source, copy.bytes);
            races().end_copy(fiber->index, copy.target - 1024, copy.size);
        }
        fiber->groups.pop_front();
    }
}

// --- numbers and matrices ---

float unpack_16(uint32 pair, bool bf16) {
    if (bf16) return as_float(pair << 16);
    _Float16 x;
    memcpy(&x, &pair, 2);
    return x;
}

uint32 round_16(float x, bool bf16) {
    unsigned short half;
    if (!bf16) {
        _Float16 rounded = (_Float16)x;
        memcpy(&half, &rounded, 2);
        return half;
    }
    uint32 bits = as_bits(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

void load_four(uint32 (&x)[4], uint32 address, bool transposed) {
    shared(address, 16);
    auto words = exchange(&address, 1);
    int lane = fiber->index % 32, g = lane / 4, t = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
        unsigned short pair[2];
        for (int e = 0; e < 2; ++e) {
            int row = transposed ? t + e : g, column = transposed ? g : t + e;
            memcpy(pair + e, shared_source(words[8 * i + row][0] + 2 * column, 2), 2);
        }
        x[i] = pair[0] | (uint32)pair[1] << 16;
    }
}

void mma_16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, bool bf16) {
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
                        float x = unpack_16(left[2 * high + half] >> 16 * e, bf16);
                        c[2 * half + column] += x * unpack_16(right >> 16 * e, bf16);
                    }
        }
}

// --- launch ---

static void enter_fiber() {
    body(argument);
    fiber->done = true;
    _longjmp(scheduler, 1);
}

// Run the fiber until it waits.
static void resume(Fiber& next) {
    fiber = &next;
    next.waits_for = nullptr;
    if (++switches > SWITCHES) fail("runs for ever");
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
static bool run_warp(int warp) {
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

static void run_cta(int threads, int shared_bytes, bool backwards) {
    cta->fibers.resize(threads);
    cta->warps.resize(threads / 32);
    cta->shared.assign(shared_bytes, 0xff);
    cta->races.emplace_back(threads, shared_bytes);
    switches = 0;
    for (int i = 0; i < threads; ++i) cta->fibers[i].index = i;
    for (bool progress = true; progress;) {
        progress = false;
        for (int i = 0; i < threads / 32 && !progress; ++i) progress = run_warp(backwards ? threads / 32 - 1 - i : i);
    }
    for (Fiber& each : cta->fibers) {
        fiber = &each;
        if (!each.done) fail("waits for ever at a barrier");
        if (!each.open.empty() || !each.groups.empty()) fail("ends with copies in flight");
    }
}

const char* launch(void (*kernel)(const void*), const void* p, int ctas, int threads, int shared_bytes, bool backwards) {
    body = kernel;
    argument = p;
    Cta current;
    cta = &current;
    if (_setjmp(failed)) return message;
    for (int index = 0; index < ctas; ++index) {
        current = Cta();
        current.index = index;
        run_cta(threads, shared_bytes, backwards);
    }
    return nullptr;
}
