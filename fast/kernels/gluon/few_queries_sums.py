"""The sums over many keys of few queries, from the weights of `few_queries`.

    loader          P, V     of each visit, to STAGES buffers
    add_products    wait for both: O += P V, release those of the visit before
    add_sums        l += sums of P, several visits at a time; then the factors of O -> ready

A CTA computes 16 to 64 columns of O. The MMAs of two visits are in flight: with one accumulator
they follow each other without a wait. Rows of P without a token are not loaded, and 0. On several
ranks, `sums_kernel` continues the sums of the rank before, and `results_kernel` divides the last
ones."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.epilogue import even_strides, row_offset
from canon.fast.kernels.gluon.few_queries import (
    M,
    first_maximum,
    place_of_rows,
    place_of_set,
    rows_of_tile,
    token_of_row,
)
from canon.fast.kernels.gluon.forward_pipeline import Output
from canon.fast.kernels.gluon.layouts import lane_sum_layout, mma_layout, per_row_layout
from canon.fast.kernels.gluon.ptx import zero_rows
from canon.fast.kernels.gluon.softmax import results_of_sums
from canon.fast.kernels.gluon.stale_maximum import largest_sum
from canon.fast.kernels.gluon.tile_ring import (
    Ring,
    aggregate,
    allocate_tiles,
    first_position,
    make_barriers,
    tma_load,
)

# of a tile of queries in the table of `few_queries_plan`; the next row has the ends
VISITS_BEGIN, CHUNKS_BEGIN = map(gl.constexpr, range(2))
VISITS_AT_A_TIME = gl.constexpr(4)  # of `add_sums`


@aggregate
class Visits:
    """Buffers of the visits: P, with mbarriers for both, and a slice of V."""

    p: Ring
    v: gl.shared_memory_descriptor


@aggregate
class Call:
    """What all partitions read: tables, sizes and constants of `sums_kernel`."""

    work: gl.tensor
    tiles: gl.tensor
    sets: gl.tensor
    visits: gl.tensor
    stored: gl.tensor
    heads: gl.tensor
    DV: gl.constexpr
    DV_PAD: gl.constexpr
    PACK: gl.constexpr
    SLICE: gl.constexpr
    STAGES: gl.constexpr
    CONTINUED: gl.constexpr


@gluon.jit
def slice_of_cta(call):
    """Return this CTA's first column of V, set, tile of queries, and range of visits."""
    SLICES: gl.constexpr = call.DV_PAD // call.SLICE
    part = gl.program_id(0) // SLICES
    tile = part // call.sets
    entry = call.tiles + 2 * tile + VISITS_BEGIN
    column = gl.program_id(0) % SLICES * call.SLICE
    return column, part % call.sets, tile, gl.load(entry), gl.load(entry + 2)


@gluon.jit
def load_visits(p_desc, v_desc, buffers, columns, group, call):
    """Load P and a slice of V of every visit (the loader)."""
    p = buffers.p
    first_column, set_, _, begin, end = slice_of_cta(call)
    batch, head = place_of_set(set_, call.heads, call.PACK)
    key_head = head // group
    P_ROWS: gl.constexpr = p_desc.block_type.shape[1]
    HALVES: gl.constexpr = p.tiles.shape[0] // call.STAGES
    nbytes: gl.constexpr = HALVES * p_desc.block_type.nbytes + v_desc.block_type.nbytes
    ring = first_position()
    following = gl.load(columns + 2 * begin)
    for visit in range(begin, end):
        column, at = following, set_ * call.visits + visit
        following = gl.load(columns + 2 * gl.minimum(visit + 1, end - 1))
        full = p.full.index(ring.slot)
        mbarrier.wait(p.free.index(ring.slot), ring.parity ^ 1)
        mbarrier.expect(full, nbytes)
        for half in gl.static_range(HALVES):
            p_tile = p.tiles.index(ring.slot * HALVES + half).slice(0, P_ROWS, dim=1)
            tma_load(p_desc, [at, 0, 0, 64 * half], full, p_tile)
        tma_load(v_desc, [batch, column, key_head, first_column], full, buffers.v.index(ring.slot))
        ring = ring.next(call.STAGES)


