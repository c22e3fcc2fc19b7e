"""Two kernels for few queries over many keys, with the bits of `forward`: weights of all keys at
once, sums in order.

    weights_kernel   a CTA for each chunk of keys     P = exp(S - m), and the sums     reads Q and K
                                                      of P, of every tile
    sums_kernel      a CTA for each 16 to 64          O += P V and l += sums, tile     reads P and V
                     columns                          after tile

`forward` gives a tile of queries to one CTA, so few queries leave most SMs idle. But only its sums
depend on the order of tiles. The MMAs of S do not. The maximum m (`stale_maximum`) is that of a
row's first visible tile, as long as no P is too large. So a CTA computes the first visible tiles of
its rows, then the weights of its chunk. A column of O depends on no other.

If a lane's sum of P is too large, `forward` would raise m. Then `weights_kernel` sets a number on
the device. A launch of `forward` comes last: it computes the whole call if the number is set, and
ends at once if not.

    barrier of `weights_kernel`   arrivals in a    arrives           waits           protects
                                  phase
    q_full, k.full                1, and all       the warpgroup     the warpgroup   Q, K until
                                  bytes            itself, then                      loaded
                                                   TMA
    k.free                        1                after S           itself          K until read

    barrier of `sums_kernel`   arrivals in a      arrives            waits          protects
                               phase
    p.full                     1, and all bytes   loader, then TMA   add_products   a visit until
                                                                                    loaded
    p.free                     1                  add_products, a    loader         P and V until
                                                  visit later                       read
    ready                      1                  add_sums, at the   add_products   the factors of O
                                                  end

`weights_kernel` has no loader, so that an SM holds two CTAs. In `sums_kernel` the MMAs of two
visits are in flight: with the same accumulator they follow each other without a wait. A loader of
one warp is faster than one of four. The TMA unit takes time for each row of a box, however narrow.
So the boxes leave out rows of P that do not exist; these are 0 from the start. `add_sums` loads its
numbers for several visits at a time, ahead of their use: its chain of sums is about as long as that
of the MMAs.

Where several ranks divide the keys (`canon.fast.decode_in_order`), `weights_kernel` runs twice on
each: for the maxima of first visible tiles, and, once those of all ranks are known, for the
weights. `sums_kernel` continues the sums of the rank before. `results_kernel` divides the sums over
all keys.

Source: Hong et al., FlashDecoding++ (2023), section 3: a maximum that is chosen ahead, and a
repetition if it fails."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.epilogue import even_strides, row_offset, store_tile
from canon.fast.kernels.gluon.forward_pipeline import Output
from canon.fast.kernels.gluon.layouts import (
    contracted_width,
    lane_sum_layout,
    mma_layout,
    per_row_layout,
)
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import (
    add_rounding_excess,
    declare_registers,
    round_and_keep,
    zero_rows,
)
from canon.fast.kernels.gluon.softcap import capped, factor_of_capped
from canon.fast.kernels.gluon.softmax import lane_sum, powers, results_of_sums, row_maximum
from canon.fast.kernels.gluon.stale_maximum import LOWEST, largest_sum
from canon.fast.kernels.gluon.tile_queue import FIRST_TOKEN, STOP_TOKEN, WORK_TILE, is_partial
from canon.fast.kernels.gluon.tile_ring import (
    Ring,
    aggregate,
    first_position,
    issue_contraction,
    load_box,
    make_barriers,
    tma_load,
)

# The tables of `few_queries_plan`.
TILE, FIRST_VISIT, FIRST_OWN, VISITS_END = map(gl.constexpr, range(4))  # of a chunk
# of a tile of queries; the next row has the ends
VISITS_BEGIN, CHUNKS_BEGIN = map(gl.constexpr, range(2))
M = gl.constexpr(64)  # rows of a tile
VISITS_AT_A_TIME = gl.constexpr(4)  # of `add_sums`
WHOLE, FIRST_TILES, OF_A_RANK = map(gl.constexpr, range(3))  # what `weights_kernel` computes


@gluon.jit
def token_of_row(first, PACK: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the token and the head of each row of a tile."""
    r = gl.arange(0, M, LAYOUT)
    return first + r // PACK, r % PACK


