"""The bands of a block-causal mask. Query i sees key j iff ``columns[j] < rows[i]``, for levels in
place of ids:

    rows        the number of valid keys that the query sees; 0 for an invalid query
    columns     the number of valid keys with a smaller id; of all of them for an invalid key

A *stretch* is a run of keys that queries of some levels see without its neighbours:

    columns    2 0 1 3 1        0 < row <= 1   keys 1:2        2 < row <= 3   keys 0:3
    row = 2    . x x . x        1 < row <= 2   keys 1:3        3 < row        keys 0:5
    row = 3    x x x . x        1 < row <= 3   keys 4:5

Neighbouring queries that see a stretch make a rectangle, and the rectangles of a stair join to one
band. Cost: O(n log n + p log p) for p <= r^2 / 2 pairs of a stretch and one of r runs of queries.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from canon.masks.arguments import whole_numbers
from canon.masks.band import Band, tight_bands
from canon.masks.mask_inputs import Ints


def block_bands(
    q_blocks: Ints, k_blocks: Ints | None, q_valid: Ints | None, k_valid: Ints | None
) -> tuple[list[Band], int, int]:
    """Return the bands of one sequence's block-causal mask, and its queries and keys."""
    q_ids, q_flags = _block_ids("q", q_blocks, q_valid)
    k_ids, k_flags = _block_ids("k", q_blocks if k_blocks is None else k_blocks, k_valid)
    return bands_of_levels(*levels(q_ids, k_ids, q_flags, k_flags)), len(q_ids), len(k_ids)


def _block_ids(name: str, blocks: Ints, valid: Ints | None) -> tuple[Tensor, Tensor]:
    ids = whole_numbers(f"{name}_blocks", blocks, booleans=True)
    flags = (
        [1] * len(ids) if valid is None else whole_numbers(f"{name}_valid", valid, booleans=True)
    )
    if len(flags) != len(ids):
        raise ValueError(f"{name}_valid has {len(flags)} entries for {len(ids)} {name}_blocks")
    if not {0, 1}.issuperset(flags):
        raise ValueError(
            f"{name}_valid must hold booleans, 0 or 1, got {max(flags, key=abs)}: "
            "one for each token"
        )
    return torch.tensor(ids, dtype=torch.int64, device="cpu"), torch.tensor(
        flags, dtype=torch.bool, device="cpu"
    )


def levels(q_ids: Tensor, k_ids: Tensor, q_valid: Tensor, k_valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the levels (rows, columns), int64, of ids (int64) and validity (bool)."""
    ids = k_ids[k_valid].sort().values
    rows = torch.searchsorted(ids, q_ids, right=True).masked_fill(~q_valid, 0)
    columns = torch.searchsorted(ids, k_ids).masked_fill(~k_valid, len(ids))
    return rows, columns


def bands_of_levels(rows: Tensor, columns: Tensor) -> list[Band]:
    """Return the bands of levels, int64 >= 0."""
    row, q_edges = _runs(rows)
    column, k_edges = _runs(columns)
    stretches = torch.tensor(
        list(_stretches(column.tolist())), dtype=torch.int64, device="cpu"
    ).reshape(-1, 4)
    start, stop, above, upto = stretches.T.contiguous()
    stretch, first, last = _seen_as_one(row, above, upto)
    q_start, q_stop = q_edges[first], q_edges[last + 1]
    k_start, k_stop = k_edges[start[stretch]], k_edges[stop[stretch]]
    order = (q_start * (len(columns) + 1) + k_start).argsort()
    return _stairs_joined(*(x[order] for x in (q_start, q_stop, k_start, k_stop)))


def _runs(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the level of each run of equal levels, and the edges of the runs."""
    values, lengths = torch.unique_consecutive(levels, return_counts=True)
    return values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _stretches(columns: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, stop, above, upto) of every stretch that rows with above < row <= upto see."""
    # (start, highest column) of the stretches that are still open
    walls: list[tuple[int, int]] = []
    for place, wall in enumerate([*columns, 1 << 62]):  # the last wall is higher than every row
        start = place
        while walls and walls[-1][1] < wall:
            start, above = walls.pop()
            yield start, place, above, min(wall, walls[-1][1]) if walls else wall
        if not walls or walls[-1][1] > wall:
            walls.append((start, wall))


def _seen_as_one(rows: Tensor, above: Tensor, upto: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (stretch, first, last) of neighbouring ``rows`` with above < row <= upto."""
    by_level = rows.argsort()
    begin, end = (torch.searchsorted(rows[by_level], bound, right=True) for bound in (above, upto))
    ends = (end - begin).cumsum(0)  # of each stretch in a list of all (stretch, row) pairs
    place = torch.arange(int(ends[-1]) if len(ends) else 0, device="cpu")
    stretch = torch.searchsorted(ends, place, right=True)
    row = by_level[place + (end - ends)[stretch]]
    size = len(rows) + 1
    # neighbouring rows differ by 1, different stretches by more
    pairs = (stretch * size + row).sort().values
    apart, edge = pairs.diff() != 1, torch.ones(1, dtype=torch.bool, device="cpu")
    first, last = (pairs[torch.cat(ends)[: len(pairs)]] for ends in ((edge, apart), (apart, edge)))
    return first // size, first % size, last % size


def _stairs_joined(q_start: Tensor, q_stop: Tensor, k_start: Tensor, k_stop: Tensor) -> list[Band]:
    """Return the bands of the sorted rectangles. A stair becomes one band."""
    lo, hi = k_start - q_stop + 1, k_stop - 1 - q_start
    numbers = (x.tolist() for x in (q_start, q_stop, k_start, k_stop, lo, hi))
    bands: list[Band | None] = list(tight_bands(zip(*numbers, strict=True)))
    width = int(k_stop.max()) + 1 if bands else 1
    # the first rectangle from the row below on that does not start further left
    below = torch.searchsorted(q_start * width + k_start, q_stop * width + k_start)
    step = (below < len(bands)).nonzero().flatten()
    below = below[step]
    left, right = k_start[below] - k_start[step], k_stop[below] - k_stop[step]
    near = (q_start[below] == q_stop[step]) & (left <= 1) & (right >= 0) & (right <= 1)
    for upper, lower in zip(step[near].tolist(), below[near].tolist(), strict=True):
        both = bands[upper].join(bands[lower])
        if both:
            bands[upper], bands[lower] = None, both
    return [band for band in bands if band]
