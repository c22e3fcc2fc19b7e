"""Repeated calls of the distributed functions replay their steps, with the bits of steps that run as written."""

import functools

import pytest
import torch
import torch.distributed as dist
from interpreted_replay import EVERYWHERE
from sharded import whole

from canon import Layout, Mask, fast
from canon.fast.replay import recordings as prepared
from canon.masks.plan_cache import PLANS
from canon.testing import process_groups

N, RANKS = 25, 3
LAYOUTS = {"zigzag": Layout.zigzag(N, RANKS), "uneven": Layout([[range(14, N)], [], [range(14)]], N)}
MASK = Mask.documents([0, 3, 4, 11, 12, 20, N], window=(9, 0))  # scattered active queries, and steps without any
FUNCTIONS = {
    "ring": fast.ring_attention,
    "strided": functools.partial(fast.strided_attention, head_stride=1),
    "magi": functools.partial(fast.magi_attention, stages=2),
    "magi keeps": functools.partial(fast.magi_attention, stages=2, keep_kv=True),
    "magi in one step": functools.partial(fast.magi_attention, stages=0),
}
CASES = [
    ("ring", "zigzag", "qkv"), ("ring", "uneven", "q"), ("ring", "uneven", "k"), ("strided", "uneven", "qkv"),
    ("strided", "zigzag", "v"), ("magi", "zigzag", "qkv"), ("magi", "uneven", "q"), ("magi keeps", "zigzag", "qkv"),
    ("magi in one step", "zigzag", "qkv"),
]  # fmt: skip


@pytest.fixture
def _replays(monkeypatch):
    """Replay passes on the CPU, too."""
    PLANS.clear()
    monkeypatch.setattr(prepared, "REPLAYED", EVERYWHERE)
    yield
    PLANS.clear()


def train(attend, layout, tensors, wanted):
    """Return out, and the gradients of the ``wanted`` inputs. q, k and v of this rank are views of one tensor."""
    q, k, v, dout = (layout.shard(x, dist.get_rank()) for x in tensors[:4])
    parts = torch.cat([q, k, v], 2).split([q.shape[2], k.shape[2], v.shape[2]], 2)
    leaves = [x.requires_grad_(name in wanted) for name, x in zip("qkv", parts, strict=True)]
    out = attend(*leaves, MASK, layout)
    return out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout)


@pytest.mark.usefixtures("_replays")
@pytest.mark.parametrize(("function", "kind", "wanted"), CASES)
def test_a_repeated_call_replays_the_bits_of_its_steps_as_written(function, kind, wanted):
    attend, layout = FUNCTIONS[function], LAYOUTS[kind]
    tensors = [whole(MASK, b=2, d=8, dv=8, dtype=torch.float32, seed=seed) for seed in (1, 2)]

    def program():
        replays = [train(attend, layout, one, wanted) for one in tensors]  # the first call is recorded
        passes = [x for x, _ in list(PLANS.plans.values()) if isinstance(x, prepared.PreparedPass)]
        dist.barrier()
        prepared.REPLAYED = {}
        dist.barrier()
        return replays, [train(attend, layout, one, wanted) for one in tensors], [x.reason for x in passes]

    for replays, written, reasons in process_groups.threads(program, RANKS):
        assert set(reasons) == {""}
        for got, expected in zip(replays, written, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
