"""A batch with a mask for each sequence gives the results of the sequences one by one, in both
halves.
"""

import pytest
import torch
from invariant_worlds import attended, different
from sharded import CALLS, all_equal, assert_agrees, attending, layout_of, on_this_rank

from canon import Layout, Mask, fast
from canon.route import attend, packing
from canon.route.packing import attend_each
from canon.testing import process_groups
from canon.testing.judge import Attended

N = 21
MASKS = [Mask.causal(N), Mask.documents([0, 5, N]), Mask([], N, N), Mask.window(N, 3, 2)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr("canon.reference.tiles.TILE", 16)


def batch(masks, h=4, g=2, d=8, dv=5):
    """Return q, k, v, dout and dlse of all sequences, in float64. Tokens that no visible cell uses
    hold NaN.
    """
    draw, (t, s) = torch.Generator().manual_seed(0), (masks[0].queries, masks[0].keys)
    shapes = (t, h, d), (s, g, d), (s, g, dv), (t, h, dv), (h, t)
    q, k, v, dout, dlse = (
        torch.randn(len(masks), *x, generator=draw, dtype=torch.float64) for x in shapes
    )
    for i, seen in enumerate(mask.dense() for mask in masks):
        for x, used in ((q, seen.any(1)), (k, seen.any(0)), (v, seen.any(0)), (dout, seen.any(1))):
            x[i, ~used] = torch.nan
        dlse[i, :, ~seen.any(1)] = 0
    return [q, k, v, dout, dlse]


def differentiate(attend, q, k, v, dout, dlse):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attend(q, k, v)
    torch.autograd.backward((out, lse), (dout, dlse))
    return Attended(out.detach(), lse.detach(), q.grad, k.grad, v.grad)


def test_any_strides_and_an_empty_batch(half):
    q, k, v, *_ = batch(MASKS, d=8, dv=8)
    expected = half.attention(q, k, v, MASKS)
    moved = [x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1) for x in (q, k, v)]
    torch.testing.assert_close(half.attention(*moved, MASKS), expected, rtol=0, atol=1e-13)
    out, lse = half.attention(q[:0], k[:0], v[:0], [], return_lse=True)
    assert (out.shape, lse.shape) == ((0, N, 4, 8), (0, 4, N))


def test_equal_masks_have_the_bits_of_one_mask(half):
    tensors = batch([MASKS[1]] * 3)
    one, several = (
        differentiate(
            lambda q, k, v, mask=mask: half.attention(q, k, v, mask, return_lse=True), *tensors
        )
        for mask in (MASKS[1], [Mask.documents([0, 5, N]) for _ in range(3)])
    )
    assert all_equal(one, several)


def test_sequences_are_packed_without_a_copy():
    q, k, v, *_ = batch(MASKS)
    seen = []
    attend = lambda *given: (seen.extend(given), fast.attention_forward(*given))[1]
    out, lse = packing.attend_each(attend, q, k, v, MASKS)
    assert [x.data_ptr() for x in seen[:3]] == [x.data_ptr() for x in (q, k, v)]
    assert out.is_contiguous()
    assert lse.stride() == (N, len(MASKS) * N, 1)


@pytest.mark.parametrize("function", ["attention", "ring_attention"])
def test_autocast_casts_tensors_before_they_are_checked(half, function):
    q, k, v, *_ = (x.float() for x in batch(MASKS))
    attend = getattr(half, function)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            attend(q, k.bfloat16(), v, MASKS), attend(*(x.bfloat16() for x in (q, k, v)), MASKS)
        )


# --- several ranks: one layout for all sequences

UNEVEN = Layout([[range(17, N), range(2)], [range(2, 16)], [], [range(16, 17)]], N)


@pytest.mark.parametrize("call", CALLS)
def test_ranks_take_a_mask_for_each_sequence(half, call):
    layout, tensors = layout_of(call, N, 4, UNEVEN), batch(MASKS)
    attend = attending(half, call, MASKS, layout)
    for got in process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 4):
        assert_agrees(got, tuple(MASKS), *tensors)


@pytest.mark.parametrize("masks", [MASKS[1:2] * 2, MASKS[:0]], ids=["equal", "none"])
@pytest.mark.parametrize("call", ["striped", "strided", "magi"])
def test_equal_masks_on_ranks_have_the_bits_of_one_mask(half, call, masks):
    layout = layout_of(call, N, 3, Layout.contiguous(N, 3))
    tensors = [x[: len(masks)] for x in batch(MASKS[1:2] * 2)]
    one, several = (
        process_groups.threads(
            lambda mask=mask: on_this_rank(attending(half, call, mask, None), layout, tensors), 3
        )[0]
        for mask in ((masks or [None])[0], masks)
    )
    assert not different(one, several)


@pytest.mark.parametrize(("function", "ranks"), [("strided_attention", 3), ("magi_attention", 2)])
def test_rank_invariant_keeps_the_bits_of_each_sequence_on_one_rank(half, function, ranks):
    masks = [Mask.causal(384), Mask.documents([0, 100, 384]), Mask.window(384, 140, 20)]
    tensors = batch(masks)
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
    q, k, v, *_ = batch(masks)
    together = half.attention(q, k, v, masks, rank_invariant=True)
    alone = [
        half.attention(*(x[i : i + 1] for x in (q, k, v)), mask, rank_invariant=True)
        for i, mask in enumerate(masks)
    ]
    assert torch.equal(together, torch.cat(alone)) == on_tiles
