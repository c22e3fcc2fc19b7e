// The dq kernel: one CTA for each (tile of queries, head), three products for each tile of keys.
//
// With p = exp(s - lse) and delta = rowsum(dout * out) - dlse, each tile of keys adds
//
//     s = scale q k^T      dp = dout v^T      ds = p * (dp - delta)      dq += scale ds k
//
// One tile of k serves both products: as columns in q k^T, as rows in ds k. PARTS > 1: see dkdv.cu.
//
// Sources: Tri Dao, FlashAttention-2 (2023), algorithm 2 (https://arxiv.org/abs/2307.08691). A kernel without atomics for dq:
// jax-ml/jax-triton, pull request 177.
#include "masking.cuh"

constexpr int Q_BYTES = ROWS * D * ELEMENT_BYTES;
constexpr int DOUT_BYTES = ROWS * DV * ELEMENT_BYTES;
constexpr int K_BYTES = COLUMNS * D * ELEMENT_BYTES;
constexpr int STAGE_BYTES = K_BYTES + COLUMNS * DV * ELEMENT_BYTES;
constexpr int EXCHANGE_BYTES = ROWS * COLUMNS * ELEMENT_BYTES;  // ds
constexpr int PART_COLUMNS = COLUMNS / PARTS;
constexpr int DQ_BLOCKS = (D / 16 + PARTS - 1) / PARTS;   // of 16 columns: the part of a warp
constexpr bool OWNED_IN_REGISTERS = M * (D + DV) <= 128;  // fragments of q and dout

static_assert(PART_COLUMNS % 16 == 0, "a warp loads 16 keys at a time");

using Scores = Accumulator<PART_COLUMNS / 8>;

// lse log2(e) and delta of a lane's rows, 0 from `stop` on.
struct RowStatistics {
    float lse[M][2], delta[M][2];

    DEVICE RowStatistics(const float* lse_head, const float* delta_head, int row, int stop) {
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int at = row + 16 * i + 8 * half + thread_index() % 32 / 4;
                lse[i][half] = at < stop ? base_2(read_constant(lse_head + at)) : 0.0f;
                delta[i][half] = at < stop ? read_constant(delta_head + at) : 0.0f;
            }
    }
};

// Replace dp by ds = p * (dp - delta), with p = exp2(scale_log2 s - lse log2(e)).
DEVICE void differentiate(Scores& dp, const Scores& s, const RowStatistics& rows, float scale_log2) {
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
        for (int n = 0; n < PART_COLUMNS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float p = power_of_2(multiply_add(s.x[i][n][e], scale_log2, -rows.lse[i][e / 2]));
                dp.x[i][n][e] = p * (dp.x[i][n][e] - rows.delta[i][e / 2]);
            }
}

