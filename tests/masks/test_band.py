"""A band has the cells of its definition, and its operations act on the cells like operations on a
boolean matrix.
"""

from itertools import pairwise

import torch
from band_strategies import bands, bounds, intervals
from hypothesis import given
from hypothesis import strategies as st

from canon import Band, Mask
from canon.masks.band import joined


def cells(band):
    return Mask([band], 12, 12).dense()


@given(intervals(), intervals(), bounds, bounds)
def test_a_band_has_the_cells_of_its_definition_and_is_tight(q, k, lo, hi):
    i, j = torch.arange(12)[:, None], torch.arange(12)
    expected = (q[0] <= i) & (i < q[1]) & (k[0] <= j) & (j < k[1])
    expected &= (j - i >= (-99 if lo is None else lo)) & (j - i <= (99 if hi is None else hi))
    band = Band(*q, *k, lo, hi)
    assert torch.equal(cells(band), expected)
    assert band.area == expected.sum()
    if band.area:
        rows, columns = expected.any(1).nonzero(), expected.any(0).nonzero()
        reached = (columns[:, None] - rows)[expected[rows.squeeze(1)][:, columns.squeeze(1)].T]
        assert (band.q_start, band.q_stop) == (rows.min(), rows.max() + 1)
        assert (band.k_start, band.k_stop) == (columns.min(), columns.max() + 1)
        assert (band.lo, band.hi) == (reached.min(), reached.max())
    else:
        assert band == Band(0, 0, 0, 0)


@given(bands(), bands())
def test_intersect_and_join_of_bands(one, other):
    assert torch.equal(cells(one.intersect(other)), cells(one) & cells(other))
    if one.intersect(other).area == 0 and one.area and other.area:
        both = one.join(other)
        assert both is None or torch.equal(cells(both), cells(one) | cells(other))
        assert both == other.join(one)


@given(bands(), st.integers(0, 3), st.integers(0, 3))
def test_shift_of_a_band_moves_its_cells(band, queries, keys):
    moved = torch.nn.functional.pad(cells(band), (keys, 0, queries, 0))[:12, :12]
    assert torch.equal(cells(band.shift(queries, keys)), moved)


@given(st.data(), bands(), st.lists(st.integers(1, 11), max_size=3))
def test_joined_repairs_a_band_that_was_cut_at_keys_in_any_order(data, band, seams):
    cuts = sorted({0, 12, *seams})
    parts = [band.intersect(Band(0, 12, a, b)) for a, b in pairwise(cuts)]
    parts = data.draw(st.permutations([part for part in parts if part.area]))
    whole = joined(parts)
    assert joined(sorted(parts)) == whole
    assert len(whole) <= len(parts)
    assert torch.equal(
        sum((cells(part).int() for part in whole), torch.zeros(12, 12, dtype=torch.int32)).bool(),
        cells(band),
    )
    assert sum(part.area for part in whole) == band.area
