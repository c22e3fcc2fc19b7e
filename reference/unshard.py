"""The collective behind `Layout.unshard`: every rank's tokens are gathered, and gradients return to their owner.

    forward                 all-gather, shards padded to the largest one
    backward                this rank's part of the gradient; nothing is sent
    backward, partial       all-to-all: a rank receives the summands of its tokens, and adds them in rank order

Summands travel in the dtype of the tensor, because autograd has rounded them to it already. The sum is float32
(float64 for float64) and is rounded once.

Cost: of W ranks, T tokens and N elements a token, a rank receives (W - 1) max(t) N elements forward, and (W - 1) t N
backward where gradients are partial. Memory: W max(t) N elements besides the full tensor, then T N and W t N.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Unshard(torch.autograd.Function):
    """Gather the tokens of all ranks: x [t, ...] -> [tokens, ...]. Raise RuntimeError for a second derivative.

    A second derivative would need the gradients of the other ranks.
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
    """Add the rows of [ranks, ...] from the first to the last in float32 (float64 for float64), and round once."""
    total = summands[0].to(torch.promote_types(summands.dtype, torch.float32), copy=True)
    for summand in summands[1:]:
        total += summand
    return total.to(summands.dtype)
