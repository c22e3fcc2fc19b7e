"""The dk and dv kernel for heads wider than 128.

128 keys x 256 columns of dK and dV would fill all registers. So two warpgroups share 64 keys:

    warpgroup     S^T = K Q^T  and  dP^T = V dO^T     of 64 keys x its half of the queries
                  write P and dS to shared memory, wait for the other half
                  dV += P dO   and   dK += dS Q       of its half of the columns

P and dS have two buffers, so one barrier per tile suffices: a warpgroup passes that of tile t + 1 only after the other one
has read tile t. Source: FlashAttention-3's backward at D = 256 (Shah et al., 2024, its code).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.dkdv import LOG2E, load_tiles, make_buffers, store_gradients
from canon.fast.kernels.gluon.layouts import mma_layout, per_column_layout, shared_operand_layout
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import broadcast_rows, keep_where_nonzero
from canon.fast.kernels.gluon.tile_queue import SPAN, columns_of, is_partial, receive, spans_of
from canon.fast.kernels.gluon.tile_ring import aggregate, make_barriers


@aggregate
class Exchange:
    """P and dS of a tile, two buffers for each warpgroup, and barriers ``full`` of both halves."""

    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def issue_scores(k, v, q, dout, buffers, slot, parity, W: gl.constexpr):
    """Issue S^T and dP^T of this warpgroup's queries; wait for S^T only. Return S^T, dP^T and lse."""
    ROWS: gl.constexpr = k.shape[0]
    HALF: gl.constexpr = q.shape[0] // 2
    zeros = gl.zeros([ROWS, HALF], gl.float32, mma_layout(HALF))
    mbarrier.wait(buffers.dout.full.index(slot), parity)
    half = buffers.delta.index(slot).slice(W * HALF, HALF, dim=0)
    dp = broadcast_rows(half.load(per_column_layout(HALF)), zeros)
    mbarrier.wait(buffers.q.full.index(slot), parity)
    lse = buffers.lse.index(slot).slice(W * HALF, HALF, dim=0).load(per_column_layout(HALF))
    half = q.slice(W * HALF, HALF, dim=0)
    s = hopper.warpgroup_mma(k, half.permute((1, 0)), zeros, use_acc=False, is_async=True)
    half = dout.slice(W * HALF, HALF, dim=0)
    dp = hopper.warpgroup_mma(v, half.permute((1, 0)), dp, is_async=True)
    s, dp = hopper.warpgroup_mma_wait(1, deps=[s, dp])
    return s, dp, lse


@gluon.jit
def accumulate(acc, shared, right, place, W: gl.constexpr):
    """Issue acc += (P or dS) (dO or Q) of this warpgroup's columns. ``shared`` has both halves of the queries."""
    HALF: gl.constexpr = right.shape[0] // 2
    COLUMNS: gl.constexpr = right.shape[1] // 2
    for h in gl.static_range(2):
        operand = right.slice(h * HALF, HALF, dim=0).slice(W * COLUMNS, COLUMNS, dim=1)
        acc = hopper.warpgroup_mma(shared.index(2 * place + h), operand, acc, is_async=True)
    return acc