@gluon.jit
def place_of_rows(batch, head, packed, token, heads, tokens):
    """Return the places of rows in a statistic (b, h, t)."""
    return (batch * heads + head + packed).to(gl.int64) * tokens + token


@gluon.jit
def first_maximum(maxima, ranks, stride, place, valid):
    """Return the maxima of the first rank that has one, or -inf. Rank r's are ``stride`` numbers
    after rank r - 1's.

    Infinity stands for none. If it is a score, P is infinite or NaN, so the call is repeated.
    """
    m = gl.load(maxima + place, mask=valid, other=float("inf"))
    for _ in range(1, ranks):
        maxima += stride
        other = gl.load(maxima + place, mask=valid, other=float("inf"))
        m = gl.where(m == float("inf"), other, m)
    return gl.where(m == float("inf"), float("-inf"), m)


@gluon.jit(
    do_not_specialize=["sets", "visits", "stored", "tokens", "ranks", "stride"],
    do_not_specialize_on_alignment=["maxima"],
)
def weights_kernel(
    q_desc,
    k_desc,
    p,
    sums,
    maxima,
    counter,
    work,
    chunks,
    order,
    columns,
    first_visits,
    scale_log2,  # > 0
    sets,
    visits,
    stored,
    heads,
    tokens,
    ranks,
    stride,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    D_PAD: gl.constexpr,
    PACK: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
    STEP: gl.constexpr,
):
    """Write p (sets, visits, stored, COLUMNS), sums (2, sets, visits, stored, 4), of P and of P
    minus rounded P by lane, and maxima (chunks, sets, 64). Set the number behind ``counter`` to 1
    if a sum is too large for this maximum.

    A set is PACK query heads of a sequence; ``stored`` rows of a tile are written. STEP:
    FIRST_TILES writes only maxima (b, h, t) of the rows whose first visible tile is the one visit
    of a chunk. OF_A_RANK reads maxima of all ``ranks``."""
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [1, 1, M // PACK, PACK, D_PAD], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, D_PAD], k_desc.layout)
    q_full = make_barriers(1, 1)
    k = Ring(k_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 1))
    fence_async_shared()  # TMA sees the initialised mbarriers

    chunk, set_ = gl.program_id(0) // sets, gl.program_id(0) % sets
    at = chunks + 4 * chunk
    first, stop, batch, head = rows_of_tile(work, gl.load(at + TILE), set_, heads, PACK)
    own, end = gl.load(at + FIRST_OWN), gl.load(at + VISITS_END)
    begin = own if STEP == OF_A_RANK else gl.load(at + FIRST_VISIT)
    load_box(q_desc, batch, first, head, q_full.index(0), q.index(0))
    for i in gl.static_range(STAGES):
        if begin + i < end:
            column = gl.load(columns + 2 * gl.load(order + begin + i))
            load_box(k_desc, batch, column, head // GROUP, k.full.index(i), k.tiles.index(i))

    ROWS: gl.constexpr = per_row_layout(COLUMNS)
    token, packed = token_of_row(first, PACK, ROWS)
    place_of_row = place_of_rows(batch, head, packed, token, heads, tokens)
    starts = gl.load(first_visits + token, mask=token < stop, other=-1)
    lane_token, _ = token_of_row(first, PACK, gl.SliceLayout(1, lane_sum_layout()))
    row = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(1, lane_sum_layout())), 1)
    place = 4 * row + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, lane_sum_layout())), 0)
    valid = gl.expand_dims(lane_token < stop, 1)
    nothing = gl.zeros([M, 4], gl.float32, lane_sum_layout())
    too_large = gl.zeros([M, 4], gl.int32, lane_sum_layout())
    m = gl.full([M], float("-inf"), gl.float32, ROWS)
    if STEP == OF_A_RANK:
        m = first_maximum(maxima, ranks, stride, place_of_row, token < stop)
    declare_registers(gl.zeros([M, COLUMNS], dtype, mma_layout(COLUMNS)), 0)
    q_tile = q.index(0).reshape([M, D_PAD])
    ring = first_position()
    mbarrier.wait(q_full.index(0), 0)
    for i in range(begin, end):
        visit = gl.load(order + i)
        column, span = gl.load(columns + 2 * visit), gl.load(columns + 2 * visit + 1)
        mbarrier.wait(k.full.index(ring.slot), ring.parity)
        zeros = gl.zeros([M, COLUMNS], gl.float32, mma_layout(COLUMNS))
        k_tile = k.tiles.index(ring.slot).reshape([COLUMNS, D_PAD])
        s = issue_contraction(q_tile, k_tile, zeros, contracted_width(D, D_PAD))
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k.free.index(ring.slot), count=1)
        if i + STAGES < end:
            mbarrier.wait(k.free.index(ring.slot), ring.parity)
            ahead = gl.load(columns + 2 * gl.load(order + i + STAGES))
            load_box(
                k_desc,
                batch,
                ahead,
                head // GROUP,
                k.full.index(ring.slot),
                k.tiles.index(ring.slot),
            )
        s = capped(s, scale_log2, SOFTCAP)
        if is_partial(work, span):
            s = mask_hidden(s, work, span, first, column, float("-inf"), PACK, True)
        if STEP != OF_A_RANK:
            highest = row_maximum(s) * factor_of_capped(scale_log2, SOFTCAP)
            m = gl.where(starts == visit, gl.maximum(m, highest), m)
        if STEP == FIRST_TILES:
            gl.store(maxima + place_of_row, m, mask=starts == visit)
        elif i >= own:
            # infinite if a row with visible keys has m = -inf
            x = powers(s, gl.maximum(m, LOWEST), scale_log2, SOFTCAP)
            lanes = lane_sum(x)
            x = round_and_keep(x, q, 0)
            excess = add_rounding_excess(nothing, x, lanes, gl.full_like(lanes, -1.0), 0)
            too_large = gl.where(valid & ~(lanes <= largest_sum(dtype)), 1, too_large)
            tile = set_ * visits + visit
            start = p + tile.to(gl.int64) * (stored * COLUMNS)
            store_tile(start, x, tile, stop - first, PACK * COLUMNS, COLUMNS, COLUMNS, PACK)
            of_tile = sums + tile.to(gl.int64) * (stored * 4)
            gl.store(of_tile + place, lanes, mask=valid)
            gl.store(
                of_tile + (sets * visits).to(gl.int64) * (stored * 4) + place, excess, mask=valid
            )
        ring = ring.next(STAGES)
    if STEP == WHOLE:
        gl.store(maxima + (chunk * sets + set_).to(gl.int64) * M + gl.arange(0, M, ROWS), m)
    if STEP != FIRST_TILES:  # noqa: SIM102 - known at compile time
        if gl.max(gl.max(too_large, 1), 0) > 0:
            gl.store(counter + 1, 1)


