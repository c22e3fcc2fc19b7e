"""The tile schedules that `schedule.c` makes are those of the NumPy code, bit for bit."""

import numpy as np
import pytest
from band_strategies import masks
from hypothesis import given
from hypothesis import strategies as st

from canon import Mask, fast
from canon.bench.shapes import documents
from canon.fast.kernels.gluon import tile_scheduler
from canon.fast.kernels.gluon.tile_scheduler import ALL_SETS, LAST_SETS, Heads, Traversal
from canon.fast.kernels.launcher import Gpu
from canon.fast.tables import work_tables
from canon.fast.tables.cells import Cells
from canon.masks.plan_cache import PARTS, PLANS

IN_C = work_tables.native_tables()
pytestmark = pytest.mark.skipif(IN_C is None, reason="there is no C compiler")


def assert_equal(make):
    """Assert that ``make()`` returns equal plans with schedules from C and from NumPy."""
    found = []
    for native in (IN_C, None):
        PARTS.clear()
        PLANS.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tile_scheduler, "native_tables", lambda native=native: native)
            found.append(make())
    assert are_equal(*map(tuple, found))


def are_equal(x, y):
    if isinstance(x, np.ndarray):
        return x.dtype == y.dtype and np.array_equal(x, y)
    if isinstance(x, tuple):
        return type(x) is type(y) and len(x) == len(y) and all(map(are_equal, x, y))
    return x == y


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
@pytest.mark.parametrize("mean", [8192, 131, None])
def test_plans_of_both_passes_are_equal(mean, heads):
    mask = (
        Mask.documents(documents(65536, mean, seed=mean)) if mean else Mask.window(20000, 3000, 0)
    )
    sizes = {"heads": heads, "widths": (128, 128), "device": Gpu((9, 0), 132, 232448)}
    assert_equal(lambda: fast.prepare("attention", mask, None, **sizes).plans)
