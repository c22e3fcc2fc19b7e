"""The dk, dv kernel for heads wider than 128: the warpgroups share 64 keys, and split queries, then columns.

    both          S^T = K Q^T  and  dP^T = V dO^T of 64 keys x its half of the queries
                  P and dS go to shared memory, where the other warpgroup's half is waited for
                  its half of the columns of   dV += P dO   and   dK += dS Q

128 keys x 256 columns of dK and of dV would fill all registers of two warpgroups. P and dS are buffered twice, so one
barrier a tile is enough: who has passed that of tile t + 1 knows that the other has read tile t. The loader is that of `dkdv`.

Shared memory: 2 (BUFFERS rows d' + STAGES columns d') + 8 STAGES columns + 8 rows columns bytes, d' = d + dv padded.
Source: the split of D over two warpgroups: FlashAttention-3's backward at D = 256 (Shah et al., 2024, its code).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.dkdv import load_tiles, make_io, store_gradients
from canon.fast.kernels.gluon.layouts import mma_layout, per_column_layout, shared_operand_layout
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import broadcast_rows, keep_where_nonzero
from canon.fast.kernels.gluon.tile_queue import SPAN, columns_of, is_partial, receive, spans_of
from canon.fast.kernels.gluon.tile_ring import make_barriers


@gluon.jit
def differentiate(io, shared, result, work, scale, W: gl.constexpr, D: gl.constexpr, DV: gl.constexpr):
    """A warpgroup: its half of the columns of dk and dv of every item."""
    tiles, signals = io
    q_ring, dout_ring, lse_ring, delta_ring, told, k_tiles, v_tiles = tiles
    q_full, q_free, dout_full, dout_free, k_full, v_full, free = signals
    p_tiles, ds_tiles, met = shared
    STAGES: gl.constexpr = q_ring.shape[0]
    BN: gl.constexpr = q_ring.shape[2]
    D_PAD: gl.constexpr = q_ring.shape[4]
    DV_PAD: gl.constexpr = dout_ring.shape[4]
    BUFFERS: gl.constexpr = k_tiles.shape[0]
    ROWS: gl.constexpr = k_tiles.shape[2]
    HALF: gl.constexpr = BN // 2
    scale_log2 = scale * 1.4426950408889634
    nothing = gl.zeros([ROWS, HALF], gl.float32, mma_layout(HALF))
    t, done = 0, 0
    item = receive(told.index(0), k_full.index(0), 0)
    while item > 0:
        b = done % BUFFERS
        row = gl.load(work + item)
        span_first, span_end = spans_of(work, item)
        acc_k = gl.zeros([ROWS, D_PAD // 2], gl.float32, mma_layout(D_PAD // 2))
        acc_v = gl.zeros([ROWS, DV_PAD // 2], gl.float32, mma_layout(DV_PAD // 2))
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
                k = k_tiles.index(now).reshape([ROWS, D_PAD])
                v = v_tiles.index(now).reshape([ROWS, DV_PAD])
                mbarrier.wait(dout_full.index(slot), turn)
                own = delta_ring.index(slot).slice(W * HALF, HALF, dim=0)
                dp = broadcast_rows(own.load(per_column_layout(HALF)), nothing)
                mbarrier.wait(q_full.index(slot), turn)
                lse = lse_ring.index(slot).slice(W * HALF, HALF, dim=0).load(per_column_layout(HALF))
                own = q.slice(W * HALF, HALF, dim=0)
                s = hopper.warpgroup_mma(k, own.permute((1, 0)), nothing, use_acc=False, is_async=True)
                own = dout.slice(W * HALF, HALF, dim=0)
                dp = hopper.warpgroup_mma(v, own.permute((1, 0)), dp, is_async=True)
                s, dp = hopper.warpgroup_mma_wait(1, deps=[s, dp])
                p = gl.exp2(s * scale_log2 - gl.expand_dims(lse, 0))
                if partial:
                    p = mask_hidden(p, work, span, row, i + W * HALF, 0.0, 1)
                place = t % 2
                p_tiles.index(2 * place + W).store(p.to(q_ring.dtype))
                dp = hopper.warpgroup_mma_wait(0, deps=[dp])
                if partial:
                    dp = keep_where_nonzero(dp, p)
                ds_tiles.index(2 * place + W).store((p * dp).to(q_ring.dtype))
                fence_async_shared()
                mbarrier.arrive(met.index(place), count=1)
                mbarrier.wait(met.index(place), t // 2 & 1)
                for h in gl.static_range(2):
                    right = dout.slice(h * HALF, HALF, dim=0).slice(W * (DV_PAD // 2), DV_PAD // 2, dim=1)
                    acc_v = hopper.warpgroup_mma(p_tiles.index(2 * place + h), right, acc_v, is_async=True)
                for h in gl.static_range(2):
                    right = q.slice(h * HALF, HALF, dim=0).slice(W * (D_PAD // 2), D_PAD // 2, dim=1)
                    acc_k = hopper.warpgroup_mma(ds_tiles.index(2 * place + h), right, acc_k, is_async=True)
                acc_v, acc_k = hopper.warpgroup_mma_wait(0, deps=[acc_v, acc_k])
                mbarrier.arrive(dout_free.index(slot), count=1)
                mbarrier.arrive(q_free.index(slot), count=1)
                t += 1
        mbarrier.arrive(free.index(b), count=1)
        store_gradients(acc_k * scale, acc_v, result, work, item, 0, W * (D_PAD // 2), W * (DV_PAD // 2), D, DV)
        done += 1
        b = done % BUFFERS
        item = receive(told.index(b), k_full.index(b), done // BUFFERS & 1)


@gluon.jit(do_not_specialize=["padded", "query_heads"])
def dkdv_hdim256_kernel(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    line_desc,
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
    """dk (b, s, o, d) and dv (b, s, o, dv), with last stride 1, of the items in ``work``; an owner has HEADS query heads."""
    descriptors = (q_desc, dout_desc, k_desc, v_desc, line_desc)
    io = make_io(descriptors, ROWS, COLUMNS, D_PAD, DV_PAD, STAGES, BUFFERS)
    p_tiles = gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, COLUMNS // 2], shared_operand_layout(COLUMNS // 2))
    ds_tiles = gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, COLUMNS // 2], shared_operand_layout(COLUMNS // 2))
    shared = (p_tiles, ds_tiles, make_barriers(2, 2))
    fence_async_shared()
    result = (dk, dv, k_strides, v_strides)
    gl.warp_specialize(
        [
            (load_tiles, (descriptors, work, counter, io, padded, query_heads, HEADS, GROUP, False)),
            (differentiate, (io, shared, result, work, scale, 0, D, DV)),
            (differentiate, (io, shared, result, work, scale, 1, D, DV)),
        ],
        [4, 4],
        [MATH_REGISTERS, MATH_REGISTERS],
    )
