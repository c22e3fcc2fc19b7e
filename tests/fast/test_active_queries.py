"""Active queries are exactly those that see a key, in order, under the same mask; parts return to
their rows.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded import DEVICE

from canon import Mask
from canon.fast import local
from canon.fast.active_queries import active_queries_of
from canon.masks.layout import Layout

MASKS = {
    "causal": Mask.causal(9),
    "none": Mask([], 6, 5),
    "scattered": Layout.zigzag(40, 4).local_mask(
        Mask.documents([0, 3, 4, 9, 21, 22, 30, 40]), 2, 1
    ),
    "slices": Mask.ranges(
        [(1, 4), (3, 6), (9, 12)], [(0, 2), (4, 7), (1, 9)], ["full", "causal", "full"]
    ),
}


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
    mask = MASKS["scattered"]
    x = torch.randn(1, mask.queries, 2, 4)
    assert active_queries_of(mask, all_queries=True).mask is mask
    assert active_queries_of(mask, all_queries=True).take(x).data_ptr() == x.data_ptr()
    assert (
        active_queries_of(Mask.causal(5).crop(queries=range(2, 5))).take(x).data_ptr()
        == x.data_ptr()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_parts_of_dq_are_added_to_their_rows(mask):
    active, draw = active_queries_of(mask), torch.Generator().manual_seed(0)
    total = torch.randn(2, mask.queries, 3, 4, generator=draw).to(DEVICE)
    expected = total.clone()
    part = torch.randn(2, active.mask.queries, 3, 4, generator=draw).to(DEVICE)
    expected[:, mask.dense().any(1)] += part
    active.add(total, part)
    assert torch.equal(total, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_parts_are_merged_into_their_rows_only(mask):
    active, draw = active_queries_of(mask), torch.Generator().manual_seed(1)
    random = lambda *sizes: torch.randn(*sizes, generator=draw).to(DEVICE)
    out = random(2, mask.queries, 5, 3).transpose(2, 3)  # of any strides
    lse, part, part_lse = (
        random(2, 3, mask.queries),
        random(2, active.mask.queries, 3, 5),
        random(2, 3, active.mask.queries),
    )
    lse[:, :, ::3], part_lse[:, :, ::2] = -torch.inf, -torch.inf
    out[:, ::3] = torch.nan  # in parts that see no key
    part[:, ::2] = torch.nan
    rows = mask.dense().any(1).nonzero()[:, 0].to(DEVICE)
    expected = [out.clone(), lse.clone()]
    merged = local.merge(out[:, rows], lse[:, :, rows], part, part_lse)
    expected[0][:, rows], expected[1][:, :, rows] = merged
    result, merged_lse = torch.empty(out.shape, dtype=torch.bfloat16, device=DEVICE), lse.clone()
    active.merge([out.clone(), merged_lse], (part, part_lse), result)
    # rounded once
    torch.testing.assert_close(result, expected[0].bfloat16(), equal_nan=True, rtol=0, atol=0)
    assert torch.equal(merged_lse, expected[1])
    active.merge([out, lse], (part, part_lse))
    # the result of merge on these rows
    torch.testing.assert_close(out, expected[0], equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_queries_of_any_strides_are_gathered(dtype):
    active, draw = active_queries_of(MASKS["scattered"]), torch.Generator().manual_seed(2)
    rows = MASKS["scattered"].dense().any(1).to(DEVICE)
    x = torch.randn(2, len(rows), 5, 3, generator=draw).to(DEVICE, dtype)
    for each in (x, x.transpose(2, 3), x[..., :1].expand(x.shape)):
        assert torch.equal(active.take(each), each[:, rows])
