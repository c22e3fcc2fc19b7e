"""A repeated call plans nothing, compiles nothing and does not wait for the device, whichever
function is called.
"""

import functools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from sharded import CALLS, attending, layout_of, shards, whole

from canon import Layout, Mask, fast
from canon.fast.kernels.triton import launch
from canon.masks import plan_cache
from canon.masks.cast_plan import CastPlan
from canon.testing import process_groups

pytestmark = pytest.mark.interpreted

N, ONE = 256, Layout.contiguous(256, 1)
PLACED = Layout([[range(128, 192), range(64)], [range(64, 128), range(192, N)]], N)
PLANNING = (
    (Layout, "local_mask"),
    (Mask, "crop"),
    (Mask, "shift"),
    (CastPlan, "send_rows"),
    (CastPlan, "keys"),
)
READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


def mask(*ends):
    """Return an equal mask in each call, but never the same object."""
    return Mask.documents([0, 30, 100, *ends, N])


def train(attend, layout, tensors, *more):
    """Run both passes on the shards of this rank,
    which holds everything in a layout of one rank.
    """
    rank = dist.get_rank() if layout.ranks > 1 else 0
    q, k, v, dout = (layout.shard(x, rank) for x in tensors[:4])
    out = attend(*(x.requires_grad_() for x in (q, k, v)), *more)
    (out[0] if isinstance(out, tuple) else out).backward(dout)


def parts(half, tensors):
    q, k, v, dout, _ = tensors
    out, lse = half.attention_forward(q, k, v, mask())
    half.attention_backward(dout, q, k, v, out, lse, mask())
    half.merge(out, lse, out, lse)


def plans(half, tensors):
    half.plan_report(mask(), half.dispatch(mask(), 2, chunk=16), chunk=16)


def casts(half, tensors):
    plan = half.cast_plan(mask(), Layout.zigzag(N, 2), casts=2)
    x = Layout.zigzag(N, 2).shard(tensors[1][0], dist.get_rank(), 0)
    for stage in range(plan.casts):
        half.group_reduce(half.group_cast(x, plan, stage), plan, stage, torch.zeros_like(x))


def moves(half, tensors):
    mine = half.Layout.contiguous(N, 2).shard(tensors[1], dist.get_rank()).requires_grad_()
    half.Layout.contiguous(N, 2).redistribute(mine, PLACED).sum().backward()
    half.Layout.contiguous(N, 2).unshard(mine).sum().backward()


def decode(half, tensors):
    q, k, v = shards(Layout.contiguous(N, 2), tensors[:3])
    half.decode_attention(q[:, -3:], k, v, Mask.full(3, N // 2))


def batch(half, tensors):
    """Attend with a mask for each sequence."""
    train(lambda *x: half.attention(*x, [mask(), mask(200)]), ONE, tensors)


def sink(half, tensors):
    layout = Layout.zigzag(N, 2)
    train(
        lambda *x: half.ring_attention(*x[:3], mask(), layout, sink=x[3]),
        layout,
        tensors,
        tensors[3][0, 0, :, 0],
    )


def invariant(half, tensors, name):
    layout = Layout.contiguous(N, 2, multiple_of=128)
    train(lambda *x: getattr(half, name)(*x, mask(), layout, rank_invariant=True), layout, tensors)


def distributed(half, tensors, call, masks=lambda: mask()):
    layout = layout_of(call, N, 2, PLACED)
    train(attending(half, call, masks(), layout), layout, tensors)


OPERATIONS = {
    function.__name__: function for function in (parts, plans, casts, moves, decode, batch, sink)
}
OPERATIONS |= {
    f"invariant {x}": functools.partial(invariant, name=f"{x}_attention")
    for x in ("strided", "magi")
}
OPERATIONS |= {call: functools.partial(distributed, call=call) for call in CALLS}
OPERATIONS |= {
    f"{call}, of each": functools.partial(distributed, call=call, masks=lambda: [mask(), mask(200)])
    for call in ("striped", "strided", "magi")
}


def repeated(half, operation, tensors, watched):
    """Run an operation twice, and once more inside ``watched()``. Return the number of plans that
    the last run makes.
    """
    for _ in range(2):
        OPERATIONS[operation](half, tensors)
    dist.barrier()
    before = plan_cache.PLANS.made
    dist.barrier()
    with watched():
        OPERATIONS[operation](half, tensors)
    dist.barrier()
    return plan_cache.PLANS.made - before


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_repeated_call_makes_no_plan_and_reads_no_tensor(half, operation, monkeypatch):
    """Kernels are left out here, because the interpreter of Triton reads tensors. The reference
    crops masks.
    """
    monkeypatch.setattr(launch, "run", lambda *_: None)
    tensors, called = whole(Mask.causal(N), b=2, d=16, dv=16, dtype=torch.bfloat16), []
    # digests of ranks on CPUs are items
    names = READS if operation in ("parts", "plans", "batch") else READS[1:]
    noted = [*PLANNING, *((torch.Tensor, name) for name in names)] if half is fast else []

    @contextmanager
    def watched():
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in noted if dist.get_rank() == 0 else ():
                plain = getattr(owner, name)
                patch.setattr(
                    owner, name, lambda *a, f=plain, n=name, **o: (called.append(n), f(*a, **o))[1]
                )
            yield
            dist.barrier()

    assert process_groups.threads(lambda: repeated(half, operation, tensors, watched), 2) == [0, 0]
    assert not called


def on_gpus():
    """Return, by operation, the plans and compilations of the last run, and the growth of the peak
    of memory in 20 runs.
    """
    from triton import knobs

    compiled, found = [], {}
    knobs.compilation.listener = lambda src, **_: compiled.append(src.name)
    tensors = [x.cuda() for x in whole(Mask.causal(N), b=2, d=64, dv=64, dtype=torch.bfloat16)]

    @contextmanager
    def watched():
        compiled.clear()
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")

    for operation in OPERATIONS:
        made = repeated(fast, operation, tensors, watched)
        peaks = []
        for _ in range(2):
            for _ in range(10):
                OPERATIONS[operation](fast, tensors)
            peaks.append(torch.cuda.max_memory_allocated())
        found[operation] = made, list(compiled), peaks[1] - peaks[0]
    return found


@pytest.mark.gpus(2)
def test_on_gpus_a_repeated_call_does_not_wait_and_keeps_its_memory():
    for found in process_groups.gpus(on_gpus, 2):
        assert found == dict.fromkeys(OPERATIONS, (0, [], 0))
