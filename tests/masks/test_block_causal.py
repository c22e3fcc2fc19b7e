"""Block-causal masks have the cells of their definition, in few bands; and overlapping bands are
found.
"""

import pytest
import torch
from band_strategies import check
from hypothesis import given, settings
from hypothesis import strategies as st

from canon import Band, Mask


@st.composite
def block_ids(draw):
    """Draw ids, few or many: random, in runs, ascending or descending, far apart or negative."""
    ids = draw(st.lists(st.integers(-1, draw(st.sampled_from([3, 50]))), max_size=40))
    if draw(st.booleans()):
        ids = [block for block in ids for _ in range(draw(st.integers(1, 5)))][:40]
    if draw(st.booleans()):
        ids.sort()
    scale = draw(st.sampled_from([1, -7, 10**12]))  # a negative one makes sorted ids descend
    return [scale * block for block in ids]


@st.composite
def sides(draw):
    """Draw (q_blocks, k_blocks or None, q_valid or None, k_valid or None)."""
    q = draw(block_ids())
    k = draw(st.none() | block_ids())
    return q, k, *(_flags(draw, len(x)) for x in (q, q if k is None else k))


def _flags(draw, n):
    """Draw the validity of n tokens: all, any, or all except one hole, as padding makes it."""
    kind = draw(st.sampled_from(["all", "random", "hole"]))
    if kind == "all":
        return None
    if kind == "random":
        return draw(st.lists(st.booleans(), min_size=n, max_size=n))
    start, stop = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
    return [not start <= place < stop for place in range(n)]


def definition(q_blocks, k_blocks, q_valid, k_valid):
    """Return the matrix, cell by cell."""
    k_blocks = q_blocks if k_blocks is None else k_blocks
    q, k = (torch.tensor(x, dtype=torch.int64) for x in (q_blocks, k_blocks))
    flags = [[True] * len(x) if f is None else f for x, f in ((q, q_valid), (k, k_valid))]
    rows, columns = (torch.tensor(f, dtype=torch.bool) for f in flags)
    return (k[None, :] <= q[:, None]) & rows[:, None] & columns


def runs_of_cells(matrix):
    """Count the runs of cells in the rows of the matrix. A row that repeats the row above does not
    count.
    """
    kept = [
        row
        for place, row in enumerate(matrix)
        if place == 0 or not torch.equal(row, matrix[place - 1])
    ]
    return sum(int((row & ~torch.nn.functional.pad(row, (1, 0))[:-1]).sum()) for row in kept)


@settings(max_examples=400)
@given(sides())
def test_a_block_causal_mask_has_the_cells_of_its_definition_in_few_tight_bands(blocks):
    mask, expected = Mask.block_causal(*blocks), definition(*blocks)
    check(mask, expected)
    assert len(mask.bands) <= runs_of_cells(expected)


def test_stairs_are_one_band_and_padding_in_the_middle_costs_a_few():
    """With ascending ids and a hole, the queries after the hole see all keys before it as one
    rectangle.
    """
    n, hole = 4000, range(1500, 1600)
    valid = [token not in hole for token in range(n)]
    before, after = Band(0, 1500, 0, 1500, None, 0), Band(1600, n, 1600, n, None, 0)
    expected = Mask([before, Band(1600, n, 0, 1500), after], n, n)
    assert Mask.block_causal(range(n), None, valid, valid) == expected
    assert Mask.block_causal(range(9, 0, -1)).bands == (Band(0, 9, 0, 9, 0),)


# --- overlapping bands ---


@given(
    st.lists(
        st.tuples(*[st.integers(0, 12)] * 4, *[st.none() | st.integers(-12, 12)] * 2), max_size=6
    )
)
def test_bands_raise_exactly_if_two_share_a_cell(numbers):
    """Two bands may become neighbours in a row where the band between them ends."""
    bands = [Band(*numbers) for numbers in numbers]
    covered = sum(Mask([band], 12, 12).dense().int() for band in [*bands, Band(0, 0, 0, 0)])
    if covered.max() > 1:
        with pytest.raises(ValueError, match="share cells"):
            Mask(bands, 12, 12)
    else:
        assert torch.equal(Mask(bands, 12, 12).dense(), covered.bool())
