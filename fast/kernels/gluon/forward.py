"""The forward kernel for Hopper: each processor does one item (tile of queries, heads) after another.

    loader        K 0   Q    V 0   K 1   V 1   K 2   ...   K n   V n | next item: K 0   Q   ...
    warpgroup     wait K j, Q:   S = Q K^T (tile j)     and behind it, when O was rescaled:     O += P V (tile j - 1)
                  wait S:        P = softmax of S       while O += P V still runs
                  wait O:        next tile

The product with V is one tile late, even across items: the last one of an item runs under the first softmax of the next
one, and only then is the item's result divided and written. Sums follow the order of the spans: same inputs, same bits.

P and O are relative to a maximum m, so that the largest P is 1, which no dtype rounds. But m need not follow a new maximum
whose P is at most the sum of the row so far: that key weighs at most half, as the second largest may in any case. Far into a
row this holds, and a warp rescales O only if one of its rows has to follow. (P up to 2^8 whatever the row's sum, as in
flash-attn-4 for Blackwell, is 1 % faster, but rows that see few keys come out with errors larger than those of the dtype.)

OPTIMISTIC: far into a row nobody has to follow, so its maximum need not be known either. P is made with the m before at once,
and its sums, by lane, say how large it is. Where one is larger than the row's sum so far, a key may weigh more than half, and
what it is rounded by would show. So there the sum that O is divided by is that of P as it was rounded: then the error of a key
of weight w is w (1 - w) times what it is rounded by. l holds the exact sum, for lse, and ``excess`` what it exceeds the other
by. Only if a sum is more than two bytes hold, or many tiles may add up to, does the warpgroup make S and P of this tile again,
with the maximum. K stays until then, which costs where few tiles are visited.

A query whose m is beyond 2^24 gets NaN: `HIGHEST`. P is at most 2^32, and a sum of it at most 2^58 over 2^30 keys, so that
values up to 1e21 make no infinity of o.

Shared memory: e (BUFFERS rows d + STAGES columns (d + dv)) bytes for elements of e bytes, widths padded to a power of 2.
Sources: Shah et al., FlashAttention-3 (2024), sections 3.1 and 3.2; the spans: `canon.fast.tiles`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.epilogue import store_tile
from canon.fast.kernels.gluon.layouts import lane_sum_layout, mma_layout, operand_layout, per_row_layout
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import (
    add_rounding_excess,
    any_above,
    declare_registers,
    ping_pong_arrive,
    ping_pong_wait,
    rescale_rows,
    round_and_keep,
    zero_rows,
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
)
from canon.fast.kernels.gluon.tile_ring import load_box, make_barriers


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, work, counter, io, GROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """The loader: claims items; K and V of every visited tile, and an item's Q behind its first K."""
    q_tiles, told, k_ring, v_ring, q_full, q_free, k_full, k_free, v_full, v_free = io
    BUFFERS: gl.constexpr = q_tiles.shape[0] // WARPGROUPS
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
                for w in gl.static_range(WARPGROUPS):
                    b = w * BUFFERS + done % BUFFERS
                    mbarrier.wait(q_free.index(b), (done // BUFFERS & 1) ^ 1)
                    publish(told.index(b), item)
                    load_box(q_desc, batch, first + w * TOKENS, head, q_full.index(b), q_tiles.index(b))
            fresh = False
            mbarrier.wait(v_free.index(slot), turn ^ 1)
            load_box(v_desc, batch, column, head // GROUP, v_full.index(slot), v_ring.index(slot))
            t += 1
            span, column, left = next_tile(work, span, column, left, span_end, BN)
        item = claim_work_tile(work, counter)
        done += 1
    for w in gl.static_range(WARPGROUPS):
        b = w * BUFFERS + done % BUFFERS
        publish_end(told.index(b), q_full.index(b), q_free.index(b), (done // BUFFERS & 1) ^ 1)


@gluon.jit
def by_lane(x):
    """A product (rows, columns) as (rows, 2, columns / 16, 4, 2): a row is shared by four lanes, the rest is in registers."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 16, 4, 2])


@gluon.jit
def row_maximum(x):
    """The maximum of each row; each lane's from four chains that do not wait for one another."""
    chains = gl.max(by_lane(x), 2)
    return gl.convert_layout(gl.max(gl.max(gl.max(chains, 1), 2), 1), per_row_layout(x.shape[1]))


@gluon.jit
def lane_sum(x):
    """(rows, 4): the sum of what each lane holds of its row, by four chains; no lane waits for another."""
    chains = gl.sum(by_lane(x), 2)
    return gl.convert_layout(gl.sum(gl.sum(chains, 1), 2), lane_sum_layout())


@gluon.jit
def rescaled(o, shrink):
    """o with its rows shrunk; nothing is done by a warp for whose rows nothing is to be done."""
    return rescale_rows(o, gl.expand_dims(gl.convert_layout(shrink, per_row_layout(o.shape[1])), 1))


@gluon.jit
def ceiling(m, l, BN: gl.constexpr):
    """Which maximum a row may have before m follows it: P is at most 2^8, and the sum so far, down to a power of 2."""
    total = gl.convert_layout(gl.sum(l, 1), per_row_layout(BN))
    # the exponent, as the low bits of a float of 2^23; log2 would keep the unit for exponentials busy
    power = (total.to(gl.int32, bitcast=True) >> 23 | 0x4B000000).to(gl.float32, bitcast=True) - (2.0**23 + 127.0)
    return gl.maximum(m, m + gl.minimum(power, 8.0))


@gluon.jit
def finite(m):
    """0 in place of -inf, the maximum of a row that has seen no column yet: -inf - -inf would be NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


# The largest m: it is rounded by at most 1/2, so that P of the largest score stays between 2^-1 and 2.
HIGHEST = gl.constexpr(2.0**24)


@gluon.jit
def finish(
    o, m, l, excess, result, work, item, W: gl.constexpr, BN: gl.constexpr, DV: gl.constexpr, PACK: gl.constexpr
):
    """Divide and write the result of an item. ``excess``: None is 0.

    Rows that saw nothing get 0 and -inf, and those whose sum or maximum is out of range get NaN.
    """
    out, lse, tokens, stride_t, stride_h = result
    M: gl.constexpr = o.shape[0]
    first, stop, batch, head = position_of(work, item)
    line = batch_head_of(work, item)
    first += W * (M // PACK)
    left = stop - first  # rows left to write
    divisor = l if excess is None else l - excess
    divisor = gl.convert_layout(gl.sum(divisor, 1), per_row_layout(BN))
    l = divisor if excess is None else gl.convert_layout(gl.sum(l, 1), per_row_layout(BN))
    blind = (l == 0.0) & (m == float("-inf"))
    held = (gl.abs(m) <= HIGHEST) & (l > 0.0) & (l < float("inf"))
    natural = (m + gl.log2(gl.where(held, l, 1.0))) * 0.6931471805599453
    natural = gl.where(blind, float("-inf"), gl.where(held, natural, float("nan")))
    r = gl.arange(0, M, per_row_layout(BN))
    start = lse + (line.to(gl.int64) * tokens + first)
    gl.store(start + (r // PACK + r % PACK * tokens), natural, mask=r // PACK < left)
    inverse = gl.where(blind, 0.0, gl.where(held, 1.0 / divisor, float("nan")))
    inverse = gl.expand_dims(gl.convert_layout(inverse, per_row_layout(o.shape[1])), 1)
    o = zero_rows(o * inverse, inverse)
    start = out + ((batch * tokens + first).to(gl.int64) * stride_t + head * stride_h)
    store_tile(start, o, line, left, stride_t, stride_h, 0, DV, PACK)


@gluon.jit
def start_scores(b, io, ring, W: gl.constexpr, TURNS: gl.constexpr):
    """S = Q K^T of this tile; wait for it.

    ``ring``: the slots of the tile before and of this one, and the parity of its phase; counted on, as the first product
    would have to wait for a division.
    """
    q_tiles, _, k_ring, _, _, _, k_full, _, _, _ = io
    M: gl.constexpr = q_tiles.shape[2] * q_tiles.shape[3]
    BN: gl.constexpr = k_ring.shape[2]
    _, slot, turn = ring
    q = q_tiles.index(b).reshape([M, q_tiles.shape[4]])
    k = k_ring.index(slot).reshape([BN, k_ring.shape[4]])
    mbarrier.wait(k_full.index(slot), turn)
    if TURNS:
        ping_pong_wait(W)
    nothing = gl.zeros([M, BN], gl.float32, mma_layout(BN))
    return hopper.warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def start_output(o, p, io, ring, W: gl.constexpr, WARPGROUPS: gl.constexpr, TURNS: gl.constexpr):
    """o += p V of the tile before; wait for it. Ahead of the first item p is 0, V whatever is there, and o is dropped."""
    _, _, _, v_ring, _, _, _, _, _, _ = io
    v = v_ring.index(ring[0]).reshape([v_ring.shape[2], v_ring.shape[4]])
    o = hopper.warpgroup_mma(p, v, o, is_async=True)
    if TURNS:
        ping_pong_arrive(W, WARPGROUPS)
    return o


@gluon.jit
def let_go(b, io, ring, is_last):
    """K of this tile has been read, and Q if it is an item's last one."""
    _, _, _, _, _, q_free, _, k_free, _, _ = io
    mbarrier.arrive(k_free.index(ring[1]), count=1)
    if is_last:
        mbarrier.arrive(q_free.index(b), count=1)


@gluon.jit
def advanced(ring, STAGES: gl.constexpr):
    """The ring at the next tile."""
    _, slot, turn = ring
    wraps = slot == STAGES - 1
    return slot, gl.where(wraps, 0, slot + 1), gl.where(wraps, turn ^ 1, turn)


@gluon.jit
def exponentials(s, m, scale_log2, io, OPTIMISTIC: gl.constexpr = False, W: gl.constexpr = 0):
    """P, as a factor, and its sums by lane."""
    q_tiles, _, _, v_ring, _, _, _, _, _, _ = io
    p = gl.exp2(s * scale_log2 - gl.expand_dims(m, 1))
    sums = lane_sum(p)
    if OPTIMISTIC:
        p = round_and_keep(p, q_tiles, W)
    else:
        p = p.to(q_tiles.dtype)
    return gl.convert_layout(p, operand_layout(v_ring.shape[4])), sums


@gluon.jit
def by_row(l, shrink):
    """l (rows, 4), as lanes hold it, times what its rows shrink by."""
    return l * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, lane_sum_layout())), 1)


@gluon.jit
def step(
    o,
    p,
    m,
    l,
    excess,
    shrink,
    b,
    io,
    result,
    work,
    previous,
    ring,
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
    """Take a tile into the maximum m (in base 2, not always followed), the sum l and the output o, which lacks its product p V.

    On entry o lacks that of the tile before, and has to be ``shrink`` times what it is, as on return. FRESH: the tile is the
    first of an item, and the ``previous`` item, if there is one, is finished. l (rows, 4) is what each lane has summed.
    With three warpgroups (LATE) exponentials wait for the product with V, so p is rounded into the registers of the p before;
    the product is done by then.
    """
    q_tiles, _, k_ring, v_ring, _, _, _, _, v_full, v_free = io
    M: gl.constexpr = q_tiles.shape[2] * PACK
    BN: gl.constexpr = k_ring.shape[2]
    DV_PAD: gl.constexpr = v_ring.shape[4]
    LATE: gl.constexpr = WARPGROUPS == 3
    UNDER: gl.constexpr = DV_PAD <= 128  # o is rescaled under S, where there are registers for that
    before, slot, turn = ring
    s = start_scores(b, io, ring, W, TURNS)
    if UNDER:
        o = rescaled(o, shrink)
    o = start_output(o, p, io, ring, W, WARPGROUPS, TURNS)
    if not FRESH:
        limit = ceiling(m, l, BN)
    s, o = hopper.warpgroup_mma_wait(1, deps=[s, o])
    let_go(b, io, ring, is_last)

    if partial:
        s = mask_hidden(s, work, span, row, column, float("-inf"), PACK)
    m_new = row_maximum(s) * scale_log2
    if not FRESH:
        m_new = gl.where(m_new > limit, m_new, m)
    m_use = finite(m_new)
    if FRESH:
        shrink = gl.full([M], 1.0, gl.float32, per_row_layout(BN))
    else:
        shrink = gl.exp2(m - m_use)
    if LATE:
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(before), count=1, pred=previous > 0 if FRESH else True)
    p, l_new = exponentials(s, m_use, scale_log2, io)
    # V of this tile is for the next step. Waiting here keeps the assembler from waiting for o above the exponentials.
    mbarrier.wait(v_full.index(slot), turn)
    if not LATE:
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(before), count=1, pred=previous > 0 if FRESH else True)
    if FRESH:
        if previous > 0:
            finish(o, m, l, excess, result, work, previous, W, BN, DV, PACK)
        o = gl.zeros([M, DV_PAD], gl.float32, mma_layout(DV_PAD))
    else:
        l_new += by_row(l, shrink)
        if not UNDER:
            o, shrink = rescaled(o, shrink), gl.full([M], 1.0, gl.float32, per_row_layout(BN))
    return o, p, m_new, l_new, shrink, advanced(ring, k_ring.shape[0])


# ------------------------------------------------------------------ optimistic steps
LOWEST = gl.constexpr(-(2.0 - 2.0**-23) * 2.0**127)  # the lowest float32: relative to it P of what is seen is infinite


@gluon.constexpr_function
def most(dtype):
    """What the sum of a lane may be of a tile: P is finite in its dtype, and so is the sum of many tiles."""
    return 65504.0 if dtype == gl.float16 else 2.0**32


@gluon.jit
def so_far(l, like):
    """What a row has summed up to, for each of its lanes; at most what P may be, or sums that double would go on for ever."""
    return gl.expand_dims(gl.minimum(gl.sum(l, 1), most(like.dtype)), 1) + gl.zeros_like(l)


@gluon.jit
def try_tiles(
    o,
    p,
    m,
    l,
    excess,
    b,
    io,
    work,
    ring,
    span,
    span_end,
    row,
    column,
    stop,
    scale_log2,
    PARTIAL: gl.constexpr,
    W: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
    PACK: gl.constexpr,
):
    """`step` after step from a column on, with the maximum m as it is, until P is ``above`` what can be held or all is done.

    Of a tile where that is nothing has been taken in, but for its predecessor's product with V. ``seen``: the sums of its P.
    The warpgroup votes on what outweighs its row, and again on what is too much where something does.
    A row that has seen no key has -inf for m, and takes the `LOWEST` for it: P of whatever it sees is infinite.
    """
    q_tiles, _, k_ring, _, _, _, _, _, v_full, v_free = io
    BN: gl.constexpr = k_ring.shape[2]
    LATE: gl.constexpr = WARPGROUPS == 3
    above, seen = 0, l
    while (column < stop) & (above == 0):
        before, slot, turn = ring
        s = start_scores(b, io, ring, W, TURNS)
        o = start_output(o, p, io, ring, W, WARPGROUPS, TURNS)
        limit = so_far(l, q_tiles)
        s, o = hopper.warpgroup_mma_wait(1, deps=[s, o])
        if LATE:
            mbarrier.wait(v_full.index(slot), turn)
            o = hopper.warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_free.index(before), count=1)
        if PARTIAL:
            s = mask_hidden(s, work, span, row, column, float("-inf"), PACK)
        p, seen = exponentials(s, gl.maximum(m, LOWEST), scale_log2, io, True, W)
        if not LATE:
            mbarrier.wait(v_full.index(slot), turn)
            o = hopper.warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_free.index(before), count=1)
        above = any_above(seen, limit, W)
        if above != 0:
            above = any_above(seen, gl.full_like(seen, most(q_tiles.dtype)), W)
            if above == 0:
                excess = add_rounding_excess(excess, p, seen, limit, W)
        if above == 0:
            l += seen
            let_go(b, io, ring, (span + SPAN == span_end) & (column + BN == stop))
            ring = advanced(ring, k_ring.shape[0])
            column += BN
    return o, p, l, excess, seen, ring, column, above