@gluon.jit
def add_products(buffers, inverse, ready, output, call):
    """Add P V of all visits, in order, and write (CONTINUED: add to) a slice of out."""
    p = buffers.p
    SLICE: gl.constexpr = call.SLICE
    HALVES: gl.constexpr = p.tiles.shape[0] // call.STAGES
    first_column, set_, tile, begin, end = slice_of_cta(call)
    first, stop, batch, head = rows_of_tile(call.work, tile, set_, call.heads, call.PACK)
    token, packed = token_of_row(0, call.PACK, per_row_layout(SLICE))
    column = first_column + gl.expand_dims(
        gl.arange(0, SLICE, gl.SliceLayout(0, mma_layout(SLICE))), 0
    )
    strides = even_strides(output.tokens, output.stride_t, output.stride_h)
    start = output.out + row_offset(batch, first, head, strides)
    offset = gl.expand_dims(token * output.stride_t + packed * output.stride_h, 1) + column
    keep = gl.expand_dims(first + token < stop, 1) & (column < call.DV)
    if call.CONTINUED:
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
        ring = ring.next(call.STAGES)
    o = hopper.warpgroup_mma_wait(0, deps=[o])
    if not call.CONTINUED:
        mbarrier.wait(ready, 0)
        factor = gl.expand_dims(inverse.load(per_row_layout(SLICE)), 1)
        o = zero_rows(o * factor, factor)
    gl.store(start + offset, o.to(output.out.dtype.element_ty), mask=keep)


@gluon.constexpr_function
def layout_of_visits(visits):
    """Return `lane_sum_layout` for (visits, 64, 4): a lane holds its numbers of all visits."""
    registers = [[1 << i, 0, 0] for i in range(visits.bit_length() - 1)] + [[0, 8, 0]]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, 16, 0], [0, 32, 0]], [], [visits, 64, 4]
    )


@gluon.jit
def sums_of_visits(sums, more, stored, tokens, PACK: gl.constexpr, visit, end):
    """Return sums of P and of P minus rounded P (visits, 64, 4); 0 from ``end`` on."""
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
    """Return both halves of x along the first of three axes."""
    return gl.split(
        gl.permute(x.reshape([2, x.shape[0] // 2, x.shape[1], x.shape[2]]), (1, 2, 3, 0))
    )


@gluon.jit
def add_two(l, excess, sums, more, LARGEST: gl.constexpr):
    """Add the sums of two visits (2, 64, 4), in order. Return l and excess."""
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
def add_sums(sums, buffers, inverse, ready, output, maxima, call, second):
    """Add the sums of P of all visits, in order; write lse, and the factors of O to ``inverse``."""
    ROWS: gl.constexpr = per_row_layout(64)
    PACK: gl.constexpr = call.PACK
    first_column, set_, tile, begin, end = slice_of_cta(call)
    first, stop, batch, head = rows_of_tile(call.work, tile, set_, call.heads, PACK)
    token, packed = token_of_row(first, PACK, gl.SliceLayout(1, lane_sum_layout()))
    lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, lane_sum_layout())), 0)
    row = gl.expand_dims(place_of_rows(batch, head, packed, token, call.heads, output.tokens), 1)
    place, kept = output.lse + (4 * row + lane), gl.expand_dims(token < stop, 1)
    l = gl.zeros([M, 4], gl.float32, lane_sum_layout())
    excess = gl.zeros([M, 4], gl.float32, lane_sum_layout())
    if call.CONTINUED:
        end = gl.where(first_column == 0, end, begin)  # one CTA of a tile adds them
        l = gl.load(place, mask=kept, other=0.0)
        excess = gl.load(place + second, mask=kept, other=0.0)
    sums += set_.to(gl.int64) * call.visits * (call.stored * 4)
    more = sums + call.sets.to(gl.int64) * call.visits * (call.stored * 4)
    ahead, more_ahead = sums_of_visits(sums, more, call.stored, stop - first, PACK, begin, end)
    for visit in range(begin, end, VISITS_AT_A_TIME):
        of_visits, of_excess = ahead, more_ahead
        ahead, more_ahead = sums_of_visits(
            sums, more, call.stored, stop - first, PACK, visit + VISITS_AT_A_TIME, end
        )
        x, y = halves(of_visits)
        x_more, y_more = halves(of_excess)
        l, excess = add_two(l, excess, x, x_more, largest_sum(buffers.v.dtype))
        l, excess = add_two(l, excess, y, y_more, largest_sum(buffers.v.dtype))
    if call.CONTINUED:
        kept = kept & (first_column == 0)
        gl.store(place, l, mask=kept)
        gl.store(place + second, excess, mask=kept)
    else:
        m = gl.full([M], float("-inf"), gl.float32, ROWS)
        chunks = call.tiles + 2 * tile + CHUNKS_BEGIN
        for chunk in range(gl.load(chunks), gl.load(chunks + 2)):
            m = gl.maximum(
                m,
                gl.load(
                    maxima + (chunk * call.sets + set_).to(gl.int64) * M + gl.arange(0, M, ROWS)
                ),
            )
        factor, natural = results_of_sums(m, l, l - excess, ROWS)
        inverse.store(factor)
        mbarrier.arrive(ready, count=1)
        token, packed = token_of_row(first, PACK, ROWS)
        row = place_of_rows(batch, head, packed, token, call.heads, output.tokens)
        gl.store(output.lse + row, natural, mask=(token < stop) & (first_column == 0))


