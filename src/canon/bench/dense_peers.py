"""Compute attention with a dense mask, as models write it.

The scores of all heads are (b, h, n, keys). "eager" rounds them to the dtype: a score s changes its weight by s roundings,
while the judge expects one. So its bound is `EAGER_BOUND` times the judge's.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from canon.bench.shapes import Shape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
EAGER_BOUND = 8.0  # the size of scores of normally distributed q and k is rarely larger


def eager(scores_dtype: torch.dtype | None, shape: Shape, device: torch.device) -> Attend:
    """Return softmax(q k^T / sqrt(d) + mask) v, with scores and softmax in ``scores_dtype`` (None: of q)."""
    hidden = ~shape.mask.dense().to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _by_query_head(q, k, v)
        wide_q, wide_k = (x.to(scores_dtype or x.dtype) for x in (q, k))
        scores = torch.matmul(wide_q, wide_k.transpose(2, 3)) * shape.d**-0.5
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return torch.matmul(weights.to(v.dtype), v).transpose(1, 2)

    return attend


def masked_sdpa(shape: Shape, device: torch.device) -> Attend:
    """Return SDPA with a dense mask."""
    seen = shape.mask.dense().to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _by_query_head(q, k, v)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    return attend


def _by_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    return (q, k, v) if group == 1 else (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


MAKERS: dict[str, Callable[[Shape, torch.device], Attend]] = {
    "SDPA mask": masked_sdpa,
    "eager": partial(eager, None),
    "eager float32": partial(eager, torch.float32),
}
