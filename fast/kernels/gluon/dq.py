"""The dq kernel for Hopper: three products a tile, item after item, as in the forward kernel.

    loader        K 0   Q    V 0   dO   K 1   V 1   K 2   ...
    warpgroup     S = Q K^T  and  dP = dO V^T, issued together
                  wait S:     P = exp(scale S - lse)     while dP runs
                  wait dP:    dQ += (P * (dP - delta)) K

Sums follow the order of the spans: same inputs, same bits. Rows that see no key get 0.

Shared memory: e (rows (d + dv) + STAGES columns (d + dv)) bytes for elements of e bytes, widths padded to a power of 2.
Source: FlashAttention-2 (Tri Dao, 2023), algorithm 2, its part for dq alone: jax-ml/jax-triton, pull request 177.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.epilogue import store_tile
from canon.fast.kernels.gluon.layouts import mma_layout, operand_layout, per_row_layout
from canon.fast.kernels.gluon.masking import mask_hidden
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
)
from canon.fast.kernels.gluon.tile_ring import load_box, make_barriers


@gluon.jit
def load_tiles(q_desc, dout_desc, k_desc, v_desc, work, counter, io, GROUP: gl.constexpr):
    """The loader: claims items; K and V of every visited tile; an item's Q behind its first K, its dO behind its first V."""
    q_tiles, dout_tiles, told, k_ring, v_ring, signals = io
    q_full, q_free, dout_full, dout_free, k_full, k_free, v_full, v_free = signals
    TOKENS: gl.constexpr = q_tiles.shape[2]
    STAGES: gl.constexpr = k_ring.shape[0]
    BN: gl.constexpr = k_ring.shape[2]
    t, done = 0, 0
    item = first_work_tile()
    while item > 0:
        first, _, batch, head = position_of(work, item)
        span, span_end, column, left = first_tile(work, item)
        fresh = True
        while span < span_end:
            slot = t % STAGES
            turn = t // STAGES & 1
            mbarrier.wait(k_free.index(slot), turn ^ 1)
            load_box(k_desc, batch, column, head // GROUP, k_full.index(slot), k_ring.index(slot))
            if fresh:  # not before K: it may have to wait until the warpgroups are done with the item before
                for w in gl.static_range(2):
                    mbarrier.wait(q_free.index(w), (done & 1) ^ 1)
                    publish(told.index(w), item)
                    load_box(q_desc, batch, first + w * TOKENS, head, q_full.index(w), q_tiles.index(w))
            mbarrier.wait(v_free.index(slot), turn ^ 1)
            load_box(v_desc, batch, column, head // GROUP, v_full.index(slot), v_ring.index(slot))
            if fresh:
                for w in gl.static_range(2):
                    mbarrier.wait(dout_free.index(w), (done & 1) ^ 1)
                    load_box(dout_desc, batch, first + w * TOKENS, head, dout_full.index(w), dout_tiles.index(w))
            fresh = False
            t += 1
            span, column, left = next_tile(work, span, column, left, span_end, BN)
        item = claim_work_tile(work, counter)
        done += 1
    for w in gl.static_range(2):
        publish_end(told.index(w), q_full.index(w), q_free.index(w), (done & 1) ^ 1)


@gluon.jit
def differentiate(io, lines, padded, result, work, scale, W: gl.constexpr, D: gl.constexpr):
    """A warpgroup: dq of its half of the rows of every item."""
    q_tiles, dout_tiles, told, k_ring, v_ring, signals = io
    q_full, q_free, dout_full, dout_free, k_full, k_free, v_full, v_free = signals
    dq, tokens, stride_t, stride_h = result
    TOKENS: gl.constexpr = q_tiles.shape[2]
    PACK: gl.constexpr = q_tiles.shape[3]
    D_PAD: gl.constexpr = q_tiles.shape[4]
    DV_PAD: gl.constexpr = v_ring.shape[4]
    M: gl.constexpr = TOKENS * PACK
    STAGES: gl.constexpr = k_ring.shape[0]
    BN: gl.constexpr = k_ring.shape[2]
    scale_log2 = scale * 1.4426950408889634
    nothing = gl.zeros([M, BN], gl.float32, mma_layout(BN))
    t, done = 0, 0
    item = receive(told.index(W), q_full.index(W), 0)
    while item > 0:
        first, end_row, _, _ = position_of(work, item)
        first += W * TOKENS
        span_first, span_end = spans_of(work, item)
        r = gl.arange(0, M, per_row_layout(BN))
        at = lines + (batch_head_of(work, item) * 2 * padded + first) + (r // PACK + r % PACK * 2 * padded)
        here = r // PACK < end_row - first
        lse_row = gl.expand_dims(gl.load(at, mask=here, other=0.0), 1)
        minus_delta = gl.expand_dims(gl.load(at + padded, mask=here, other=0.0), 1)
        acc = gl.zeros([M, D_PAD], gl.float32, mma_layout(D_PAD))
        mbarrier.wait(dout_full.index(W), done & 1)
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, BN)
            partial = is_partial(work, span)
            for j in range(column, stop, BN):
                slot = t % STAGES
                turn = t // STAGES & 1
                is_last = (span + SPAN == span_end) & (j + BN == stop)
                now = W + (t >> 30)  # W, but not known before the loop: addresses of tiles are made where they are used
                q = q_tiles.index(now).reshape([M, D_PAD])
                dout = dout_tiles.index(now).reshape([M, DV_PAD])
                k = k_ring.index(slot).reshape([BN, D_PAD])
                v = v_ring.index(slot).reshape([BN, DV_PAD])
                mbarrier.wait(k_full.index(slot), turn)
                s = hopper.warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(slot), turn)
                dp = hopper.warpgroup_mma(dout, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
                s, dp = hopper.warpgroup_mma_wait(1, deps=[s, dp])
                if is_last:
                    mbarrier.arrive(q_free.index(W), count=1)
                p = gl.exp2(s * scale_log2 - lse_row)
                mbarrier.wait(
                    v_full.index(slot), turn
                )  # long done: keeps the assembler from waiting for dp any earlier
                dp = hopper.warpgroup_mma_wait(0, deps=[dp])
                mbarrier.arrive(v_free.index(slot), count=1)
                if is_last:
                    mbarrier.arrive(dout_free.index(W), count=1)
                ds = p * (dp + minus_delta)
                if partial:  # not P, before: 0 times a NaN of dP is NaN
                    ds = mask_hidden(ds, work, span, first, j, 0.0, PACK)
                ds = gl.convert_layout(ds.to(q_tiles.dtype), operand_layout(D_PAD))
                acc = hopper.warpgroup_mma(ds, k, acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(k_free.index(slot), count=1)
                t += 1
        first, end_row, batch, head = position_of(work, item)
        first += W * TOKENS
        start = dq + ((batch * tokens + first).to(gl.int64) * stride_t + head * stride_h)
        store_tile(start, acc * scale, batch_head_of(work, item), end_row - first, stride_t, stride_h, 0, D, PACK)
        done += 1
        item = receive(told.index(W), q_full.index(W), done & 1)


@gluon.jit(do_not_specialize=["tokens", "padded"])
def dq_kernel(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    lines,
    padded,
    dq,
    work,
    counter,
    scale,
    tokens,
    stride_t,
    stride_h,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    D_PAD: gl.constexpr,
    DV_PAD: gl.constexpr,
    PACK: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    MATH_REGISTERS: gl.constexpr,
):
    """dq (b, t, h, d), evenly strided over b and t, of the items in ``work``; lines (b, h, 2, padded)."""
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [2, 1, ROWS // 2 // PACK, PACK, D_PAD], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(dtype, [2, 1, ROWS // 2 // PACK, PACK, DV_PAD], dout_desc.layout)
    told = allocate_published(2)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, D_PAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, DV_PAD], v_desc.layout)
    q_full, q_free = make_barriers(2, 1), make_barriers(2, 1)
    dout_full, dout_free = make_barriers(2, 1), make_barriers(2, 1)
    k_full, k_free = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    v_full, v_free = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    signals = (q_full, q_free, dout_full, dout_free, k_full, k_free, v_full, v_free)
    io = (q_tiles, dout_tiles, told, k_ring, v_ring, signals)
    result = (dq, tokens, stride_t, stride_h)
    gl.warp_specialize(
        [
            (load_tiles, (q_desc, dout_desc, k_desc, v_desc, work, counter, io, GROUP)),
            (differentiate, (io, lines, padded, result, work, scale, 0, D)),
            (differentiate, (io, lines, padded, result, work, scale, 1, D)),
        ],
        [4, 4],
        [MATH_REGISTERS, MATH_REGISTERS],
    )
