"""The mask between the tokens of some ranges and those of others, in the coordinates of two buffers.

A buffer holds the tokens of its ranges one after another. Here the causal mask, for queries 0 1 6 7 and keys 6 7 0 1:

                keys  6 7 0 1
    query 0           . . x .       three crops: q 0:2 with k 0:2, q 6:8 with k 6:8, q 6:8 with k 0:2
    query 1           . . x x       two bands: the crops in the last two columns join
    query 6           x . x x
    query 7           x x x x

Each pair of a query range and a key range gives a crop of the mask, which moves to its place in the buffers. Parts of a
band that a seam between two ranges has cut are joined again.

Cost: O(r log n + c log c) for r query ranges, n bands and c crops, if the bands of a range are neighbours in the mask, as
in packed documents. In the worst case every range tests every band.
"""

from collections import defaultdict
from collections.abc import Sequence

from canon.masks.band import Band, joined
from canon.masks.band_lists import IntervalIndex, picked
from canon.masks.mask import Mask


def mask_between(mask: Mask, queries: Sequence[range], keys: Sequence[range]) -> Mask:
    """Return the mask between the tokens of the ranges ``queries`` and those of ``keys``, in buffer coordinates.

    All ranges lie inside the mask and have one step >= 1. Raises ValueError if their steps differ.
    """
    rows, columns = _placed(queries), sorted(_placed(keys), key=lambda placed: placed[1].start)
    index = IntervalIndex([(piece.start, piece.stop) for _, piece in columns])
    bands: list[Band] = []
    for q_offset, q_piece in rows:
        touching: defaultdict[int, list[Band]] = defaultdict(list)  # by place in ``columns``
        for band in mask.bands_near(q_piece):
            near = index.near(band.k_start, band.k_stop)
            for place in range(near.start, near.stop):
                touching[place].append(band)
        for place, some in touching.items():
            k_offset, k_piece = columns[place]
            bands += picked(some, q_piece, k_piece, q_offset, k_offset)
    return mask.of_disjoint(joined(bands), sum(map(len, queries)), sum(map(len, keys)))


def _placed(pieces: Sequence[range]) -> list[tuple[int, range]]:
    """Return (offset in the buffer, tokens) of each piece. A piece that continues the previous one is joined to it."""
    placed: list[tuple[int, range]] = []
    end = 0
    for piece in pieces:
        offset, last = placed[-1] if placed else (0, range(0))
        if len(last) and last[-1] + last.step == piece.start and last.step == piece.step:
            placed[-1] = (offset, range(last.start, piece.stop, piece.step))
        else:
            placed.append((end, piece))
        end += len(piece)
    return placed
