"""The dq kernel for Hopper: three MMAs for each tile. A CTA owns a tile of queries and visits tiles
of keys.

    loader        K 0   Q    V 0   dO   K 1   V 1   K 2   ...
    warpgroup     S = Q K^T  and  dP = dO V^T, issued together
                  wait for S:     P = exp(scale S - lse)     while dP runs
                  wait for dP:    dQ += (P * (dP - delta)) K

Each of two warpgroups owns half of the rows. V is free after dP, so it may have fewer buffers than
K (``v_stages``). Sources: as `dkdv`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.epilogue import even_strides, row_offset, store_tile
from canon.fast.kernels.gluon.hoisting import unhoisted_index
from canon.fast.kernels.gluon.layouts import (
    contracted_width,
    mma_layout,
    operand_layout,
    per_row_layout,
)
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.softcap import weights
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
from canon.fast.kernels.gluon.tile_ring import (
    Ring,
    aggregate,
    allocate_tiles,
    issue_contraction,
    load_tile,
    make_barriers,
)
from canon.fast.kernels.triton.blocks import LOG2E


@aggregate
class Constants:
    """The width of q and k, and switches."""

    D: gl.constexpr
    KEY_ORDER: gl.constexpr
    SOFTCAP: gl.constexpr


@aggregate
class Buffers:
    """The owned ``q`` (its barriers also guard ``published``) and ``dout`` of each warpgroup, and
    two rings.
    """

    q: Ring
    dout: Ring
    published: gl.shared_memory_descriptor
    k: Ring
    v: Ring


@gluon.jit
def load_tiles(descriptors, work, counter, buffers, group):
    """Load K and V of every visited tile, Q and dO after the first of each (the loader)."""
    q_desc, dout_desc, k_desc, v_desc = descriptors
    q, dout, k, v = buffers.q, buffers.dout, buffers.k, buffers.v
    TOKENS: gl.constexpr = q.tiles.shape[2]
    STAGES: gl.constexpr = k.tiles.shape[0]
    V_STAGES: gl.constexpr = v.tiles.shape[0]
    BN: gl.constexpr = k.tiles.shape[2]
    t, done = 0, 0  # visited tiles, work tiles
    work_tile = first_work_tile()
    while work_tile > 0:
        first, _, batch, head = position_of(work, work_tile)
        key_head = head // group
        span, span_end, column, left = first_tile(work, work_tile)
        fresh = True
        while span < span_end:
            slot, v_slot = t % STAGES, t % V_STAGES
            # K, and Q of a new work tile
            mbarrier.wait(k.free.index(slot), (t // STAGES & 1) ^ 1)
            load_tile(k_desc, batch, column, key_head, k, slot)
            if fresh:
                for w in gl.static_range(2):
                    mbarrier.wait(q.free.index(w), (done & 1) ^ 1)
                    publish(buffers.published.index(w), work_tile)
                    load_tile(q_desc, batch, first + w * TOKENS, head, q, w)
            # V, and dO of a new work tile
            mbarrier.wait(v.free.index(v_slot), (t // V_STAGES & 1) ^ 1)
            load_tile(v_desc, batch, column, key_head, v, v_slot)
            if fresh:
                for w in gl.static_range(2):
                    mbarrier.wait(dout.free.index(w), (done & 1) ^ 1)
                    load_tile(dout_desc, batch, first + w * TOKENS, head, dout, w)
            fresh = False
            t += 1
            span, column, left = next_tile(work, span, column, left, span_end, BN)
        work_tile = claim_work_tile(work, counter)
        done += 1
    for w in gl.static_range(2):
        publish_end(buffers.published.index(w), q.full.index(w), q.free.index(w), (done & 1) ^ 1)


@gluon.jit
def load_statistics(
    stats, padded, batch_head, first, stop, M: gl.constexpr, BN: gl.constexpr, PACK: gl.constexpr
):
    """Return lse (base 2) and -delta as columns, 0 from token ``stop`` on."""
    r = gl.arange(0, M, per_row_layout(BN))
    at = stats + (batch_head * 2 * padded + first) + (r // PACK + r % PACK * 2 * padded)
    inside = r // PACK < stop - first
    lse = gl.expand_dims(gl.load(at, mask=inside, other=0.0), 1)
    minus_delta = gl.expand_dims(gl.load(at + padded, mask=inside, other=0.0), 1)
    return lse, minus_delta


@gluon.jit
def issue_scores(q, dout, k, v, zeros, buffers, t, D: gl.constexpr):
    """Issue S = Q K^T and dP = dO V^T; wait for S only. Return both."""
    STAGES: gl.constexpr = buffers.k.tiles.shape[0]
    V_STAGES: gl.constexpr = buffers.v.tiles.shape[0]
    mbarrier.wait(buffers.k.full.index(t % STAGES), t // STAGES & 1)
    s = issue_contraction(q, k, zeros, contracted_width(D, q.shape[1]))
    mbarrier.wait(buffers.v.full.index(t % V_STAGES), t // V_STAGES & 1)
    dp = hopper.warpgroup_mma(dout, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return hopper.warpgroup_mma_wait(1, deps=[s, dp])


@gluon.jit
def differentiate(buffers, stats, padded, result, work, scale, W: gl.constexpr, c):
    """Compute dq of the rows of warpgroup W."""
    dq, tokens, stride_t, stride_h = result
    TOKENS: gl.constexpr = buffers.q.tiles.shape[2]
    PACK: gl.constexpr = buffers.q.tiles.shape[3]
    D_PAD: gl.constexpr = buffers.q.tiles.shape[4]
    M: gl.constexpr = TOKENS * PACK
    STAGES: gl.constexpr = buffers.k.tiles.shape[0]
    V_STAGES: gl.constexpr = buffers.v.tiles.shape[0]
    BN: gl.constexpr = buffers.k.tiles.shape[2]
    scale_log2 = scale * LOG2E
    zeros = gl.zeros([M, BN], gl.float32, mma_layout(BN))
    t, done = 0, 0
    work_tile = receive(buffers.published.index(W), buffers.q.full.index(W), 0)
    while work_tile > 0:
        first, end_row, _, _ = position_of(work, work_tile)
        first += W * TOKENS
        span_first, span_end = spans_of(work, work_tile)
        batch_head = batch_head_of(work, work_tile)
        lse, minus_delta = load_statistics(stats, padded, batch_head, first, end_row, M, BN, PACK)
        acc = gl.zeros([M, D_PAD], gl.float32, mma_layout(D_PAD))
        mbarrier.wait(buffers.dout.full.index(W), done & 1)
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, BN)
            partial = is_partial(work, span)
            for j in range(column, stop, BN):
                slot, v_slot = t % STAGES, t % V_STAGES
                is_last = (span + SPAN == span_end) & (j + BN == stop)
                now = unhoisted_index(W, t)
                q, dout = buffers.q.operand(now), buffers.dout.operand(now)
                k, v = buffers.k.operand(slot), buffers.v.operand(unhoisted_index(v_slot, t))
                s, dp = issue_scores(q, dout, k, v, zeros, buffers, t, c.D)
                if is_last:
                    mbarrier.arrive(buffers.q.free.index(W), count=1)
                # P, while dP runs
                bent = weights(s, lse, scale_log2, c.SOFTCAP)[1]
                # Complete already: keeps the wait for dP behind P.
                mbarrier.wait(buffers.v.full.index(v_slot), t // V_STAGES & 1)
                dp = hopper.warpgroup_mma_wait(0, deps=[dp])
                mbarrier.arrive(buffers.v.free.index(v_slot), count=1)
                if is_last:
                    mbarrier.arrive(buffers.dout.free.index(W), count=1)
                # dS, and dQ += dS K
                ds = bent * (dp + minus_delta)
                if partial:  # dS, not P: dP of a hidden cell may be NaN, and 0 * NaN is NaN
                    ds = mask_hidden(ds, work, span, first, j, 0.0, PACK, c.KEY_ORDER)
                ds = gl.convert_layout(ds.to(q.dtype), operand_layout(D_PAD))
                acc = hopper.warpgroup_mma(ds, k, acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(buffers.k.free.index(slot), count=1)
                t += 1
        first, end_row, batch, head = position_of(work, work_tile)
        first += W * TOKENS
        start = dq + row_offset(batch, first, head, even_strides(tokens, stride_t, stride_h))
        acc *= scale
        batch_head = batch_head_of(work, work_tile)
        store_tile(start, acc, batch_head, end_row - first, stride_t, stride_h, c.D, PACK)
        done += 1
        work_tile = receive(buffers.published.index(W), buffers.q.full.index(W), done & 1)


@gluon.jit(do_not_specialize=["tokens", "padded", "group"])
def dq_kernel(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    stats,
    padded,
    dq,
    work,
    counter,
    scale,
    tokens,
    stride_t,
    stride_h,
    group,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    KEY_ORDER: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MATH_REGISTERS: gl.constexpr,
):
    """Write dq (b, t, h, d), batch stride t token strides. ``stats``: (b, h, 2, padded)."""
    q, dout = allocate_tiles(q_desc, 2), allocate_tiles(dout_desc, 2)
    published = allocate_published(2)
    k, v = allocate_tiles(k_desc, STAGES), allocate_tiles(v_desc, V_STAGES)
    q = Ring(q, make_barriers(2, 1), make_barriers(2, 1))
    dout = Ring(dout, make_barriers(2, 1), make_barriers(2, 1))
    k = Ring(k, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    v = Ring(v, make_barriers(V_STAGES, 1), make_barriers(V_STAGES, 2))
    buffers = Buffers(q, dout, published, k, v)
    fence_async_shared()
    c = Constants(D, KEY_ORDER, SOFTCAP)
    descriptors = (q_desc, dout_desc, k_desc, v_desc)
    result = (dq, tokens, stride_t, stride_h)
    gl.warp_specialize(
        [
            (load_tiles, (descriptors, work, counter, buffers, group)),
            (differentiate, (buffers, stats, padded, result, work, scale, 0, c)),
            (differentiate, (buffers, stats, padded, result, work, scale, 1, c)),
        ],
        [4, 4],
        [MATH_REGISTERS, MATH_REGISTERS],
    )
