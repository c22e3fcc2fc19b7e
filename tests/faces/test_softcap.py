"""With ``softcap``, scores s become softcap * tanh(s / softcap) before they are masked, in both
halves and both passes.
"""

import functools

import pytest
import torch
from invariant_worlds import LAYOUTS, attended, different
from sharded import close, whole

from canon import Band, Layout, Mask, fast, reference
from canon.fast.kernels.cuda import launch as cuda
from canon.route.checks import CappedScale
from canon.testing.judge import Attended, agreement, oracle, orders
from canon.testing.simulated_kernels import simulated

N = 60
MASK = Mask(
    [Band(0, 20, 0, 20, -N, 0), Band(24, N, 30, 50, -30, 0)], N, N
)  # queries 20 to 29 and some keys see nothing


def passes(attend, tensors, *more):
    """Return out, lse and the gradients of q, k, v and ``more``."""
    q, k, v, dout, dlse = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *more)]
    out, lse = attend(*leaves)
    return (
        out.detach(),
        lse.detach(),
        *torch.autograd.grad((out, lse), leaves, (dout, dlse.masked_fill(~seen(), 0))),
    )


def seen():
    return MASK.dense().any(1)


@pytest.mark.parametrize("function", ["strided_attention", "magi_attention"])
def test_bits_do_not_depend_on_the_number_of_ranks(half, function):
    mask = Mask.causal(200)
    tensors = whole(mask, dtype=torch.float32)
    options = dict(scale=1.7, softcap=2.0)  # most scores are bent
    one = attended(half, "attention", mask, Layout.contiguous(200, 1), tensors, **options)
    assert not different(
        one, attended(half, function, mask, LAYOUTS["contiguous"](mask, 2), tensors, **options)
    )


@pytest.mark.usefixtures("replays")
def test_a_replayed_pass_belongs_to_one_softcap():
    tensors, runs = whole(MASK), {}
    for softcap in (1.0, 2.0, None, 1.0, 2.0, None):
        attend = lambda q, k, v, softcap=softcap: fast.attention(
            q, k, v, MASK, softcap=softcap, return_lse=True
        )
        runs.setdefault(softcap, []).append(passes(attend, tensors))
    for first, replayed in runs.values():
        assert all(map(torch.equal, first, replayed))
    written = functools.partial(reference.attention, mask=MASK, softcap=2.0, return_lse=True)
    close(runs[2.0][1], passes(written, tensors))
    assert not torch.allclose(runs[1.0][0][0], runs[2.0][0][0])


@pytest.mark.sweep
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("d", "method", "invariant"),
    [(64, "fused", False), (64, "head_parallel", True), (256, "split", False)],
)
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_the_hopper_kernels_agree(d, method, invariant, softcap):
    # the last queries see three tiles: the second and third keep a stale maximum
    mask = Mask.window(300, 250, 3)
    q, k, v, dout, dlse = whole(mask, h=2, g=1, d=d, dv=d, dtype=torch.bfloat16)
    options = dict(
        scale=2 * d**-0.5,
        softcap=softcap,
        backward=method,
        rank_invariant=invariant,
        return_lse=True,
    )
    with fast.backend("gluon"), simulated():
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = fast.attention(*leaves, mask, **options)
        grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    given = q, k, v, dout, mask, CappedScale(2 * d**-0.5, softcap), dlse
    verdict = agreement(
        Attended(out.detach(), lse.detach(), *grads), oracle(*given), orders(*given)
    )
    assert verdict.agrees, str(verdict)


def test_a_softcap_far_above_the_scores_changes_nothing_beyond_rounding(half):
    tensors = whole(MASK, dtype=torch.float32)
    mine = passes(
        lambda q, k, v: half.attention(q, k, v, MASK, softcap=1e6, return_lse=True), tensors
    )
    theirs = passes(lambda q, k, v: half.attention(q, k, v, MASK, return_lse=True), tensors)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


def test_the_cuda_kernels_refuse_a_softcap():
    assert cuda.uncapped(0.5) == 0.5
    with pytest.raises(
        ValueError,
        match=r"the CUDA kernels have no soft-cap, got softcap=5.0: use "
        r'backend\("triton"\)',
    ):
        cuda.uncapped(CappedScale(0.5, 5.0))
