"""Two kernels for few queries over many keys, with the bits of `forward`: weights of all keys at once, sums in order.

    weights_kernel    a CTA for each chunk of keys     P = exp(S - m), and the sums of P, of every tile      reads Q and K
    sums_kernel       a CTA for each 16 to 64 columns  O += P V and l += sums, tile after tile               reads P and V

`forward` gives a tile of queries to one CTA, so few queries leave most SMs idle. Only its sums depend on the order of tiles:
the MMAs of S do not, and m (`stale_maximum`) is the maximum of a row's first visible tile as long as no P is too large. So a
CTA computes the first visible tiles of its rows, then the weights of its chunk. A column of O depends on no other column.

If a lane's sum of P is too large, `forward` would raise m. `weights_kernel` then says so, and the launch of `forward`
that follows computes the whole call; otherwise that launch ends at once.

Both kernels are one warpgroup of 64 rows, whose threads also start the TMA loads, STAGES tiles ahead. A slot is loaded again
after all warps have arrived at its ``free``: the MMA that read it is done.

Source: Hong et al., FlashDecoding++ (2023), section 3: a maximum that is chosen ahead, and a repetition if it fails.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.layouts import contracted_width, lane_sum_layout, mma_layout, per_row_layout
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import add_rounding_excess, declare_registers, round_and_keep, zero_rows
from canon.fast.kernels.gluon.softcap import capped, factor_of_capped
from canon.fast.kernels.gluon.softmax import lane_sum, powers, results_of_sums, row_maximum
from canon.fast.kernels.gluon.stale_maximum import LOWEST, largest_sum, sum_so_far
from canon.fast.kernels.gluon.tile_queue import FIRST_TOKEN, STOP_TOKEN, WORK_TILE, is_partial
from canon.fast.kernels.gluon.tile_ring import Ring, first_position, issue_contraction, load_box, make_barriers

# The tables of `few_queries_plan`.
TILE, FIRST_VISIT, FIRST_OWN, VISITS_END = map(gl.constexpr, range(4))  # of a chunk
VISITS_BEGIN, CHUNKS_BEGIN = map(gl.constexpr, range(2))  # of a tile of queries; the next row has the ends
M = gl.constexpr(64)  # rows of a tile
AHEAD = gl.constexpr(3)  # visits by which `sums_kernel` loads sums ahead


@gluon.jit
def token_of_row(first, PACK: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the token and the head of each row of a tile."""
    r = gl.arange(0, M, LAYOUT)
    return first + r // PACK, r % PACK


