"""A report of a plan counts its visible cells and its moved tokens, and the packs are those of a
published distribution.
"""

import pytest
import torch
from band_strategies import layouts, square_masks
from hypothesis import given
from hypothesis import strategies as st

from canon import Layout, Mask, fast, reference
from canon.bench.packs import sampled_packs

sizes = st.sampled_from([1, 7, 40, 61])
masks_and_layouts = sizes.flatmap(lambda n: st.tuples(square_masks(n), layouts(n)))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_closed_forms_of_the_volume(half, ranks):
    n = 48 * ranks
    assert half.plan_report(Mask.causal(n), Layout.zigzag(n, ranks)).volume == 0.75
    window = Mask.window(n, 7, 0)
    assert half.plan_report(window, Layout.contiguous(n, ranks)).volume == 7 / n


@given(masks_and_layouts)
def test_reports_equal_counts_of_cells_and_tokens(drawn):
    mask, layout = drawn
    report = reference.plan_report(mask, layout, chunk=8)
    assert report == fast.plan_report(mask, layout, chunk=8)
    dense = mask.dense()
    assert report.areas == tuple(
        int(dense[layout.positions(rank)].sum()) for rank in range(layout.ranks)
    )
    assert report.largest_chunk == max(
        int(dense[a : a + 8].sum()) for a in range(0, layout.tokens, 8)
    )
    plan = reference.cast_plan(mask, layout, casts=1)
    moved = sum(
        sum(plan.receive_sizes(cast, rank))
        for cast in range(plan.casts)
        for rank in range(layout.ranks)
    )
    assert sum(report.sent) == sum(report.received) == moved
    assert f"{report.volume:.3f}" in str(report)


def test_sampled_packs_are_the_published_ones():
    """The mean number of documents and longest document of 20 packs of 64K, as MagiAttention's
    benchmark reports them.
    """
    packs = [torch.tensor(pack).diff() for pack in sampled_packs(65536, 20)]
    assert sum(map(len, packs)) / 20 == 44.95
    assert sum(int(lengths.max()) for lengths in packs) / 20 == 14467.1
