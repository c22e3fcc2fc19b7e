"""The forward kernel for Hopper without refinements: read it first. Calls run `forward`.

A CTA computes one work tile, 128 queries of one head:

    loader         Q   K 0   V 0   K 1   V 1   K 2   V 2   ...   by TMA, to STAGES buffers
    warpgroup 0    S 0 | softmax 0 | O 0, S 1  | softmax 1 | O 1, S 2  | softmax 2 | ...
    warpgroup 1        |    S 0    | softmax 0 | O 0, S 1  | softmax 1 | O 1, S 2  | ...

S j is S = Q K^T with tile j of K. Softmax j computes P = exp2(S scale_log2 - m) with the row
maximum m so far, and rescales O and the sum l of P. O j is O += P V. At the end, out is O / l. A
warpgroup issues O j and S j + 1 together. Meanwhile the other one computes its softmax (ping-pong
scheduling), so the tensor cores are busy during exponentials.

    barrier          arrivals in a phase   arrives                 waits           protects
    q_full           1, and all bytes      loader, then TMA        its warpgroup   Q until loaded
    k.full, v.full   1, and all bytes      loader, then TMA        warpgroups      K, V until loaded
    k.free, v.free   2                     each warpgroup, once    loader          K, V until read
                                           its MMA is done
    named 8 + w      256 threads           the other one, its      warpgroup w     order of MMAs
                                           MMAs issued

Read `tile_ring` for barriers and TMA, and `tile_queue` for ``work``. Source: Shah et al.,
FlashAttention-3 (2024), section 3.1."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.epilogue import even_strides, row_offset, store_tile
from canon.fast.kernels.gluon.layouts import mma_layout, operand_layout, per_row_layout
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import ping_pong_arrive, ping_pong_wait
from canon.fast.kernels.gluon.tile_queue import (
    batch_head_of,
    first_tile,
    first_work_tile,
    is_partial,
    next_tile,
    position_of,
)
from canon.fast.kernels.gluon.tile_ring import (
    Ring,
    allocate_tiles,
    first_position,
    load_box,
    make_barriers,
)
from canon.fast.kernels.triton.blocks import LN2


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, q, q_full, k, v, work, group):
    """Load Q of both warpgroups, then K and V of every visited tile (the loader)."""
    ROWS: gl.constexpr = q.shape[2]
    first, _, batch, head = position_of(work, first_work_tile())
    key_head = head // group
    for w in gl.static_range(2):
        load_box(q_desc, batch, first + w * ROWS, head, q_full.index(w), q.index(w))
    ring = first_position()
    span, span_end, column, left = first_tile(work, first_work_tile())
    while span < span_end:
        mbarrier.wait(k.free.index(ring.slot), ring.parity ^ 1)
        load_box(k_desc, batch, column, key_head, k.full.index(ring.slot), k.tiles.index(ring.slot))
        mbarrier.wait(v.free.index(ring.slot), ring.parity ^ 1)
        load_box(v_desc, batch, column, key_head, v.full.index(ring.slot), v.tiles.index(ring.slot))
        ring = ring.next(k.tiles.shape[0])
        span, column, left = next_tile(work, span, column, left, span_end, k.tiles.shape[2])


@gluon.jit
def attend(q, q_full, k, v, result, work, scale_log2, W: gl.constexpr, DV: gl.constexpr):
    """Compute out and lse of the 64 queries of warpgroup W."""
    ROWS: gl.constexpr = q.shape[2]
    STAGES: gl.constexpr = k.tiles.shape[0]
    COLUMNS: gl.constexpr = k.tiles.shape[2]
    DV_PAD: gl.constexpr = v.tiles.shape[4]
    row = gl.load(work + first_work_tile()) + W * ROWS
    # row maximum of the scores, in base 2
    m = gl.full([ROWS], float("-inf"), gl.float32, per_row_layout(COLUMNS))
    l = gl.zeros([ROWS], gl.float32, per_row_layout(COLUMNS))  # sum of P
    o = gl.zeros([ROWS, DV_PAD], gl.float32, mma_layout(DV_PAD))  # sum of P V

    # S 0
    ring = first_position()
    span, span_end, column, left = first_tile(work, first_work_tile())
    mbarrier.wait(q_full.index(W), 0)
    if W == 1:
        ping_pong_arrive(W, 2)  # warpgroup 0 goes first
    ping_pong_wait(W)
    s = issue_scores(q.index(W), k, ring)
    ping_pong_arrive(W, 2)
    s = hopper.warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k.free.index(ring.slot), count=1)
    if is_partial(work, span):
        s = mask_hidden(s, work, span, row, column, float("-inf"), 1)
    span, column, left = next_tile(work, span, column, left, span_end, COLUMNS)

    # softmax j, then O j and S j + 1
    while span < span_end:
        partial = is_partial(work, span)
        following = ring.next(STAGES)
        p, m, l, o = softmax(s, m, l, o, scale_log2, q.dtype)
        ping_pong_wait(W)
        o = issue_output(p, v, o, ring)
        s = issue_scores(q.index(W), k, following)
        ping_pong_arrive(W, 2)
        s, o = hopper.warpgroup_mma_wait(0, deps=[s, o])
        mbarrier.arrive(v.free.index(ring.slot), count=1)
        mbarrier.arrive(k.free.index(following.slot), count=1)
        if partial:
            s = mask_hidden(s, work, span, row, column, float("-inf"), 1)
        ring = following
        span, column, left = next_tile(work, span, column, left, span_end, COLUMNS)

    # the last softmax, and O
    p, m, l, o = softmax(s, m, l, o, scale_log2, q.dtype)
    ping_pong_wait(W)
    o = issue_output(p, v, o, ring)
    ping_pong_arrive(W, 2)
    o = hopper.warpgroup_mma_wait(0, deps=[o])
    if W == 0:
        ping_pong_wait(W)  # take the last arrival of warpgroup 1: the barrier ends balanced
    write_result(o, m, l, result, work, COLUMNS, W, DV)


@gluon.jit
def issue_scores(q_tile, k, ring):
    """Issue S = Q K^T once K has arrived."""
    ROWS: gl.constexpr = q_tile.shape[1]
    COLUMNS: gl.constexpr = k.tiles.shape[2]
    D_PAD: gl.constexpr = k.tiles.shape[4]
    mbarrier.wait(k.full.index(ring.slot), ring.parity)
    k_tile = k.operand(ring.slot).permute((1, 0))
    nothing = gl.zeros([ROWS, COLUMNS], gl.float32, mma_layout(COLUMNS))
    return hopper.warpgroup_mma(
        q_tile.reshape([ROWS, D_PAD]), k_tile, nothing, use_acc=False, is_async=True
    )


@gluon.jit
def issue_output(p, v, o, ring):
    """Issue O += P V once V has arrived."""
    mbarrier.wait(v.full.index(ring.slot), ring.parity)
    v_tile = v.operand(ring.slot)
    return hopper.warpgroup_mma(p, v_tile, o, is_async=True)


@gluon.jit
def softmax(s, m, l, o, scale_log2, dtype: gl.constexpr):
    """Return P of a tile as an MMA operand, the new m and l, and o relative to the new m."""
    DV_PAD: gl.constexpr = o.shape[1]
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    # no visible key so far; -inf - -inf is NaN
    m_finite = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(m_finite, 1))
    shrink = gl.exp2(m - m_finite)
    l = l * shrink + gl.sum(p, 1)
    o = o * gl.expand_dims(gl.convert_layout(shrink, per_row_layout(DV_PAD)), 1)
    return gl.convert_layout(p.to(dtype), operand_layout(DV_PAD)), m_new, l, o


@gluon.jit
def write_result(o, m, l, result, work, COLUMNS: gl.constexpr, W: gl.constexpr, DV: gl.constexpr):
    """Write o / l and lse. Fully masked rows get 0 and -inf; rows with |m| > 2^24, where m is
    inexact, get NaN.
    """
    out, lse, tokens, stride_t, stride_h = result
    first, stop, batch, head = position_of(work, first_work_tile())
    batch_head = batch_head_of(work, first_work_tile())
    first += W * o.shape[0]
    masked = (m == float("-inf")) & (l == 0.0)
    l = gl.where(gl.abs(m) <= 2.0**24, l, float("nan"))
    natural = gl.where(masked, float("-inf"), (m + gl.log2(l)) * LN2)
    r = gl.arange(0, o.shape[0], per_row_layout(COLUMNS))
    gl.store(lse + (batch_head.to(gl.int64) * tokens + first) + r, natural, mask=first + r < stop)
    inverse = gl.convert_layout(gl.where(masked, 0.0, 1.0 / l), per_row_layout(o.shape[1]))
    inverse = gl.expand_dims(inverse, 1)
    o = gl.where(inverse == 0.0, 0.0, o * inverse)  # 0 times NaN would be NaN
    start = out + row_offset(batch, first, head, even_strides(tokens, stride_t, stride_h))
    store_tile(start, o, batch_head, stop - first, stride_t, stride_h, DV, 1)


@gluon.jit(do_not_specialize=["tokens", "group"], do_not_specialize_on_alignment=["lse"])
def forward_plain_kernel(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse,
    work,
    scale_log2,  # > 0
    tokens,
    stride_t,
    stride_h,
    group,
    DV: gl.constexpr,
    STAGES: gl.constexpr,
    MATH_REGISTERS: gl.constexpr,
):
    """Write ``out`` (b, t, h, dv), batch stride tokens * stride_t, and natural ``lse`` (b, h, t,
    contiguous) of the work tiles in ``work``. ``group`` query heads share a key head.
    """
    q = allocate_tiles(q_desc, 2)  # 64 queries for each warpgroup
    k_tiles = allocate_tiles(k_desc, STAGES)
    v_tiles = allocate_tiles(v_desc, STAGES)
    q_full = make_barriers(2, 1)
    k = Ring(k_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    v = Ring(v_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    fence_async_shared()  # TMA sees the initialised mbarriers
    # Triton passes 1 as a constant
    result = (out, lse, tokens, gl.to_tensor(stride_t), gl.to_tensor(stride_h))
    gl.warp_specialize(
        [
            (load_tiles, (q_desc, k_desc, v_desc, q, q_full, k, v, work, group)),
            (attend, (q, q_full, k, v, result, work, scale_log2, 0, DV)),
            (attend, (q, q_full, k, v, result, work, scale_log2, 1, DV)),
        ],
        [4, 4],
        [MATH_REGISTERS, MATH_REGISTERS],
    )
