// The dk and dv kernel: one CTA for each (tile of keys, owner). An owner is a key head, or a query head (head_parallel).
//
// With p = exp(s - lse) and delta = rowsum(dout * out) - dlse, each tile of queries adds
//
//     s = scale q k^T      dv += p^T dout      dp = dout v^T      ds = p * (dp - delta)      dk += scale ds^T q
//
// Accumulators hold s^T and dp^T, so p^T and ds^T are left operands of the next products without a transposition. PARTS > 1
// warps own the same keys, because dk and dv of wide heads exceed the registers of one:
//
//                           queries of the tile                width of dk
//                     keys  | warp 0 | warp 1 |          keys  | warp 0 | warp 1 |
//
// They exchange p^T and ds^T through shared memory. With one buffer (EXCHANGES = 1), ds^T follows p^T. The query heads of an
// owner are visited one after another for each tile of queries: registers sum them in a fixed order.
//
// Sources: Tri Dao, FlashAttention-2 (2023), algorithm 2 (https://arxiv.org/abs/2307.08691); one owner for each query head:
// TensorAuto/OpenTau, pull request 376.
#include "masking.cuh"

constexpr int K_BYTES = ROWS * D * ELEMENT_BYTES;
constexpr int V_BYTES = ROWS * DV * ELEMENT_BYTES;
constexpr int Q_BYTES = COLUMNS * D * ELEMENT_BYTES;
constexpr int DOUT_BYTES = COLUMNS * DV * ELEMENT_BYTES;
constexpr int STAGE_BYTES = Q_BYTES + DOUT_BYTES + 8 * COLUMNS;  // q, dout, lse, delta
constexpr int EXCHANGES = PARTS == 1 ? 0 : CANON_EXCHANGES;
constexpr int EXCHANGE_BYTES = ROWS * COLUMNS * ELEMENT_BYTES;
constexpr int PART_COLUMNS = COLUMNS / PARTS;
constexpr int DK_BLOCKS = (D / 16 + PARTS - 1) / PARTS;  // of 16 columns: the part of a warp
constexpr int DV_BLOCKS = (DV / 16 + PARTS - 1) / PARTS;
constexpr bool OWNED_IN_REGISTERS = M * (D + DV) <= 128;  // fragments of k and v

static_assert(PART_COLUMNS % 16 == 0, "a warp loads 16 queries at a time");

using Scores = Accumulator<PART_COLUMNS / 8>;

// Replace scores by exp2(scale_log2 s - lse log2(e)). `lse`: address of the warp's first query.
DEVICE void exponentiate(Scores& s, uint32 lse, float scale_log2) {
#pragma unroll
    for (int n = 0; n < PART_COLUMNS / 8; ++n) {
        float pair[2];
        read_shared(pair, lse + 32 * n + 8 * (thread_index() % 4));
        pair[0] = base_2(pair[0]), pair[1] = base_2(pair[1]);
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s.x[i][n][e] = power_of_2(multiply_add(s.x[i][n][e], scale_log2, -pair[e % 2]));
    }
}

// Replace dp by ds = p * (dp - delta). `delta`: address of the warp's first query.
DEVICE void differentiate(Scores& dp, const Scores& p, uint32 delta) {
#pragma unroll
    for (int n = 0; n < PART_COLUMNS / 8; ++n) {
        float pair[2];
        read_shared(pair, delta + 32 * n + 8 * (thread_index() % 4));
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) dp.x[i][n][e] = p.x[i][n][e] * (dp.x[i][n][e] - pair[e % 2]);
    }
}

// Write a warp's part of dk or dv, BLOCKS blocks of 16 columns.
template <int BLOCKS, int WIDTH>
DEVICE void write_part(const Accumulator<2 * BLOCKS>& x, Result* head, int64 stride, uint32 shared, int first, int stop) {
    int warp = thread_index() / 32, column = warp % PARTS * 16 * BLOCKS;
    cta_barrier();  // the staging area is free
    uint32 staging = shared + warp * WARP_ROWS * 16 * BLOCKS * ELEMENT_BYTES;
    write_rows<BLOCKS>(x.x, staging, head + first * stride + column, stride, stop - first, WIDTH - column,
                       thread_index() % 32);
}

