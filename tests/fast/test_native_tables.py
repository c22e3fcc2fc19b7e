"""The tables that `tables.c` makes are those of the NumPy code, bit for bit."""

import numpy as np
import pytest
import torch
from band_strategies import masks
from hypothesis import example, given
from hypothesis import strategies as st

from canon import Mask, fast
from canon.bench.shapes import documents
from canon.fast.kernels.gluon import tile_scheduler
from canon.fast.kernels.gluon.tile_scheduler import ALL_SETS, LAST_SETS, Heads, Traversal
from canon.fast.kernels.launcher import Gpu
from canon.fast.tables import work_tables
from canon.fast.tables.cells import Cells
from canon.masks.plan_cache import PARTS, PLANS

SIZES = st.sampled_from([1, 2, 4, 8, 16])
IN_C = work_tables.native_tables()
pytestmark = pytest.mark.skipif(IN_C is None, reason="there is no C compiler")


def made(make, native):
    """Return ``make()`` with tables from C, or from NumPy, and no plan in the cache."""
    PARTS.clear()
    PLANS.clear()
    with pytest.MonkeyPatch.context() as patch:
        for module in (work_tables, tile_scheduler):
            patch.setattr(module, "native_tables", lambda: IN_C if native else None)
        return make()


def assert_equal(make):
    assert_same(made(make, True), made(make, False))


def assert_same(from_c, from_numpy):
    for a, b in zip(from_c, from_numpy, strict=True):
        if isinstance(b, np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.array_equal(a, b)
        else:
            assert type(a) is type(b)
            assert a == b


@given(masks(), SIZES, SIZES, SIZES, st.booleans(), st.sampled_from([0, 1, 4]))
@example(Mask.full(20), 16, 4, 4, False, 4)  # a short tile
def test_work_tables_from_c_are_equal(mask, rows, columns, small, transposed, boxes):
    given = Cells(mask), rows, columns, min(small, columns), transposed, boxes
    assert_equal(lambda: work_tables.host_table(*given))
    given = Cells(mask), rows, columns, transposed, boxes
    assert_equal(lambda: work_tables.visits.__wrapped__(*given))


@given(masks())
@example(Mask([], 3, 5))
def test_bands_and_areas_from_c_are_equal(mask):
    assert_equal(lambda: (work_tables.band_array.__wrapped__(mask),))
    assert made(lambda: work_tables.band_array(mask).flags.f_contiguous, True)
    assert_equal(lambda: (work_tables.area.__wrapped__(mask),))
    assert made(lambda: work_tables.area(mask), True) == mask.area


@st.composite
def traversals(draw):
    """Draw a traversal of forward or dq, or of dk and dv; with at least four work tiles a CTA, the
    last CTAs begin with short ones.
    """
    transposed = draw(st.booleans())
    share = draw(st.sampled_from([1, 2, 4]))
    pack = 1 if transposed else draw(st.sampled_from([n for n in (1, 2, 4) if n <= share]))
    heads = Heads(draw(st.integers(0, 3)), share * draw(st.integers(1, 9)), share)
    rows, columns = draw(st.sampled_from([4, 8, 16])), draw(st.sampled_from([4, 8]))
    some = {"full_first": draw(st.booleans()), "ctas": draw(st.integers(0, 50))}
    if transposed:
        some = {"even_ends": draw(st.sampled_from([0, LAST_SETS, ALL_SETS]))}
    repeat = draw(st.integers(1, 3)) if transposed else 1
    read = draw(st.sampled_from([1, 12 << 20, 100 << 20]))
    return Traversal(rows, columns, transposed, heads, pack, repeat, read, **some)


@given(masks(), traversals())
def test_tile_schedules_from_c_are_equal(mask, traversal):
    make = tile_scheduler.tile_schedule.__wrapped__
    assert_equal(lambda: make(Cells(mask), traversal))


@pytest.mark.parametrize("heads", [(64, 8), (32, 32), (6, 1)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [Mask.documents(documents(65536, mean, seed=mean)) for mean in (8192, 1000, 131)]
    + [Mask.causal(8192), Mask.window(20000, 3000, 0), Mask.documents([0, 5000, 9000])],
    ids=["8192", "1000", "131", "causal", "window", "two documents"],
)
def test_plans_of_both_passes_are_equal(mask, heads):
    sizes = {"heads": heads, "widths": (128, 128), "batch": 2, "dtype": torch.bfloat16}
    sizes["device"] = Gpu((9, 0), 132, 232448)
    make = lambda: fast.prepare("attention", mask, None, **sizes).plans
    for (key, from_c), (same, from_numpy) in zip(made(make, True), made(make, False), strict=True):
        assert key == same
        if isinstance(from_c, tuple):
            assert_same(from_c, from_numpy)
        else:
            assert np.array_equal(from_c, from_numpy)
