"""The dk and dv kernel for heads wider than 128: a CTA holds 64 keys, and each warpgroup one result
(paper/backward_on_hopper.md).

    warpgroup of dV        S^T = K Q^T,  P = exp(scale S - lse)      write P to shared memory
                           dV += P dO                                P stays in registers
    warpgroup of dK        dP^T = V dO^T - delta                     while the other one computes P
                           dS = P * dP,  dK += dS Q                  dS stays in registers

``free`` of a slot of Q guards its buffer of P, too. Source: flash-attention pull request 2889
(2025)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.dkdv import (
    Constants,
    hide_weights,
    load_tiles,
    make_buffers,
    store_gradient,
)
from canon.fast.kernels.gluon.hoisting import unhoisted_index
from canon.fast.kernels.gluon.layouts import (
    contracted_width,
    mma_layout,
    operand_layout,
    per_column_layout,
    shared_operand_layout,
)
from canon.fast.kernels.gluon.ptx import broadcast_rows, keep_where_nonzero
from canon.fast.kernels.gluon.softcap import weights
from canon.fast.kernels.gluon.tile_queue import (
    SPAN,
    columns_of,
    is_partial,
    receive_after,
    spans_of,
)
from canon.fast.kernels.gluon.tile_ring import issue_contraction, make_barriers
from canon.fast.kernels.triton.blocks import LOG2E


@gluon.jit
def compute_dv(buffers, shared_p, p_full, dv, strides, work, scale, c):
    """Compute P and dv; share P, times the slope under a soft-cap."""
    scale_log2 = scale * LOG2E
    zeros = gl.zeros([c.ROWS, c.COLUMNS], gl.float32, mma_layout(c.COLUMNS))
    t, done = 0, 0  # visited tiles, work tiles
    work_tile = receive_after(buffers.published, buffers.k.full, 0)
    while work_tile > 0:
        b = done % c.BUFFERS
        row = gl.load(work + work_tile)
        span_first, span_end = spans_of(work, work_tile)
        acc = gl.zeros([c.ROWS, c.DV_PAD], gl.float32, mma_layout(c.DV_PAD))
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, c.COLUMNS)
            partial = is_partial(work, span)
            for i in range(column, stop, c.COLUMNS):
                slot = t % c.STAGES
                q, dout = buffers.q.operand(slot), buffers.dout.operand(slot)
                k = buffers.k.operand(unhoisted_index(b, t))
                mbarrier.wait(buffers.q.full.index(slot), t // c.STAGES & 1)
                lse = buffers.lse.index(slot).load(per_column_layout(c.COLUMNS))
                # S, P and its copy for the warpgroup of dK
                s = issue_contraction(k, q, zeros, contracted_width(c.D, c.D_PAD))
                s = hopper.warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(buffers.q.free.index(slot), count=1)
                p, bent = weights(s, gl.expand_dims(lse, 0), scale_log2, c.SOFTCAP)
                if partial:
                    p, bent = hide_weights(p, bent, work, span, row, i, c)
                p = p.to(q.dtype)
                shared_p.index(slot).store(p if c.SOFTCAP is None else bent.to(q.dtype))
                mbarrier.arrive(p_full.index(slot), count=1)
                # dV
                mbarrier.wait(buffers.dout.full.index(slot), t // c.STAGES & 1)
                acc = hopper.warpgroup_mma(
                    gl.convert_layout(p, operand_layout(c.DV_PAD)), dout, acc, is_async=True
                )
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(buffers.dout.free.index(slot), count=1)
                t += 1
        mbarrier.arrive(buffers.k.free.index(b), count=1)
        store_gradient(acc, dv, strides, work, work_tile, 0, c.DV)
        done += 1
        work_tile = receive_after(buffers.published, buffers.k.full, done)


@gluon.jit
def compute_dk(buffers, shared_p, p_full, dk, strides, work, scale, c):
    """Compute dP, dS and dk with the other warpgroup's P."""
    zeros = gl.zeros([c.ROWS, c.COLUMNS], gl.float32, mma_layout(c.COLUMNS))
    t, done = 0, 0
    work_tile = receive_after(buffers.published, buffers.k.full, 0)
    while work_tile > 0:
        b = done % c.BUFFERS
        span_first, span_end = spans_of(work, work_tile)
        acc = gl.zeros([c.ROWS, c.D_PAD], gl.float32, mma_layout(c.D_PAD))
        mbarrier.wait(buffers.v.full.index(b), done // c.BUFFERS & 1)
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, c.COLUMNS)
            partial = is_partial(work, span)
            for _ in range(column, stop, c.COLUMNS):
                slot = t % c.STAGES
                q, dout = buffers.q.operand(slot), buffers.dout.operand(slot)
                v = buffers.v.operand(unhoisted_index(b, t))
                mbarrier.wait(buffers.dout.full.index(slot), t // c.STAGES & 1)
                # dP, while the other warpgroup computes P
                minus_delta = buffers.delta.index(slot).load(per_column_layout(c.COLUMNS))
                dp = broadcast_rows(minus_delta, zeros)
                dp = hopper.warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
                # once P has arrived, Q of the slot has, too
                mbarrier.wait(p_full.index(slot), t // c.STAGES & 1)
                p = shared_p.index(slot).load(mma_layout(c.COLUMNS)).to(gl.float32)
                dp = hopper.warpgroup_mma_wait(0, deps=[dp])
                mbarrier.arrive(buffers.dout.free.index(slot), count=1)
                # dS and dK
                if partial:
                    dp = keep_where_nonzero(dp, p)
                ds = gl.convert_layout((p * dp).to(q.dtype), operand_layout(c.D_PAD))
                acc = hopper.warpgroup_mma(ds, q, acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(buffers.q.free.index(slot), count=1)
                t += 1
        mbarrier.arrive(buffers.k.free.index(b), count=1)
        store_gradient(acc * scale, dk, strides, work, work_tile, 0, c.D)
        done += 1
        work_tile = receive_after(buffers.published, buffers.k.full, done)


@gluon.jit(do_not_specialize=["padded", "query_heads", "heads", "group"])
def dkdv_hdim256_kernel(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    stats_desc,
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
    D: gl.constexpr,
    DV: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    KEY_ORDER: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MATH_REGISTERS: gl.constexpr,
):
    """As `dkdv_kernel`, without dq."""
    COLUMNS: gl.constexpr = q_desc.block_type.shape[1]
    D_PAD: gl.constexpr = q_desc.block_type.shape[3]
    DV_PAD: gl.constexpr = dout_desc.block_type.shape[3]
    c = Constants(
        ROWS, COLUMNS, D, DV, D_PAD, DV_PAD, STAGES, BUFFERS, False, False, KEY_ORDER, SOFTCAP
    )
    descriptors = (q_desc, dout_desc, k_desc, v_desc, stats_desc)
    buffers = make_buffers(descriptors, c, 2)
    p = gl.allocate_shared_memory(
        q_desc.dtype, [STAGES, ROWS, COLUMNS], shared_operand_layout(COLUMNS)
    )
    p_full = make_barriers(STAGES, 1)
    loaded = (descriptors, work, counter, buffers, padded, query_heads, heads, group, c)
    fence_async_shared()
    gl.warp_specialize(
        [
            (load_tiles, loaded),
            (compute_dv, (buffers, p, p_full, dv, v_strides, work, scale, c)),
            (compute_dk, (buffers, p, p_full, dk, k_strides, work, scale, c)),
        ],
        [4, 4],
        [MATH_REGISTERS, MATH_REGISTERS],
    )
