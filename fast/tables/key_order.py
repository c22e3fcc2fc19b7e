"""The order of ``rank_invariant=True``: a row visits each tile of keys once, in the order of the
keys' positions.

    bands of a tile of rows   a: keys 0:300      b: keys 260:600, a window     (tiles of 128 keys)
    spans                     a: 0:256 | a and b, chained: 256:384 | b: 384:640

If several bands of a tile of rows share a tile of keys, one *chained* span has them all, in the
order of their keys in each row. Its field 2 is the index of its first band among the spans, and
field 3 is minus the number of its bands. The bands follow all visited spans."""

from typing import NamedTuple

import numpy as np

from canon.fast.tables.index_ranges import counted, expanded

# first column, number of tiles; the band's row start, stop, column start, stop, lo, hi
SPAN_FIELDS = 8
COLUMN_BITS = 31  # of a number that holds a tile and a column
EVERY_TOKEN = 1 << 30
# a band of all cells
EVERYTHING = np.array([0, EVERY_TOKEN, 0, EVERY_TOKEN, -EVERY_TOKEN, EVERY_TOKEN])


class Cut(NamedTuple):
    """Rows cut into tiles, and a piece for each band and tile: rows ``first:last``, of which some
    see ``begin:end``.
    """

    bands: np.ndarray  # (6, n)
    starts: np.ndarray  # of each tile
    stops: np.ndarray
    band: np.ndarray  # of each piece, as below
    tile: np.ndarray
    first: np.ndarray
    last: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    visits: float


class Runs(NamedTuple):
    """Runs of neighbouring tiles of keys of a piece, and whether all of the rows see all of
    them.
    """

    piece: np.ndarray
    begin: np.ndarray  # columns
    stop: np.ndarray
    full: np.ndarray


