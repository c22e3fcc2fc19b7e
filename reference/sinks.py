"""Attention sinks: a learned logit for each query head joins the denominator of the softmax, without a key or a value.

Let out_keys and lse be the results over the keys j that a query sees. A sink z enlarges the denominator:

    out = sum_j exp(score_j) v_j / (exp(lse) + exp(z)) = a out_keys           a = sigmoid(lse - z)

So the sink is applied once, after all keys: no merge and no message changes. The returned lse stays that of the keys alone, so
that parts still merge. With da / dlse = a (1 - a) = -da / dz and r = rowsum(dout * out_keys), the gradients are

    dout_keys = a dout         dlse gets a (1 - a) r more         dz = - sum over batch and tokens of a (1 - a) r

    sink    lse       a     gradients through it
    any     -inf      0     0: the query sees no key, and its dout may hold anything
    -inf    > -inf    1     dout_keys = dout; dlse and dz get 0: attention without a sink
    +inf    > -inf    0     0

Each rank computes dz from its own queries. Add the gradients of all ranks, as for every replicated parameter.

Cost: a few operations for each element of out; nothing is sent. Memory: a second (b, t, h, dv), because the backward pass reads
out_keys. Rounding: out_keys, its product with a, and dout_keys are each rounded to the dtype of q. The rest is float32 (float64
for float64).

Sources: Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023); learned logits: OpenAI, gpt-oss-120b &
gpt-oss-20b Model Card (2025).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from canon.runtime.call import Half
from canon.runtime.sink_weights import over_width, sink_weight, weighted


def under_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return out (*b, t, h, dv) under ``sink`` (h,)."""
    return _Sink.apply(out, lse, sink)


class _Sink(torch.autograd.Function):
    """out (*b, t, h, dv) times sigmoid(lse - sink), as a function of out, lse (*b, h, t) and sink (h,)."""

    @staticmethod
    def forward(ctx, out, lse, sink):
        ctx.save_for_backward(out, lse, sink)
        return weighted(out, lse, sink)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        out, lse, sink = ctx.saved_tensors
        a, visible = sink_weight(lse, sink), lse != -torch.inf
        dout = dout.to(lse.dtype).masked_fill(~over_width(visible), 0)
        r = (dout * out).sum(-1).transpose(-1, -2)
        dlse = torch.where(visible, a * torch.sigmoid(sink[:, None] - lse) * r, 0)  # 1 - a would cancel
        dsink = -dlse.transpose(-1, -2).reshape(-1, len(sink)).sum(0) if ctx.needs_input_grad[2] else None
        return (over_width(a) * dout).to(out.dtype), dlse, None if dsink is None else dsink.to(sink.dtype)


REFERENCE = Half("reference", under_sink)
