"""Active queries are exactly those that see a key, in order, under the same mask; parts return to
their rows.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from canon import Mask
from canon.fast.active_queries import active_queries_of
from canon.masks.layout import Layout


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_active_queries_are_right_for_any_documents_and_layouts(cuts, ranks, data):
    n = max(cuts)
    mask = Mask.documents(
        [0, *sorted(cuts)], window=data.draw(st.sampled_from([None, (7, 0), (2, 3)]))
    )
    layout = getattr(Layout, data.draw(st.sampled_from(["contiguous", "zigzag", "striped"])))(
        n, ranks
    )
    local = layout.local_mask(
        mask, data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, ranks - 1))
    )
    active, dense = active_queries_of(local), local.dense()
    assert torch.equal(active.mask.dense(), dense[dense.any(1)])
    assert torch.equal(active.take(torch.arange(local.queries), 0), dense.any(1).nonzero()[:, 0])


def test_one_range_is_used_in_place():
    mask, x = Mask.documents([0, 3, 4, 9]).crop(keys=range(4)), torch.randn(1, 9, 2, 4)
    for active in (active_queries_of(mask), active_queries_of(mask, all_queries=True)):
        assert active.take(x).data_ptr() == x.data_ptr()
    assert active.mask is mask