@gluon.jit(do_not_specialize=["sets", "visits", "stored"])
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
    GROUP: gl.constexpr,
    D: gl.constexpr,
    D_PAD: gl.constexpr,
    PACK: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """Write p (sets, visits, stored, COLUMNS), sums (2, sets, visits, stored, 4), of P and of P minus rounded P by lane, and
    maxima (chunks, sets, 64). Set the number behind ``counter`` to 1 if a sum is too large for this maximum.

    A set is PACK query heads of a sequence; ``stored`` rows of a tile are written.
    """
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [1, 1, M // PACK, PACK, D_PAD], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, D_PAD], k_desc.layout)
    q_full = make_barriers(1, 1)
    k = Ring(k_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 1))
    fence_async_shared()  # TMA sees the initialised mbarriers

    chunk, set_ = gl.program_id(0) // sets, gl.program_id(0) % sets
    batch, head = set_ // (heads // PACK), set_ % (heads // PACK) * PACK
    at = chunks + 4 * chunk
    work_tile = WORK_TILE * (1 + gl.load(at + TILE))
    begin, own, end = gl.load(at + FIRST_VISIT), gl.load(at + FIRST_OWN), gl.load(at + VISITS_END)
    first, stop = gl.load(work + work_tile + FIRST_TOKEN), gl.load(work + work_tile + STOP_TOKEN)
    load_box(q_desc, batch, first, head, q_full.index(0), q.index(0))
    for i in gl.static_range(STAGES):
        if begin + i < end:
            column = gl.load(columns + 2 * gl.load(order + begin + i))
            load_box(k_desc, batch, column, head // GROUP, k.full.index(i), k.tiles.index(i))

    ROWS: gl.constexpr = per_row_layout(COLUMNS)
    token, _ = token_of_row(first, PACK, ROWS)
    starts = gl.load(first_visits + token, mask=token < stop, other=-1)
    lane_token, _ = token_of_row(first, PACK, gl.SliceLayout(1, lane_sum_layout()))
    row = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(1, lane_sum_layout())), 1)
    place = 4 * row + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, lane_sum_layout())), 0)
    valid = gl.expand_dims(lane_token < stop, 1) & (place >= 0)
    p_row = gl.expand_dims(gl.arange(0, M, ROWS), 1)
    p_place = p_row * COLUMNS + gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, mma_layout(COLUMNS))), 0)
    p_valid = gl.expand_dims(token < stop, 1) & (p_place >= 0)
    nothing = gl.zeros([M, 4], gl.float32, lane_sum_layout())
    too_large = gl.zeros([M, 4], gl.int32, lane_sum_layout())
    m = gl.full([M], float("-inf"), gl.float32, ROWS)
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
            load_box(k_desc, batch, ahead, head // GROUP, k.full.index(ring.slot), k.tiles.index(ring.slot))
        s = capped(s, scale_log2, SOFTCAP)
        if is_partial(work, span):
            s = mask_hidden(s, work, span, first, column, float("-inf"), PACK, True)
        highest = row_maximum(s) * factor_of_capped(scale_log2, SOFTCAP)
        m = gl.where(starts == visit, gl.maximum(m, highest), m)
        if i >= own:
            x = powers(s, gl.maximum(m, LOWEST), scale_log2, SOFTCAP)
            lanes = lane_sum(x)
            x = round_and_keep(x, q, 0)
            excess = add_rounding_excess(nothing, x, lanes, gl.full_like(lanes, -1.0), 0)
            too_large = gl.where(valid & ~(lanes <= largest_sum(dtype)), 1, too_large)
            tile = set_ * visits + visit
            gl.store(p + tile.to(gl.int64) * (stored * COLUMNS) + p_place, x, mask=p_valid)
            gl.store(sums + tile * (stored * 4) + place, lanes, mask=valid)
            gl.store(sums + (sets * visits + tile) * (stored * 4) + place, excess, mask=valid)
        ring = ring.next(STAGES)
    gl.store(maxima + (chunk * sets + set_) * M + gl.arange(0, M, ROWS), m)
    if gl.max(gl.max(too_large, 1), 0) > 0:
        gl.store(counter + 1, 1)


@gluon.jit
def sums_of_visit(sums, tile, place, stored, valid):
    """Return the sums of P by lane of a visit."""
    return gl.load(sums + tile * (stored * 4) + place, mask=valid, other=0.0)


@gluon.jit(do_not_specialize=["tokens", "sets", "visits", "stored"], do_not_specialize_on_alignment=["lse"])
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
    GROUP: gl.constexpr,
    DV: gl.constexpr,
    DV_PAD: gl.constexpr,
    PACK: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLICE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Write ``out`` (b, t, h, dv) and natural ``lse`` (b, h, t, contiguous) from the results of `weights_kernel`.

    The batch stride of ``out`` is tokens * stride_t. A CTA computes SLICE columns of a tile of rows.
    """
    SLICES: gl.constexpr = DV_PAD // SLICE
    dtype: gl.constexpr = v_desc.dtype
    p_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, M, 1, COLUMNS], p_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, 1, SLICE], v_desc.layout)
    p = Ring(p_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 1))
    v_full = make_barriers(STAGES, 1)
    fence_async_shared()  # TMA sees the initialised mbarriers

    # Slices of the same keys are neighbours: they read the same lines of L2.
    first_column, set_ = gl.program_id(0) % SLICES * SLICE, gl.program_id(0) // SLICES % sets
    tile = gl.program_id(0) // SLICES // sets
    batch, head = set_ // (heads // PACK), set_ % (heads // PACK) * PACK
    work_tile = WORK_TILE * (1 + tile)
    first, stop = gl.load(work + work_tile + FIRST_TOKEN), gl.load(work + work_tile + STOP_TOKEN)
    begin, end = gl.load(tiles + 2 * tile + VISITS_BEGIN), gl.load(tiles + 2 * tile + 2 + VISITS_BEGIN)
    p_first = set_ * visits
    for i in gl.static_range(STAGES):
        if begin + i < end:
            column = gl.load(columns + 2 * (begin + i))
            load_box(p_desc, p_first + begin + i, 0, 0, p.full.index(i), p.tiles.index(i))
            load_box(v_desc, batch, column, head // GROUP, v_full.index(i), v_tiles.index(i), first_column)

    ROWS: gl.constexpr = per_row_layout(COLUMNS)
    LANE_ROWS: gl.constexpr = gl.SliceLayout(1, lane_sum_layout())
    lane_token, _ = token_of_row(first, PACK, LANE_ROWS)
    place = 4 * gl.expand_dims(gl.arange(0, M, LANE_ROWS), 1)
    place += gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, lane_sum_layout())), 0)
    valid = gl.expand_dims(lane_token < stop, 1) & (place >= 0)
    rest = sets * visits  # the sums of P minus rounded P follow those of P
    sums_0 = sums_of_visit(sums, p_first + begin, place, stored, valid)
    excess_0 = sums_of_visit(sums, rest + p_first + begin, place, stored, valid)
    sums_1 = sums_of_visit(sums, p_first + begin + 1, place, stored, valid & (begin + 1 < end))
    excess_1 = sums_of_visit(sums, rest + p_first + begin + 1, place, stored, valid & (begin + 1 < end))
    sums_2 = sums_of_visit(sums, p_first + begin + 2, place, stored, valid & (begin + 2 < end))
    excess_2 = sums_of_visit(sums, rest + p_first + begin + 2, place, stored, valid & (begin + 2 < end))

    o = gl.zeros([M, SLICE], gl.float32, mma_layout(SLICE))
    l = gl.zeros([M, 4], gl.float32, lane_sum_layout())
    excess = gl.zeros([M, 4], gl.float32, lane_sum_layout())
    ring = first_position()
    for visit in range(begin, end):
        mbarrier.wait(p.full.index(ring.slot), ring.parity)
        mbarrier.wait(v_full.index(ring.slot), ring.parity)
        p_tile, v_tile = p.tiles.index(ring.slot), v_tiles.index(ring.slot)
        o = hopper.warpgroup_mma(p_tile.reshape([M, COLUMNS]), v_tile.reshape([COLUMNS, SLICE]), o, is_async=True)
        limit = sum_so_far(l, v_tiles)
        limit = gl.where(limit > 0.0, limit, float("inf"))  # a row's first visible tile has no excess
        excess += gl.where(sums_0 > limit, excess_0, 0.0)
        l += sums_0
        sums_0, excess_0, sums_1, excess_1 = sums_1, excess_1, sums_2, excess_2
        exists = valid & (visit + AHEAD < end)
        sums_2 = sums_of_visit(sums, p_first + visit + AHEAD, place, stored, exists)
        excess_2 = sums_of_visit(sums, rest + p_first + visit + AHEAD, place, stored, exists)
        o = hopper.warpgroup_mma_wait(1, deps=[o])  # the MMA before is done
        if visit > begin:
            mbarrier.arrive(p.free.index(ring.previous), count=1)
            following = visit - 1 + STAGES
            if following < end:
                mbarrier.wait(p.free.index(ring.previous), gl.where(ring.slot == 0, ring.parity ^ 1, ring.parity))
                column = gl.load(columns + 2 * following)
                p_slot, v_slot = p.tiles.index(ring.previous), v_tiles.index(ring.previous)
                load_box(p_desc, p_first + following, 0, 0, p.full.index(ring.previous), p_slot)
                load_box(v_desc, batch, column, head // GROUP, v_full.index(ring.previous), v_slot, first_column)
        ring = ring.next(STAGES)
    o = hopper.warpgroup_mma_wait(0, deps=[o])

    m = gl.full([M], float("-inf"), gl.float32, ROWS)
    chunk_end = gl.load(tiles + 2 * tile + 2 + CHUNKS_BEGIN)
    for chunk in range(gl.load(tiles + 2 * tile + CHUNKS_BEGIN), chunk_end):
        m = gl.maximum(m, gl.load(maxima + (chunk * sets + set_) * M + gl.arange(0, M, ROWS)))
    inverse, natural = results_of_sums(m, l, l - excess, ROWS)
    token, packed = token_of_row(first, PACK, ROWS)
    if first_column == 0:
        start = lse + (batch * heads + head).to(gl.int64) * tokens
        gl.store(start + (packed * tokens + token), natural, mask=token < stop)
    inverse = gl.expand_dims(gl.convert_layout(inverse, per_row_layout(SLICE)), 1)
    o = zero_rows(o * inverse, inverse)
    token, packed = token_of_row(0, PACK, per_row_layout(SLICE))
    column = first_column + gl.expand_dims(gl.arange(0, SLICE, gl.SliceLayout(0, mma_layout(SLICE))), 0)
    start = out + ((batch * tokens + first).to(gl.int64) * stride_t + head * stride_h)
    offset = gl.expand_dims(token * stride_t + packed * stride_h, 1) + column
    gl.store(start + offset, o.to(out.dtype.element_ty), mask=gl.expand_dims(first + token < stop, 1) & (column < DV))
