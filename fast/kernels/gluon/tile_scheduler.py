"""The tile schedule of the Hopper kernels: all work tiles of a launch, in the order in which
persistent CTAs claim them.

Heads that share keys come together while their tensors fit the L2 cache. Within such a set, the
longest work tiles come first, so the last set starts its longest tile late. Where that costs more
than 2 %, launches of dk and dv in any order have the shortest tenth of their work last. `dq_order`
has the order of launches with ordered dq. Source: Graham, Bounds on multiprocessing timing
anomalies (1969): longest processing time first."""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from canon.fast.kernels.gluon.dq_order import (
    SMS,
    alternate,
    alternation,
    cut_by_tickets,
    heads_in_flight,
    mean_additions,
)
from canon.fast.kernels.gluon.tile_queue import (
    BATCH,
    BATCH_HEAD,
    COLUMN,
    FIRST_COLUMN,
    FIRST_SPAN,
    FIRST_TOKEN,
    HEAD,
    ROW_START,
    ROW_STOP,
    SPANS_END,
    STOP_TOKEN,
    TICKETS,
    TILES,
    WORK_TILES_END,
)
from canon.fast.kernels.gluon.tile_queue import WORK_TILE as _WORK_TILE
from canon.fast.tables.cells import Cells
from canon.fast.tables.device_plans import device_plan, host_array
from canon.fast.tables.index_ranges import expanded
from canon.fast.tables.tile_costs import BOX, FIXED, L2_BYTES, PARTIAL, TileCosts, tile_costs
from canon.fast.tables.work_tables import arrays, band_array, bands_and_size, native_tables
from canon.masks.plan_cache import cached_plan

SHORT = 0.1  # share of the work that evens the ends of the SMs
GAIN = 0.02  # of the predicted time
LATE_CTAS = 32  # these begin with a short work tile; messages should hold no more SMs
# Sets of heads whose short tiles may come last, and then read heads that have left the L2 cache.
ALL_SETS, LAST_SETS = 1 << 30, 4
SEVERAL = 4  # work tiles for each CTA; with fewer, all short ones are needed at the end
MOST_CTAS = 256  # of a launch: GPUs with these kernels have at most 144 SMs
FEW_VISITS = 1 << 29  # so many are allowed for any number of CTAs
WORK_TILE = _WORK_TILE.value  # numbers of a work tile, and of a span


class Heads(NamedTuple):
    """The ``number`` heads in each of ``batches``; each ``group`` shares its reads."""

    batches: int
    number: int
    group: int

    @property
    def groups(self) -> int:
        return self.batches * self.number // self.group


class Traversal(NamedTuple):
    """How a kernel traverses a mask: it owns tiles of ``rows`` and visits tiles of ``columns``.

    transposed         the rows are keys
    pack               heads that share the rows of a tile
    repeat             query heads of an owner, which each visit the spans
    bytes_per_group    bytes that a group of heads reads
    ordered            additions to dq come in the order of the schedule
    full_first         full spans come first, unless keys have an order
    even_ends          how many sets of heads may have their shortest tiles last
    ctas               the most CTAs, if CTA i starts with work tile i; else 0"""

    rows: int
    columns: int
    transposed: bool
    heads: Heads
    pack: int
    repeat: int
    bytes_per_group: int
    ordered: bool = False
    full_first: bool = False
    even_ends: int = 0
    ctas: int = 0

    @property
    def boxes(self) -> int:
        """The ``boxes`` of `work_table`. If ordered, tiles of dq are disjoint."""
        return (self.columns if self.ordered else BOX) if self.transposed else 0


class MaskedTokens(NamedTuple):
    """Whether tiles load queries, and keys, that the mask does not touch."""

    queries: bool
    keys: bool


class TileSchedule(NamedTuple):
    """The schedule ``work`` for `tile_queue`, with ``visits`` of a tile. The launch first fills
    ``fully_masked_rows``: rows without spans, and those between them.
    """

    work: Any  # an array, or a tensor on a device
    work_tiles: int
    fully_masked_rows: tuple[slice, ...]
    loads_masked_tokens: MaskedTokens
    visits: int
    key_order: bool

    @property
    def structure(self) -> tuple:
        """What a launch depends on, besides the address of ``work``."""
        work_tiles, visits = min(self.work_tiles, MOST_CTAS), max(self.visits, FEW_VISITS)
        return work_tiles, *self[2:4], visits, self.key_order


