// The forward kernel: one CTA for each (tile of queries, head) keeps a running softmax over its visited tiles of keys.
//
// Each warp owns WARP_ROWS queries. For each tile of keys it computes
//
//     s = q k^T       m = max(m, rowmax(scale s))       p = exp2(scale s - m)       l = shrink l + rowsum(p)
//     out = shrink out + p v,       with shrink = exp2(old m - m)
//
// scale contains log2(e), so the exponent of p is one FMA. s, p and out stay in registers. k and v pass through STAGES buffers:
//
//     wait for tile j | barrier | begin to load tile j + STAGES - 1 | compute tile j
//
// After the barrier all warps see the loads of all threads, and have finished tile j - 1, whose buffer is loaded next.
//
// Source: Tri Dao, FlashAttention-2 (2023), algorithm 1 (https://arxiv.org/abs/2307.08691).
#include "masking.cuh"

static_assert(PARTS == 1, "a warp of the forward kernel owns whole rows");

constexpr int Q_BYTES = ROWS * (D > DV ? D : DV) * ELEMENT_BYTES;  // later the staging area of out
constexpr int K_BYTES = COLUMNS * D * ELEMENT_BYTES;
constexpr int STAGE_BYTES = K_BYTES + COLUMNS * DV * ELEMENT_BYTES;
constexpr bool Q_IN_REGISTERS = M * D <= 128;
constexpr float LARGEST_MAXIMUM = 16777216.0f;  // 2^24: above, the rounding error of a maximum exceeds 1/2

using Scores = Accumulator<COLUMNS / 8>;
using Output = Accumulator<DV / 8>;

// Maximum (scaled, base 2) and sum of a lane's rows. Until the end, a sum covers only this lane's columns.
struct RowState {
    float maximum[M][2], sum[M][2];
};

// Return the sum or maximum over the 4 lanes that share a row.
DEVICE float row_maximum(float x) {
    x = larger(x, shuffle_xor(x, 1));
    return larger(x, shuffle_xor(x, 2));
}

DEVICE float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// Replace the scores of a row by its probabilities. Return the factor for the earlier sum and output.
DEVICE float row_softmax(float (&s)[COLUMNS / 8][4], int half, float& maximum, float& sum, float scale) {
    float largest = s[0][2 * half];
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) largest = larger(largest, larger(s[n][2 * half], s[n][2 * half + 1]));
    float after = larger(maximum, row_maximum(largest) * scale);
    float used = after;
    if (after == -infinity()) used = 0.0f;  // no visible key so far: -inf - -inf is NaN
    float shrink = power_of_2(maximum - used);
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s[n][e] = power_of_2(multiply_add(s[n][e], scale, -used));
            total += s[n][e];
        }
    maximum = after;
    sum = multiply_add(sum, shrink, total);
    return shrink;
}

// Add one tile of keys with scores `s` to the running softmax.
DEVICE void softmax_step(Scores& s, RowState& rows, Output& out, const SharedTile<DV>& v, float scale) {
    float shrink[M][2];
    bool unchanged = true;
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            shrink[i][half] = row_softmax(s.x[i], half, rows.maximum[i][half], rows.sum[i][half], scale);
            unchanged &= shrink[i][half] == 1.0f;
        }
    if (!all_lanes(unchanged))  // late tiles seldom have a new maximum
        out.each([&](float& x, int i, int, int e) { x *= shrink[i][e / 2]; });
    RegisterOperand<COLUMNS / 16> p;
    p.round(s);
    multiply<COLUMNS>(out, p, v);
}

// Multiply the queries by `sign`, because the maximum needs a scale of at least 0.
DEVICE void apply_sign(uint32 tile, float sign) {
    cta_barrier();
    for (int i = thread_index(); i < ROWS * D / 8; i += THREADS) {
        uint32 pairs[4];
        read_shared(pairs, tile + 16 * i);
#pragma unroll
        for (int e = 0; e < 4; ++e) pairs[e] = pack(unpack(pairs[e]) * sign, unpack(pairs[e] >> 16) * sign);
        write_shared(tile + 16 * i, pairs);
    }
}

