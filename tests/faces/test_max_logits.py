"""``return_max_logits=True`` adds the largest visible score of each query head, over batch, tokens
and ranks.
"""

from functools import partial

import pytest
import torch
from sharded import CALLS, OWN_LAYOUTS, layout_of, shards, whole

from canon import Band, Layout, Mask, fast
from canon.fast.device import computing_with
from canon.fast.local import forward_for
from canon.fast.tables import key_parts
from canon.testing import process_groups

N = 60
MASK = Mask([Band(0, 20, 0, 20, -N, 0), Band(24, N, 30, 50, -30, 0)], N, N)
near = partial(torch.testing.assert_close, rtol=1e-6, atol=0)
OPTIONS = dict(scale=-1.3, softcap=3.0, return_max_logits=True)


def definition(q, k, mask, scale=-1.3, softcap=3.0):
    """Return the largest visible score of each query head."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = softcap * torch.tanh(scale * torch.einsum("bthd,bshd->bhts", q, k) / softcap)
    return scores.masked_fill(~mask.dense(), -torch.inf).amax((0, 2, 3)).float()


def inputs(mask=MASK, b=2, **shape):
    """Return q, k, v and dout. The largest score lies in a hidden cell, and a head has only
    negative ones.
    """
    q, k, v, dout, _ = whole(mask, b=b, **shape)
    k[:, 55] = 100.0
    q[:, :, 1] = k[:, :1, 0].sign() * 1e-3
    return q, k, v, dout


@pytest.mark.parametrize("return_lse", [False, True])
def test_one_rank_returns_the_largest_visible_scores_as_the_last_result(half, return_lse):
    q, k, v, dout = inputs()
    q.requires_grad_()
    *results, largest = half.attention(q, k, v, MASK, return_lse=return_lse, **OPTIONS)
    near(largest, definition(q.detach(), k, MASK))
    assert largest.dtype == torch.float32
    assert not largest.requires_grad
    assert len(results) == 1 + return_lse
    (grad,) = torch.autograd.grad(results[0], q, dout)
    plain = half.attention(q, k, v, MASK, scale=-1.3, softcap=3.0)
    assert torch.equal(results[0], plain)
    assert torch.equal(grad, torch.autograd.grad(plain, q, dout)[0])


def test_packed_tensors_masks_of_sequences_and_heads_that_see_nothing(half):
    q, k, v, _ = inputs()
    other = Mask.window(N, 3, 0)
    _, largest = half.attention(q, k, v, (MASK, other), **OPTIONS)
    each = [
        half.attention(q[i], k[i], v[i], mask, **OPTIONS)[1] for i, mask in enumerate((MASK, other))
    ]
    assert torch.equal(largest, torch.maximum(*each))
    _, one_by_one = half.attention(q, k, v, (MASK, other), rank_invariant=True, **OPTIONS)
    near(one_by_one, largest)
    _, _, nothing = half.attention(q, k, v, Mask([], N, N), return_lse=True, **OPTIONS)
    assert torch.equal(nothing, torch.full((4,), -torch.inf))


RANKED = {  # of several ranks: the function, the mask, the layout and options
    name: (CALLS[name][0], MASK, layout_of(name, N, 3, Layout.zigzag(N, 3)), CALLS[name][1])
    for name in ("ring", "zigzag", "striped", "strided, split", "magi")
}
RANKED |= {
    f"{name}, rank invariant": (
        name,
        Mask.causal(200),
        Layout.contiguous(200, 2, 128),
        {"rank_invariant": True},
    )
    for name in ("strided_attention", "magi_attention")
}


@pytest.mark.parametrize("name", RANKED)
def test_all_ranks_return_the_maximum_over_all_ranks(half, name):
    function, mask, layout, options = RANKED[name]
    q, k, v, _ = inputs(mask)
    placed = {} if function in OWN_LAYOUTS else {"layout": layout}

    def program():
        mine = shards(layout, (q, k, v))
        return getattr(half, function)(*mine, mask, **placed, **options, **OPTIONS)[-1]

    for largest in process_groups.threads(program, layout.ranks):
        near(largest, definition(q, k, mask))


@pytest.mark.usefixtures("replays")
def test_parts_of_the_keys_and_replays_raise_the_same_maximum(monkeypatch):
    monkeypatch.setattr(key_parts, "FEWEST_KEYS", 64)
    mask = Mask.causal(5, 300)
    q, k, v, _ = inputs(Mask.causal(300))
    for shift in (0.0, 0.0, 1.0):
        _, largest = fast.attention(q[:, :5] + shift, k, v, mask, **OPTIONS)
        near(largest, definition(q[:, :5] + shift, k, mask))


def test_other_chosen_backends_raise():
    q, _, v, _ = inputs()
    wrong = r'the gluon kernels do not support return_max_logits=True: use backend\("triton"\)'
    with computing_with("gluon"), pytest.raises(ValueError, match=wrong):
        forward_for(q, v, MASK, True, True)
