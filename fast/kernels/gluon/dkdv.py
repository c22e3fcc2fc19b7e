"""The dk, dv kernel for Hopper: four products a tile, or five with dq ("fused"). Tiles of keys are owned, of queries visited.

    loader        Q 0   K    dO 0   V    Q 1   dO 1   Q 2   ...            (head by head of those that an owner sums)
    warpgroup     S^T = K Q^T  and  dP^T = V dO^T - delta, issued together
                  wait S^T:    P = exp(scale S - lse)       while dP^T runs
                               dV += P dO
                  wait dP^T:   dS = P * dP                  while dV runs
                               dK += dS Q
    fused         dS of both warpgroups meets in shared memory; each makes 64 columns of dQ^T = K^T dS (at D = 64 all of
                  them, for every second tile), and leaves them in shared memory
    adder         has the TMA unit add them to float32 dq: as they come, or in order

An *owner* is a key head with all query heads of its group, summed in registers in order; or, for head_parallel, one query
head, whose part is written in float32 and summed with the others afterwards, in order. But for the dq of "fused" where it
is added up as it comes, same inputs give the same bits.

In order: at each tile of dq stands a number, of who has added to it last (`canon.fast.kernels.gluon.tile_scheduler`). The
adder waits for that of the item before, adds, and leaves its own when its addition has come. It is a warp of its own
because whoever waits for that and for turns can do nothing else, and the wait empties the L1 cache.

Shared memory: 2 (BUFFERS rows (d + dv) + STAGES columns (d + dv)) + 8 STAGES columns bytes, and if fused
4 rows columns + 8 columns d; widths padded to a power of 2.
Shared memory limits it: paper/shared_memory_bound.md.
Sources: FlashAttention-2 (Tri Dao, 2023), algorithm 2; S^T in registers, dq by TMA: Shah et al., FlashAttention-3 (2024).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from canon.fast.kernels.gluon.epilogue import store_tile
from canon.fast.kernels.gluon.layouts import mma_layout, operand_layout, per_column_layout, shared_operand_layout
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import (
    back_off,
    broadcast_rows,
    fence_async_global,
    keep_where_nonzero,
    load_acquire,
    store_release,
    tma_reduce_add,
    wait_for_reductions,
)
from canon.fast.kernels.gluon.tile_queue import (
    SPAN,
    allocate_published,
    batch_head_of,
    claim_work_tile,
    columns_of,
    first_tile,
    first_work_tile,
    is_partial,
    next_tile,
    position_of,
    publish,
    publish_end,
    receive,
    spans_of,
    ticket_of,
)
from canon.fast.kernels.gluon.tile_ring import load_box, make_barriers, tma_load


@gluon.jit
def make_io(
    descriptors,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    D_PAD: gl.constexpr,
    DV_PAD: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    LISTENERS: gl.constexpr = 2,
):
    """Rings of what is visited, tiles of what an item owns, and the barriers of both; an item is let go by LISTENERS.

    The ring of delta holds -delta: `canon.fast.kernels.gluon.softmax_stats`.
    """
    q_desc, dout_desc, k_desc, v_desc, line_desc = descriptors
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, COLUMNS, 1, D_PAD], q_desc.layout)
    dout_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, COLUMNS, 1, DV_PAD], dout_desc.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], line_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], line_desc.layout)
    told = allocate_published(BUFFERS)
    k_tiles = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS, 1, ROWS, 1, D_PAD], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS, 1, ROWS, 1, DV_PAD], v_desc.layout)
    q_full, q_free = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    dout_full, dout_free = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    k_full, v_full, free = make_barriers(BUFFERS, 1), make_barriers(BUFFERS, 1), make_barriers(BUFFERS, LISTENERS)
    tiles = (q_ring, dout_ring, lse_ring, delta_ring, told, k_tiles, v_tiles)
    signals = (q_full, q_free, dout_full, dout_free, k_full, v_full, free)
    return tiles, signals


@gluon.jit
def load_tiles(
    descriptors,
    work,
    counter,
    io,
    padded,
    query_heads,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ORDERED: gl.constexpr,
):
    """The loader: claims items; Q, lse, dO and delta of every visited tile, and an item's K and V behind the first ones."""
    q_desc, dout_desc, k_desc, v_desc, line_desc = descriptors
    tiles, signals = io
    q_ring, dout_ring, lse_ring, delta_ring, told, k_tiles, v_tiles = tiles
    q_full, q_free, dout_full, dout_free, k_full, v_full, free = signals
    STAGES: gl.constexpr = q_ring.shape[0]
    BN: gl.constexpr = q_ring.shape[2]
    BUFFERS: gl.constexpr = k_tiles.shape[0]
    t, done = 0, 0
    item = claim_work_tile(work, counter, ORDERED) if ORDERED else first_work_tile()
    while item > 0:
        first, _, batch, owner = position_of(work, item)
        span_first, span_end, column, left = first_tile(work, item)
        span, each_head = span_first, (span_end - span_first) // HEADS
        head, b = owner * HEADS, done % BUFFERS
        fresh = True
        while span < span_end:
            slot = t % STAGES
            turn = t // STAGES & 1
            line = (batch * query_heads + head) * 2 * padded + column
            mbarrier.wait(q_free.index(slot), turn ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + line_desc.block_type.nbytes)
            tma_load(q_desc, [batch, column, head, 0], q_full.index(slot), q_ring.index(slot))
            tma_load(line_desc, [line], q_full.index(slot), lse_ring.index(slot))
            if fresh:  # not before Q: it may have to wait until the warpgroups are done with the item before
                mbarrier.wait(free.index(b), (done // BUFFERS & 1) ^ 1)
                publish(told.index(b), item)
                load_box(k_desc, batch, first, head // GROUP, k_full.index(b), k_tiles.index(b))
            mbarrier.wait(dout_free.index(slot), turn ^ 1)
            mbarrier.expect(dout_full.index(slot), dout_desc.block_type.nbytes + line_desc.block_type.nbytes)
            tma_load(dout_desc, [batch, column, head, 0], dout_full.index(slot), dout_ring.index(slot))
            tma_load(line_desc, [line + padded], dout_full.index(slot), delta_ring.index(slot))
            if fresh:
                load_box(v_desc, batch, first, head // GROUP, v_full.index(b), v_tiles.index(b))
            fresh = False
            t += 1
            before = span
            span, column, left = next_tile(work, span, column, left, span_end, BN)
            if span != before:
                head = owner * HEADS + (span - span_first) // each_head
        item = claim_work_tile(work, counter, ORDERED)
        done += 1
    b = done % BUFFERS
    publish_end(told.index(b), k_full.index(b), free.index(b), (done // BUFFERS & 1) ^ 1)


@gluon.jit
def row_offset(batch, row, head, strides):
    """Where a row of a tensor (b, s, o, width) begins."""
    return batch.to(gl.int64) * strides[0] + row.to(gl.int64) * strides[1] + head.to(gl.int64) * strides[2]


@gluon.jit
def store_gradients(
    acc_k,
    acc_v,
    result,
    work,
    item,
    skipped: gl.constexpr,
    k_column: gl.constexpr,
    v_column: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
):
    """Write rows of dk and dv of an item, ``skipped`` rows from its first on, and columns from those given on."""
    dk, dv, k_strides, v_strides = result
    first, stop, batch, owner = position_of(work, item)  # again: registers are short in the loop
    first += skipped
    line = batch_head_of(work, item)
    start = dk + row_offset(batch, first, owner, k_strides)
    store_tile(start, acc_k, line, stop - first, k_strides[1], 0, k_column, D, 1)
    start = dv + row_offset(batch, first, owner, v_strides)
    store_tile(start, acc_v, line, stop - first, v_strides[1], 0, v_column, DV, 1)


@gluon.jit
def share_ds(ds, fused, t, W: gl.constexpr):
    """Put this warpgroup's half of ds where both can read it."""
    ds_tiles, _, met, _, _ = fused
    ds_tiles.index(t % 2).slice(W * ds.shape[0], ds.shape[0], dim=0).store(ds)
    fence_async_shared()
    mbarrier.arrive(met.index(t % 2), count=1)


@gluon.jit
def begin_dq(k, column, fused, t):
    """64 columns of dq, transposed, on their way: k^T ds, of the keys of both warpgroups."""
    ds_tiles, _, met, _, _ = fused
    BN: gl.constexpr = ds_tiles.shape[2]
    mbarrier.wait(met.index(t % 2), t // 2 & 1)
    nothing = gl.zeros([64, BN], gl.float32, mma_layout(BN))
    some = k.slice(column, 64, dim=1)
    return hopper.warpgroup_mma(some.permute((1, 0)), ds_tiles.index(t % 2), nothing, use_acc=False, is_async=True)


@gluon.jit
def hand_dq(dq, fused, t, PART: gl.constexpr, PARTS: gl.constexpr):
    """Leave 64 columns, one of PARTS of a tile, for the adder. Transposed, 32 lanes write to 32 banks."""
    _, dq_tiles, _, made, gone = fused
    mbarrier.wait(gone.index(t % 2), (t // 2 & 1) ^ 1)
    dq_tiles.index(t % 2 * PARTS + PART).reshape([dq.shape[1], 64]).permute((1, 0)).store(dq)
    fence_async_shared()
    mbarrier.arrive(made.index(t % 2), count=1)


@gluon.jit
def await_turn(place, awaited):
    """Wait until the number stands there that a span waits for; the additions that follow come behind those before it."""
    while load_acquire(place) != awaited:
        back_off()
    fence_async_global()


@gluon.jit
def pass_on(place, number):
    """Once dq has been added to, publish the number of the span that did so, for the adder that waits for it."""
    wait_for_reductions()
    store_release(place, number)


@gluon.jit
def add_tiles(dq_desc, io, fused, work, places, tiles, HEADS: gl.constexpr, ORDERED: gl.constexpr):
    """The adder: has dq added to global memory, tile by tile. ORDERED: in turns, that are taken at ``places``."""
    dq_tiles, made, gone = fused[1], fused[3], fused[4]
    told, k_full, free = io[0][4], io[1][4], io[1][6]
    BUFFERS: gl.constexpr = told.shape[0]
    BN: gl.constexpr = dq_tiles.shape[2]
    PARTS: gl.constexpr = dq_tiles.shape[0] // 2
    t, done = 0, 0
    item = receive(told.index(0), k_full.index(0), 0)
    while item > 0:
        mbarrier.arrive(free.index(done % BUFFERS), count=1)
        _, _, batch, owner = position_of(work, item)
        line = batch_head_of(work, item)
        span_first, span_end = spans_of(work, item)
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, BN)
            head = (span - span_first) // ((span_end - span_first) // HEADS)
            if ORDERED:
                awaited, number = ticket_of(work, span)
                place = places + (line * HEADS + head) * tiles + column // BN
            for i in range(column, stop, BN):
                if ORDERED:
                    await_turn(place, awaited)  # while the warpgroups make dq
                mbarrier.wait(made.index(t % 2), t // 2 & 1)
                for part in gl.static_range(PARTS):
                    tma_reduce_add(
                        dq_desc, [batch, i, owner * HEADS + head, 64 * part], dq_tiles.index(t % 2 * PARTS + part)
                    )
                tma.store_wait(0)  # they have been read
                mbarrier.arrive(gone.index(t % 2), count=1)
                if ORDERED:
                    pass_on(place, number)
                    place += 1
                t += 1
        done += 1
        item = receive(told.index(done % BUFFERS), k_full.index(done % BUFFERS), done // BUFFERS & 1)


@gluon.constexpr_function
def early(columns):
    """Whether registers can hold lse while scores are made: read later, it is slow, as products fill shared memory's pipe."""
    return columns <= 64


@gluon.jit
def differentiate(
    io,
    fused,
    result,
    work,
    scale,
    W: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    FUSED: gl.constexpr,
):
    """A warpgroup: dk and dv of its half of the keys of every item."""
    tiles, signals = io
    q_ring, dout_ring, lse_ring, delta_ring, told, k_tiles, v_tiles = tiles
    q_full, q_free, dout_full, dout_free, k_full, v_full, free = signals
    STAGES: gl.constexpr = q_ring.shape[0]
    BN: gl.constexpr = q_ring.shape[2]
    D_PAD: gl.constexpr = q_ring.shape[4]
    DV_PAD: gl.constexpr = dout_ring.shape[4]
    BUFFERS: gl.constexpr = k_tiles.shape[0]
    ROWS: gl.constexpr = k_tiles.shape[2]
    N: gl.constexpr = ROWS // 2
    EARLY: gl.constexpr = early(BN)
    scale_log2 = scale * 1.4426950408889634
    nothing = gl.zeros([N, BN], gl.float32, mma_layout(BN))
    t, done = 0, 0
    item = receive(told.index(0), k_full.index(0), 0)
    while item > 0:
        b = done % BUFFERS
        span_first, span_end = spans_of(work, item)
        acc_k = gl.zeros([N, D_PAD], gl.float32, mma_layout(D_PAD))
        acc_v = gl.zeros([N, DV_PAD], gl.float32, mma_layout(DV_PAD))
        mbarrier.wait(v_full.index(b), done // BUFFERS & 1)
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, BN)
            partial = is_partial(work, span)
            for i in range(column, stop, BN):
                slot = t % STAGES
                turn = t // STAGES & 1
                q = q_ring.index(slot).reshape([BN, D_PAD])
                dout = dout_ring.index(slot).reshape([BN, DV_PAD])
                now = b + (t >> 30)  # b, but not known before the loop: addresses of tiles are made where they are used
                all_k = k_tiles.index(now).reshape([ROWS, D_PAD])
                k = all_k.slice(W * N, N, dim=0)
                v = v_tiles.index(now).reshape([ROWS, DV_PAD]).slice(W * N, N, dim=0)
                mbarrier.wait(dout_full.index(slot), turn)
                dp = broadcast_rows(
                    delta_ring.index(slot).load(per_column_layout(BN)), nothing
                )  # where a product begins at is free
                mbarrier.wait(q_full.index(slot), turn)
                if EARLY:
                    lse = lse_ring.index(slot).load(per_column_layout(BN))
                s = hopper.warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
                dp = hopper.warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
                s, dp = hopper.warpgroup_mma_wait(1, deps=[s, dp])
                if not EARLY:
                    lse = lse_ring.index(slot).load(per_column_layout(BN))
                p = gl.exp2(s * scale_log2 - gl.expand_dims(lse, 0))
                if partial:  # not S, before: lse of a query that sees no key here may be NaN
                    row = gl.load(work + item) + W * N  # here: registers are short
                    p = mask_hidden(p, work, span, row, i, 0.0, 1)
                p_factor = gl.convert_layout(p.to(q_ring.dtype), operand_layout(DV_PAD))
                acc_v = hopper.warpgroup_mma(p_factor, dout, acc_v, is_async=True)
                dp, acc_v = hopper.warpgroup_mma_wait(1, deps=[dp, acc_v])
                if partial:
                    dp = keep_where_nonzero(dp, p)
                ds = (p * dp).to(q_ring.dtype)
                ds_factor = gl.convert_layout(ds, operand_layout(D_PAD))
                if FUSED:
                    share_ds(ds, fused, t, W)
                if FUSED and D_PAD > 64:  # 64 columns of dq are this warpgroup's
                    dq = begin_dq(all_k, W * 64, fused, t)
                    acc_k = hopper.warpgroup_mma(ds_factor, q, acc_k, is_async=True)
                    dq, acc_k, acc_v = hopper.warpgroup_mma_wait(1, deps=[dq, acc_k, acc_v])
                    mbarrier.arrive(dout_free.index(slot), count=1)
                    hand_dq(dq * scale, fused, t, W, 2)
                else:
                    acc_k = hopper.warpgroup_mma(ds_factor, q, acc_k, is_async=True)
                    acc_v, acc_k = hopper.warpgroup_mma_wait(1, deps=[acc_v, acc_k])
                    mbarrier.arrive(dout_free.index(slot), count=1)
                    if FUSED:  # noqa: SIM102 - or all of them, of every second tile
                        if t % 2 == W:
                            dq = begin_dq(all_k, 0, fused, t)
                            dq, acc_k = hopper.warpgroup_mma_wait(0, deps=[dq, acc_k])
                            hand_dq(dq * scale, fused, t, 0, 1)
                acc_k = hopper.warpgroup_mma_wait(0, deps=[acc_k])
                mbarrier.arrive(q_free.index(slot), count=1)
                t += 1
        mbarrier.arrive(free.index(b), count=1)
        store_gradients(acc_k * scale, acc_v, result, work, item, W * N, 0, 0, D, DV)
        done += 1
        b = done % BUFFERS
        item = receive(told.index(b), k_full.index(b), done // BUFFERS & 1)


@gluon.jit(do_not_specialize=["padded", "query_heads", "tiles"])
def dkdv_kernel(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    line_desc,
    dq_desc,
    dk,
    dv,
    work,
    counter,
    scale,
    k_strides,
    v_strides,
    padded,
    query_heads,
    tiles,
    FUSED: gl.constexpr,
    ORDERED: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    D_PAD: gl.constexpr,
    DV_PAD: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    MATH_REGISTERS: gl.constexpr,
):
    """dk (b, s, o, d) and dv (b, s, o, dv), with last stride 1, of the items in ``work``: tiles of keys and owners.

    An owner has HEADS query heads. ``line_desc``: of lines (b, h, 2, padded), flat. FUSED: adds to dq, float32 (b, t, h, d).
    ORDERED: in the order of ``work``; behind ``counter`` stand zeros, one for each of the ``tiles`` of queries of each query
    head.
    """
    descriptors = (q_desc, dout_desc, k_desc, v_desc, line_desc)
    io = make_io(descriptors, ROWS, COLUMNS, D_PAD, DV_PAD, STAGES, BUFFERS, 2 + FUSED)
    result = (dk, dv, k_strides, v_strides)
    if FUSED:
        PARTS: gl.constexpr = D_PAD // 64
        ds_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, COLUMNS], shared_operand_layout(COLUMNS))
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2 * PARTS, 1, COLUMNS, 1, 64], dq_desc.layout)
        fused = (ds_tiles, dq_tiles, make_barriers(2, 2), make_barriers(2, PARTS), make_barriers(2, 1))
        fence_async_shared()
        gl.warp_specialize(  # loader and adder, of a warp each, are a third warpgroup: so 240 registers are left for the others
            [
                (differentiate, (io, fused, result, work, scale, 0, D, DV, FUSED)),
                (differentiate, (io, fused, result, work, scale, 1, D, DV, FUSED)),
                (load_tiles, (descriptors, work, counter, io, padded, query_heads, HEADS, GROUP, ORDERED)),
                (add_tiles, (dq_desc, io, fused, work, counter + 1, tiles, HEADS, ORDERED)),
            ],
            [4, 1, 1],
            [MATH_REGISTERS, 24, 24],
        )
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (load_tiles, (descriptors, work, counter, io, padded, query_heads, HEADS, GROUP, ORDERED)),
                (differentiate, (io, io, result, work, scale, 0, D, DV, FUSED)),
                (differentiate, (io, io, result, work, scale, 1, D, DV, FUSED)),
            ],
            [4, 4],
            [MATH_REGISTERS, MATH_REGISTERS],
        )
