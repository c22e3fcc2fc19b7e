"""The collective of `Layout.unshard`: gather the tokens of all ranks, and return gradients to the owners of the tokens.

    forward                 all-gather of shards, padded to the largest one
    backward                take this rank's tokens of the gradient; nothing is sent
    backward, partial       all-to-all: a rank receives W summands for its tokens and adds them in rank order

Summands travel in the dtype of the tensor, because autograd has already rounded them to it. They are added in float32
(float64 for float64), and the sum is rounded once.

Cost for W ranks with t tokens each, T in all, of N elements: in the forward pass a rank receives (W - 1) max(t) N elements.
In the backward pass it receives (W - 1) t N elements if gradients are partial. Memory: W max(t) N elements besides the
full tensor; T N sent and W t N received in the backward pass.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Unshard(torch.autograd.Function):
    """Gather the tokens of all ranks: x (t, ...) -> (tokens, ...).

    A second derivative raises RuntimeError, because it would need the gradients of the other ranks.
    """

    @staticmethod
    def forward(ctx, x, layout, rank, group, partial_grad):
        ctx.call = layout, rank, group, partial_grad
        sizes = [layout.size(r) for r in range(layout.ranks)]
        if layout.ranks == 1:
            shards = [x]
        else:
            padded = x.new_zeros(max(sizes), *x.shape[1:])
            padded[: len(x)] = x
            shards = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(shards, padded, group=group)
        full = x.new_empty(layout.tokens, *x.shape[1:])
        for r, shard in enumerate(shards):
            full[layout.positions(r).to(x.device)] = shard[: sizes[r]]
        return full

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (full,) = grads
        layout, rank, group, partial_grad = ctx.call
        mine = layout.shard(full, rank, dim=0)
        if partial_grad and layout.ranks > 1:
            sizes = [layout.size(r) for r in range(layout.ranks)]
            send = torch.cat([layout.shard(full, r, dim=0) for r in range(layout.ranks)])
            received = full.new_empty(layout.ranks * sizes[rank], *full.shape[1:])
            dist.all_to_all_single(received, send, [sizes[rank]] * layout.ranks, sizes, group=group)
            mine = _sum_in_order(received.unflatten(0, (layout.ranks, sizes[rank])))
        return mine, None, None, None, None


def _sum_in_order(summands: Tensor) -> Tensor:
    """Return the sum over the first axis, added in rank order in float32 (float64 for float64) and rounded once."""
    total = summands[0].to(torch.promote_types(summands.dtype, torch.float32), copy=True)
    for summand in summands[1:]:
        total += summand
    return total.to(summands.dtype)
