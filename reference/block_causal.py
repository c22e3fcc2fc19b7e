"""The bands of a block-causal mask: which keys are seen side by side, and by which queries.

Ids only say who comes before whom, so they become levels: query i sees key j iff ``columns[j] < rows[i]``, where

    rows        is the number of valid keys that the query sees; 0 where it is not valid
    columns     is the number of valid keys with a smaller id; that of all valid keys where it is not valid

A *stretch* of keys is seen as one, and none beside it, by the queries of a range of levels:

    columns    2 0 1 3 1        0 < row <= 1   keys 1:2        2 < row <= 3   keys 0:3
    row = 1    . x . . .        1 < row <= 2   keys 1:3        3 < row        keys 0:5
    row = 2    . x x . x        1 < row <= 3   keys 4:5
    row = 3    x x x . x

There are no more stretches than keys, and one pass finds them all. Neighbouring queries that see a stretch make a rectangle.
Rectangles that are the steps of a stair make one band: ascending ids, one a token, are causal. The bands depend on the cells of
the mask alone, not on the ids that said so: equal cells, equal masks.

How many: random ids make many bands, whoever makes them. A band has one *corner*, a cell with none of its cells to the left,
above and in between. So bands cannot be fewer than the corners of the mask:

    cells (i, j) with q[i-1] < k[j] <= q[i] < k[j-1]        (q is -inf before the first and where invalid, k +inf)

These are r^2 / 24 for random ids in r runs, n^2 / 24 where each of n tokens has an id of its own. Rectangles alone, with
four corners each, cannot be fewer than r^2 / 12. These here are r^2 / 9, and 0.105 r^2 after the stairs.

Cost: O(n log n + p log p) in tensors, p being the pairs of a run of queries and a stretch that it sees as one (r^2 / 6 for
random ids, r^2 / 2 at most), and a Python object for each band.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from canon.reference.band import Band


def levels(q_ids: Tensor, k_ids: Tensor, q_valid: Tensor, k_valid: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns): columns[j] < rows[i] iff k_ids[j] <= q_ids[i] and both are valid. int64, like the ids."""
    ids = k_ids[k_valid].sort().values
    rows = torch.searchsorted(ids, q_ids, right=True).masked_fill(~q_valid, 0)
    columns = torch.searchsorted(ids, k_ids).masked_fill(~k_valid, len(ids))
    return rows, columns


def bands_of_levels(rows: Tensor, columns: Tensor) -> list[Band]:
    """The bands of the mask in which query i sees key j iff columns[j] < rows[i], both >= 0."""
    row, q_edges = _runs(rows)
    column, k_edges = _runs(columns)
    stretches = torch.tensor(list(_stretches(column.tolist())), dtype=torch.int64, device="cpu").reshape(-1, 4)
    start, stop, above, upto = stretches.T.contiguous()
    stretch, first, last = _seen_as_one(row, above, upto)
    q_start, q_stop = q_edges[first], q_edges[last + 1]
    k_start, k_stop = k_edges[start[stretch]], k_edges[stop[stretch]]
    order = (q_start * (len(columns) + 1) + k_start).argsort()
    return _stairs_joined(*(x[order] for x in (q_start, q_stop, k_start, k_stop)))


def _runs(levels: Tensor) -> tuple[Tensor, Tensor]:
    """The level of each run of equal ones, and where the runs start; then the end."""
    values, lengths = torch.unique_consecutive(levels, return_counts=True)
    return values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _stretches(columns: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, above, upto) of every stretch: rows above < row <= upto see its columns, and not those beside it."""
    # (start, highest column) of the stretches that are still open, each inside the last
    walls: list[tuple[int, int]] = []
    for place, wall in enumerate([*columns, 1 << 62]):  # at the end, one that no row sees over
        start = place
        while walls and walls[-1][1] < wall:
            start, above = walls.pop()
            yield start, place, above, min(wall, walls[-1][1]) if walls else wall
        if not walls or walls[-1][1] > wall:
            walls.append((start, wall))


def _seen_as_one(rows: Tensor, above: Tensor, upto: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(stretch, first row, last row) of all neighbours among ``rows`` that are in above < row <= upto of a stretch."""
    by_level = rows.argsort()
    begin, end = (torch.searchsorted(rows[by_level], bound, right=True) for bound in (above, upto))
    ends = (end - begin).cumsum(0)  # rows that see the first stretches, one after another
    place = torch.arange(int(ends[-1]) if len(ends) else 0, device="cpu")
    stretch = torch.searchsorted(ends, place, right=True)
    seeing = by_level[place + (end - ends)[stretch]]
    size = len(rows) + 1
    pairs = (stretch * size + seeing).sort().values  # neighbours differ by 1, those of different stretches by more
    apart, edge = pairs.diff() != 1, torch.ones(1, dtype=torch.bool, device="cpu")
    first, last = (pairs[torch.cat(ends)[: len(pairs)]] for ends in ((edge, apart), (apart, edge)))
    return first // size, first % size, last % size


def _stairs_joined(q_start: Tensor, q_stop: Tensor, k_start: Tensor, k_stop: Tensor) -> list[Band]:
    """Bands of the rectangles, which are sorted; those that are steps of a stair as one.

    The next step stands below, and both its ends are where they were or one column further: there is one such at most.
    """
    lo, hi = k_start - q_stop + 1, k_stop - 1 - q_start
    numbers = (x.tolist() for x in (q_start, q_stop, k_start, k_stop, lo, hi))
    bands: list[Band | None] = list(map(Band._make, zip(*numbers, strict=True)))  # as they are: rectangles are tight
    width = int(k_stop.max()) + 1 if bands else 1
    # the first that starts no further left
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
