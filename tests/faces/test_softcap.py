"""With ``softcap``, scores s become softcap * tanh(s / softcap) before they are masked: replays,
and the kernels for Hopper.
"""

from functools import partial

import pytest
import torch
from sharded import all_equal, close, gradients, whole

from canon import Mask, fast, reference
from canon.fast.kernels.cuda import launch as cuda
from canon.route.checks import CappedScale
from canon.testing.judge import Attended, agreement, oracle, orders
from canon.testing.simulated_kernels import simulated


@pytest.mark.usefixtures("replays")
def test_a_replayed_pass_belongs_to_one_softcap():
    mask, runs = Mask.documents([0, 20, 60]), {}
    *qkv, dout, dlse = whole(mask)
    run = lambda half, softcap: gradients(
        partial(half.attention, mask=mask, softcap=softcap, return_lse=True), qkv, dout, dlse
    )
    for softcap in (1.0, 2.0, None) * 2:
        runs.setdefault(softcap, []).append(run(fast, softcap))
    for softcap, (first, again) in runs.items():
        assert all_equal(first, again)
        close(again, run(reference, softcap))


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
        got = gradients(partial(fast.attention, mask=mask, **options), (q, k, v), dout, dlse)
    given = q, k, v, dout, mask, CappedScale(2 * d**-0.5, softcap), dlse
    verdict = agreement(Attended(*got), oracle(*given), orders(*given))
    assert verdict.agrees, str(verdict)


def test_the_cuda_kernels_refuse_a_softcap():
    assert cuda.uncapped(0.5) == 0.5
    with pytest.raises(
        ValueError,
        match=r"the CUDA kernels have no soft-cap, got softcap=5.0: use "
        r'backend\("triton"\)',
    ):
        cuda.uncapped(CappedScale(0.5, 5.0))
