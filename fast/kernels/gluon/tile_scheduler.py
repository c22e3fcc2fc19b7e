"""In which order things are done: the tiles of a work table, for every batch and head, in one list for all processors.

A Hopper program is *persistent*: there is one on each processor, and it does one item after another, so that the end of
one overlaps the beginning of the next. Who has started all of an item's loads claims the next item of the list that
nobody has: processors are not equally fast, so nothing is dealt out beforehand. Heads that share keys, and whole groups
of them, stand together while what they read fits the L2 cache; within such a set the longest tiles come first. Tiles
that see nothing are not in the list. Where programs add in turn, more heads stand together (`_side_by_side`), or short
tiles and long ones come by turns (`_in_pairs`).

Cost: O(items) on the host, once per mask, shapes and device; 32 bytes an item on the device.

Source: list scheduling, longest processing time first: Graham, Bounds on multiprocessing timing anomalies (1969).
"""

from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from canon.fast.device_plans import device_plan
from canon.fast.tiles import work_table
from canon.reference.mask import Mask
from canon.reference.plan_cache import cached_plan

L2_BYTES = 32 << 20  # of what heads that run side by side read; the cache of an H200 holds 50 MB
# Tiles of queries that a tile of keys visits, 128 x 128, by the padded width: so few do not make up for what order costs.
FEW = {64: 8, 128: 24}
FEW_IN_PAIRS = {64: 8, 128: 12}  # see UNEVEN
FOLLOWS = 2.5  # steps by which a tile of keys is behind the one before it, if both add to dq in order
IN_TURN = 6  # tiles of one head under way at a time, if each waits for the one before
# Programs of one head read the same columns from the cache as long as they keep together, and the more often they add to
# a column in all, the farther they drift apart: so often, of all heads side by side. On causal zigzag shards to which 1024
# tiles add, two heads at a time made 569 TFLOP/s, eight 433 (paper/data/lists_side_by_side_h200.json).
ADDED = 1100
# Tiles in turn that are not equally long are done in pairs, see `_in_pairs`, so many heads side by side that waiting and
# drifting apart cost least: those parts of the time for one head, from times with 1 to 32 (paper/data/pairs_h200.json).
UNEVEN = 1.2  # the longest, over the mean, from which on they count as not equally long
WAITING = 0.75  # times processors ** 2 / columns visited
DRIFTING = 0.9e-14, 2.3e-14  # times bytes ** 2 / tokens; of one query head, of several after one another
LITTLE = 0.08  # with so much of both, two products more cost less
# Counted for an H200, so that bits are the same elsewhere.
PROCESSORS = 132
BOX = 4  # columns at whose multiples boxes of queries may begin: 16 bytes of lse
FIXED = 1.0  # what an item costs beyond its tiles, in tiles: its beginning, and the writing of its result
PARTIAL = 1.2  # what a partial tile costs, in full ones


class Heads(NamedTuple):
    """The heads that walk through one table: ``number`` in each of ``batches``, in groups of ``group`` that share."""

    batches: int
    number: int
    group: int


class TileSchedule(NamedTuple):
    """``work``: what the kernel reads (see `canon.fast.kernels.gluon.tile_queue`).

    ``blind``: where the rows of all tiles without spans are, and perhaps others: results that nobody writes. ``strays``:
    whether items load queries that the mask does not touch, and whether they load such keys.
    """

    work: Tensor
    items: int
    blind: tuple[slice, ...]
    strays: tuple[bool, bool]


