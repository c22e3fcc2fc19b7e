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
    """Return the sigmoid, in float64 on a CPU, which takes another exponential for the last float32
    elements.
    """
    return torch.sigmoid(x.double()).to(x.dtype) if x.is_cpu else torch.sigmoid(x)


def over_width(x: Tensor) -> Tensor:
    """Return a row statistic (*b, h, t) as (*b, t, h, 1)."""
    return x.transpose(-1, -2)[..., None]