// Write dk (b, s, o, d) and dv (b, s, o, dv). Keys that no query sees get 0.
extern "C" __global__ void __launch_bounds__(THREADS, CANON_CTAS) canon_dkdv(const __grid_constant__ DkdvParams p) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    const int own_row = warp / PARTS * WARP_ROWS, part = warp % PARTS, own_column = part * PART_COLUMNS;
    const uint32 shared = shared_memory(), exchange = shared + K_BYTES + V_BYTES;
    const uint32 exchange_ds = exchange + (EXCHANGES == 2 ? EXCHANGE_BYTES : 0);
    const uint32 stages = exchange + EXCHANGES * EXCHANGE_BYTES;
    const Visits visits = {stages + STAGES * STAGE_BYTES};
    const WorkTile tile = cta_work_tile(p.tiles, p.tile_count, p.owners, p.l2_heads);
    const int query_head = tile.head * p.heads_per_owner, key_head = query_head / p.group;
    const Element* k = p.k + tile.batch * p.k_strides.batch + key_head * p.k_strides.head;
    const Element* v = p.v + tile.batch * p.v_strides.batch + key_head * p.v_strides.head;

    auto load_stage = [&](int stage, int slot) {
        const Visit visit = visits.read_all(slot);
        if (visit.span < tile.end) {
            const int64 batch = tile.batch, head = query_head + visit.head;
            const Element* q = p.q + batch * p.q_strides.batch + head * p.q_strides.head;
            const Element* dout = p.dout + batch * p.dout_strides.batch + head * p.dout_strides.head;
            const int64 statistics = batch * p.statistic_strides.batch + head * p.statistic_strides.head;
            const int first = visit.column, begin = visit.band_start, end = visit.band_stop;
            uint32 target = stages + stage * STAGE_BYTES;
            load_tile<COLUMNS, D>(target, q, p.q_strides.token, first, begin, end);
            load_tile<COLUMNS, DV>(target + Q_BYTES, dout, p.dout_strides.token, first, begin, end);
            load_statistics(target + Q_BYTES + DOUT_BYTES, p.lse + statistics, p.delta + statistics, first, begin, end);
        }
        close_copies();  // even an empty group: `wait_for_copies` counts groups
    };

    load_tile<ROWS, D>(shared, k, p.k_strides.token, tile.start, tile.start, tile.stop);
    load_tile<ROWS, DV>(shared + K_BYTES, v, p.v_strides.token, tile.start, tile.start, tile.stop);
    close_copies();
    visits.begin(tile, p.spans, p.heads_per_owner);
    cta_barrier();
    for (int stage = 0; stage < STAGES - 1; ++stage) load_stage(stage, stage);

    const SharedOperand<D> k_shared(shared, own_row, lane);
    const SharedOperand<DV> v_shared(shared + K_BYTES, own_row, lane);
    RegisterOperand<OWNED_IN_REGISTERS ? D / 16 : 1> k_registers;
    RegisterOperand<OWNED_IN_REGISTERS ? DV / 16 : 1> v_registers;
    if constexpr (OWNED_IN_REGISTERS) {
        wait_for_copies<STAGES - 1>();
        cta_barrier();
        k_registers.load(k_shared);
        v_registers.load(v_shared);
    }
    Accumulator<2 * DK_BLOCKS> dk;
    Accumulator<2 * DV_BLOCKS> dv;
    dk.clear();
    dv.clear();

    for (int stage = 0, slot = 0;; stage = stage + 1 == STAGES ? 0 : stage + 1, slot = Visits::following(slot)) {
        wait_for_copies<STAGES - 2>();
        cta_barrier();
        const Visit visit = visits.read(slot);
        if (visit.span >= tile.end) break;
        const bool is_partial = visit.span < tile.full;
        const int newest = slot < 2 ? slot + STAGES - 1 : slot - 2;  // the visit of tile j + STAGES - 1
        load_stage(stage == 0 ? STAGES - 1 : stage - 1, newest);
        visits.proceed(newest, tile, p.spans, p.heads_per_owner);
        const int row = tile.start + own_row;
        if (is_partial && Visible(p.spans, visit, row, lane).none()) continue;
        const uint32 q_address = stages + stage * STAGE_BYTES, dout_address = q_address + Q_BYTES;
        const uint32 lse = dout_address + DOUT_BYTES + 4 * own_column, delta = lse + 4 * COLUMNS;
        const SharedTile<D> q_rows(q_address, lane), q_columns(q_address, by_columns(lane));
        const SharedTile<DV> dout_rows(dout_address, lane), dout_columns(dout_address, by_columns(lane));

        Scores s;
        s.clear();
        if constexpr (OWNED_IN_REGISTERS)
            multiply_transposed(s, k_registers, q_columns, own_column);
        else
            multiply_transposed(s, k_shared, q_columns, own_column);
        exponentiate(s, lse, p.scale * LOG2_E);
        if (is_partial) hide(s, Visible(p.spans, visit, row, lane), own_column, 0.0f);
        RegisterOperand<PART_COLUMNS / 16> own;
        own.round(s);
        if constexpr (PARTS > 1) own.write<COLUMNS>(exchange, own_row, own_column / 16);
        if constexpr (EXCHANGES == 1) publish_part(warp);
        multiply<PART_COLUMNS>(dv, own, dout_rows, part * DV_BLOCKS, own_column);
        if constexpr (EXCHANGES == 1) {
            wait_for_parts(warp);
            multiply_other_parts(dv, exchange, own_row, part, dout_rows, part * DV_BLOCKS);
        }

        Scores ds;
        ds.clear();
        if constexpr (OWNED_IN_REGISTERS)
            multiply_transposed(ds, v_registers, dout_columns, own_column);
        else
            multiply_transposed(ds, v_shared, dout_columns, own_column);
        differentiate(ds, s, delta);
        if (is_partial)  // dp of an invisible key may be NaN, and 0 * NaN is NaN
            hide(ds, Visible(p.spans, visit, row, lane), own_column, 0.0f);
        own.round(ds);
        if constexpr (PARTS > 1) {
            if constexpr (EXCHANGES == 1) group_barrier(warp);  // all have read p^T
            own.write<COLUMNS>(exchange_ds, own_row, own_column / 16);
            publish_part(warp);
        }
        multiply<PART_COLUMNS>(dk, own, q_rows, part * DK_BLOCKS, own_column);
        if constexpr (PARTS > 1) {
            wait_for_parts(warp);
            if constexpr (EXCHANGES == 2) multiply_other_parts(dv, exchange, own_row, part, dout_rows, part * DV_BLOCKS);
            multiply_other_parts(dk, exchange_ds, own_row, part, q_rows, part * DK_BLOCKS);
        }  // buffers are overwritten after the next `cta_barrier`
    }
    wait_for_copies<0>();
    const WorkTile own = cta_work_tile(p.tiles, p.tile_count, p.owners, p.l2_heads);
    dk.scale(p.scale);
    Result* dk_head = p.dk + own.batch * p.dk_strides.batch + own.head * p.dk_strides.head;
    Result* dv_head = p.dv + own.batch * p.dv_strides.batch + own.head * p.dv_strides.head;
    const int first = own.start + thread_index_again() / (32 * PARTS) * WARP_ROWS;
    write_part<DK_BLOCKS, D>(dk, dk_head, p.dk_strides.token, shared, first, own.stop);
    write_part<DV_BLOCKS, DV>(dv, dv_head, p.dv_strides.token, shared, first, own.stop);
}
