"""The tables that `tables.c` makes are those of the NumPy code, bit for bit."""

import numpy as np
import pytest
import torch
from band_strategies import masks
from hypothesis import example, given
from hypothesis import strategies as st

from canon import Mask, fast
from canon.bench.shapes import documents
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
        patch.setattr(work_tables, "native_tables", lambda: IN_C if native else None)
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
