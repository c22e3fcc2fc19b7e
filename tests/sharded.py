"""Inputs, sharded attention and the judge's verdict for tests of distributed attention."""

from functools import partial

import torch
import torch.distributed as dist

from canon import Layout
from canon.testing import process_groups
from canon.testing.judge import Attended, agreement, dense, oracle

DEVICE = "cuda" if process_groups.kernel_gpus() else "cpu"  # for kernels; conftest.py handles --gpu
ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)

OWN_LAYOUTS = {"zigzag_attention": Layout.zigzag, "striped_attention": Layout.striped}
CALLS = {  # of every distributed function: its name and options
    "ring": ("ring_attention", {}),
    "zigzag": ("zigzag_attention", {}),
    "striped": ("striped_attention", {}),
    "strided": ("strided_attention", {"head_stride": 1}),
    "strided, split": (
        "strided_attention",
        {"head_stride": 2, "forward_first_stride": 1, "backward_last_stride": 1},
    ),
    "strided, ring": ("strided_attention", {"head_stride": 2, "backward_schedule": "ring"}),
    "magi": ("magi_attention", {"casts": 2}),
    "magi keeps": ("magi_attention", {"casts": 2, "keep_kv": True}),
    "magi, one step": ("magi_attention", {"own_keys_first": False}),
}


def layout_of(call, tokens, ranks, layout):
    """Return the layout of a function that has its own one, else ``layout``."""
    own = OWN_LAYOUTS.get(CALLS[call][0])
    return own(tokens, ranks) if own else layout


def attending(half, call, mask, layout, **options):
    """Return a call of CALLS that takes q, k and v alone and returns out and lse."""
    name, of_call = CALLS[call]
    given = {} if name in OWN_LAYOUTS else {"layout": layout}
    return partial(getattr(half, name), mask=mask, return_lse=True, **given, **of_call, **options)


def whole(mask, b=1, h=4, g=2, d=8, dv=6, dtype=torch.float64, seed=0):
    """Return q, k, v, dout and dlse of the whole sequence, equal on every rank."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(h, d), (g, d), (g, dv), (h, dv)]
    q, k, v, dout = (
        torch.randn(b, mask.queries, *x, generator=draw, dtype=torch.float64).to(dtype)
        for x in shapes
    )
    dlse = torch.randn(b, h, mask.queries, generator=draw, dtype=torch.float64)
    return q, k, v, dout, dlse.to(torch.promote_types(dtype, torch.float32))


def shards(layout, tensors):
    """Return this rank's parts of whole sequences."""
    return [layout.shard(x, dist.get_rank()) for x in tensors]


def gradients(attend, leaves, *douts):
    """Return the results of ``attend(*leaves)`` and then the gradients of the leaves, all
    detached.
    """
    leaves = [x.detach().requires_grad_() for x in leaves]
    results = attend(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    return [
        *(x.detach() for x in results),
        *torch.autograd.grad(results, leaves, douts),
    ]


def on_this_rank(attend, layout, tensors, group=None):
    """Run attention and its gradients on this rank's shards, and return the results of the whole
    sequence.
    """
    rank = dist.get_rank(group)
    q, k, v, dout, dlse = tensors
    q, k, v = (layout.shard(x, rank).detach().requires_grad_() for x in (q, k, v))
    out, lse = attend(q, k, v)
    torch.autograd.backward((out, lse), (layout.shard(dout, rank), layout.shard(dlse, rank, 2)))
    got = Attended(out.detach(), lse.detach(), q.grad, k.grad, v.grad)
    return Attended(
        *(
            layout.unshard(x, group, 2 if name == "lse" else 1)
            for name, x in zip(got._fields, got, strict=True)
        )
    )


def all_equal(one, other):
    """Return whether all tensors of two results are equal."""
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def close(mine, theirs, atol=1e-12):
    """Fail unless all tensors are equal up to ``atol``."""
    torch.testing.assert_close([*mine], [*theirs], rtol=0, atol=atol)


def assert_agrees(got, mask, q, k, v, dout, dlse):
    """Fail unless the judge accepts ``got``."""
    verdict = agreement(
        got, oracle(q, k, v, dout, mask, dlse=dlse), dense(q, k, v, dout, mask, dlse=dlse)
    )
    assert verdict.agrees, str(verdict)
