"""The weight a = sigmoid(lse - sink) of attention under a sink (`canon.reference.local`), for
torch.compile.
"""

import torch
from torch import Tensor


def weighted(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return out (*b, t, h, dv) times a, in the dtype of out. ``lse`` (*b, h, t), ``sink`` (h,)."""
    return (over_width(sink_weight(lse, sink)) * out).to(out.dtype)


def sink_weight(lse: Tensor, sink: Tensor) -> Tensor:
    """Return a (*b, h, t), 0 for queries that see no key."""
    # -inf is replaced before the subtraction: -inf - -inf has the gradient NaN
    hidden = lse == -torch.inf
    return sigmoid(lse.masked_fill(hidden, 0) - sink[:, None]).masked_fill(hidden, 0)


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid. On a CPU, the last elements of `torch.sigmoid` may have other bits."""
    if not x.is_cpu:
        return torch.sigmoid(x)
    positive, y = x >= 0, x.double()
    e = torch.exp(torch.where(positive, -y, y))  # -abs(y) would have the gradient 0 at 0
    return (torch.where(positive, 1, e) / (1 + e)).to(x.dtype)


def over_width(x: Tensor) -> Tensor:
    """Return a row statistic (*b, h, t) as (*b, t, h, 1)."""
    return x.transpose(-1, -2)[..., None]
