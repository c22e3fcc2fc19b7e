"""Exchanges that write received tokens to their positions in the sequence, for `owner_computes.py`.

    `SequenceGather`    all tokens of some heads, for `strided_attention`: an all-gather of shards, padded to the largest
    `SequenceCast`      the needed tokens of all heads, for `magi_attention`: a group cast; other positions hold 0

Each brings two tensors (b, s, heads, width): K and V, q and dout, or lse and delta of width 1. A cast of queries follows the
plan of the transposed mask: the owner of a key receives the queries that see it.

Cost: bytes as in `owner_computes.py`. Memory: both tensors of the whole sequence, once as received and once in order.

Source: as `strided.py` and `magi.py`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from canon.masks.cast_plan import CastPlan
from canon.reference.group_collectives import GroupCast, cast_plan
from canon.reference.owner_computes import owner_backward, owner_forward
from canon.runtime.call import Call
from canon.runtime.rank_invariance import transposed


class SequenceGather:
    """An all-gather in flight, of some ``heads`` of x and y (b, t, all heads, width)."""

    def __init__(self, call: Call, pack_first: bool, x: Tensor, y: Tensor, heads: range | slice):
        own = [z[:, :, heads.start : heads.stop] for z in (x, y)]
        self.layout, self.widths, self.shards, self.requests = call.layout, [z.shape[-1] for z in own], [], []
        sizes = [call.layout.size(rank) for rank in range(call.ranks)]
        for z in [torch.cat(own, dim=-1)] if pack_first and heads.start == 0 else own:
            padded = z.new_zeros(z.shape[0], max(sizes), *z.shape[2:])
            padded[:, : z.shape[1]] = z
            self.shards.append([torch.empty_like(padded) for _ in sizes] if call.ranks > 1 else [padded])
            if call.ranks > 1:
                self.requests.append(dist.all_gather(self.shards[-1], padded, group=call.group, async_op=True))

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for the messages and return both tensors of all tokens, in the order of the sequence."""
        for request in self.requests:
            request.wait()
        full = []
        for shards in self.shards:
            made = shards[0].new_empty(shards[0].shape[0], self.layout.tokens, *shards[0].shape[2:])
            for rank, shard in enumerate(shards):
                made[:, self.layout.positions(rank).to(made.device)] = shard[:, : self.layout.size(rank)]
            full.append(made)
        x, y = full if len(full) == 2 else full[0].split(self.widths, dim=-1)
        return x, y


class SequenceCast:
    """A group cast in flight, of x and y (b, t, heads, width). ``received``: rows that an earlier cast has brought."""

    def __init__(self, call: Call, plan: CastPlan, x: Tensor, y: Tensor, received: Tensor | None = None):
        self.own = torch.cat([x, y], dim=-1).transpose(0, 1).contiguous()  # one row for each token
        self.widths, self.tokens = [x.shape[-1], y.shape[-1]], plan.layout.tokens
        pieces = [torch.arange(tokens.start, tokens.stop) for tokens in plan.keys(0, call.rank)]
        self.positions = torch.cat([torch.arange(0), *pieces]).to(x.device)
        self.received = self.own[:0] if received is None else received
        self.in_flight = GroupCast(self.own, plan, 0, call.group) if plan.casts and received is None else None

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for the messages and return both tensors: own and received tokens at their positions, 0 for all others."""
        if self.in_flight:
            self.received = self.in_flight.wait()
        full = self.own.new_zeros(self.tokens, *self.own.shape[1:])
        full[self.positions] = torch.cat([self.own, self.received])
        x, y = full.transpose(0, 1).split(self.widths, dim=-1)
        return x, y


def cast_passes(call: Call, plan: CastPlan, keep_kv: bool) -> tuple[Callable, Callable]:
    """Return both passes of `magi_attention` with ``rank_invariant=True``. They have one step for all heads."""
    query_plan = cast_plan(transposed(call.mask), call.layout, stages=0)
    fetch_queries = lambda x, y, heads: SequenceCast(call, query_plan, x, y)

    def forward(q, k, v):
        keys = SequenceCast(call, plan, k, v)
        out, lse = owner_forward(call, [range(k.shape[2])], lambda *_: keys, q, k, v)
        return out, lse, *([keys.received] if keep_kv else [])

    def differentiate(needs_grad, dout, dlse, q, k, v, out, lse, *kept):
        fetch_keys = lambda x, y, heads: SequenceCast(call, plan, x, y, *kept)
        return owner_backward(
            call, [range(k.shape[2])], fetch_keys, fetch_queries, needs_grad, dout, dlse, q, k, v, out, lse
        )

    return forward, differentiate
