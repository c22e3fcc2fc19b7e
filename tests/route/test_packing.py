"""A batch with a mask for each sequence has the bits of its sequences one by one. `canon check`
compares the values.
"""

import pytest
import torch
from invariant_worlds import attended, different
from sharded import attending, layout_of, on_this_rank, whole

from canon import Layout, Mask, fast
from canon.route import attend, packing
from canon.route.packing import attend_each
from canon.testing import process_groups
from canon.testing.judge import Attended

N = 21


def test_sequences_are_packed_without_a_copy():
    masks = [Mask.causal(N), Mask.documents([0, 5, N]), Mask([], N, N)]
    q, k, v, *_ = whole(masks[0], b=3)
    seen = []
    attend = lambda *given: (seen.extend(given), fast.attention_forward(*given))[1]
    out, lse = packing.attend_each(attend, q, k, v, masks)
    assert [x.data_ptr() for x in seen[:3]] == [x.data_ptr() for x in (q, k, v)]
    assert out.is_contiguous()
    assert lse.stride() == (N, 3 * N, 1)


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("call", ["striped", "strided", "magi"])
def test_equal_masks_on_ranks_have_the_bits_of_one_mask(half, call, batch):
    mask, layout = Mask.documents([0, 5, N]), layout_of(call, N, 3, Layout.contiguous(N, 3))
    tensors = whole(mask, b=batch)
    one, several = (
        process_groups.threads(
            lambda given=given: on_this_rank(attending(half, call, given, None), layout, tensors), 3
        )[0]
        for given in (mask, [Mask.documents([0, 5, N]) for _ in range(batch)])
    )
    assert not different(one, several)


@pytest.mark.parametrize(("function", "ranks"), [("strided_attention", 3), ("magi_attention", 2)])
def test_rank_invariant_keeps_the_bits_of_each_sequence_on_one_rank(half, function, ranks):
    masks = [Mask.causal(384), Mask.documents([0, 100, 384]), Mask.window(384, 140, 20)]
    tensors = whole(masks[0], b=3)
    got = attended(half, function, masks, Layout.zigzag(384, ranks, 128), tensors)
    for i, mask in enumerate(masks):
        one = attended(
            half, "attention", mask, Layout.contiguous(384, 1), [x[i : i + 1] for x in tensors]
        )
        assert not different(one, Attended(*(x[i : i + 1] for x in got)))


@pytest.mark.parametrize("on_tiles", [True, False], ids=["in turn", "packed"])
def test_rank_invariant_keeps_the_bits_of_each_sequence_of_any_length(half, on_tiles, monkeypatch):
    """In a pack, a sequence of 150 tokens would begin inside a tile."""
    if not on_tiles:
        monkeypatch.setattr(attend, "attend_each", lambda *given, on_tiles: attend_each(*given))
    masks = [Mask.causal(150), Mask.full(150)]
    q, k, v, *_ = whole(masks[0], b=2)
    together = half.attention(q, k, v, masks, rank_invariant=True)
    alone = [
        half.attention(*(x[i : i + 1] for x in (q, k, v)), mask, rank_invariant=True)
        for i, mask in enumerate(masks)
    ]
    assert torch.equal(together, torch.cat(alone)) == on_tiles