# ------------------------------------------------------------------ sums in order
@aggregate
class Visits:
    """Buffers of the visits: P, with mbarriers for both, and a slice of V."""

    p: Ring
    v: gl.shared_memory_descriptor


@gluon.jit
def slice_of_cta(tiles, sets, DV_PAD: gl.constexpr, SLICE: gl.constexpr):
    """Return this CTA's first column of V, set, tile of queries, and range of visits.

    Slices of the same keys are neighbours: they read the same lines of L2.
    """
    SLICES: gl.constexpr = DV_PAD // SLICE
    part = gl.program_id(0) // SLICES
    entry = tiles + 2 * (part // sets) + VISITS_BEGIN
    return (
        gl.program_id(0) % SLICES * SLICE,
        part % sets,
        part // sets,
        gl.load(entry),
        gl.load(entry + 2),
    )


@gluon.jit
def rows_of_tile(work, tile, set_, heads, PACK: gl.constexpr):
    """Return the first token of a tile, the end of its tokens, its batch and its first head."""
    work_tile = work + WORK_TILE * (1 + tile)
    first, stop = gl.load(work_tile + FIRST_TOKEN), gl.load(work_tile + STOP_TOKEN)
    batch, head = place_of_set(set_, heads, PACK)
    return first, stop, batch, head


@gluon.jit
def place_of_set(set_, heads, PACK: gl.constexpr):
    """Return the batch and the first head of a set."""
    return set_ // (heads // PACK), set_ % (heads // PACK) * PACK


@gluon.jit
def load_visits(
    p_desc,
    v_desc,
    buffers,
    columns,
    tiles,
    sets,
    visits,
    heads,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    DV_PAD: gl.constexpr,
    SLICE: gl.constexpr,
):
    """Load P and a slice of V of every visit (the loader)."""
    p = buffers.p
    first_column, set_, _, begin, end = slice_of_cta(tiles, sets, DV_PAD, SLICE)
    batch, head = place_of_set(set_, heads, PACK)
    P_ROWS: gl.constexpr = p_desc.block_type.shape[1]
    STAGES: gl.constexpr = buffers.v.shape[0]
    HALVES: gl.constexpr = p.tiles.shape[0] // STAGES
    nbytes: gl.constexpr = HALVES * p_desc.block_type.nbytes + v_desc.block_type.nbytes
    ring = first_position()
    following = gl.load(columns + 2 * begin)
    for visit in range(begin, end):
        column, at = following, set_ * visits + visit
        following = gl.load(columns + 2 * gl.minimum(visit + 1, end - 1))
        full = p.full.index(ring.slot)
        mbarrier.wait(p.free.index(ring.slot), ring.parity ^ 1)
        mbarrier.expect(full, nbytes)
        for half in gl.static_range(HALVES):
            p_tile = p.tiles.index(ring.slot * HALVES + half).slice(0, P_ROWS, dim=1)
            tma_load(p_desc, [at, 0, 0, 64 * half], full, p_tile)
        tma_load(
            v_desc, [batch, column, head // GROUP, first_column], full, buffers.v.index(ring.slot)
        )
        ring = ring.next(STAGES)


@gluon.jit
def add_products(
    buffers,
    inverse,
    ready,
    output,
    work,
    tiles,
    sets,
    heads,
    DV: gl.constexpr,
    DV_PAD: gl.constexpr,
    PACK: gl.constexpr,
    CONTINUED: gl.constexpr,
):
    """Add P V of all visits, in order, and write a slice of out (a warpgroup). CONTINUED: add it to
    a slice of out.
    """
    p = buffers.p
    SLICE: gl.constexpr = buffers.v.shape[4]
    STAGES: gl.constexpr = buffers.v.shape[0]
    HALVES: gl.constexpr = p.tiles.shape[0] // STAGES
    first_column, set_, tile, begin, end = slice_of_cta(tiles, sets, DV_PAD, SLICE)
    first, stop, batch, head = rows_of_tile(work, tile, set_, heads, PACK)
    token, packed = token_of_row(0, PACK, per_row_layout(SLICE))
    column = first_column + gl.expand_dims(
        gl.arange(0, SLICE, gl.SliceLayout(0, mma_layout(SLICE))), 0
    )
    strides = even_strides(output.tokens, output.stride_t, output.stride_h)
    start = output.out + row_offset(batch, first, head, strides)
    offset = gl.expand_dims(token * output.stride_t + packed * output.stride_h, 1) + column
    keep = gl.expand_dims(first + token < stop, 1) & (column < DV)
    if CONTINUED:
        o = gl.load(start + offset, mask=keep, other=0.0)
    else:
        o = gl.zeros([M, SLICE], gl.float32, mma_layout(SLICE))
    ring = first_position()
    for visit in range(begin, end):
        mbarrier.wait(p.full.index(ring.slot), ring.parity)
        v_tile = buffers.v.index(ring.slot).reshape([64 * HALVES, SLICE])
        for half in gl.static_range(HALVES):
            p_half = p.tiles.index(ring.slot * HALVES + half).reshape([M, 64])
            o = hopper.warpgroup_mma(p_half, v_tile.slice(64 * half, 64), o, is_async=True)
        o = hopper.warpgroup_mma_wait(HALVES, deps=[o])  # the MMAs of the previous visit are done
        mbarrier.arrive(p.free.index(ring.previous), count=1, pred=visit > begin)
        ring = ring.next(STAGES)
    o = hopper.warpgroup_mma_wait(0, deps=[o])
    if not CONTINUED:
        mbarrier.wait(ready, 0)
        factor = gl.expand_dims(inverse.load(per_row_layout(SLICE)), 1)
        o = zero_rows(o * factor, factor)
    gl.store(start + offset, o.to(output.out.dtype.element_ty), mask=keep)


@gluon.constexpr_function
def layout_of_visits(visits):
    """Return `lane_sum_layout` for several visits (visits, 64, 4):
    a lane holds its numbers of all.
    """
    registers = [[1 << i, 0, 0] for i in range(visits.bit_length() - 1)] + [[0, 8, 0]]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, 16, 0], [0, 32, 0]], [], [visits, 64, 4]
    )


