"""The weights of few queries over many keys, with the bits of `forward`.

    weights_kernel   a CTA for each chunk of keys     P = exp(S - m), and the sums     reads Q and K
                                                      of P, of every tile
    sums_kernel      a CTA for each 16 to 64          O += P V and l += sums, tile     reads P and V
                     columns                          after tile (`few_queries_sums`)

`forward` gives a tile of queries to one CTA, so few queries leave most SMs idle. But only its sums
depend on the order of tiles: m is the maximum of a row's first visible tile, as long as no P is too
large. So a CTA computes these tiles, then the weights of its chunk. Where `forward` would raise m,
a last launch of it computes the whole call (REPEAT). `canon.fast.decode_in_order` runs the kernel
twice on each rank.

An SM holds two CTAs, so there is no loader: the warpgroup waits for k.free itself.

Source: Hong et al., FlashDecoding++ (2023), section 3, also chooses a maximum ahead and repeats."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.epilogue import store_tile
from canon.fast.kernels.gluon.layouts import (
    contracted_width,
    lane_sum_layout,
    mma_layout,
    per_row_layout,
)
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import add_rounding_excess, declare_registers, round_and_keep
from canon.fast.kernels.gluon.softcap import capped, factor_of_capped
from canon.fast.kernels.gluon.softmax import lane_sum, powers, row_maximum
from canon.fast.kernels.gluon.stale_maximum import LOWEST, largest_sum
from canon.fast.kernels.gluon.tile_queue import FIRST_TOKEN, STOP_TOKEN, WORK_TILE, is_partial
from canon.fast.kernels.gluon.tile_ring import (
    Ring,
    allocate_tiles,
    first_position,
    issue_contraction,
    load_box,
    load_tile,
    make_barriers,
)

# of a chunk in the table of `few_queries_plan`
TILE, FIRST_VISIT, FIRST_OWN, VISITS_END = map(gl.constexpr, range(4))
M = gl.constexpr(64)  # rows of a tile
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
def rows_of_tile(work, tile, set_, heads, PACK: gl.constexpr):
    """Return first token, end, batch and first head of a tile."""
    work_tile = work + WORK_TILE * (1 + tile)
    first, stop = gl.load(work_tile + FIRST_TOKEN), gl.load(work_tile + STOP_TOKEN)
    batch, head = place_of_set(set_, heads, PACK)
    return first, stop, batch, head


@gluon.jit
def place_of_set(set_, heads, PACK: gl.constexpr):
    """Return the batch and the first head of a set."""
    return set_ // (heads // PACK), set_ % (heads // PACK) * PACK


@gluon.jit
def first_maximum(maxima, ranks, stride, place, valid):
    """Return the maxima of the first rank that has one, or -inf; ranks are ``stride`` numbers
    apart. Infinity stands for none: as a score, it repeats the call.
    """
    m = gl.load(maxima + place, mask=valid, other=float("inf"))
    for _ in range(1, ranks):
        maxima += stride
        other = gl.load(maxima + place, mask=valid, other=float("inf"))
        m = gl.where(m == float("inf"), other, m)
    return gl.where(m == float("inf"), float("-inf"), m)


@gluon.jit(
    do_not_specialize=["sets", "visits", "stored", "heads", "tokens", "ranks", "stride", "group"],
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
    group,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
    STEP: gl.constexpr,
):
    """Write p (sets, visits, stored, COLUMNS), sums (2, sets, visits, stored, 4), of P and of P
    minus rounded P by lane, and maxima (chunks, sets, 64). Set ``counter[1]`` to 1 if a sum is too
    large.

    A set is PACK query heads of a sequence; ``stored`` rows of a tile are written. STEP:
    FIRST_TILES writes only maxima (b, h, t), of rows that begin in a chunk's one visit. OF_A_RANK
    reads maxima of all ``ranks``."""
    dtype: gl.constexpr = q_desc.dtype
    PACK: gl.constexpr = q_desc.block_type.shape[2]
    q, k_tiles = allocate_tiles(q_desc, 1), allocate_tiles(k_desc, STAGES)
    D_PAD: gl.constexpr = k_tiles.shape[4]
    COLUMNS: gl.constexpr = k_tiles.shape[2]
    q_full = make_barriers(1, 1)
    k = Ring(k_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 1))
    fence_async_shared()

    # this CTA's chunk; Q, and the first tiles of K
    chunk, set_ = gl.program_id(0) // sets, gl.program_id(0) % sets
    at = chunks + 4 * chunk
    first, stop, batch, head = rows_of_tile(work, gl.load(at + TILE), set_, heads, PACK)
    own, end = gl.load(at + FIRST_OWN), gl.load(at + VISITS_END)
    begin = own if STEP == OF_A_RANK else gl.load(at + FIRST_VISIT)
    key_head = head // group
    load_box(q_desc, batch, first, head, q_full.index(0), q.index(0))
    for i in gl.static_range(STAGES):
        if begin + i < end:
            column = gl.load(columns + 2 * gl.load(order + begin + i))
            load_tile(k_desc, batch, column, key_head, k, i)

    # places of rows, of lanes' sums, and maxima so far
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
        # S, and the K that follows in this buffer
        mbarrier.wait(k.full.index(ring.slot), ring.parity)
        zeros = gl.zeros([M, COLUMNS], gl.float32, mma_layout(COLUMNS))
        s = issue_contraction(q_tile, k.operand(ring.slot), zeros, contracted_width(D, D_PAD))
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k.free.index(ring.slot), count=1)
        if i + STAGES < end:
            mbarrier.wait(k.free.index(ring.slot), ring.parity)
            ahead = gl.load(columns + 2 * gl.load(order + i + STAGES))
            load_tile(k_desc, batch, ahead, key_head, k, ring.slot)
        # the maximum of first visible tiles
        s = capped(s, scale_log2, SOFTCAP)
        if is_partial(work, span):
            s = mask_hidden(s, work, span, first, column, float("-inf"), PACK, True)
        if STEP != OF_A_RANK:
            highest = row_maximum(s) * factor_of_capped(scale_log2, SOFTCAP)
            m = gl.where(starts == visit, gl.maximum(m, highest), m)
        if STEP == FIRST_TILES:
            gl.store(maxima + place_of_row, m, mask=starts == visit)
        elif i >= own:  # P and its sums
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
