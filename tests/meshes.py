"""Calls over a mesh ("tokens", "heads"), and the same on one rank."""

import functools

import torch
import torch.distributed as dist
from sharded import attending, layout_of, on_this_rank, whole

from canon import Mask, reference
from canon.testing.judge import Attended

FIELDS = (*Attended._fields, "dsink", "largest")
MASKS = {
    "causal": Mask.causal(37),
    "documents": Mask.documents([0, 5, 6, 20, 37]),
    "window": Mask.window(37, 6, 0),
    "full": Mask.full(37),
    "tree": Mask.tree([-1, 0, 1, 0, -1], [9, 5, 8, 7, 8]),
    "one token": Mask.causal(1),
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
    (*tensors, dout, dlse), sink = sequence(mask)
    *leaves, z = [x.clone().requires_grad_() for x in (*tensors, sink)]
    results = {"return_lse": True, "return_max_logits": True}
    out, lse, largest = reference.attention(*leaves, mask, sink=z, **results, **options)
    torch.autograd.backward((out, lse), (dout, dlse))
    return out.detach(), lse.detach(), *(x.grad for x in (*leaves, z)), largest


def over_mesh(half, schedule, mask, layout, group, given=None, **options):
    """Return the results of `alone` from the ranks of a mesh."""
    tensors, sink = given or sequence(mask)
    sink, largest = sink.clone().requires_grad_(), []
    layout = layout_of(schedule, mask.queries, layout.ranks, layout)
    call = attending(half, schedule, mask, layout, group=group, sink=sink, **options)

    def attend(q, k, v):
        out, lse, most = call(q, k, v, return_max_logits=True)
        largest.append(most)
        return out, lse

    got = on_this_rank(attend, layout, tensors)
    dist.all_reduce(sink.grad)
    return (*got, sink.grad, *largest)