@device_plan
def tile_schedule(
    mask: Mask,
    rows: int,
    columns: int,
    transposed: bool,
    heads: Heads,
    pack: int,
    bytes_each_group: int,
    device: torch.device,
    repeat: int = 1,
    in_turn: bool = False,
    full_first: bool = False,
) -> TileSchedule:
    """The schedule of a mask; an item has the ``pack`` heads from its own on.

    ``transposed``: tiles of keys, and ``boxes`` of queries as in `work_table`; ``repeat``: how often the spans of a tile come
    after one another, once for each query head of an owner. ``in_turn``: tiles add to columns in the order of the list;
    their boxes are either the same or apart, and behind the spans stand two numbers for each, see `_with_turns`.
    ``full_first``: a tile's full spans come before its partial ones.
    """
    boxes = (columns if in_turn else BOX) if transposed else 0
    tiles, spans, cost = costs = _costs(mask, rows // pack, columns, transposed, repeat, boxes)
    first, stop, begin, _, end = tiles.T
    seeing = end > begin
    groups = heads.batches * heads.number // heads.group
    pairs = _pairs(costs, rows, columns, repeat, groups, bytes_each_group, mask.queries) if in_turn else None
    if pairs:
        together, _ = pairs
    else:
        together = _side_by_side(groups, bytes_each_group, _additions(spans, columns) if in_turn else None)
    lines = np.arange(0, groups * heads.group, pack).reshape(-1, together * heads.group // pack)
    read = together * bytes_each_group  # by all that run side by side
    regions = 1 if in_turn else -(-read // L2_BYTES)  # short tiles at the end of a region would wait for longer ones
    order = _longest_first(cost, first * regions // max(1, int(stop.max(initial=0))))
    order = order[seeing[order]]
    if pairs:
        order = _in_pairs(order, max(1, round(PROCESSORS / together)))
    loaded = [(first[seeing], rows // pack), (spans[:, 0], columns * spans[:, 1])]
    queries, keys = loaded[::-1] if transposed else loaded
    strays = _hold(untouched(mask, keys=False), *queries), _hold(untouched(mask, keys=True), *keys)
    if full_first:
        owner = np.searchsorted(np.sort(begin[seeing]), np.arange(len(spans)), side="right")
        spans = spans[np.lexsort((spans[:, 3] > 0, owner))]  # a full one has no band
    if in_turn:
        spans, begin, end = _with_turns(spans, begin, end, order, columns)
    if repeat > 1:
        spans, begin, end = _repeated(spans, begin, end, repeat)
    spans, turns = np.split(spans, [8], axis=1)
    if not lines.size:
        order = order[:0]
    tile = np.broadcast_to(order[None, :, None], (len(lines), len(order), lines.shape[1])).ravel()
    line = np.broadcast_to(lines[:, None, :], (len(lines), len(order), lines.shape[1])).ravel()
    items_end = 8 * (1 + len(tile))
    at = lambda spans: items_end + 8 * spans[tile]
    batch, head = line // heads.number, line % heads.number
    items = np.stack([first[tile], stop[tile], batch, head, at(begin), at(end), line, spans[begin[tile], 0]], 1)
    ends = [items_end, 0, 0, 0, 0, 0, 0, items_end + spans.size]
    work = np.concatenate([ends, items.ravel(), spans.ravel(), turns.ravel()]).astype(np.int32)
    return TileSchedule(torch.from_numpy(work).to(device), len(tile), _runs(tiles[~seeing]), strays)


def untouched(mask: Mask, keys: bool) -> np.ndarray:
    """Which keys, or queries, no band touches (bool). Bands are tight: all their rows see something."""
    steps = np.zeros((mask.keys if keys else mask.queries) + 1, np.int64)
    for band in mask.bands:
        start, stop = (band.k_start, band.k_stop) if keys else (band.q_start, band.q_stop)
        steps[start] += 1
        steps[stop] -= 1
    return np.cumsum(steps)[:-1] == 0


@cached_plan
def unevenness(mask: Mask, rows: int, columns: int, owners: int, each: int, programs: int) -> float:
    """What the busiest processor has to do for dk and dv, over the mean: ``owners`` that sum ``each`` query heads."""
    tiles, _, cost = _costs(mask, rows, columns, True, each, BOX)
    cost = np.sort(cost[tiles[:, 4] > tiles[:, 2]])[::-1].repeat(owners)
    load = np.zeros(programs)
    for start in range(0, len(cost), programs):  # in rounds, the longest item to the least loaded processor
        longest = cost[start : start + programs]
        load[np.argsort(load, kind="stable")[: len(longest)]] += longest
    return float(load.max() / load.mean()) if len(cost) else 1.0


@cached_plan
def followers_wait_little(
    mask: Mask, heads: int, owners: int, programs: int, width: int, rows: int, columns: int
) -> bool:
    """Whether adding to dq in turn costs little: tiles of keys visit many, and begin only some steps behind one another."""
    table, each = work_table(mask, 128, 128, None, True, "cpu", 128), heads // owners
    if mask.keys <= mask.queries:  # else gradients of other ranks' keys are to travel under the last kernel of "split"
        costs, bytes_each = _costs(mask, rows, columns, True, each, columns), 4 * width * each * mask.queries
        if pairs := _pairs(costs, rows, columns, each, owners, bytes_each, mask.queries):
            return table.visits > FEW_IN_PAIRS[width] * len(table) and pairs[1] < LITTLE
    behind = FOLLOWS * min(len(table), programs / owners)
    return table.visits > FEW[width] * len(table) and table.visits * heads / programs > 10 * behind


def _costs(
    mask: Mask, rows: int, columns: int, transposed: bool, repeat: int, boxes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles and spans of the work table, and what each tile costs, in full tiles of columns."""
    table = work_table(mask, rows, columns, None, transposed, "cpu", boxes)
    tiles, spans = table.tiles.numpy().astype(np.int64), table.spans.numpy()
    number = np.concatenate([[0], np.cumsum(spans[:, 1] * 1.0)])  # tiles before each span
    _, _, begin, full, end = tiles.T
    return tiles, spans, repeat * ((number[full] - number[begin]) * PARTIAL + (number[end] - number[full])) + FIXED


def _hold(some: np.ndarray, starts: np.ndarray, lengths: np.ndarray | int) -> bool:
    """Whether some of these tokens are in start:start + length of any."""
    before = np.concatenate([[0], np.cumsum(some)])
    return bool((before[np.minimum(starts + lengths, len(some))] > before[starts]).any())


def _runs(tiles: np.ndarray) -> tuple[slice, ...]:
    """The rows of these tiles; where they stand in more than four places, from the first of them to the last."""
    tiles = tiles[np.argsort(tiles[:, 0])]
    apart = np.flatnonzero(tiles[1:, 0] > tiles[:-1, 1]) + 1
    runs = [slice(int(run[0, 0]), int(run[-1, 1])) for run in np.split(tiles, apart) if len(run)]
    return tuple(runs) if len(runs) <= 4 else (slice(runs[0].start, runs[-1].stop),)


def _longest_first(cost: np.ndarray, region: np.ndarray) -> np.ndarray:
    """The tiles, region by region, those with the longest tiles first, and the longest of each first."""
    longest = np.zeros(int(region.max(initial=0)) + 1)
    np.maximum.at(longest, region, cost)
    return np.lexsort((-cost, region, -longest[region]))


def _in_pairs(order: np.ndarray, some: int) -> np.ndarray:
    """By turns ``some`` of the shortest tiles, the shortest first, and as many of the longest, the longest first.

    Where rows end together a tile that is shorter than the one before begins later, and waits until that one, which is to
    add first, has come there; so of those that begin at once all take as long as the longest. Here each begins when a short
    one has ended, the longest first: one after another, at about the intervals that let nobody wait.
    """
    parts, first, last = [order[:0]], 0, len(order)
    while first < last:
        parts.append(order[max(first, last - some) : last][::-1])
        last -= len(parts[-1])
        parts.append(order[first : min(first + some, last)])
        first += len(parts[-1])
    return np.concatenate(parts)


def _with_turns(
    spans: np.ndarray, begin: np.ndarray, end: np.ndarray, order: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spans, begin:end for each tile, with two more numbers: that of whom a span waits for, or 0, and its own.

    Whoever adds to a tile of columns leaves a number there, and waits for that of the tile before it in ``order``. Spans are
    cut where these are not the same from end to end.
    """
    last = np.zeros(int((spans[:, 0] // columns + spans[:, 1]).max(initial=0)), np.int64)
    pieces, number, at = [np.zeros((0, spans.shape[1] + 2), np.int64)], 0, 0
    new_begin, new_end = np.zeros_like(begin), np.zeros_like(end)
    for tile in order:
        new_begin[tile] = at
        for span in spans[begin[tile] : end[tile]]:
            number += 1
            here = last[span[0] // columns :][: span[1]]
            starts = np.append(0, np.flatnonzero(np.diff(here)) + 1)
            piece = np.tile([*span, 0, number], (len(starts), 1))
            piece[:, 0] += columns * starts
            piece[:, 1] = np.diff(np.append(starts, span[1]))
            piece[:, -2] = here[starts]
            pieces.append(piece)
            here[:] = number
            at += len(starts)
        new_end[tile] = at
    return np.concatenate(pieces), new_begin, new_end


def _repeated(
    spans: np.ndarray, begin: np.ndarray, end: np.ndarray, repeat: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The spans of each tile, begin:end, ``repeat`` times after one another, and where they are then."""
    by_begin = np.argsort(begin, kind="stable")
    owner = np.repeat(by_begin, repeat * (end - begin)[by_begin])
    place = np.arange(len(owner)) - repeat * begin[owner]
    return spans[begin[owner] + place % (end - begin)[owner]], repeat * begin, repeat * end


def _additions(spans: np.ndarray, columns: int) -> float:
    """How many tiles of rows add to a tile of columns, on average."""
    last = int((spans[:, 0] + columns * spans[:, 1]).max(initial=columns))
    return columns * float(spans[:, 1].sum()) / last


def _side_by_side(groups: int, bytes_each: int, added: float | None) -> int:
    """How many groups of heads run side by side: as many as what they read, ``bytes_each``, fits the cache.

    ``added``: how many tiles add in turn to a tile of columns. Then more do than fit, so that programs do not wait for one
    another; unless they would drift apart (`ADDED`), in more than four times what fits.
    """
    sets = _divisors(groups)
    largest = lambda each, room: max(n for n in sets if n == 1 or n * each <= room)
    side_by_side = largest(bytes_each, L2_BYTES)
    if added is None:
        return side_by_side
    enough = next((n for n in sets if n * IN_TURN >= PROCESSORS), sets[-1])
    together = max(largest(added, ADDED), largest(bytes_each, 4 * L2_BYTES))
    return max(side_by_side, min(enough, together))


def _pairs(
    costs: tuple[np.ndarray, np.ndarray, np.ndarray],
    rows: int,
    columns: int,
    repeat: int,
    groups: int,
    bytes_each: int,
    tokens: int,
) -> tuple[int, float] | None:
    """If tiles that add in turn are done in pairs: how many groups of heads run side by side, and what part of the time waiting
    and drifting apart cost. They are if many add to one, and they are not equally long.

    ``costs``: from `_costs`; ``tokens``: queries, of which a group reads ``bytes_each``.
    """
    tiles, spans, cost = costs
    cost = cost[tiles[:, 4] > tiles[:, 2]]
    if not len(cost) or 4 * _additions(spans, columns) < len(cost) or cost.max() <= UNEVEN * cost.mean():
        return None
    if repeat * rows < 2 * columns:  # by so little a tile is shorter than the one before that pairs do not stay apart
        return None
    waiting = WAITING * PROCESSORS**2 / (repeat * int(spans[:, 1].sum()))
    drifting = DRIFTING[repeat > 1] * bytes_each**2 / tokens
    return min(((n, waiting / n**2 + drifting * n**2) for n in _divisors(groups)), key=itemgetter(1))


def _divisors(groups: int) -> list[int]:
    """In how many groups of heads all can be divided evenly, ascending; of none, 1."""
    return [n for n in range(1, groups + 1) if groups % n == 0] or [1]
