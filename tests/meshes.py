"""Calls over a mesh ("tokens", "heads") on ranks that are threads, and the same on one rank."""

import functools

import torch
import torch.distributed as dist
from sharded import attending, layout_of, on_this_rank, whole

from canon import Layout, Mask, fast, reference
from canon.testing.judge import Attended

HALVES = {"reference": reference, "fast": fast}
MESHES = [(2, 2), (2, 4), (3, 2), (1, 4), (4, 1)]
SCHEDULES = ("ring", "zigzag", "striped", "strided", "magi", "magi keeps", "strided, ring")
MASKS = {
    "causal": Mask.causal(37),
    "documents": Mask.documents([0, 5, 6, 20, 37]),
    "window": Mask.window(37, 6, 0),
    "full": Mask.full(37),
    "tree": Mask.tree([-1, 0, 1, 0, -1], [9, 5, 8, 7, 8]),
    "one token": Mask.causal(1),
}
LAYOUTS = {
    "divided": lambda n, rows, heads: Layout.zigzag(n, rows).divided(heads),
    "contiguous": lambda n, rows, heads: Layout.contiguous(n, rows * heads),
    "zigzag": lambda n, rows, heads: Layout.zigzag(n, rows * heads),
    "empty": lambda n, rows, heads: Layout(
        [[range(n // 2, n)], *[[]] * (rows * heads - 2), [range(n // 2)]], n
    ),
    "dispatched": lambda n, rows, heads: reference.dispatch(
        Mask.documents([0, n // 3, n]), rows, chunk=4
    ).divided(heads),
}


def mesh(rows, heads, names=("tokens", "heads")):
    return dist.init_device_mesh("cpu", (rows, heads), mesh_dim_names=names)


@functools.cache
def sequence(mask, b=2, h=16, g=4, **options):
    """Return q, k, v, dout and dlse of the whole sequence, and a sink."""
    tensors = whole(mask, b=b, h=h, g=g, **options)
    return tensors, torch.linspace(-1, 2, h, dtype=tensors[0].dtype)


@functools.cache
def alone(mask, **options):
    """Return out, lse, dq, dk, dv, the gradient of the sink and the largest scores on one rank."""
    (q, k, v, dout, dlse), sink = sequence(mask)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    results = {"return_lse": True, "return_max_logits": True}
    out, lse, most = reference.attention(*leaves[:3], mask, sink=leaves[3], **results, **options)
    torch.autograd.backward((out, lse), (dout, dlse))
    return out.detach(), lse.detach(), *(x.grad for x in leaves), most


def over_mesh(half, schedule, mask, layout, group, **options):
    """Return the results of `alone` from the ranks of a mesh."""
    tensors, sink = sequence(mask)
    sink, largest = sink.clone().requires_grad_(), []
    layout = layout_of(schedule, mask.queries, layout.ranks, layout)
    call = attending(HALVES[half], schedule, mask, layout, group=group, sink=sink, **options)

    def attend(q, k, v):
        out, lse, most = call(q, k, v, return_max_logits=True)
        largest.append(most)
        return out, lse

    got = on_this_rank(attend, layout, tensors)
    dist.all_reduce(sink.grad)
    return (*got, sink.grad, *largest)


FIELDS = (*Attended._fields, "dsink", "largest")