@gluon.jit(
    do_not_specialize=["sets", "visits", "stored", "heads", "tokens", "second", "group"],
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
    group,
    DV: gl.constexpr,
    DV_PAD: gl.constexpr,
    PACK: gl.constexpr,
    STAGES: gl.constexpr,
    CONTINUED: gl.constexpr,
):
    """Write ``out`` and ``lse`` as `forward_kernel`, from the results of `weights_kernel`.

    CONTINUED: add P V to ``out``, float32, and sums of P to ``lse`` (b, h, t, 4), of P minus
    rounded P ``second`` numbers behind it."""
    dtype: gl.constexpr = v_desc.dtype
    COLUMNS: gl.constexpr = v_desc.block_type.shape[1]
    SLICE: gl.constexpr = v_desc.block_type.shape[3]
    p_tiles = gl.allocate_shared_memory(dtype, [STAGES * COLUMNS // 64, 1, M, 1, 64], p_desc.layout)
    v_tiles = allocate_tiles(v_desc, STAGES)
    p = Ring(p_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 1))
    inverse = gl.allocate_shared_memory(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = make_barriers(1, 1).index(0)
    if p_desc.block_type.shape[1] < M:
        for i in gl.static_range(STAGES * COLUMNS // 64):
            zeros = gl.zeros([M, 64], dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
            p_tiles.index(i).reshape([M, 64]).store(zeros)
    fence_async_shared()  # the MMA sees the zeros
    buffers = Visits(p, v_tiles)
    output = Output(out, lse, tokens, gl.to_tensor(stride_t), gl.to_tensor(stride_h))
    call = Call(
        work, tiles, sets, visits, stored, heads, DV, DV_PAD, PACK, SLICE, STAGES, CONTINUED
    )
    gl.warp_specialize(
        [
            (add_products, (buffers, inverse, ready, output, call)),
            (add_sums, (sums, buffers, inverse, ready, output, maxima, call, second)),
            (load_visits, (p_desc, v_desc, buffers, columns, group, call)),
        ],
        [4, 1],
        [96, 32],
    )


@gluon.jit(do_not_specialize=["ranks", "stride", "rows", "heads", "tokens"])
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
    """Write ``out`` (b, t, h, dv) and natural ``lse`` (b, h, t), from the sums over all keys: ``o``
    (b, t, h, dv), ``sums`` (2, b, h, t, 4), contiguous as each rank's ``maxima`` (b, h, t).

    Set ``repeat`` to 1 if an o is not finite: a NaN reaches other rows of its tile, and ranks have
    other tiles."""
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
