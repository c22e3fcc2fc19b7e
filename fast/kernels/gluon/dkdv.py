"""The dk and dv kernel for Hopper: four MMAs for each tile, or five if it also adds to dq
("fused").

A CTA holds ROWS keys of one owner and visits tiles of COLUMNS queries, span after span:

    loader        Q 0   K    dO 0   V    Q 1   dO 1   Q 2   ...   (query head after query head)
    warpgroup     S^T = K Q^T  and  dP^T = V dO^T - delta, issued together
                  wait for S^T:    P = exp(scale S - lse)       while dP^T runs
                                   dV += P dO
                  wait for dP^T:   dS = P * dP                  while dV runs
                                   dK += dS Q
    fused         dQ^T = K^T dS; adder warps add it to float32 dq (`dq_adder`)

Each warpgroup holds dK and dV of half of the keys. Measurements: paper/backward_on_hopper.md.
Sources: Tri Dao, FlashAttention-2 (2023), algorithm 2; Shah et al., FlashAttention-3 (2024)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.dq_adder import (
    add_dq,
    adders,
    issue_dq,
    make_exchange,
    pass_dq,
    share_ds,
)
from canon.fast.kernels.gluon.epilogue import row_offset, store_tile
from canon.fast.kernels.gluon.hoisting import unhoisted_index
from canon.fast.kernels.gluon.layouts import (
    contracted_width,
    mma_layout,
    operand_layout,
    per_column_layout,
)
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import broadcast_rows, keep_where_nonzero
from canon.fast.kernels.gluon.softcap import weights
from canon.fast.kernels.gluon.tile_queue import (
    SPAN,
    allocate_published,
    batch_head_of,
    claim_any_work_tile,
    columns_of,
    first_tile,
    is_partial,
    next_tile,
    position_of,
    publish,
    publish_end,
    receive_after,
    spans_of,
)
from canon.fast.kernels.gluon.tile_ring import (
    Ring,
    aggregate,
    allocate_tiles,
    issue_contraction,
    load_tile,
    make_barriers,
    tma_load,
)
from canon.fast.kernels.triton.blocks import LOG2E


@aggregate
class Constants:
    """Tiles of ROWS keys and COLUMNS queries, widths, rings, switches."""

    ROWS: gl.constexpr
    COLUMNS: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr
    D_PAD: gl.constexpr
    DV_PAD: gl.constexpr
    STAGES: gl.constexpr
    BUFFERS: gl.constexpr
    FUSED: gl.constexpr
    ORDERED: gl.constexpr
    KEY_ORDER: gl.constexpr
    SOFTCAP: gl.constexpr


@aggregate
class Buffers:
    """Rings of the visited ``q``, ``dout``, ``lse``, ``delta`` (negative), and the owned ``k``,
    ``v``. Barriers of q also guard lse, of dout delta, ``full`` of k ``published``.
    """

    q: Ring
    dout: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    published: gl.shared_memory_descriptor
    k: Ring
    v: Ring


@gluon.jit
def make_buffers(descriptors, c, READERS: gl.constexpr):
    """Allocate the buffers. READERS partitions release a published work tile."""
    q_desc, dout_desc, k_desc, v_desc, stats_desc = descriptors
    q, dout = allocate_tiles(q_desc, c.STAGES), allocate_tiles(dout_desc, c.STAGES)
    lse = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.COLUMNS], stats_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.COLUMNS], stats_desc.layout)
    published = allocate_published(c.BUFFERS)
    k, v = allocate_tiles(k_desc, c.BUFFERS), allocate_tiles(v_desc, c.BUFFERS)
    q = Ring(q, make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 2))
    dout = Ring(dout, make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 2))
    k_full, v_full = make_barriers(c.BUFFERS, 1), make_barriers(c.BUFFERS, 1)
    free = make_barriers(c.BUFFERS, READERS)
    return Buffers(q, dout, lse, delta, published, Ring(k, k_full, free), Ring(v, v_full, free))


@gluon.jit
def load_tiles(descriptors, work, counter, buffers, padded, query_heads, heads, group, c):
    """Load Q, lse, dO and delta of every visited tile (the loader); K after the first Q, V after
    the first dO: their buffers are freed late. ``padded``: tokens in a row of statistics.
    """
    q_desc, dout_desc, k_desc, v_desc, stats_desc = descriptors
    q, dout, k, v = buffers.q, buffers.dout, buffers.k, buffers.v
    t, done = 0, 0  # visited tiles, work tiles
    work_tile = claim_any_work_tile(work, counter, True, c.ORDERED)
    while work_tile > 0:
        first, _, batch, owner = position_of(work, work_tile)
        span_first, span_end, column, left = first_tile(work, work_tile)
        span, each_head = span_first, (span_end - span_first) // heads
        head, b = owner * heads, done % c.BUFFERS
        key_head = head // group
        fresh = True
        while span < span_end:
            slot = t % c.STAGES
            parity = t // c.STAGES & 1
            # Q and lse; delta is ``padded`` numbers later
            row = (batch * query_heads + head) * 2 * padded + column
            mbarrier.wait(q.free.index(slot), parity ^ 1)
            mbarrier.expect(
                q.full.index(slot), q_desc.block_type.nbytes + stats_desc.block_type.nbytes
            )
            tma_load(q_desc, [batch, column, head, 0], q.full.index(slot), q.tiles.index(slot))
            tma_load(stats_desc, [row], q.full.index(slot), buffers.lse.index(slot))
            if fresh:  # publish the work tile, and load K
                mbarrier.wait(k.free.index(b), (done // c.BUFFERS & 1) ^ 1)
                publish(buffers.published.index(b), work_tile)
                load_tile(k_desc, batch, first, key_head, k, b)
            mbarrier.wait(dout.free.index(slot), parity ^ 1)
            mbarrier.expect(
                dout.full.index(slot), dout_desc.block_type.nbytes + stats_desc.block_type.nbytes
            )
            tma_load(
                dout_desc, [batch, column, head, 0], dout.full.index(slot), dout.tiles.index(slot)
            )
            tma_load(stats_desc, [row + padded], dout.full.index(slot), buffers.delta.index(slot))
            if fresh:
                load_tile(v_desc, batch, first, key_head, v, b)
            fresh = False
            t += 1
            before = span
            span, column, left = next_tile(work, span, column, left, span_end, c.COLUMNS)
            if span != before:
                head = owner * heads + (span - span_first) // each_head
        work_tile = claim_any_work_tile(work, counter, False, c.ORDERED)
        done += 1
    b = done % c.BUFFERS
    publish_end(
        buffers.published.index(b), k.full.index(b), k.free.index(b), (done // c.BUFFERS & 1) ^ 1
    )


@gluon.constexpr_function
def early(columns):
    """Return whether registers suffice to load lse before S^T is issued."""
    return columns <= 64


@gluon.jit
def issue_scores(k, v, q, dout, zeros, buffers, slot, parity, c):
    """Issue S^T and dP^T = V dO^T - delta; wait for S^T only. Return both and lse."""
    LAYOUT: gl.constexpr = per_column_layout(c.COLUMNS)
    EARLY: gl.constexpr = early(c.COLUMNS)
    mbarrier.wait(buffers.dout.full.index(slot), parity)
    # an initial accumulator costs nothing
    dp = broadcast_rows(buffers.delta.index(slot).load(LAYOUT), zeros)
    mbarrier.wait(buffers.q.full.index(slot), parity)
    if EARLY:
        lse = buffers.lse.index(slot).load(LAYOUT)
    s = issue_contraction(k, q, zeros, contracted_width(c.D, c.D_PAD))
    dp = hopper.warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
    s, dp = hopper.warpgroup_mma_wait(1, deps=[s, dp])
    if not EARLY:
        lse = buffers.lse.index(slot).load(LAYOUT)
    return s, dp, lse


@gluon.jit
def hide_weights(p, bent, work, span, row, column, c):
    """Return `weights` with 0 in hidden cells. P, not S: lse may be NaN in rows that see no key."""
    p = mask_hidden(p, work, span, row, column, 0.0, 1, c.KEY_ORDER)
    if c.SOFTCAP is None:
        return p, p
    else:
        return p, mask_hidden(bent, work, span, row, column, 0.0, 1, c.KEY_ORDER)


@gluon.jit
def differentiate(buffers, exchange, result, work, scale, W: gl.constexpr, c):
    """Compute dk and dv of the keys of warpgroup W."""
    N: gl.constexpr = c.ROWS // 2
    scale_log2 = scale * LOG2E
    zeros = gl.zeros([N, c.COLUMNS], gl.float32, mma_layout(c.COLUMNS))
    t, done = 0, 0
    work_tile = receive_after(buffers.published, buffers.k.full, 0)
    while work_tile > 0:
        b = done % c.BUFFERS
        span_first, span_end = spans_of(work, work_tile)
        acc_k = gl.zeros([N, c.D_PAD], gl.float32, mma_layout(c.D_PAD))
        acc_v = gl.zeros([N, c.DV_PAD], gl.float32, mma_layout(c.DV_PAD))
        mbarrier.wait(buffers.v.full.index(b), done // c.BUFFERS & 1)
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, c.COLUMNS)
            partial = is_partial(work, span)
            for i in range(column, stop, c.COLUMNS):
                slot = t % c.STAGES
                q, dout = buffers.q.operand(slot), buffers.dout.operand(slot)
                now = unhoisted_index(b, t)
                all_k = buffers.k.operand(now)
                k = all_k.slice(W * N, N, dim=0)
                v = buffers.v.operand(now).slice(W * N, N, dim=0)
                s, dp, lse = issue_scores(k, v, q, dout, zeros, buffers, slot, t // c.STAGES & 1, c)
                # P, while dP runs
                p, bent = weights(s, gl.expand_dims(lse, 0), scale_log2, c.SOFTCAP)
                if partial:
                    row = gl.load(work + work_tile) + W * N  # reloaded to save registers
                    p, bent = hide_weights(p, bent, work, span, row, i, c)
                p_operand = gl.convert_layout(p.to(q.dtype), operand_layout(c.DV_PAD))
                acc_v = hopper.warpgroup_mma(p_operand, dout, acc_v, is_async=True)
                dp, acc_v = hopper.warpgroup_mma_wait(1, deps=[dp, acc_v])
                # dS, while dV runs
                if partial:
                    dp = keep_where_nonzero(dp, bent)
                ds = (bent * dp).to(q.dtype)
                ds_operand = gl.convert_layout(ds, operand_layout(c.D_PAD))
                # dK, and a part of dQ
                if c.FUSED:
                    share_ds(ds, exchange, t, W)
                if c.FUSED and c.D_PAD > 64:  # this warpgroup computes 64 columns of dQ
                    dq = issue_dq(all_k, W * 64, exchange, t)
                    acc_k = hopper.warpgroup_mma(ds_operand, q, acc_k, is_async=True)
                    dq, acc_k, acc_v = hopper.warpgroup_mma_wait(1, deps=[dq, acc_k, acc_v])
                    mbarrier.arrive(buffers.dout.free.index(slot), count=1)
                    pass_dq(dq * scale, exchange, t, W, 2)
                else:
                    acc_k = hopper.warpgroup_mma(ds_operand, q, acc_k, is_async=True)
                    acc_v, acc_k = hopper.warpgroup_mma_wait(1, deps=[acc_v, acc_k])
                    mbarrier.arrive(buffers.dout.free.index(slot), count=1)
                    if c.FUSED:  # noqa: SIM102 - all columns, of every second tile
                        if t % 2 == W:
                            dq = issue_dq(all_k, 0, exchange, t)
                            dq, acc_k = hopper.warpgroup_mma_wait(0, deps=[dq, acc_k])
                            pass_dq(dq * scale, exchange, t, 0, 1)
                acc_k = hopper.warpgroup_mma_wait(0, deps=[acc_k])
                mbarrier.arrive(buffers.q.free.index(slot), count=1)
                t += 1
        # the owner's results, once its K and V are free
        mbarrier.arrive(buffers.k.free.index(b), count=1)
        dk, dv, k_strides, v_strides = result
        store_gradient(acc_k * scale, dk, k_strides, work, work_tile, W * N, c.D)
        store_gradient(acc_v, dv, v_strides, work, work_tile, W * N, c.DV)
        done += 1
        work_tile = receive_after(buffers.published, buffers.k.full, done)


@gluon.jit
def store_gradient(acc, grad, strides, work, work_tile, ROW: gl.constexpr, WIDTH: gl.constexpr):
    """Write an accumulator to dk or dv, from row ROW of the work tile on."""
    # reloaded to save registers in the loop
    first, stop, batch, owner = position_of(work, work_tile)
    first += ROW
    start = grad + row_offset(batch, first, owner, strides)
    store_tile(start, acc, batch_head_of(work, work_tile), stop - first, strides[1], 0, WIDTH, 1)


@gluon.jit(do_not_specialize=["padded", "query_heads", "heads", "group", "dq_tiles"])
def dkdv_kernel(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    stats_desc,
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
    heads,
    group,
    dq_tiles,
    FUSED: gl.constexpr,
    ORDERED: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    KEY_ORDER: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MATH_REGISTERS: gl.constexpr,
):
    """Write dk (b, s, o, d) and dv (b, s, o, dv), last stride 1, of o owners with ``heads`` query
    heads, of ``group`` that share a key head. ORDERED: zeros, the semaphores (b, h, dq_tiles),
    follow ``counter``.
    """
    COLUMNS: gl.constexpr = q_desc.block_type.shape[1]
    D_PAD: gl.constexpr = q_desc.block_type.shape[3]
    DV_PAD: gl.constexpr = dout_desc.block_type.shape[3]
    c = Constants(
        ROWS, COLUMNS, D, DV, D_PAD, DV_PAD, STAGES, BUFFERS, FUSED, ORDERED, KEY_ORDER, SOFTCAP
    )
    descriptors = (q_desc, dout_desc, k_desc, v_desc, stats_desc)
    result = (dk, dv, k_strides, v_strides)
    if FUSED:
        READERS: gl.constexpr = 2 + adders(ORDERED)
    else:
        READERS: gl.constexpr = gl.constexpr(2)
    buffers = make_buffers(descriptors, c, READERS)
    loaded = (descriptors, work, counter, buffers, padded, query_heads, heads, group, c)
    if FUSED:
        exchange = make_exchange(q_desc.dtype, dq_desc, c)
        semaphores = counter + 1
        fence_async_shared()
        # loader and adders share a warpgroup: 240 registers are left for the others
        gl.warp_specialize(
            [
                (differentiate, (buffers, exchange, result, work, scale, 0, c)),
                (differentiate, (buffers, exchange, result, work, scale, 1, c)),
                (load_tiles, loaded),
                (add_dq, (dq_desc, buffers, exchange, work, semaphores, dq_tiles, heads, c, 0)),
                (add_dq, (dq_desc, buffers, exchange, work, semaphores, dq_tiles, heads, c, 1)),
            ][: 5 if ORDERED else 4],
            [4, 1, 1, 1] if ORDERED else [4, 1, 1],
            [MATH_REGISTERS, 24, 24, 24] if ORDERED else [MATH_REGISTERS, 24, 24],
        )
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (load_tiles, loaded),
                (differentiate, (buffers, buffers, result, work, scale, 0, c)),
                (differentiate, (buffers, buffers, result, work, scale, 1, c)),
            ],
            [4, 4],
            [MATH_REGISTERS, MATH_REGISTERS],
        )
