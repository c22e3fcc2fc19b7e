"""The tile schedule of the Hopper kernels: all work tiles of a launch, in the order in which CTAs
claim them.

Heads that share keys come together while their tensors fit the L2 cache. Within such a set, the
longest work tiles come first (Graham, Bounds on multiprocessing timing anomalies, 1969), so the
last set starts its longest tile late. Where that costs more than 2 %, launches of dk and dv have
the shortest tenth of their work last. `dq_order` has the order of ordered dq."""

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
from canon.fast.kernels.gluon.tile_queue import COLUMN, ROW_START, ROW_STOP, TICKETS, TILES
from canon.fast.kernels.gluon.tile_queue import WORK_TILE as _WORK_TILE
from canon.fast.tables.cells import Cells
from canon.fast.tables.device_plans import device_plan, host_array
from canon.fast.tables.index_ranges import expanded
from canon.fast.tables.tile_costs import BOX, FIXED, L2_BYTES, PARTIAL, tile_costs
from canon.fast.tables.work_tables import band_array, host_table, native_tables
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
    ordered            dq is ordered
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


class TileSchedule(NamedTuple):
    """The schedule ``work`` for `tile_queue`. The launch first fills ``fully_masked_rows``.
    ``loads_masked_tokens``: whether tiles load queries, and keys, that the mask does not touch.
    """

    work: Any  # an array, or a tensor on a device
    work_tiles: int
    fully_masked_rows: tuple[slice, ...]
    loads_masked_tokens: tuple[bool, ...]
    visits: int
    key_order: bool

    @property
    def structure(self) -> tuple:
        """What a launch depends on, besides the address of ``work``."""
        work_tiles, visits = min(self.work_tiles, MOST_CTAS), max(self.visits, FEW_VISITS)
        return work_tiles, *self[2:4], visits, self.key_order


@device_plan
def tile_schedule(cells: Cells, t: Traversal) -> TileSchedule:
    """Return the tile schedule. Raises RuntimeError without a C compiler."""
    if (native := native_tables()) is None:
        raise RuntimeError(
            "tile schedules of the Hopper kernels need a C compiler, as Triton does: install gcc, "
            "or name another one in CC"
        )
    if key_order := cells.places is not None:
        t = t._replace(full_first=False)
    tiles, spans, together, alternates = _table(cells, t)
    # with ordered dq, a region's last tile would wait
    regions = 1 if t.ordered else -(-together * t.bytes_per_group // L2_BYTES)
    order, cost, visited = native.order(tiles, spans, t.repeat, PARTIAL, FIXED, regions)
    order = np.frombuffer(order, np.int64)
    if alternates:
        order = alternate(order, together)
    chains = spans[tiles[:, 4].max() if key_order and len(tiles) else len(spans) :]
    spans = spans[: len(spans) - len(chains)]
    masked_rows = () if len(order) == len(tiles) else _row_ranges(tiles[tiles[:, 4] == tiles[:, 2]])
    masked = tuple(_holds_masked(cells, keys, tiles, spans, t) for keys in (False, True))
    first_chain, tickets = len(spans), np.zeros(0, np.int32)
    if t.ordered:
        tiles, spans, tickets = _with_tickets(tiles, spans, order, t)

    sets = t.heads.groups // together, together * t.heads.group // t.pack
    work_tiles = sets[0] * sets[1] * len(order)
    first_span = WORK_TILE * (1 + work_tiles)
    stop = first_span + t.repeat * spans.size
    work = host_array(stop + chains.size + tickets.size)
    ctas = t.ctas if work_tiles >= SEVERAL * t.ctas else 0
    native.write_schedule(
        work[:stop], tiles, spans, order, cost, *sets, t.pack, max(1, t.heads.number), t.repeat,
        t.full_first, ctas, min(LATE_CTAS, ctas), t.even_ends, SMS, SHORT, GAIN,
    )  # fmt: skip
    if len(chains):
        records = work[first_span:stop].reshape(-1, WORK_TILE)
        chained = records[:, ROW_STOP] < 0
        records[chained, ROW_START] = stop + WORK_TILE * (records[chained, ROW_START] - first_chain)
    if stop < len(work):
        work[TICKETS] += chains.size
        work[stop:] = np.append(chains, tickets)
    visits = sets[0] * sets[1] * t.repeat * visited
    return TileSchedule(work, work_tiles, masked_rows, masked, visits, key_order)


def _table(cells: Cells, t: Traversal) -> tuple[np.ndarray, np.ndarray, int, bool]:
    """Return tiles and spans, groups of heads in flight, and whether to alternate."""
    groups, read, rows = t.heads.groups, t.bytes_per_group, t.rows // t.pack
    if t.transposed:  # perhaps made for `needs_more_owners`
        tiles, spans, _ = tile_costs(cells, rows, t.columns, True, t.repeat, t.boxes)
    else:
        tiles, spans, *_ = host_table(cells, rows, t.columns, t.columns, boxes=t.boxes)
    if not t.ordered:
        return tiles, spans.astype(np.int32, copy=False), heads_in_flight(groups, read), False
    found = alternation(cells, rows, t.columns, t.repeat, groups, read)
    additions = mean_additions(spans, t.columns)
    together = found[0] if found else heads_in_flight(groups, read, additions)
    return tiles, spans.astype(np.int32, copy=False), together, found is not None


def _with_tickets(
    tiles: np.ndarray, spans: np.ndarray, order: np.ndarray, t: Traversal
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the table with spans cut by tickets, and the tickets of each repeated span."""
    spans, begin, end, tickets = cut_by_tickets(spans, *tiles[:, [2, 4]].T, order, t.columns)
    repeated = np.sort(begin).repeat(t.repeat), np.sort(end).repeat(t.repeat)
    tiles = np.stack([*tiles[:, :2].T, begin, end, end], 1)
    return tiles, spans, tickets[expanded(*repeated)[1]]


@cached_plan
def untouched(cells: Cells, keys: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops of the keys, or queries, that no band touches."""
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
