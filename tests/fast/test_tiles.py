"""The work table covers exactly the visible cells, for every mask and tile size."""

import numpy as np
import pytest
from band_strategies import masks
from hypothesis import given
from hypothesis import strategies as st

from canon import Mask
from canon.fast.tables import work_tables
from canon.fast.tables.cells import Cells
from canon.fast.tables.work_tables import area, count_visits, host_table
from canon.masks.plan_cache import PLANS

SIZES = st.sampled_from([1, 2, 4, 8, 16])
IN_C = work_tables.native_tables()


@pytest.fixture(scope="module", params=["C", "NumPy"], autouse=True)
def native(request):
    """Make tables in C, or as where there is no compiler."""
    PLANS.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_tables, "native_tables", lambda: IN_C if request.param == "C" else None)
        yield request.param
    PLANS.clear()


def cells_of(band, first, stop, start, end):
    row_start, row_stop, column_start, column_stop, lo, hi = band
    i, j = np.arange(first, stop)[:, None], np.arange(start, end)
    return (
        (row_start <= i)
        & (i < row_stop)
        & (column_start <= j)
        & (j < column_stop)
        & (lo <= j - i)
        & (j - i <= hi)
    )


def assert_exact(mask, rows, columns, transposed, small=None, boxes=0):
    """Compute all cells by the spans of a table. Boxes load rows after the end of a tile, too."""
    small = small or columns
    table = host_table(Cells(mask), rows, columns, small, transposed, boxes)
    dense = mask.dense().numpy().T if transposed else mask.dense().numpy()
    height, width = dense.shape
    times, full = np.zeros((2, height + rows, width + columns), int)
    owners, work = np.zeros(height, int), []
    for first, stop, partial, whole, end in table.tiles.tolist():
        assert 0 < stop - first <= rows
        owners[first:stop] += 1
        wide, narrow = (
            sum(table.spans[a:b, 1].tolist()) for a, b in ((whole, end), (partial, whole))
        )
        work.append(wide + narrow * small / columns)
        last = first + rows if boxes else stop
        for index in range(partial, end):
            start, count, *band = table.spans[index].tolist()
            assert count > 0
            assert start % (boxes or 1) == 0
            end_column = start + count * (columns if index >= whole else small)
            cells = slice(first, last), slice(start, end_column)
            if index >= whole:
                assert 0 <= start <= end_column <= width, "a full span reads beyond the tokens"
                times[cells] += 1
                full[cells] = 1
            else:
                times[cells] += (seen := cells_of(band, first, last, start, end_column))
                assert not seen[stop - first :].any(), "a cell after the end of its tile"
    assert (owners == 1).all(), "every row belongs to one tile"
    assert (times[:height, :width] == dense).all(), "every visible cell is computed once"
    assert times.sum() == dense.sum(), "and no other cell"
    assert dense[full[:height, :width] > 0].all(), "a full span is visible from end to end"
    assert work == sorted(work, reverse=True), "longest first"
    assert sum(work) == table.visits
    whole = host_table(Cells(mask), rows, columns, columns, transposed)
    counts = count_visits(Cells(mask), rows, columns, transposed)
    assert counts == (whole.visits, len(whole.tiles))


@given(masks(), SIZES, SIZES, SIZES, st.booleans())
def test_every_visible_cell_is_covered_once_and_full_spans_are_full(
    mask, rows, columns, small, transposed
):
    assert_exact(mask, rows, columns, transposed, min(small, columns))


@given(masks(), SIZES, st.sampled_from([4, 8, 16]), st.booleans(), st.booleans())
def test_boxes_show_no_cell_after_the_end_of_their_tile(mask, rows, columns, transposed, aligned):
    assert_exact(mask, rows, columns, transposed, boxes=columns if aligned else 4)


def test_tiles_start_where_documents_do(native):
    if native == "NumPy":
        pytest.skip("tiles start at multiples of their size there")
    ends = [0, 1000, 2100, 3000]
    table = host_table(Cells(Mask.documents(ends)), 128, 128, 128)
    assert set(ends[:-1]) <= set(table.tiles[:, 0].tolist())
    assert table.visits == sum(n * (n + 1) // 2 for n in (8, 9, 8))  # no tile reads two documents


def test_more_tokens_than_32_bits_count_raise():
    with pytest.raises(ValueError, match="32 bits"):
        host_table(Cells(Mask([], 1 << 30, 1)), 128, 128, 128)


def test_the_area_of_many_bands_is_that_of_the_mask():
    large = 2**29
    for mask in (
        Mask.documents([0, 0, 1, 40, 97], window=(7, 3)),
        Mask.block_causal([0, 2, 1, 1, 0, 3, 3]),
        Mask.causal(40).crop(range(3, 31, 3), range(0, 30, 3)),
        Mask.window(50, 4, 2).crop(range(30, 50), range(10, 45)),
        Mask.causal(large),
        Mask([], 3, 4),
    ):
        assert area(mask) == mask.area
        bands = work_tables.band_array(mask)
        assert bands.tolist() == [list(band) for band in mask.bands]
        assert bands.T.flags.c_contiguous
