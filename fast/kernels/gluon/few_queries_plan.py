"""The tables of `few_queries`: the tiles of keys that each tile of queries visits, in order, and
chunks of them. No size here changes a bit of finite results.

    tile of queries 0 visits   0   1   2   3   4   5   6     its rows see keys from tile 0 or 4 on
    chunk 0                    0   1   2
    chunk 1                   (0)          3   4   5         (0): again, for the maximum
    chunk 2                   (0)             (4)      6"""

from typing import Any, NamedTuple

import numpy as np

from canon.fast.kernels.gluon.tile_queue import COLUMN, FIRST_SPAN, SPANS_END, TILES
from canon.fast.kernels.gluon.tile_scheduler import (
    WORK_TILE,
    Heads,
    Traversal,
    tile_schedule,
)
from canon.fast.tables.cells import Cells, in_place
from canon.fast.tables.device_plans import device_plan
from canon.fast.tables.index_ranges import counted, expanded
from canon.fast.tables.work_tables import band_array, visits
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan

ROWS = 64  # of a tile: tokens x query heads of a group
MOST_QUERIES = 64  # more give `forward` enough to do
FEWEST_VISITS = 16  # of a tile of queries; with fewer, three launches take longer than one


class FewQueriesPlan(NamedTuple):
    """The tables, int32 on a device, and their sizes.

    work          the schedule of the tiles of queries, as in `tile_queue`, for one set of heads
    chunks        (n, 4): tile of queries, then in ``order``: first visit, first own visit, end
    first_chunks  (n, 4): likewise, one for each tile of queries and first visit of its rows
    order         visits of the chunks, those computed again first; then those of ``first_chunks``
    columns       (visits, 2): first key, and span in ``work``
    first_visits  of each query: the visit of the first key that it sees, or -1
    tiles         (tiles of queries + 1, 2): first visit and first chunk
    pack, keys    heads and keys of a tile
    tokens        of a tile of queries, at most"""

    work: Any
    chunks: Any
    first_chunks: Any
    order: Any
    columns: Any
    first_visits: Any
    tiles: Any
    pack: int
    keys: int
    tokens: int
    fully_masked_rows: tuple[slice, ...]
    loads_masked_tokens: tuple[bool, ...]


@device_plan
def few_queries_plan(cells: Cells, pack: int, columns: int, each: int) -> FewQueriesPlan:
    """Return the plan for tiles of ``pack`` heads and ``columns`` keys, ``each`` in a chunk."""
    tokens = tokens_of_tile(cells, pack, columns)
    traversal = Traversal(tokens * pack, columns, False, Heads(1, pack, pack), pack, 1, 1)
    schedule = tile_schedule.__wrapped__(cells, traversal)
    records = schedule.work.reshape(-1, WORK_TILE)
    tiles = records[1 : 1 + schedule.work_tiles]
    tile, span = expanded(tiles[:, FIRST_SPAN] // WORK_TILE, tiles[:, SPANS_END] // WORK_TILE)
    of_span, place = counted(records[span, int(TILES)])
    span, tile = span[of_span], tile[of_span]
    column = records[span, int(COLUMN)] + columns * place
    ends = np.append(0, np.cumsum(np.bincount(tile, minlength=len(tiles))))
    first_key, last_key = seen_keys(cells.mask)
    first_visits, chunks, order, begins = np.full(cells.sizes[0], -1), [], [], [0]
    first_of_tiles: list[tuple[int, int]] = []
    for i, (first, stop, begin, end) in enumerate(
        zip(*tiles[:, :2].T, ends, ends[1:], strict=False)
    ):
        rows = np.arange(first, stop)[first_key[first:stop] < last_key[first:stop]]
        own = column[begin:end]
        first_visits[rows] = begin + np.searchsorted(own, first_key[rows], "right") - 1
        first_of_tiles += [(i, visit) for visit in np.unique(first_visits[rows])]
        for at in range(begin, end, each):
            earlier = rows[(first_visits[rows] < at) & (last_key[rows] > column[at])]
            again = np.unique(first_visits[earlier])
            chunks.append(
                (
                    i,
                    len(order),
                    len(order) + len(again),
                    len(order) + len(again) + min(each, end - at),
                )
            )
            order += [*again, *range(at, min(at + each, end))]
        begins.append(len(chunks))
    first_chunks = [(i, at, at + 1, at + 1) for at, (i, _) in enumerate(first_of_tiles, len(order))]
    order += [visit for _, visit in first_of_tiles]
    made = (
        schedule.work,
        np.reshape(chunks, (-1, 4)),
        np.reshape(first_chunks, (-1, 4)),
        np.array(order),
        np.stack([column, WORK_TILE * span], 1),
        first_visits,
        np.stack([ends, begins], 1),
    )
    arrays = (x.astype(np.int32) for x in made)
    return FewQueriesPlan(
        *arrays, pack, columns, tokens, schedule.fully_masked_rows, schedule.loads_masked_tokens
    )


def is_few(cells: Cells, columns: int) -> bool:
    """Return whether few queries of a whole sequence see many keys, in the order of keys."""
    mask, places = cells
    few = 0 < mask.queries <= MOST_QUERIES and mask.keys >= FEWEST_VISITS * columns
    return few and places == in_place(mask)


@cached_plan
def tokens_of_tile(cells: Cells, pack: int, columns: int) -> int:
    """Return the fewest tokens with which no larger tile saves a tenth of the visits."""
    most = min(ROWS // pack, 1 << (cells.sizes[0] - 1).bit_length())
    found = {
        tokens: visits(cells, tokens, columns)[0]
        for tokens in (1, 2, 4, 8, 16, 32, 64)
        if tokens <= most
    }
    return next(tokens for tokens, number in found.items() if number <= 1.1 * min(found.values()))


def seen_keys(mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """Return the first key that each query sees, and the end of the last."""
    q_start, q_stop, k_start, k_stop, lo, hi = band_array(mask).T
    query = np.arange(mask.queries)[:, None]
    left, right = np.maximum(k_start, query + lo), np.minimum(k_stop, query + hi + 1)
    sees = (query >= q_start) & (query < q_stop) & (left < right)
    first = np.where(sees, left, mask.keys).min(1, initial=mask.keys)
    return first, np.maximum(np.where(sees, right, 0).max(1, initial=0), first)
