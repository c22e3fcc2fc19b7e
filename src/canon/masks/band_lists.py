"""Operations on the sorted bands of a mask: find them, crop them, check that they are disjoint, list visible keys.

    IntervalIndex     finds the intervals that a range may overlap, by bisection
    picked            crops bands to ranges of queries and keys
    check_disjoint    raises if two bands share a cell
    visible_keys      lists the keys that some queries see, as intervals

Cost for n bands: a crop of m neighbouring bands takes O(log n + m). So crops that cover a packed sequence take O(n log n)
together.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter

from canon.masks.band import Band, tight_bands


class IntervalIndex:
    """Half-open intervals (start, stop), sorted by start, that are searched by bisection. They may overlap."""

    def __init__(self, intervals: Sequence[tuple[int, ...]]):
        self.starts = list(map(itemgetter(0), intervals))
        self.stops = list(accumulate(map(itemgetter(1), intervals), max))  # the largest stop so far

    def near(self, start: int, stop: int) -> slice:
        """Return a slice of the places that holds every interval that overlaps start:stop. Others may be in it."""
        return slice(bisect_right(self.stops, start), bisect_left(self.starts, stop))


def picked(bands: Iterable[Band], rows: range, columns: range, q_offset: int = 0, k_offset: int = 0) -> list[Band]:
    """Return the bands between ``rows`` and ``columns``, numbered from the offsets. Bands without cells are dropped.

    This is `Band.pick` followed by `Band.shift`. With step 1, a band inside both ranges stays tight and only moves.
    """
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
            moved = q_start + down, q_stop + down, k_start + across, k_stop + across, lo + diagonal, hi + diagonal
            kept.append(moved)
        elif (cut := band.pick(rows, columns)).q_stop:
            kept.append(cut.shift(q_offset, k_offset) if q_offset or k_offset else cut)
    return tight_bands(kept)


def check_disjoint(bands: Sequence[Band]) -> None:
    """Raise ValueError if two of the sorted bands share a cell. Name both."""
    first, reach = 0, 0  # the first band of a group that shares rows, and the largest end of the group's rows
    for place, band in enumerate(bands):
        if band.q_start >= reach:
            _check_rows(bands[first:place])
            first = place
        reach = max(reach, band.q_stop)
    _check_rows(bands[first:])


def _check_rows(bands: Sequence[Band]) -> None:
    """Sweep down the rows in which bands start or end, and compare the bands that are neighbours along the keys there.

    Only these rows can change the order of the bands that are open. In between, the two ends of a band move by at most
    one column per row, so two bands cannot pass each other without sharing a cell.
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
                raise ValueError(f"two bands of a mask share cells: {min(left, right)} and {max(left, right)}")


def visible_keys(bands: Iterable[Band], rows: range) -> Iterator[tuple[int, int]]:
    """Yield the keys that the bands show to the queries ``rows``, as intervals (start, stop) in any order."""
    step = rows.step
    for q_start, q_stop, k_start, k_stop, lo, hi in bands:
        inside = rows[max(0, -((rows.start - q_start) // step)) : max(0, -((rows.start - q_stop) // step))]
        # With step <= hi - lo + 1 the keys of neighbouring rows overlap or touch, so they form one interval.
        for part in [inside] if step <= hi - lo + 1 else [range(row, row + 1) for row in inside]:
            if part:
                start, stop = max(k_start, part[0] + lo), min(k_stop, part[-1] + hi + 1)
                if start < stop:
                    yield start, stop


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of half-open intervals, ascending. No interval of the result touches the next one."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
