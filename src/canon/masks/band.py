"""A band: a rectangle of queries and keys, cut by two diagonals. A mask is a set of disjoint bands.

    keys         k_start        k_stop
                    |  . . . . . |          query i sees key j  iff  q_start <= i < q_stop,
    q_start  -      |x x . . . . |                                   k_start <= j < k_stop  and
                    |x x x . . . |                                   lo <= j - i <= hi.
                    |. x x x . . |
    q_stop   -      |. . x x x . |          (here lo = -1 and hi = +1, counted from the corner)

Causal attention is hi = 0, a left window of w keys is lo = -w. Crops of a band, and every W-th
token, are bands.

Source: bands generalise the four slice types of MagiAttention (Zewei Tao and Yunpeng Huang, SandAI,
2025).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import itemgetter
from typing import NamedTuple

from canon.masks.arguments import whole

_INTS = frozenset({int, type(None)})


class _Bounds(NamedTuple):
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int


class Band(_Bounds):
    """The cells with q_start <= i < q_stop, k_start <= j < k_stop and lo <= j - i <= hi. None is no
    bound.

    The constructor shrinks rectangle and bounds to the cells inside, so bands with equal cells are
    equal: Band(0, 4, 0, 9, None, 0) is Band(0, 4, 0, 4, -3, 0).
    """

    __slots__ = ()

    def __new__(
        cls,
        q_start: int,
        q_stop: int,
        k_start: int,
        k_stop: int,
        lo: int | None = None,
        hi: int | None = None,
    ):
        given = q_start, q_stop, k_start, k_stop, lo, hi
        if not _INTS.issuperset(map(type, given)) or None in given[:4]:
            names = zip(_Bounds._fields, given, strict=True)
            return cls(
                *(
                    None if value is None and name in ("lo", "hi") else whole(name, value)
                    for name, value in names
                )
            )
        lowest, highest = k_start - q_stop + 1, k_stop - 1 - q_start
        bounds = lowest if lo is None else lo, highest if hi is None else hi
        return _tight(q_start, q_stop, k_start, k_stop, *bounds)

    def __repr__(self) -> str:
        return (
            f"Band(q {self.q_start}:{self.q_stop}, k {self.k_start}:{self.k_stop}, {self.lo} "
            f"<= j-i <= {self.hi})"
        )

    @property
    def area(self) -> int:
        """The number of cells, in closed form: the rectangle minus two corners."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        below = self.lo - (self.k_start - self.q_stop + 1)  # diagonals under lo
        above = (self.k_stop - 1 - self.q_start) - self.hi  # diagonals over hi
        return queries * keys - _corner(queries, keys, below) - _corner(queries, keys, above)

    def intersect(self, other: "Band") -> "Band":
        """Return the cells that both bands hold."""
        return _tight(
            max(self.q_start, other.q_start),
            min(self.q_stop, other.q_stop),
            max(self.k_start, other.k_start),
            min(self.k_stop, other.k_stop),
            max(self.lo, other.lo),
            min(self.hi, other.hi),
        )

    def minus(self, other: "Band") -> "list[Band]":
        """Return the cells that ``other`` lacks, as at most six disjoint bands: part n lies inside
        the first n - 1 of its six half-planes, and outside of half-plane n.
        """
        if not self.intersect(other).q_stop:
            return [self]
        parts, inside = [], list(self)
        for start, stop, after in ((0, 1, 0), (2, 3, 0), (4, 5, 1)):  # ``hi`` is inclusive
            below, above = list(inside), list(inside)
            below[stop] = min(inside[stop], other[start] - after)
            above[start] = max(inside[start], other[stop] + after)
            parts += [_tight(*below), _tight(*above)]
            inside[start] = max(inside[start], other[start])
            inside[stop] = min(inside[stop], other[stop])
        return [part for part in parts if part.q_stop]

    def shift(self, queries: int = 0, keys: int = 0) -> "Band":
        """Return the band moved down by ``queries`` and right by ``keys``."""
        return Band(
            self.q_start + queries,
            self.q_stop + queries,
            self.k_start + keys,
            self.k_stop + keys,
            self.lo + keys - queries,
            self.hi + keys - queries,
        )

    def pick(self, queries: range, keys: range) -> "Band":
        """Return the slice ``matrix[queries][:, keys]``, of two ranges with one step W >= 1. Bounds
        follow from lo <= (keys.start - queries.start) + W (j' - i') <= hi.
        """
        if queries.step != keys.step or queries.step < 1:
            raise ValueError(
                f"pick needs two ascending ranges of one step, got {queries} and {keys}"
            )
        step, offset = queries.step, keys.start - queries.start
        return Band(
            max(0, -((queries.start - self.q_start) // step)),
            min(len(queries), -((queries.start - self.q_stop) // step)),
            max(0, -((keys.start - self.k_start) // step)),
            min(len(keys), -((keys.start - self.k_stop) // step)),
            -((offset - self.lo) // step),
            (self.hi - offset) // step,
        )

    def join(self, other: "Band") -> "Band | None":
        """Return the band with exactly the cells of two disjoint bands, or None."""
        q_start, q_stop, k_start, k_stop, lo, hi = other
        if q_start >= self.q_stop and k_start >= self.k_stop and not self.lo == self.hi == lo == hi:
            return None  # no common row or column: only two pieces of one diagonal make a band
        hull = _tight(
            min(self.q_start, q_start),
            max(self.q_stop, q_stop),
            min(self.k_start, k_start),
            max(self.k_stop, k_stop),
            min(self.lo, lo),
            max(self.hi, hi),
        )
        # the hull contains both: equal areas, equal cells
        return hull if hull.area == self.area + other.area else None


def _tight(q_start: int, q_stop: int, k_start: int, k_stop: int, lo: int, hi: int) -> Band:
    lo, hi = max(lo, k_start - q_stop + 1), min(hi, k_stop - 1 - q_start)
    if q_start >= q_stop or k_start >= k_stop or lo > hi:
        return Band._make((0, 0, 0, 0, 0, -1))
    # a bound on a difference of two of the numbers i, j and 0 is tightened by the third alone
    q_limits = max(q_start, k_start - hi), min(q_stop, k_stop - lo)
    k_limits = max(k_start, q_start + lo), min(k_stop, q_stop + hi)
    return Band._make((*q_limits, *k_limits, lo, hi))


def tight_bands(numbers: Iterable[tuple[int, ...]]) -> list[Band]:
    """Return the bands of tight numbers."""
    return list(map(tuple.__new__, repeat(Band), numbers))


def _corner(rows: int, columns: int, diagonals: int) -> int:
    """Return the number of cells on the first diagonals from a corner."""
    return _triangle(diagonals) - _triangle(diagonals - rows) - _triangle(diagonals - columns)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


def joined(bands: list[Band]) -> list[Band]:
    """Return disjoint bands in fewer ones: neighbours join along keys, then rows."""
    for order in (itemgetter(0, 1, 2), itemgetter(0, 2)):
        merged: list[Band] = []
        for band in sorted(bands, key=order):
            both = merged[-1].join(band) if merged else None
            if both:
                merged[-1] = both
            else:
                merged.append(band)
        bands = merged
    return bands


def disjoint(bands: Iterable[Band], most: int) -> list[Band]:
    """Return disjoint bands with the cells of any bands: of each, what no larger one holds.

    Raises ValueError if they are more than ``most``. Cost: O(n log n), and all pairs that share
    rows.
    """
    ranked = sorted(bands, key=lambda band: (-band.area, band))
    larger: list[list[Band]] = [[] for _ in ranked]  # those that share cells with each, by q_start
    opened: list[int] = []
    for place in sorted(range(len(ranked)), key=ranked.__getitem__):
        band = ranked[place]
        opened = [other for other in opened if ranked[other].q_stop > band.q_start]
        for other in opened:
            if band.intersect(ranked[other]).q_stop:
                larger[max(place, other)].append(ranked[min(place, other)])
        opened.append(place)
    found: list[Band] = []
    for band, others in zip(ranked, larger, strict=True):
        found += _without(band, others)
        if len(found) > most:
            raise ValueError(
                f"a union of {len(ranked)} bands takes more than {most} disjoint bands"
            )
    return found


def _without(band: Band, others: list[Band]) -> list[Band]:
    """Return the cells of a band that none of the others holds; all share cells with it. The middle
    one comes first, as it separates the others.
    """
    if not others:
        return [band]
    first = others.pop(len(others) // 2)
    return [
        part
        for piece in band.minus(first)
        for part in _without(piece, [x for x in others if piece.intersect(x).q_stop])
    ]


class IntervalIndex:
    """Half-open intervals (start, stop), sorted by start, for bisection."""

    def __init__(self, intervals: Sequence[tuple[int, ...]]):
        self.starts = list(map(itemgetter(0), intervals))
        self.stops = list(accumulate(map(itemgetter(1), intervals), max))  # the largest stop so far

    def near(self, start: int, stop: int) -> slice:
        """Return a slice with all intervals that overlap start:stop."""
        return slice(bisect_right(self.stops, start), bisect_left(self.starts, stop))


def picked(
    bands: Iterable[Band], rows: range, columns: range, q_offset: int = 0, k_offset: int = 0
) -> list[Band]:
    """Return the bands between ``rows`` and ``columns``, numbered from the offsets."""
    kept: list[tuple[int, ...]] = []
    top, bottom, left, right = rows.start, rows.stop, columns.start, columns.stop
    down, across = q_offset - top, k_offset - left
    diagonal = across - down
    whole = rows.step == columns.step == 1
    for band in bands:
        q_start, q_stop, k_start, k_stop, lo, hi = band
        if q_start >= bottom or q_stop <= top or k_start >= right or k_stop <= left:
            continue
        if whole and top <= q_start and q_stop <= bottom and left <= k_start and k_stop <= right:
            moved = (
                q_start + down,
                q_stop + down,
                k_start + across,
                k_stop + across,
                lo + diagonal,
                hi + diagonal,
            )
            kept.append(moved)
        elif (cut := band.pick(rows, columns)).q_stop:
            kept.append(cut.shift(q_offset, k_offset) if q_offset or k_offset else cut)
    return tight_bands(kept)


def check_disjoint(bands: Sequence[Band]) -> None:
    """Raise ValueError if two of the sorted bands share a cell. Name both."""
    # of a group that shares rows: its first band, and the end of its rows
    first, reach = 0, 0
    for place, band in enumerate(bands):
        if band.q_start >= reach:
            _check_rows(bands[first:place])
            first = place
        reach = max(reach, band.q_stop)
    _check_rows(bands[first:])


def _check_rows(bands: Sequence[Band]) -> None:
    """Compare the neighbours along the keys in each row in which a band starts or ends. In between,
    no band can pass another unseen: ends move by at most one column per row.
    """
    if len(bands) < 2:
        return
    opened: list[Band] = []
    coming = 0
    for row in sorted({row for band in bands for row in (band.q_start, band.q_stop)}):
        opened = [band for band in opened if band.q_stop > row]
        while coming < len(bands) and bands[coming].q_start == row:
            opened.append(bands[coming])
            coming += 1
        opened.sort(key=lambda band: max(band.k_start, row + band.lo))
        for left, right in zip(opened, opened[1:], strict=False):
            if left.k_stop > right.k_start and left.intersect(right).area:
                raise ValueError(
                    f"two bands of a mask share cells: {min(left, right)} and {max(left, right)}"
                )


def visible_keys(bands: Iterable[Band], rows: range) -> Iterator[tuple[int, int]]:
    """Yield the keys that ``rows`` see, as intervals (start, stop) in any order."""
    step = rows.step
    for q_start, q_stop, k_start, k_stop, lo, hi in bands:
        inside = rows[
            max(0, -((rows.start - q_start) // step)) : max(0, -((rows.start - q_stop) // step))
        ]
        # up to this step, the keys of neighbouring rows form one interval
        for part in [inside] if step <= hi - lo + 1 else [range(row, row + 1) for row in inside]:
            if part:
                start, stop = max(k_start, part[0] + lo), min(k_stop, part[-1] + hi + 1)
                if start < stop:
                    yield start, stop


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of half-open intervals, ascending and apart."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
