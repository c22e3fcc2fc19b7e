"""Costs of work tiles, and the imbalance of the SMs that share them. The unit is the time for a
full tile. A partial tile costs `PARTIAL`, and a work tile `FIXED` more, for its start and its
result.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from canon.fast.tables.cells import Cells
from canon.fast.tables.work_tables import host_table
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_part, cached_plan

FIXED = 1.0
PARTIAL = 1.2
MORE_OWNERS = 1.25  # ratio of imbalances above which `needs_more_owners` is true
BOX = 4  # TMA loads queries from multiples of this number: 16 bytes of lse
L2_BYTES = 32 << 20  # for tensors that heads in flight read repeatedly; L2 caches hold 40 to 60 MB


class TileCosts(NamedTuple):
    """``tiles`` and ``spans`` of a work table, and the ``cost`` of each tile."""

    tiles: np.ndarray
    spans: np.ndarray
    cost: np.ndarray

    @property
    def active(self) -> np.ndarray:
        return self.tiles[:, 4] > self.tiles[:, 2]


@cached_part
def tile_costs(
    cells: Cells, rows: int, columns: int, transposed: bool, repeat: int, boxes: int
) -> TileCosts:
    """Return the costs, if spans are visited ``repeat`` times."""
    tiles, spans, *_ = host_table(cells, rows, columns, columns, transposed, boxes)
    # visited tiles before each span
    before = np.concatenate([[0], np.cumsum(spans[:, 1], dtype=np.float64)])
    _, _, begin, full, end = tiles.T
    cost = (
        repeat * ((before[full] - before[begin]) * PARTIAL + (before[end] - before[full])) + FIXED
    )
    return TileCosts(tiles, spans, cost)


@cached_plan
def needs_more_owners(
    mask: Mask, rows: int, columns: int, key_heads: int, query_heads: int, sms: int
) -> bool:
    """Return whether SMs are too unequal with one owner of dk and dv for each key head. Bounds of
    the imbalance decide most masks; margins cover rounding.
    """
    by_key = (mask, rows, columns, key_heads, query_heads // key_heads)
    by_query = (mask, rows, columns, query_heads, 1)
    margin = 1e-6
    if _imbalance_bound(*by_key, sms) <= MORE_OWNERS - margin:
        return False
    imbalance_by_key = imbalance(*by_key, sms)
    if imbalance_by_key <= MORE_OWNERS - margin:
        return False
    if imbalance_by_key > MORE_OWNERS * _imbalance_bound(*by_query, sms) + margin:
        return True
    return imbalance_by_key > MORE_OWNERS * imbalance(*by_query, sms)


@cached_plan
def imbalance(mask: Mask, rows: int, columns: int, owners: int, each: int, sms: int) -> float:
    """Return the work of the busiest SM over the mean, if the longest work tile always goes to the
    idlest SM. Each of the ``owners`` sums ``each`` query heads.
    """
    cost = np.sort(_active_costs(mask, rows, columns, each))[::-1].repeat(owners)
    load = np.zeros(sms)
    for start in range(0, len(cost), sms):
        longest = cost[start : start + sms]
        load[np.argsort(load, kind="stable")[: len(longest)]] += longest
    return float(load.max() / load.mean()) if len(cost) else 1.0


def _imbalance_bound(
    mask: Mask, rows: int, columns: int, owners: int, each: int, sms: int
) -> float:
    """Return an upper bound: two SMs differ by at most the longest work tile."""
    cost = _active_costs(mask, rows, columns, each)
    return 1 + cost.max() * sms / (cost.sum() * owners) if len(cost) else 1.0


@lru_cache
def divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, ascending; [1] for 0."""
    return [n for n in range(1, number + 1) if number % n == 0] or [1]


@lru_cache
def largest_divisor(number: int, each: float, room: float) -> int:
    """Return the largest divisor n of ``number`` with n * ``each`` <= ``room``, or 1."""
    return max(n for n in divisors(number) if n == 1 or n * each <= room)


def _active_costs(mask: Mask, rows: int, columns: int, each: int) -> np.ndarray:
    costs = tile_costs(Cells(mask), rows, columns, True, each, BOX)
    return costs.cost[costs.active]