@gluon.jit
def sums_of_visits(sums, more, stored, tokens, PACK: gl.constexpr, visit, end):
    """Return sums of P and of P minus rounded P (VISITS_AT_A_TIME, 64, 4) from a visit on; 0 from
    ``end`` on.
    """
    LAYOUT: gl.constexpr = layout_of_visits(VISITS_AT_A_TIME)
    at = gl.arange(0, VISITS_AT_A_TIME, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    row = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    at, row = (
        visit + gl.expand_dims(gl.expand_dims(at, 1), 2),
        gl.expand_dims(gl.expand_dims(row, 0), 2),
    )
    place = at * (stored * 4) + (4 * row + gl.expand_dims(gl.expand_dims(lane, 0), 1))
    kept = (at < end) & (row // PACK < tokens)
    return gl.load(sums + place, mask=kept, other=0.0), gl.load(more + place, mask=kept, other=0.0)


@gluon.jit
def halves(x):
    """Return the first and the last half of x along the first of three axes."""
    return gl.split(
        gl.permute(x.reshape([2, x.shape[0] // 2, x.shape[1], x.shape[2]]), (1, 2, 3, 0))
    )


@gluon.jit
def add_two(l, excess, sums, more, LARGEST: gl.constexpr):
    """Add the sums of two visits (2, 64, 4), in order. Return l and excess (64, 4)."""
    sums, more = halves(sums), halves(more)
    for i in gl.static_range(2):
        of_visit = gl.convert_layout(sums[i].reshape([M, 4]), lane_sum_layout())
        limit = gl.expand_dims(gl.minimum(gl.sum(l, 1), LARGEST), 1)
        # a row's first visible tile has no excess
        limit = gl.where(limit > 0.0, limit, float("inf"))
        excess += gl.where(
            of_visit > limit, gl.convert_layout(more[i].reshape([M, 4]), lane_sum_layout()), 0.0
        )
        l += of_visit
    return l, excess


@gluon.jit
def add_sums(
    sums,
    buffers,
    inverse,
    ready,
    output,
    maxima,
    work,
    tiles,
    sets,
    visits,
    stored,
    heads,
    second,
    DV_PAD: gl.constexpr,
    PACK: gl.constexpr,
    CONTINUED: gl.constexpr,
):
    """Add the sums of P of all visits, in order; write lse, and the factors of O to ``inverse`` (a
    warpgroup).

    CONTINUED: instead of lse there are sums (b, h, t, 4), to which they are added, and others
    ``second`` numbers behind it."""
    ROWS: gl.constexpr = per_row_layout(64)
    SLICE: gl.constexpr = buffers.v.shape[4]
    first_column, set_, tile, begin, end = slice_of_cta(tiles, sets, DV_PAD, SLICE)
    first, stop, batch, head = rows_of_tile(work, tile, set_, heads, PACK)
    token, packed = token_of_row(first, PACK, gl.SliceLayout(1, lane_sum_layout()))
    lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, lane_sum_layout())), 0)
    row = gl.expand_dims(place_of_rows(batch, head, packed, token, heads, output.tokens), 1)
    place, kept = output.lse + (4 * row + lane), gl.expand_dims(token < stop, 1)
    l = gl.zeros([M, 4], gl.float32, lane_sum_layout())
    excess = gl.zeros([M, 4], gl.float32, lane_sum_layout())
    if CONTINUED:
        end = gl.where(first_column == 0, end, begin)  # one CTA of a tile adds them
        l = gl.load(place, mask=kept, other=0.0)
        excess = gl.load(place + second, mask=kept, other=0.0)
    sums += set_.to(gl.int64) * visits * (stored * 4)
    more = sums + sets.to(gl.int64) * visits * (stored * 4)
    ahead, more_ahead = sums_of_visits(sums, more, stored, stop - first, PACK, begin, end)
    for visit in range(begin, end, VISITS_AT_A_TIME):
        of_visits, of_excess = ahead, more_ahead
        ahead, more_ahead = sums_of_visits(
            sums, more, stored, stop - first, PACK, visit + VISITS_AT_A_TIME, end
        )
        x, y = halves(of_visits)
        x_more, y_more = halves(of_excess)
        l, excess = add_two(l, excess, x, x_more, largest_sum(buffers.v.dtype))
        l, excess = add_two(l, excess, y, y_more, largest_sum(buffers.v.dtype))
    if CONTINUED:
        kept = kept & (first_column == 0)
        gl.store(place, l, mask=kept)
        gl.store(place + second, excess, mask=kept)
    else:
        m = gl.full([M], float("-inf"), gl.float32, ROWS)
        chunks = tiles + 2 * tile + CHUNKS_BEGIN
        for chunk in range(gl.load(chunks), gl.load(chunks + 2)):
            m = gl.maximum(
                m, gl.load(maxima + (chunk * sets + set_).to(gl.int64) * M + gl.arange(0, M, ROWS))
            )
        factor, natural = results_of_sums(m, l, l - excess, ROWS)
        inverse.store(factor)
        mbarrier.arrive(ready, count=1)
        token, packed = token_of_row(first, PACK, ROWS)
        row = place_of_rows(batch, head, packed, token, heads, output.tokens)
        gl.store(output.lse + row, natural, mask=(token < stop) & (first_column == 0))


@gluon.jit(
    do_not_specialize=["tokens", "sets", "visits", "stored", "second"],
    do_not_specialize_on_alignment=["lse"],
)
def sums_kernel(
    p_desc,
    v_desc,
    sums,
    maxima,
    out,
    lse,
    work,
    tiles,
    columns,
    sets,
    visits,
    stored,
    heads,
    tokens,
    stride_t,
    stride_h,
    second,
    GROUP: gl.constexpr,
    DV: gl.constexpr,
    DV_PAD: gl.constexpr,
    PACK: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLICE: gl.constexpr,
    STAGES: gl.constexpr,
    CONTINUED: gl.constexpr,
):
    """Write ``out`` (b, t, h, dv) and natural ``lse`` (b, h, t, contiguous) from the results of
    `weights_kernel`.

    The batch stride of ``out`` is tokens * stride_t. A CTA computes SLICE columns of a tile of
    rows. CONTINUED: add P V to ``out``, float32, and sums of P to ``lse`` (b, h, t, 4), of P minus
    rounded P ``second`` numbers behind it, instead."""
    dtype: gl.constexpr = v_desc.dtype
    p_tiles = gl.allocate_shared_memory(dtype, [STAGES * COLUMNS // 64, 1, M, 1, 64], p_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, SLICE], v_desc.layout)
    p = Ring(p_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 1))
    inverse = gl.allocate_shared_memory(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = make_barriers(1, 1).index(0)
    if p_desc.block_type.shape[1] < M:
        for i in gl.static_range(STAGES * COLUMNS // 64):
            zeros = gl.zeros([M, 64], dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
            p_tiles.index(i).reshape([M, 64]).store(zeros)
    fence_async_shared()  # TMA sees the initialised mbarriers, and the MMA the zeros
    buffers = Visits(p, v_tiles)
    # Triton passes 1 as a constant
    output = Output(out, lse, tokens, gl.to_tensor(stride_t), gl.to_tensor(stride_h))
    # constants in a tuple that a variable holds would become numbers at run time
    gl.warp_specialize(
        [
            (
                add_products,
                (
                    buffers,
                    inverse,
                    ready,
                    output,
                    work,
                    tiles,
                    sets,
                    heads,
                    DV,
                    DV_PAD,
                    PACK,
                    CONTINUED,
                ),
            ),
            (
                add_sums,
                (
                    sums,
                    buffers,
                    inverse,
                    ready,
                    output,
                    maxima,
                    work,
                    tiles,
                    sets,
                    visits,
                    stored,
                    heads,
                    second,
                    DV_PAD,
                    PACK,
                    CONTINUED,
                ),
            ),
            (
                load_visits,
                (
                    p_desc,
                    v_desc,
                    buffers,
                    columns,
                    tiles,
                    sets,
                    visits,
                    heads,
                    GROUP,
                    PACK,
                    DV_PAD,
                    SLICE,
                ),
            ),
        ],
        [4, 1],
        [96, 32],
    )


# ------------------------------------------------------------------ several ranks
@gluon.jit(do_not_specialize=["ranks", "stride", "rows", "tokens"])
def results_kernel(
    o,
    sums,
    maxima,
    out,
    lse,
    repeat,
    ranks,
    stride,
    rows,
    heads,
    tokens,
    DV: gl.constexpr,
    DV_PAD: gl.constexpr,
):
    """Write ``out`` (b, t, h, dv) and natural ``lse`` (b, h, t) of ``rows`` rows of (b, h, t), from
    the sums over all keys.

    ``o`` (b, t, h, dv), ``sums`` (2, b, h, t, 4): those of `sums_kernel`. ``maxima`` (b, h, t) of
    each rank. All contiguous. Set ``repeat`` to 1 if an o is not finite: a NaN reaches other rows
    of its tile, and ranks have other tiles of queries."""
    WIDTH: gl.constexpr = M  # columns at a time
    ROWS: gl.constexpr = per_row_layout(WIDTH)
    row = gl.program_id(0) * M + gl.arange(0, M, ROWS)
    m = first_maximum(maxima, ranks, stride, row, row < rows)
    lane_row = gl.program_id(0) * M + gl.arange(0, M, gl.SliceLayout(1, lane_sum_layout()))
    lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, lane_sum_layout())), 0)
    place = 4 * gl.expand_dims(lane_row.to(gl.int64), 1) + lane
    kept = gl.expand_dims(lane_row < rows, 1)
    l = gl.load(sums + place, mask=kept, other=0.0)
    excess = gl.load(sums + 4 * rows.to(gl.int64) + place, mask=kept, other=0.0)
    factor, natural = results_of_sums(m, l, l - excess, ROWS)
    gl.store(lse + row, natural, mask=row < rows)
    factor = gl.expand_dims(factor, 1)
    sequence, head, token = row // tokens // heads, row // tokens % heads, row % tokens
    start = gl.expand_dims(((sequence * tokens + token) * heads + head).to(gl.int64) * DV, 1)
    for first in gl.static_range(0, DV_PAD, WIDTH):
        column = first + gl.expand_dims(
            gl.arange(0, WIDTH, gl.SliceLayout(0, mma_layout(WIDTH))), 0
        )
        keep = gl.expand_dims(row < rows, 1) & (column < DV)
        x = gl.load(o + start + column, mask=keep, other=0.0)
        if gl.max(gl.max(gl.where(gl.abs(x) < float("inf"), 0, 1), 1), 0) > 0:
            gl.store(repeat, 1)
        gl.store(
            out + start + column, zero_rows(x * factor, factor).to(out.dtype.element_ty), mask=keep
        )