@gluon.jit
def follow(
    o,
    m,
    l,
    excess,
    seen,
    b,
    io,
    work,
    ring,
    span,
    row,
    column,
    scale_log2,
    partial,
    W: gl.constexpr,
    PACK: gl.constexpr,
):
    """The tile at which `try_tiles` has stopped: with the maximum of those rows of which a lane has ``seen`` too much."""
    s = hopper.warpgroup_mma_wait(0, deps=[start_scores(b, io, ring, W, False)])
    if partial:
        s = mask_hidden(s, work, span, row, column, float("-inf"), PACK)
    far = gl.convert_layout(gl.max(seen, 1) > most(io[0].dtype), per_row_layout(s.shape[1]))
    m_new = gl.where(far, gl.maximum(m, row_maximum(s) * scale_log2), m)
    m_use = finite(m_new)
    shrink = gl.exp2(m - m_use)
    p, seen = exponentials(s, m_use, scale_log2, io, True, W)
    l, excess = by_row(l, shrink), by_row(excess, shrink)
    return rescaled(o, shrink), p, m_new, l + seen, add_rounding_excess(excess, p, seen, so_far(l, io[0]), W)


# ------------------------------------------------------------------ a warpgroup
@gluon.jit
def attend(
    io,
    result,
    work,
    scale_log2,
    W: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
    OPTIMISTIC: gl.constexpr,
    DV: gl.constexpr,
):
    """A warpgroup: its part of the rows of every item."""
    q_tiles, told, k_ring, v_ring, q_full, _, _, _, _, _ = io
    BUFFERS: gl.constexpr = q_tiles.shape[0] // WARPGROUPS
    TOKENS: gl.constexpr = q_tiles.shape[2]
    PACK: gl.constexpr = q_tiles.shape[3]
    M: gl.constexpr = TOKENS * PACK
    BN: gl.constexpr = k_ring.shape[2]
    DV_PAD: gl.constexpr = v_ring.shape[4]
    o = gl.zeros([M, DV_PAD], gl.float32, mma_layout(DV_PAD))
    p = gl.zeros([M, BN], q_tiles.dtype, operand_layout(DV_PAD))
    m = gl.zeros([M], gl.float32, per_row_layout(BN))
    l = gl.zeros([M, 4], gl.float32, lane_sum_layout())
    excess = gl.zeros([M, 4], gl.float32, lane_sum_layout()) if OPTIMISTIC else None
    shrink = gl.full([M], 1.0, gl.float32, per_row_layout(BN))
    previous, done, ring = 0, 0, (0, 0, 0)
    if OPTIMISTIC:
        declare_registers(p, W)
    if TURNS and W == WARPGROUPS - 1:
        ping_pong_arrive(W, WARPGROUPS)  # the first turn is the first warpgroup's
    item = receive(told.index(W * BUFFERS), q_full.index(W * BUFFERS), 0)
    while item > 0:
        b = W * BUFFERS + done % BUFFERS
        row = gl.load(work + item) + W * TOKENS
        span_first, span_end = spans_of(work, item)
        column, stop = columns_of(work, span_first, BN)
        partial = is_partial(work, span_first)
        is_last = (span_first + SPAN == span_end) & (column + BN == stop)
        o, p, m, l, shrink, ring = step(
            o, p, m, l, excess, shrink, b, io, result, work, previous, ring, span_first, row, column, scale_log2, partial,
            is_last, True, W, WARPGROUPS, TURNS, DV, PACK,
        )  # fmt: skip
        if OPTIMISTIC:
            excess = gl.zeros_like(l)
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, BN)
            partial = is_partial(work, span)
            column += gl.where(span == span_first, BN, 0)
            if OPTIMISTIC:
                while column < stop:
                    if partial:
                        o, p, l, excess, seen, ring, column, above = try_tiles(
                            o, p, m, l, excess, b, io, work, ring, span, span_end, row, column, stop, scale_log2,
                            True, W, WARPGROUPS, TURNS, PACK,
                        )  # fmt: skip
                    else:
                        o, p, l, excess, seen, ring, column, above = try_tiles(
                            o, p, m, l, excess, b, io, work, ring, span, span_end, row, column, stop, scale_log2,
                            False, W, WARPGROUPS, TURNS, PACK,
                        )  # fmt: skip
                    if above != 0:
                        o, p, m, l, excess = follow(
                            o, m, l, excess, seen, b, io, work, ring, span, row, column, scale_log2, partial, W, PACK
                        )
                        let_go(b, io, ring, (span + SPAN == span_end) & (column + BN == stop))
                        ring = advanced(ring, k_ring.shape[0])
                        column += BN
            else:
                turning = gl.where(partial, stop, column)
                for j in range(column, turning, BN):
                    is_last = (span + SPAN == span_end) & (j + BN == stop)
                    o, p, m, l, shrink, ring = step(
                        o, p, m, l, excess, shrink, b, io, result, work, previous, ring, span, row, j, scale_log2, True,
                        is_last, False, W, WARPGROUPS, TURNS, DV, PACK,
                    )  # fmt: skip
                for j in range(turning, stop, BN):
                    is_last = (span + SPAN == span_end) & (j + BN == stop)
                    o, p, m, l, shrink, ring = step(
                        o, p, m, l, excess, shrink, b, io, result, work, previous, ring, span, row, j, scale_log2, False,
                        is_last, False, W, WARPGROUPS, TURNS, DV, PACK,
                    )  # fmt: skip
        done += 1
        b = W * BUFFERS + done % BUFFERS
        previous, item = item, receive(told.index(b), q_full.index(b), done // BUFFERS & 1)
    if previous > 0:
        o = start_output(rescaled(o, shrink), p, io, ring, W, WARPGROUPS, False)
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        finish(o, m, l, excess, result, work, previous, W, BN, DV, PACK)
    if TURNS and W == 0:
        ping_pong_wait(W)  # the last one: the barrier ends as it began


@gluon.jit(do_not_specialize=["tokens"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse,
    work,
    counter,
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
    OPTIMISTIC: gl.constexpr,
    MATH_REGISTERS: gl.constexpr,
):
    """out (b, t, h, dv), evenly strided over b and t, and natural lse (b, h, t), contiguous, of the items in ``work``."""
    WARPGROUPS: gl.constexpr = ROWS // 64
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS * BUFFERS, 1, 64 // PACK, PACK, D_PAD], q_desc.layout)
    told = allocate_published(WARPGROUPS * BUFFERS)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, D_PAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, DV_PAD], v_desc.layout)
    q_full, q_free = make_barriers(WARPGROUPS * BUFFERS, 1), make_barriers(WARPGROUPS * BUFFERS, 1)
    k_full, k_free = make_barriers(STAGES, 1), make_barriers(STAGES, WARPGROUPS)
    v_full, v_free = make_barriers(STAGES, 1), make_barriers(STAGES, WARPGROUPS)
    fence_async_shared()
    io = (q_tiles, told, k_ring, v_ring, q_full, q_free, k_full, k_free, v_full, v_free)
    result = (out, lse, tokens, stride_t, stride_h)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (load_tiles, (q_desc, k_desc, v_desc, work, counter, io, GROUP, WARPGROUPS)),
                (attend, (io, result, work, scale_log2, 0, WARPGROUPS, TURNS, OPTIMISTIC, DV)),
                (attend, (io, result, work, scale_log2, 1, WARPGROUPS, TURNS, OPTIMISTIC, DV)),
            ],
            [4, 4],
            [MATH_REGISTERS, MATH_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (load_tiles, (q_desc, k_desc, v_desc, work, counter, io, GROUP, WARPGROUPS)),
                (attend, (io, result, work, scale_log2, 0, WARPGROUPS, TURNS, OPTIMISTIC, DV)),
                (attend, (io, result, work, scale_log2, 1, WARPGROUPS, TURNS, OPTIMISTIC, DV)),
                (attend, (io, result, work, scale_log2, 2, WARPGROUPS, TURNS, OPTIMISTIC, DV)),
            ],
            [4, 4, 4],
            [MATH_REGISTERS, MATH_REGISTERS, MATH_REGISTERS],
        )
