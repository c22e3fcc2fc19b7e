"""The forward kernel for Hopper: each processor walks through its own list of items (tile of queries, heads).

    loader        K 0   Q    V 0   K 1   V 1   K 2   ...   K n   V n | next item: K 0   Q   ...
    warpgroup     wait K j, Q:   S = Q K^T (tile j)     issued together with     O += P V (tile j - 1)
                  wait S:        P = softmax of S       while O += P V still runs
                  wait O:        rescale O, next tile

The product with V is one tile late, even across items: the last one of an item runs under the first softmax of the next
one, and only then is the item's result divided and written. Sums follow the order of the spans: same inputs, same bits.

Shared memory: e (BUFFERS rows d + STAGES columns (d + dv)) bytes for elements of e bytes, widths padded to a power of 2.
Sources: Shah et al., FlashAttention-3 (2024), sections 3.1 and 3.2; the spans: `canon.fast.tiles`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.blocks import (
    FIRST,
    ITEM,
    SECOND,
    SPAN,
    THIRD,
    barriers,
    column_layout,
    columns_of,
    factor_layout,
    fetch,
    finite,
    hide_unseen,
    is_partial,
    items_of,
    line_of,
    pass_turn,
    place_of,
    product_layout,
    spans_of,
    store_tile,
    take_turn,
)


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, work, io, begin, end, GROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """The loader: K and V of every visited tile, and an item's Q behind its first K."""
    q_tiles, k_ring, v_ring, q_full, q_free, k_full, k_free, v_full, v_free = io
    BUFFERS: gl.constexpr = q_tiles.shape[0] // WARPGROUPS
    TOKENS: gl.constexpr = q_tiles.shape[2]
    STAGES: gl.constexpr = k_ring.shape[0]
    BN: gl.constexpr = k_ring.shape[2]
    t, done = 0, 0
    for item in range(begin, end, ITEM):
        first, _, batch, head = place_of(work, item)
        span_first, span_end = spans_of(work, item)
        fresh = True
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, BN)
            for j in range(column, stop, BN):
                slot = t % STAGES
                turn = t // STAGES & 1
                mbarrier.wait(k_free.index(slot), turn ^ 1)
                fetch(k_desc, batch, j, head // GROUP, k_full.index(slot), k_ring.index(slot))
                if fresh:  # not before K: it may have to wait until the warpgroups are done with the item before
                    for w in gl.static_range(WARPGROUPS):
                        b = w * BUFFERS + done % BUFFERS
                        mbarrier.wait(q_free.index(b), (done // BUFFERS & 1) ^ 1)
                        fetch(q_desc, batch, first + w * TOKENS, head, q_full.index(b), q_tiles.index(b))
                fresh = False
                mbarrier.wait(v_free.index(slot), turn ^ 1)
                fetch(v_desc, batch, j, head // GROUP, v_full.index(slot), v_ring.index(slot))
                t += 1
        done += 1


@gluon.jit
def finish(
    o, m, l, result, work, item, exists, W: gl.constexpr, BN: gl.constexpr, DV: gl.constexpr, PACK: gl.constexpr
):
    """Divide and write the result of an item, if it ``exists``; rows that saw nothing get 0 and -inf."""
    out, lse, tokens, stride_t, stride_h = result
    M: gl.constexpr = o.shape[0]
    first, stop, batch, head = place_of(work, item)
    line = line_of(work, item)
    first += W * (M // PACK)
    left = gl.where(exists, stop, 0) - first  # rows left to write
    blind = l == 0.0
    l = gl.where(blind, 1.0, l)
    natural = gl.where(blind, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453)
    r = gl.arange(0, M, column_layout(BN))
    start = lse + (line.to(gl.int64) * tokens + first)
    gl.store(start + (r // PACK + r % PACK * tokens), natural, mask=r // PACK < left)
    inverse = gl.convert_layout(gl.where(blind, 0.0, 1.0 / l), column_layout(o.shape[1]))
    start = out + ((batch * tokens + first).to(gl.int64) * stride_t + head * stride_h)
    store_tile(start, o * gl.expand_dims(inverse, 1), line, left, stride_t, stride_h, 0, DV, PACK)


@gluon.jit
def step(
    o,
    p,
    m,
    l,
    b,
    io,
    result,
    work,
    item,
    t,
    span,
    row,
    column,
    scale_log2,
    partial,
    is_last,
    FRESH: gl.constexpr,
    W: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
    DV: gl.constexpr,
    PACK: gl.constexpr,
):
    """Take tile t into the running maximum m (in base 2), sum l and output o, which lacks the product p V of tile t.

    On entry o lacks that of tile t - 1. FRESH: tile t is the first of an item, and the item before is finished here.
    """
    q_tiles, k_ring, v_ring, _, q_free, k_full, k_free, v_full, v_free = io
    M: gl.constexpr = q_tiles.shape[2] * PACK
    D_PAD: gl.constexpr = q_tiles.shape[4]
    STAGES: gl.constexpr = k_ring.shape[0]
    BN: gl.constexpr = k_ring.shape[2]
    DV_PAD: gl.constexpr = v_ring.shape[4]
    now = b + (t >> 30)  # b, but not known before the loop: the address of q is made where it is used
    q = q_tiles.index(now).reshape([M, D_PAD])
    slot = t % STAGES
    turn = t // STAGES & 1
    before = gl.maximum(t - 1, 0) % STAGES
    k = k_ring.index(slot).reshape([BN, D_PAD])
    v = v_ring.index(before).reshape([BN, DV_PAD])
    mbarrier.wait(k_full.index(slot), turn)
    if FRESH:  # at t = 0 nothing is behind: p is 0, and the product is dropped
        mbarrier.wait(v_full.index(before), 0, pred=t == 0)
    if TURNS:
        take_turn(W)
    nothing = gl.zeros([M, BN], gl.float32, product_layout(BN))
    s = hopper.warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    o = hopper.warpgroup_mma(p, v, o, is_async=True)
    if TURNS:
        pass_turn(W, WARPGROUPS)
    s, o = hopper.warpgroup_mma_wait(1, deps=[s, o])
    mbarrier.arrive(k_free.index(slot), count=1)
    if is_last:
        mbarrier.arrive(q_free.index(b), count=1)

    if partial:
        s = hide_unseen(s, work, span, row, column, float("-inf"), PACK)
    m_new = gl.max(s, 1) * scale_log2
    if not FRESH:
        m_new = gl.maximum(m, m_new)
    m_use = finite(m_new)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(m_use, 1))
    l_new = gl.sum(p, 1)
    p = gl.convert_layout(p.to(q_tiles.dtype), factor_layout(DV_PAD))
    # V of this tile is for the next step. Waiting here keeps the assembler from waiting for o above the exponentials.
    mbarrier.wait(v_full.index(slot), turn)
    o = hopper.warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_free.index(before), count=1, pred=t > 0)
    if FRESH:
        finish(o, m, l, result, work, gl.maximum(item - ITEM, 0), t > 0, W, BN, DV, PACK)
        o = gl.zeros([M, DV_PAD], gl.float32, product_layout(DV_PAD))
    else:
        shrink = gl.exp2(m - m_use)
        l_new += l * shrink
        o = o * gl.expand_dims(gl.convert_layout(shrink, column_layout(DV_PAD)), 1)
    return o, p, m_new, l_new


@gluon.jit
def attend(
    io,
    result,
    work,
    begin,
    end,
    scale_log2,
    W: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
    DV: gl.constexpr,
):
    """A warpgroup: its part of the rows of every item."""
    q_tiles, k_ring, v_ring, q_full, _, _, _, _, _ = io
    BUFFERS: gl.constexpr = q_tiles.shape[0] // WARPGROUPS
    TOKENS: gl.constexpr = q_tiles.shape[2]
    PACK: gl.constexpr = q_tiles.shape[3]
    M: gl.constexpr = TOKENS * PACK
    STAGES: gl.constexpr = k_ring.shape[0]
    BN: gl.constexpr = k_ring.shape[2]
    DV_PAD: gl.constexpr = v_ring.shape[4]
    o = gl.zeros([M, DV_PAD], gl.float32, product_layout(DV_PAD))
    p = gl.zeros([M, BN], q_tiles.dtype, factor_layout(DV_PAD))
    m = gl.zeros([M], gl.float32, column_layout(BN))
    l = gl.zeros([M], gl.float32, column_layout(BN))
    t, done = 0, 0
    if TURNS and W == WARPGROUPS - 1:
        pass_turn(W, WARPGROUPS)  # the first turn is the first warpgroup's
    for item in range(begin, end, ITEM):
        row = gl.load(work + item) + W * TOKENS
        span_first, span_end = spans_of(work, item)
        b = W * BUFFERS + done % BUFFERS
        mbarrier.wait(q_full.index(b), done // BUFFERS & 1)
        column, stop = columns_of(work, span_first, BN)
        partial = is_partial(work, span_first)
        is_last = (span_first + SPAN == span_end) & (column + BN == stop)
        o, p, m, l = step(
            o, p, m, l, b, io, result, work, item, t, span_first, row, column, scale_log2, partial, is_last,
            True, W, WARPGROUPS, TURNS, DV, PACK,
        )  # fmt: skip
        t += 1
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, BN)
            partial = is_partial(work, span)
            for j in range(column + gl.where(span == span_first, BN, 0), stop, BN):
                is_last = (span + SPAN == span_end) & (j + BN == stop)
                o, p, m, l = step(
                    o, p, m, l, b, io, result, work, item, t, span, row, j, scale_log2, partial, is_last,
                    False, W, WARPGROUPS, TURNS, DV, PACK,
                )  # fmt: skip
                t += 1
        done += 1
    if end > begin:
        v = v_ring.index((t - 1) % STAGES).reshape([BN, DV_PAD])
        o = hopper.warpgroup_mma_wait(0, deps=[hopper.warpgroup_mma(p, v, o, is_async=True)])
        finish(o, m, l, result, work, end - ITEM, True, W, BN, DV, PACK)
    if TURNS and W == FIRST:
        take_turn(W)  # the last one: the barrier ends as it began


@gluon.jit(do_not_specialize=["tokens"])
def forward_kernel(
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
    GROUP: gl.constexpr,
    DV: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    D_PAD: gl.constexpr,
    DV_PAD: gl.constexpr,
    PACK: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    TURNS: gl.constexpr,
    MATH_REGISTERS: gl.constexpr,
):
    """out (b, t, h, dv), evenly strided over b and t, and natural lse (b, h, t), contiguous, of the items in ``work``."""
    WARPGROUPS: gl.constexpr = ROWS // 64
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS * BUFFERS, 1, 64 // PACK, PACK, D_PAD], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, D_PAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, DV_PAD], v_desc.layout)
    q_full, q_free = barriers(WARPGROUPS * BUFFERS, 1), barriers(WARPGROUPS * BUFFERS, 1)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, WARPGROUPS)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, WARPGROUPS)
    fence_async_shared()
    io = (q_tiles, k_ring, v_ring, q_full, q_free, k_full, k_free, v_full, v_free)
    result = (out, lse, tokens, stride_t, stride_h)
    begin, end = items_of(work)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (load_tiles, (q_desc, k_desc, v_desc, work, io, begin, end, GROUP, WARPGROUPS)),
                (attend, (io, result, work, begin, end, scale_log2, FIRST, WARPGROUPS, TURNS, DV)),
                (attend, (io, result, work, begin, end, scale_log2, SECOND, WARPGROUPS, TURNS, DV)),
            ],
            [4, 4],
            [MATH_REGISTERS, MATH_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (load_tiles, (q_desc, k_desc, v_desc, work, io, begin, end, GROUP, WARPGROUPS)),
                (attend, (io, result, work, begin, end, scale_log2, FIRST, WARPGROUPS, TURNS, DV)),
                (attend, (io, result, work, begin, end, scale_log2, SECOND, WARPGROUPS, TURNS, DV)),
                (attend, (io, result, work, begin, end, scale_log2, THIRD, WARPGROUPS, TURNS, DV)),
            ],
            [4, 4, 4],
            [MATH_REGISTERS, MATH_REGISTERS, MATH_REGISTERS],
        )
