"""The rows of a mesh ("tokens", "heads"): the tokens of their ranks.

    4 ranks, 2 rows      rank 0    rank 1    rank 2    rank 3      row 0          row 1
    zigzag(16, 4)        0 1 14 15 2 3 12 13 4 5 10 11 6 7 8 9     0..3 12..15    4..11

A row has its pieces by position, so that steps over rows have few bands.
"""

from operator import attrgetter

import numpy as np

from canon.masks.arguments import whole
from canon.masks.layout import Layout, equal_parts, placed
from canon.masks.plan_cache import cached_plan


@cached_plan
def united(layout: Layout, heads: int) -> Layout:
    """Return the layout of the rows of ``heads`` ranks."""
    rows = (_pieces_of_row(layout, heads, row) for row in range(layout.ranks // heads))
    rows = [sorted(row, key=attrgetter("start")) for row in rows]
    return Layout([[piece for _, piece in placed(row)] for row in rows], layout.tokens)


def arrival_order(layout: Layout, heads: int, row: int) -> tuple[np.ndarray, ...]:
    """Return the place of each token of a row of `united` among its parts in rank order (int64), or
    nothing if they arrive by position.
    """
    pieces = _pieces_of_row(layout, heads, row)
    starts = np.cumsum([0, *map(len, pieces)])
    order = sorted(range(len(pieces)), key=lambda place: pieces[place].start)
    if order == sorted(order):
        return ()
    return (np.concatenate([np.arange(starts[place], starts[place + 1]) for place in order]),)


def divided(rows: Layout, heads: int) -> Layout:
    """Return the layout of `Layout.divided`."""
    heads = whole("heads", heads, 1)
    parts = [part for held in rows.ranges_per_rank for part in equal_parts(held, heads)]
    return Layout(parts, rows.tokens)


def _pieces_of_row(layout: Layout, heads: int, row: int) -> list[range]:
    parts = layout.ranges_per_rank[row * heads : (row + 1) * heads]
    return [piece for part in parts for piece in part if len(piece)]
