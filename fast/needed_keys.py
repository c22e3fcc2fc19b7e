"""Areas and needed keys of pieces of the queries, as NumPy arrays."""

import numpy as np

from canon.fast.tables.work_tables import band_array
from canon.masks.mask import Mask


def areas_and_needs(
    mask: Mask, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the area of each piece start:stop of the queries, ascending and disjoint, and its keys
    as (piece, first, last) intervals, which may overlap.
    """
    bands = band_array(mask)
    first = np.searchsorted(stop, bands[:, 0], "right")
    count = np.maximum(np.searchsorted(start, bands[:, 1], "left") - first, 0)
    band = np.repeat(np.arange(len(bands)), count)
    piece = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
    row, row_stop, column, column_stop, lo, hi = bands[band].T
    row, row_stop = np.maximum(row, start[piece]), np.minimum(row_stop, stop[piece])
    area = np.zeros(len(start), np.int64)
    np.add.at(area, piece, _sum_min(row, row_stop, hi + 1, column_stop))
    # a row starts at max(a, b) = a + b - min(a, b)
    np.add.at(area, piece, _sum_min(row, row_stop, lo, column))
    np.add.at(area, piece, -_sum(row, row_stop) - (row_stop - row) * (lo + column))
    return area, piece, np.maximum(column, row + lo), np.minimum(column_stop, row_stop + hi)


def _sum_min(start, stop, offset, most):
    """Return the sum of min(i + offset, most) over start <= i < stop."""
    bend = np.clip(most - offset, start, stop)
    return _sum(start, bend) + (bend - start) * offset + (stop - bend) * most


def _sum(start, stop):
    return (stop * (stop - 1) - start * (start - 1)) // 2


def union_of_intervals(owner: np.ndarray, first: np.ndarray, last: np.ndarray, tokens: int):
    """Return the union of each owner's intervals as (owner, first, last): ascending, with gaps."""
    shift = owner * (tokens + 1)  # all owners on one axis
    order = np.argsort(first + shift, kind="stable")
    owner, first, shift = owner[order], first[order], shift[order]
    reached = np.maximum.accumulate(last[order] + shift)
    new = np.append(True, (first + shift)[1:] > reached[:-1])[: len(first)]
    end = np.append(new[1:], True)[: len(first)]
    return owner[new], first[new], (reached - shift)[end]
