"""A training step with the same bits on any number of ranks: every sum over tokens has one owner
and one order.

    the sequence        block 0    block 1   block 2   block 3   128 tokens each, on any rank
    all but attention   copy 0     copy 1    copy 2    copy 3    copies of the model, same weights
    gradients           g0         g1        g2        g3        one for each block
    all ranks           ((g0 + g1) + g2) + g3                    the same sum everywhere

A matrix product may add in another order if its number of rows changes. So each block is computed
alone, with the same shapes on every rank. The gradient of a weight is a sum over all tokens. Each
copy has the sum over its block. One all-reduce brings the parts of all blocks to all ranks: each
part comes from one owner, and the others add zeros. Then every rank adds them in the order of the
sequence. Attention is the only part that mixes blocks, and has ``rank_invariant=True``.

Cost: B blocks take B times the memory and the traffic of one gradient, and small matrix products.
It is for comparisons."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

BLOCK = 128  # tokens; the pieces of the layout begin at its multiples


class InBlocks:
    """A model for ``tokens`` tokens, computed in blocks. `backward` replaces the passes of DDP and
    the loss.
    """

    def __init__(self, model: Any, tokens: int, autocast: Any):
        self.model, self.autocast = model, autocast
        self.copies = [copy.deepcopy(model) for _ in range(tokens // BLOCK)]
        for one in self.copies:
            for shared, parameter in zip(one.parameters(), model.parameters(), strict=True):
                shared.data = parameter.data  # the optimizer changes all copies at once

    def backward(self, batch: Any) -> Tensor:
        """Return the loss. Afterwards each parameter of the model has the gradient of the mean over
        all tokens.
        """
        rank = dist.get_rank() if batch.layout.ranks > 1 else 0
        # numbers of blocks in the sequence
        mine = (batch.layout.positions(rank)[::BLOCK] // BLOCK).tolist()
        labels = batch.part["shift_labels"].split(BLOCK, dim=1)
        with self.autocast():
            logits = self.logits([self.copies[number] for number in mine], batch)
        sums = [
            cross_entropy(x[0].float(), y[0], reduction="sum")
            for x, y in zip(logits, labels, strict=True)
        ]
        losses = torch.zeros(len(self.copies), device=labels[0].device)
        counts = losses.long()
        for number, own, label in zip(mine, sums, labels, strict=True):
            losses[number], counts[number] = own.detach(), (label >= 0).sum()
        valid = from_owners(counts).sum()
        torch.autograd.backward([own / valid for own in sums])
        self.add_gradients()
        return in_order(from_owners(losses)) / valid

    def logits(self, copies: list[Any], batch: Any) -> list[Tensor]:
        """Return the logits of each block."""
        ids, positions = (batch.part[name].split(BLOCK, dim=1) for name in ("ids", "position_ids"))
        xs = [model.text(x) for model, x in zip(copies, ids, strict=True)]
        for layer in range(len(self.model.blocks)):
            blocks = [model.blocks[layer] for model in copies]
            parts = [
                block.before(*each) for block, *each in zip(blocks, xs, positions, strict=True)
            ]
            out = batch.attend(*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)))
            xs = [
                block.after(*each)
                for block, *each in zip(blocks, xs, out.split(BLOCK, dim=1), strict=True)
            ]
        return [model.head(model.norm(x)) for model, x in zip(copies, xs, strict=True)]

    def add_gradients(self) -> None:
        """Set the gradient of each parameter to the sum over all blocks."""
        for parameter, *shared in zip(
            self.model.parameters(), *(x.parameters() for x in self.copies), strict=True
        ):
            parts = torch.stack([torch.zeros_like(x) if x.grad is None else x.grad for x in shared])
            parameter.grad = in_order(from_owners(parts))
            for x in shared:
                x.grad = None


def from_owners(parts: Tensor) -> Tensor:
    """Return the parts of all blocks. A rank passes its own, and zeros for the others."""
    if dist.is_initialized():
        dist.all_reduce(parts)
    return parts


def in_order(parts: Tensor) -> Tensor:
    """Return the sum of the parts along their first axis, one after the other."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total