def ordered_table(
    cut: Cut, rows: int, columns: int, chained: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return tiles and spans, as in `WorkTable`, in key order. All spans count as partial; full
    ones have no band.

    Pieces of ``cut`` begin at multiples of ``columns``. Without ``chained``, a tile is visited once
    for each of its bands."""
    piece, begin, stop, shared = _segments(cut, columns)
    alone = _classified(cut, rows, columns, piece[~shared], begin[~shared], stop[~shared])
    seg, place = counted((stop[shared] - begin[shared]) // columns)
    piece, column = piece[shared][seg], begin[shared][seg] + columns * place
    line = (cut.tile[piece] << COLUMN_BITS) + column
    order = np.lexsort((piece, _before(cut, piece, line), line))
    piece, column = piece[order], column[order]
    heads = (
        np.append(True, np.diff((cut.tile[piece] << COLUMN_BITS) + column) > 0)[: len(piece)]
        if chained
        else piece >= 0
    )
    number = np.diff(np.append(np.flatnonzero(heads), len(piece)))

    owner = cut.tile[np.append(alone.piece, piece[heads])]
    spans = np.zeros((len(owner), SPAN_FIELDS), np.int64)
    spans[: len(alone.piece), 0], spans[: len(alone.piece), 1] = (
        alone.begin,
        (alone.stop - alone.begin) // columns,
    )
    spans[: len(alone.piece), 2:] = np.where(alone.full[:, None], 0, _own_bands(cut, alone.piece))
    spans[len(alone.piece) :, 0], spans[len(alone.piece) :, 1] = column[heads], 1
    if chained:
        spans[len(alone.piece) :, 2], spans[len(alone.piece) :, 3] = (
            len(spans) + np.flatnonzero(heads),
            -number,
        )
    else:
        spans[len(alone.piece) :, 2:] = _own_bands(cut, piece)
    order = np.argsort((owner << COLUMN_BITS) + spans[:, 0], kind="stable")
    chains = np.zeros((len(piece) if chained else 0, SPAN_FIELDS), np.int64)
    chains[:, 2:] = _own_bands(cut, piece[: len(chains)])

    ends = np.cumsum(np.bincount(owner, minlength=len(cut.starts)))
    tiles = np.stack([cut.starts, cut.stops, np.append(0, ends)[: len(ends)], ends, ends], 1)
    work = np.bincount(owner, spans[:, 1], minlength=len(cut.starts))
    return tiles[np.argsort(-work, kind="stable")], np.concatenate([spans[order], chains]).astype(
        np.int32
    )


def moved_chains(spans: np.ndarray, bands: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Return the bands of the chained ``spans``, moved by each span's ``moves`` (six numbers), and
    point the spans to them. ``bands``: the spans that have them now.
    """
    chained = np.flatnonzero(spans[:, 3] < 0)
    number = -spans[chained, 3]
    chain, place = counted(number)
    made = bands[spans[chained[chain], 2] + place].astype(spans.dtype)
    made[:, 2:] += moves[chained[chain]]
    spans[chained, 2] = len(spans) + np.cumsum(number) - number
    return made


def everywhere_banded(spans: np.ndarray) -> np.ndarray:
    """Return the spans with a band of all cells in full ones, for kernels that always compare."""
    full = (spans[:, 1] > 0) & (spans[:, 3] == 0)
    return np.concatenate([spans[:, :2], np.where(full[:, None], EVERYTHING, spans[:, 2:])], 1)


def _segments(cut: Cut, columns: int) -> tuple[np.ndarray, ...]:
    """Cut each piece where others of its tile begin or stop. Return (piece, begin, stop, whether
    shared).
    """
    some = np.flatnonzero(cut.end > cut.begin)
    line, begin, end = cut.tile[some] << COLUMN_BITS, cut.begin[some], cut.end[some]
    stop = end + (begin - end) % columns
    edges = np.unique(np.concatenate([line + begin, line + stop]))
    piece, edge = expanded(
        np.searchsorted(edges, line + begin), np.searchsorted(edges, line + stop)
    )
    shared = np.bincount(edge, minlength=len(edges))[edge] > 1
    column = lambda edge: edges[edge] & (1 << COLUMN_BITS) - 1
    return some[piece], column(edge), column(edge + 1), shared


def _before(cut: Cut, piece: np.ndarray, line: np.ndarray) -> np.ndarray:
    """Return a number for each piece: of those in one ``line`` with a common row, that of lower
    keys is lower.

    Bands are disjoint, so all common rows see two pieces in one order, and no pieces form a circle.
    """
    _, start, size = np.unique(line, return_inverse=True, return_counts=True)
    by_line = np.argsort(start, kind="stable")
    one, place = counted(size[start])
    other = by_line[(np.cumsum(size) - size)[start[one]] + place]
    row = np.maximum(cut.first[piece[one]], cut.first[piece[other]])
    common = row < np.minimum(cut.last[piece[one]], cut.last[piece[other]])
    one, other, row = one[common], other[common], row[common]
    left = lambda i: np.maximum(
        cut.bands[2, cut.band[piece[i]]], row + cut.bands[4, cut.band[piece[i]]]
    )
    lower = left(one) < left(other)
    one, other = one[lower], other[lower]
    depth, deeper = np.zeros(len(piece), np.int64), True
    while deeper:
        before = depth.copy()
        np.maximum.at(depth, other, before[one] + 1)
        deeper = bool((depth > before).any())
    return depth


def _classified(
    cut: Cut, rows: int, columns: int, piece: np.ndarray, begin: np.ndarray, stop: np.ndarray
) -> Runs:
    """Return up to three runs of each segment: partial, full, partial."""
    _, _, start, end, lo, hi = cut.bands.take(cut.band[piece], 1)
    first, last, tile = cut.first[piece], cut.last[piece], cut.tile[piece]
    whole = (first == cut.starts[tile]) & (last == cut.stops[tile]) & (last - first == rows)
    # every row sees these
    all_begin, all_end = np.maximum(start, last - 1 + lo), np.minimum(end, first + hi + 1)
    full_from = np.maximum(begin, all_begin + -all_begin % columns)
    full_to = np.minimum(stop, all_end // columns * columns)
    some = whole & (full_to > full_from)
    full_from, full_to = np.where(some, full_from, stop), np.where(some, full_to, stop)
    kinds = Runs(
        np.tile(piece, 3),
        np.concatenate([begin, full_from, full_to]),
        np.concatenate([full_from, full_to, stop]),
        np.repeat([False, True, False], len(piece)),
    )
    return Runs(*(x[kinds.stop > kinds.begin] for x in kinds))


def _own_bands(cut: Cut, piece: np.ndarray) -> np.ndarray:
    bands = cut.bands.take(cut.band[piece], 1).T
    bands[:, 1] = cut.last[piece]
    return bands