// Divide by the sums, and write out and lse. Fully masked rows get 0 and -inf, rows with numbers out of range NaN.
DEVICE void finish(Output& out, RowState& rows, const ForwardParams& p, const WorkTile& tile, uint32 shared, int warp) {
    int lane = thread_index_again() % 32, first = tile.start + warp * WARP_ROWS;
    float* lse = p.lse + tile.batch * p.lse_strides.batch + tile.head * p.lse_strides.head;
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float m = rows.maximum[i][half], l = row_sum(rows.sum[i][half]);
            bool fully_masked = l == 0.0f && m == -infinity();
            bool in_range = m <= LARGEST_MAXIMUM && m >= -LARGEST_MAXIMUM && l > 0.0f && l < infinity();
            float inverse = fully_masked ? 0.0f : in_range ? 1.0f / l : not_a_number();
            float natural = fully_masked ? -infinity() : in_range ? (m + logarithm_2(l)) * LN_2 : not_a_number();
            int row = first + 16 * i + 8 * half + lane / 4;
            if (lane % 4 == 0 && row < tile.stop) lse[row] = natural;
#pragma unroll
            for (int n = 0; n < DV / 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e)  // v of invisible keys may be NaN
                    out.x[i][n][e] = fully_masked ? 0.0f : out.x[i][n][e] * inverse;
        }
    Result* target = p.out + tile.batch * p.out_strides.batch + first * p.out_strides.token + tile.head * p.out_strides.head;
    cta_barrier();  // the staging area is the memory of q
    uint32 staging = shared + warp * WARP_ROWS * DV * ELEMENT_BYTES;
    write_rows<DV / 16>(out.x, staging, target, p.out_strides.token, tile.stop - first, DV, lane);
}

// Write out (b, t, h, dv) and natural lse (b, h, t).
extern "C" __global__ void __launch_bounds__(THREADS, CANON_CTAS) canon_forward(const __grid_constant__ ForwardParams p) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    const uint32 shared = shared_memory(), stages = shared + Q_BYTES;
    const Visits visits = {stages + STAGES * STAGE_BYTES};
    const WorkTile tile = cta_work_tile(p.tiles, p.tile_count, p.heads, p.l2_heads);
    const int key_head = tile.head / p.group;
    const Element* q = p.q + tile.batch * p.q_strides.batch + tile.head * p.q_strides.head;
    const Element* k = p.k + tile.batch * p.k_strides.batch + key_head * p.k_strides.head;
    const Element* v = p.v + tile.batch * p.v_strides.batch + key_head * p.v_strides.head;

    auto load_stage = [&](int stage, int slot) {
        const Visit visit = visits.read_all(slot);
        if (visit.span < tile.end) {
            uint32 target = stages + stage * STAGE_BYTES;
            load_tile<COLUMNS, D>(target, k, p.k_strides.token, visit.column, visit.band_start, visit.band_stop);
            load_tile<COLUMNS, DV>(target + K_BYTES, v, p.v_strides.token, visit.column, visit.band_start, visit.band_stop);
        }
        close_copies();  // even an empty group: `wait_for_copies` counts groups
    };

    load_tile<ROWS, D>(shared, q, p.q_strides.token, tile.start, tile.start, tile.stop);
    close_copies();
    visits.begin(tile, p.spans, 1);
    cta_barrier();
    for (int stage = 0; stage < STAGES - 1; ++stage) load_stage(stage, stage);
    wait_for_copies<STAGES - 1>();
    if (p.sign != 1) apply_sign(shared, (float)p.sign);

    SharedOperand<D> q_shared(shared, warp * WARP_ROWS, lane);
    RegisterOperand<Q_IN_REGISTERS ? D / 16 : 1> q_registers;
    if constexpr (Q_IN_REGISTERS) {
        cta_barrier();
        q_registers.load(q_shared);
    }
    RowState rows;
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) rows.maximum[i][half] = -infinity(), rows.sum[i][half] = 0.0f;
    Output out;
    out.clear();

    for (int stage = 0, slot = 0;; stage = stage + 1 == STAGES ? 0 : stage + 1, slot = Visits::following(slot)) {
        wait_for_copies<STAGES - 2>();
        cta_barrier();
        const Visit visit = visits.read(slot);
        if (visit.span >= tile.end) break;
        const bool is_partial = visit.span < tile.full;
        const int newest = slot < 2 ? slot + STAGES - 1 : slot - 2;  // the visit of tile j + STAGES - 1
        load_stage(stage == 0 ? STAGES - 1 : stage - 1, newest);
        visits.proceed(newest, tile, p.spans, 1);
        const SharedTile<D> k_tile(stages + stage * STAGE_BYTES, by_columns(lane));
        const SharedTile<DV> v_tile(stages + stage * STAGE_BYTES + K_BYTES, lane);
        const int row = tile.start + warp * WARP_ROWS;
        if (is_partial && Visible(p.spans, visit, row, lane).none()) continue;
        Scores s;
        s.clear();
        if constexpr (Q_IN_REGISTERS)
            multiply_transposed(s, q_registers, k_tile);
        else
            multiply_transposed(s, q_shared, k_tile);
        if (is_partial) hide(s, Visible(p.spans, visit, row, lane), 0, -infinity());
        softmax_step(s, rows, out, v_tile, p.scale_log2);
    }
    wait_for_copies<0>();
    finish(out, rows, p, tile, shared, warp);
}