@gluon.jit
def differentiate(buffers, exchange, result, work, scale, W: gl.constexpr, D: gl.constexpr, DV: gl.constexpr):
    """Compute the columns of dk and dv of warpgroup W for every work tile."""
    STAGES: gl.constexpr = buffers.q.tiles.shape[0]
    BN: gl.constexpr = buffers.q.tiles.shape[2]
    D_PAD: gl.constexpr = buffers.q.tiles.shape[4]
    DV_PAD: gl.constexpr = buffers.dout.tiles.shape[4]
    BUFFERS: gl.constexpr = buffers.k.tiles.shape[0]
    ROWS: gl.constexpr = buffers.k.tiles.shape[2]
    HALF: gl.constexpr = BN // 2
    scale_log2 = scale * LOG2E
    t, done = 0, 0  # tiles visited, work tiles done
    work_tile = receive(buffers.published.index(0), buffers.k.full.index(0), 0)
    while work_tile > 0:
        b = done % BUFFERS
        row = gl.load(work + work_tile)
        span_first, span_end = spans_of(work, work_tile)
        acc_k = gl.zeros([ROWS, D_PAD // 2], gl.float32, mma_layout(D_PAD // 2))
        acc_v = gl.zeros([ROWS, DV_PAD // 2], gl.float32, mma_layout(DV_PAD // 2))
        mbarrier.wait(buffers.v.full.index(b), done // BUFFERS & 1)
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, BN)
            partial = is_partial(work, span)
            for i in range(column, stop, BN):
                slot = t % STAGES
                q = buffers.q.tiles.index(slot).reshape([BN, D_PAD])
                dout = buffers.dout.tiles.index(slot).reshape([BN, DV_PAD])
                now = b + (t >> 30)  # equals b, but opaque: hoisted addresses of tiles would cost registers
                k = buffers.k.tiles.index(now).reshape([ROWS, D_PAD])
                v = buffers.v.tiles.index(now).reshape([ROWS, DV_PAD])
                s, dp, lse = issue_scores(k, v, q, dout, buffers, slot, t // STAGES & 1, W)
                p = gl.exp2(s * scale_log2 - gl.expand_dims(lse, 0))
                if partial:
                    p = mask_hidden(p, work, span, row, i + W * HALF, 0.0, 1)
                place = t % 2
                exchange.p.index(2 * place + W).store(p.to(q.dtype))
                dp = hopper.warpgroup_mma_wait(0, deps=[dp])
                if partial:
                    dp = keep_where_nonzero(dp, p)
                exchange.ds.index(2 * place + W).store((p * dp).to(q.dtype))
                fence_async_shared()
                mbarrier.arrive(exchange.full.index(place), count=1)
                mbarrier.wait(exchange.full.index(place), t // 2 & 1)
                acc_v = accumulate(acc_v, exchange.p, dout, place, W)
                acc_k = accumulate(acc_k, exchange.ds, q, place, W)
                acc_v, acc_k = hopper.warpgroup_mma_wait(0, deps=[acc_v, acc_k])
                mbarrier.arrive(buffers.dout.free.index(slot), count=1)
                mbarrier.arrive(buffers.q.free.index(slot), count=1)
                t += 1
        mbarrier.arrive(buffers.k.free.index(b), count=1)
        store_gradients(acc_k * scale, acc_v, result, work, work_tile, 0, W * (D_PAD // 2), W * (DV_PAD // 2), D, DV)
        done += 1
        b = done % BUFFERS
        work_tile = receive(buffers.published.index(b), buffers.k.full.index(b), done // BUFFERS & 1)


@gluon.jit(do_not_specialize=["padded", "query_heads"])
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
    """Write dk (b, s, o, d) and dv (b, s, o, dv): see `dkdv_kernel`."""
    descriptors = (q_desc, dout_desc, k_desc, v_desc, stats_desc)
    buffers = make_buffers(descriptors, ROWS, COLUMNS, D_PAD, DV_PAD, STAGES, BUFFERS)
    p = gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, COLUMNS // 2], shared_operand_layout(COLUMNS // 2))
    ds = gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, COLUMNS // 2], shared_operand_layout(COLUMNS // 2))
    exchange = Exchange(p, ds, make_barriers(2, 2))
    fence_async_shared()
    result = (dk, dv, k_strides, v_strides)
    gl.warp_specialize(
        [
            (load_tiles, (descriptors, work, counter, buffers, padded, query_heads, HEADS, GROUP, False)),
            (differentiate, (buffers, exchange, result, work, scale, 0, D, DV)),
            (differentiate, (buffers, exchange, result, work, scale, 1, D, DV)),
        ],
        [4, 4],
        [MATH_REGISTERS, MATH_REGISTERS],
    )
