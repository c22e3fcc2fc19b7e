"""The plans that `planner.c` makes are those of the NumPy code, chunk for chunk."""

import pytest
from band_strategies import square_masks
from hypothesis import example, given
from hypothesis import strategies as st

from canon import Mask, fast
from canon.bench.packs import sampled_packs
from canon.bench.shapes import documents
from canon.fast import planner
from canon.masks.plan_cache import PLANS

IN_C = planner.native_planner()
pytestmark = [
    pytest.mark.skipif(IN_C is None, reason="there is no C compiler"),
    pytest.mark.filterwarnings("ignore:dispatch. chunk"),
]


def planned(native, *arguments, **options):
    """Return the layout that C makes, or NumPy, and no plan from the cache."""
    PLANS.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "native_planner", lambda: IN_C if native else None)
        return fast.dispatch(*arguments, **options)


def assert_equal(*arguments, **options):
    layout = planned(True, *arguments, **options)
    assert layout == planned(False, *arguments, **options)
    assert layout.digest, "ranks compare it"


MASKS = st.sampled_from([1, 7, 64, 120]).flatmap(
    lambda n: square_masks(n) | st.lists(square_masks(n), min_size=2, max_size=3)
)


@given(
    MASKS,
    st.sampled_from([1, 2, 3, 5, 8, 13]),
    st.sampled_from([None, 1, 3, 8, 40]),
    st.sampled_from([1.0, 1.05, 1.3, 2.0]),
    st.sampled_from([(1, 1), (4400, 18), (10, 200), (1, 18)]),
    st.sampled_from([0, 1, 5]),
)
@example(Mask([], 40, 40), 3, 1, 1e30, (1, 1), 1)  # exceeds 64 bits
def test_plans_from_c_are_equal(mask, ranks, chunk, imbalance, rates, swaps):
    cells, tokens = rates
    rates = {"cells_per_us": cells, "tokens_per_us": tokens}
    assert_equal(mask, ranks, chunk=chunk, imbalance=imbalance, swaps_per_chunk=swaps, **rates)


def tree(depth):
    """Return a tree of 400 nodes: branches of so many nodes at one root."""
    parents = [-1, *(node - 1 if node % depth else 0 for node in range(1, 400))]
    return Mask.tree(parents, [100 + node % 128 for node in range(400)])


@pytest.mark.parametrize("ranks", [2, 8, 33])
@pytest.mark.parametrize(
    "mask",
    [
        *(Mask.documents(documents(65536, mean, seed=mean)) for mean in (4096, 1024, 256)),
        *map(Mask.documents, sampled_packs(65536, 2)),
        Mask.causal(65536),
        Mask.window(65536, 3000, 0),
        tree(4),
        tree(100),
    ],
    ids=["4096", "1024", "256", "a pack", "another", "causal", "window", "wide", "deep"],
)
def test_plans_of_long_sequences_are_equal(mask, ranks):
    assert_equal(mask, ranks)