@device_plan
def tile_schedule(cells: Cells, t: Traversal) -> TileSchedule:
    """Return the tile schedule of the cells."""
    if key_order := cells.places is not None:
        t = t._replace(full_first=False)
    native = None if key_order or t.ordered else native_tables()
    made = _of_numpy(cells, t) if native is None else _of_c(native, cells, t)
    tiles, spans, sets, active = made.tiles, made.spans, made.sets, made.active
    rows = () if active == len(tiles) else _row_ranges(tiles[tiles[:, 4] == tiles[:, 2]])
    masked = MaskedTokens(*(_holds_masked(cells, keys, tiles, spans, t) for keys in (False, True)))
    number = sets.sets * sets.together * active
    visits = sets.sets * sets.together * t.repeat * made.visited if number else 0
    return TileSchedule(made.work, number, rows, masked, visits, key_order)


class _Made(NamedTuple):
    """A schedule and its table: ``active`` tiles have spans, and visit ``visited`` tiles."""

    work: np.ndarray
    tiles: np.ndarray
    spans: np.ndarray
    sets: "Sets"
    active: int
    visited: int


def _of_c(native: ModuleType, cells: Cells, t: Traversal) -> _Made:
    rows, groups = t.rows // t.pack, heads_in_flight(t.heads.groups, t.bytes_per_group)
    sets, regions = Sets.of(t, groups), _regions(t, groups)
    given = *bands_and_size(cells.mask, rows, t.columns, t.transposed), rows, t.columns, t.columns
    *_, tiles, spans = native.table(*given, t.boxes, False)
    order, cost, visited = native.order(tiles, spans, t.repeat, PARTIAL, FIXED, regions)
    active = len(order) // 8
    number = sets.sets * sets.together * active
    work = host_array(WORK_TILE * (1 + number) + t.repeat * len(spans) // 4)
    ctas = t.ctas if number >= SEVERAL * t.ctas else 0
    native.write_schedule(
        work, tiles, spans, order, cost, *sets, t.repeat, t.full_first,
        ctas, min(LATE_CTAS, ctas), t.even_ends, SMS, SHORT, GAIN,
    )  # fmt: skip
    return _Made(work, *arrays(tiles, spans), sets, active, visited)


def _of_numpy(cells: Cells, t: Traversal) -> _Made:
    costs = tile_costs(cells, t.rows // t.pack, t.columns, t.transposed, t.repeat, t.boxes)
    spans, chains = np.split(costs.spans, [costs.tiles[:, 4].max(initial=0)])
    groups, order = _order(costs, t, cells)
    sets = Sets.of(t, groups)
    work = _work(costs, spans, chains, order, sets, t)
    visited = int(spans[:, TILES].sum(dtype=np.int64))
    return _Made(work, costs.tiles, spans, sets, len(order), visited)


class Sets(NamedTuple):
    """The heads of a table: ``sets``, each with ``together`` work tiles of a tile of the mask for
    ``pack`` heads each; ``number`` heads in a batch.
    """

    sets: int
    together: int
    pack: int
    number: int

    @classmethod
    def of(cls, t: Traversal, groups: int) -> "Sets":
        together = groups * t.heads.group // t.pack
        return cls(t.heads.groups // groups, together, t.pack, max(1, t.heads.number))


def _work(
    costs: TileCosts,
    spans: np.ndarray,
    chains: np.ndarray,
    order: np.ndarray,
    sets: Sets,
    t: Traversal,
) -> np.ndarray:
    """Return the numbers that `tile_queue` reads, as `tables.c` writes them."""
    tiles, begin, end = costs.tiles, costs.tiles[:, 2], costs.tiles[:, 4]
    if t.full_first:
        spans = _full_first(spans, begin, costs.active)
    tickets = np.zeros((0, 2), np.int32)
    if t.ordered:
        spans, begin, end, tickets = cut_by_tickets(spans, begin, end, order, t.columns)
    if t.repeat > 1:
        source = _repeated(begin, end, t.repeat)
        spans, begin, end, tickets = (
            spans[source],
            t.repeat * begin,
            t.repeat * end,
            tickets[source if t.ordered else []],
        )
    if len(chains):
        spans, chained = np.concatenate([spans, chains]), np.flatnonzero(spans[:, ROW_STOP] < 0)
        spans[chained, ROW_START] += len(spans) - len(costs.spans)
    heads = sets.pack * np.arange(sets.sets * sets.together).reshape(sets.sets, sets.together)
    work, number = _serialised(
        tiles[:, :2], spans, begin, end, order if heads.size else order[:0], heads, sets.number,
        tickets,
    )  # fmt: skip
    if number:
        work_tiles = work[WORK_TILE : WORK_TILE * (1 + number)].reshape(
            len(heads), -1, heads.shape[1], WORK_TILE
        )
        if number >= SEVERAL * t.ctas > 0:
            _late_ctas_get_short_ones(work_tiles, costs.cost[order], t.ctas)
        if t.even_ends:
            _even_ends(work_tiles, costs.cost[order], t.even_ends)
    return work


# ------------------------------------------------------------------ the order
def _order(costs: TileCosts, t: Traversal, cells: Cells) -> tuple[int, np.ndarray]:
    """Return how many groups of heads are in flight, and the order of the active tiles."""
    groups, start, stop = t.heads.groups, costs.tiles[:, 0], costs.tiles[:, 1]
    found = (
        alternation(cells, t.rows, t.columns, t.repeat, groups, t.bytes_per_group)
        if t.ordered
        else None
    )
    additions = mean_additions(costs.spans, t.columns) if t.ordered else None
    together = found[0] if found else heads_in_flight(groups, t.bytes_per_group, additions)
    regions = _regions(t, together)
    order = _longest_first(costs.cost, start * regions // max(1, int(stop.max(initial=0))))
    order = order[costs.active[order]]
    return together, alternate(order, together) if found else order


def _regions(t: Traversal, groups: int) -> int:
    """Return in how many regions, each of which fits the L2 cache, so many groups of heads traverse
    the mask. With ordered dq it is one: a region's last tile would wait.
    """
    return 1 if t.ordered else -(-groups * t.bytes_per_group // L2_BYTES)


def _longest_first(cost: np.ndarray, region: np.ndarray) -> np.ndarray:
    longest = np.zeros(int(region.max(initial=0)) + 1)
    np.maximum.at(longest, region, cost)
    return np.lexsort((-cost, region, -longest[region]))


def _late_ctas_get_short_ones(work_tiles: np.ndarray, cost: np.ndarray, ctas: int) -> None:
    """Move every second short work tile to the last CTAs, which start late if NCCL holds SMs.

    ``work_tiles``: (sets of heads, tiles, heads of a set, numbers)."""
    sets, tiles, heads, _ = work_tiles.shape
    late = min(LATE_CTAS, ctas)
    shortest = np.argsort(cost, kind="stable")[: -(-2 * late // (sets * heads))]
    first = heads * (tiles * np.arange(sets) + shortest[:, None])
    place = (first[..., None] + np.arange(heads)).ravel()[: 2 * late : 2]
    records, gaps = work_tiles.reshape(-1, WORK_TILE), np.sort(place)
    starts, stops = [0, *(gaps + 1).tolist()], [*gaps.tolist(), len(records)]
    short = records[place]
    others = np.concatenate([records[x:y] for x, y in zip(starts, stops, strict=True)])
    records[: ctas - late] = others[: ctas - late]
    records[ctas - late : ctas] = short
    records[ctas:] = others[ctas - late :]


def _even_ends(work_tiles: np.ndarray, cost: np.ndarray, last_sets: int) -> None:
    """Move the shortest work tiles, SHORT of all work, to the end, if it gains more than GAIN: of
    all sets if they are at most ``last_sets``, else of as few (at least two) as come within half of
    GAIN of the best.
    """
    sets, _, heads, _ = work_tiles.shape
    each = np.tile(np.repeat(cost, heads), sets)
    least = np.cumsum(each)[-1] / SMS
    if sets == 1 or _latest(each) - least <= GAIN * least:
        return
    if (time := _time(each)) - least <= GAIN * least:
        return
    orders, times = [], []
    for number in [sets] if sets <= last_sets else range(2, last_sets + 1):
        orders.append(_short_ones_last(each, len(each) // sets * (sets - number)))
        moved, enough = each[orders[-1]], least + GAIN / 2 * least
        bound = _latest(moved)  # spares `_time` where it decides
        times.append(bound if bound <= min(enough, time - GAIN * least) else _time(moved))
        if times[-1] <= enough:
            break
    fewest = next(i for i, x in enumerate(times) if x <= min(times) + GAIN / 2 * least)
    if time - times[fewest] > GAIN * least:
        flat = work_tiles.reshape(-1, WORK_TILE)
        flat[:] = flat[orders[fewest]]


def _short_ones_last(cost: np.ndarray, first: int) -> np.ndarray:
    by_cost = first + np.argsort(cost[first:], kind="stable")
    number = np.searchsorted(np.cumsum(cost[by_cost]), SHORT * np.cumsum(cost)[-1], "right")
    last = np.sort(by_cost[:number])
    return np.append(
        np.delete(np.arange(len(cost)), last), last[np.argsort(-cost[last], kind="stable")]
    )


def _latest(cost: np.ndarray) -> float:
    """Return an upper bound of `_time`."""
    return float(((np.cumsum(cost) - cost) / SMS + cost).max())


def _time(cost: np.ndarray) -> float:
    """Return when the last of SMS multiprocessors ends that claim tiles in this order: in rounds,
    until one of those that have claimed a tile ends before the next one.
    """
    ends = np.zeros(SMS)  # ascending
    while len(cost):
        after = ends[: len(cost)] + cost[:SMS]
        late = ends[1 : len(after)] - np.minimum.accumulate(after)[:-1]  # ascending
        claimed = 1 + late.searchsorted(0.0, "right")
        ends[:claimed] = after[:claimed]
        ends.sort()
        cost = cost[claimed:]
    return float(ends[-1])


# ------------------------------------------------------------------ spans
def _full_first(spans: np.ndarray, begin: np.ndarray, active: np.ndarray) -> np.ndarray:
    owner = np.searchsorted(np.sort(begin[active]), np.arange(len(spans)), side="right")
    return spans[np.argsort(2 * owner + (spans[:, ROW_STOP] > 0), kind="stable")]


def _repeated(begin: np.ndarray, end: np.ndarray, repeat: int) -> np.ndarray:
    """Return the numbers begin:end of each tile, ``repeat`` times."""
    return expanded(np.sort(begin).repeat(repeat), np.sort(end).repeat(repeat))[1]


def _serialised(
    rows, spans, begin, end, order, heads, each_batch: int, tickets
) -> tuple[np.ndarray, int]:
    """Return the numbers that `tile_queue` reads, and how many work tiles they hold.

    ``heads`` (sets, heads of a set): the first head of each work tile, over all batches."""
    number = heads.size * len(order)
    first_span = WORK_TILE * (1 + number)
    first_ticket = first_span + spans[:, :WORK_TILE].size
    work = np.zeros(first_ticket + tickets.size, np.int32)
    work[WORK_TILES_END], work[TICKETS] = first_span, first_ticket
    work_tiles = work[WORK_TILE:first_span].reshape(
        len(heads), len(order), heads.shape[1], WORK_TILE
    )
    of_tile = np.zeros((len(order), 1, WORK_TILE), np.int32)
    of_tile[:, 0, FIRST_TOKEN], of_tile[:, 0, STOP_TOKEN] = rows[order].T
    of_tile[:, 0, FIRST_SPAN], of_tile[:, 0, SPANS_END] = (
        first_span + WORK_TILE * x[order] for x in (begin, end)
    )
    of_tile[:, 0, FIRST_COLUMN] = spans[begin[order], COLUMN]
    of_head = np.zeros((*heads.shape, WORK_TILE), np.int32)
    of_head[..., BATCH_HEAD] = heads
    of_head[..., BATCH], of_head[..., HEAD] = np.divmod(heads, each_batch)
    np.add(of_tile, of_head[:, None], out=work_tiles)
    if (chained := spans[:, ROW_STOP] < 0).any():
        spans = spans.copy()
        spans[chained, ROW_START] = first_span + WORK_TILE * spans[chained, ROW_START]
    work[first_span:first_ticket], work[first_ticket:] = spans.ravel(), tickets.ravel()
    return work, number


# ------------------------------------------------------------------ masked tokens
@cached_plan
def untouched(cells: Cells, keys: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops of the ranges of keys, or of queries, that no band touches."""
    mask, places = cells
    tokens = mask.keys if keys else mask.queries
    if places is not None:
        return places.untouched(keys, tokens, *untouched(Cells(mask), keys))
    start, stop = band_array(mask)[:, 2:4].T if keys else band_array(mask)[:, :2].T
    order = np.argsort(start, kind="stable")
    starts, stops = np.empty((2, len(order) + 1), np.int64)
    starts[0], stops[-1], stops[:-1] = 0, tokens, start[order]
    np.maximum.accumulate(stop[order], out=starts[1:])
    gaps = starts < stops
    return starts[gaps], stops[gaps]


def _holds_masked(
    cells: Cells, keys: bool, tiles: np.ndarray, spans: np.ndarray, t: Traversal
) -> bool:
    """Return whether the queries, or the keys, that tiles load hold an untouched one."""
    gaps, stops = untouched(cells, keys)
    if not len(gaps):
        return False
    if keys == t.transposed:  # the tokens that tiles own
        starts, lengths = tiles[tiles[:, 4] > tiles[:, 2], 0], t.rows // t.pack
    else:
        starts, lengths = (spans[:, x].astype(np.int64) for x in (COLUMN, TILES))
        lengths *= t.columns
    after = np.searchsorted(stops, starts, side="right")  # the first gap that ends behind the start
    return bool((np.append(gaps, np.iinfo(np.int64).max)[after] < starts + lengths).any())


def _row_ranges(tiles: np.ndarray) -> tuple[slice, ...]:
    """Return the rows of these tiles as at most four ranges, else as one."""
    if not len(tiles):
        return ()
    tiles = tiles[np.argsort(tiles[:, 0])]
    apart = np.flatnonzero(tiles[1:, 0] > tiles[:-1, 1])
    starts, stops = (
        tiles[np.append(0, apart + 1), 0].tolist(),
        tiles[np.append(apart, -1), 1].tolist(),
    )
    return tuple(map(slice, starts, stops)) if len(starts) <= 4 else (slice(starts[0], stops[-1]),)