// Write dq (b, t, h, d). Fully masked rows get 0.
extern "C" __global__ void __launch_bounds__(THREADS, CANON_CTAS) canon_dq(const __grid_constant__ DqParams p) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    const int own_row = warp / PARTS * WARP_ROWS, part = warp % PARTS, own_column = part * PART_COLUMNS;
    const uint32 shared = shared_memory(), exchange = shared + Q_BYTES + DOUT_BYTES;
    const uint32 stages = exchange + (PARTS > 1 ? EXCHANGE_BYTES : 0);
    const Visits visits = {stages + STAGES * STAGE_BYTES};
    const WorkTile tile = cta_work_tile(p.tiles, p.tile_count, p.heads, p.l2_heads);
    const int key_head = tile.head / p.group;
    const Element* q = p.q + tile.batch * p.q_strides.batch + tile.head * p.q_strides.head;
    const Element* dout = p.dout + tile.batch * p.dout_strides.batch + tile.head * p.dout_strides.head;
    const int64 statistics = tile.batch * p.statistic_strides.batch + tile.head * p.statistic_strides.head;

    auto load_stage = [&](int stage, int slot) {
        const Visit visit = visits.read_all(slot);
        if (visit.span < tile.end) {
            const Element* k = p.k + tile.batch * p.k_strides.batch + key_head * p.k_strides.head;
            const Element* v = p.v + tile.batch * p.v_strides.batch + key_head * p.v_strides.head;
            uint32 target = stages + stage * STAGE_BYTES;
            load_tile<COLUMNS, D>(target, k, p.k_strides.token, visit.column, visit.band_start, visit.band_stop);
            load_tile<COLUMNS, DV>(target + K_BYTES, v, p.v_strides.token, visit.column, visit.band_start, visit.band_stop);
        }
        close_copies();  // even an empty group: `wait_for_copies` counts groups
    };

    load_tile<ROWS, D>(shared, q, p.q_strides.token, tile.start, tile.start, tile.stop);
    load_tile<ROWS, DV>(shared + Q_BYTES, dout, p.dout_strides.token, tile.start, tile.start, tile.stop);
    close_copies();
    visits.begin(tile, p.spans, 1);
    cta_barrier();
    for (int stage = 0; stage < STAGES - 1; ++stage) load_stage(stage, stage);
    const int row = tile.start + own_row;
    const RowStatistics rows(p.lse + statistics, p.delta + statistics, row, tile.stop);

    const SharedOperand<D> q_shared(shared, own_row, lane);
    const SharedOperand<DV> dout_shared(shared + Q_BYTES, own_row, lane);
    RegisterOperand<OWNED_IN_REGISTERS ? D / 16 : 1> q_registers;
    RegisterOperand<OWNED_IN_REGISTERS ? DV / 16 : 1> dout_registers;
    if constexpr (OWNED_IN_REGISTERS) {
        wait_for_copies<STAGES - 1>();
        cta_barrier();
        q_registers.load(q_shared);
        dout_registers.load(dout_shared);
    }
    Accumulator<2 * DQ_BLOCKS> dq;
    dq.clear();

    for (int stage = 0, slot = 0;; stage = stage + 1 == STAGES ? 0 : stage + 1, slot = Visits::following(slot)) {
        wait_for_copies<STAGES - 2>();
        cta_barrier();
        const Visit visit = visits.read(slot);
        if (visit.span >= tile.end) break;
        const bool is_partial = visit.span < tile.full;
        const int newest = slot < 2 ? slot + STAGES - 1 : slot - 2;  // the visit of tile j + STAGES - 1
        load_stage(stage == 0 ? STAGES - 1 : stage - 1, newest);
        visits.proceed(newest, tile, p.spans, 1);
        if (is_partial && Visible(p.spans, visit, row, lane).none()) continue;
        const uint32 k_address = stages + stage * STAGE_BYTES;
        const SharedTile<D> k_rows(k_address, lane), k_columns(k_address, by_columns(lane));
        const SharedTile<DV> v_columns(k_address + K_BYTES, by_columns(lane));
        Scores s, ds;
        s.clear();
        ds.clear();
        if constexpr (OWNED_IN_REGISTERS) {
            multiply_transposed(s, q_registers, k_columns, own_column);
            multiply_transposed(ds, dout_registers, v_columns, own_column);
        } else {
            multiply_transposed(s, q_shared, k_columns, own_column);
            multiply_transposed(ds, dout_shared, v_columns, own_column);
        }
        differentiate(ds, s, rows, p.scale * LOG2_E);
        if (is_partial) hide(ds, Visible(p.spans, visit, row, lane), own_column, 0.0f);
        RegisterOperand<PART_COLUMNS / 16> own;
        own.round(ds);
        if constexpr (PARTS > 1) {
            own.write<COLUMNS>(exchange, own_row, own_column / 16);
            publish_part(warp);
        }
        multiply<PART_COLUMNS>(dq, own, k_rows, part * DQ_BLOCKS, own_column);
        if constexpr (PARTS > 1) {
            wait_for_parts(warp);
            multiply_other_parts(dq, exchange, own_row, part, k_rows, part * DQ_BLOCKS);
        }  // the buffer is overwritten after the next `cta_barrier`
    }
    wait_for_copies<0>();
    const WorkTile own = cta_work_tile(p.tiles, p.tile_count, p.heads, p.l2_heads);
    dq.scale(p.scale);
    const int first = own.start + thread_index_again() / (32 * PARTS) * WARP_ROWS, column = part * 16 * DQ_BLOCKS;
    Result* target = p.dq + own.batch * p.dq_strides.batch + first * p.dq_strides.token + own.head * p.dq_strides.head;
    cta_barrier();  // the staging area is the memory of q and dout
    uint32 staging = shared + warp * WARP_ROWS * 16 * DQ_BLOCKS * ELEMENT_BYTES;
    write_rows<DQ_BLOCKS>(dq.x, staging, target + column, p.dq_strides.token, own.stop - first, D - column, lane);
}
