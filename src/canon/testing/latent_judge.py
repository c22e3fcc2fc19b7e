"""The oracle of `latent_attention` for `canon.testing.judge`: project, attend densely, and project the gradients back.

Honest results round K and V, and their gradients, to the dtype of q, as operands of matrix products. ``latent`` and ``k_rope``,
(b, t, 1, width) or without b, have the axis of one head, as their gradients here. Only hidden tokens may hold NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from canon.runtime.checks import Scale
from canon.testing.judge import Masks, Results, dense, oracle


class AttendedLatent(NamedTuple):
    """Results of latent attention. On several ranks, dup_weight is the sum of their gradients."""

    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dlatent: Tensor | None = None
    dk_rope: Tensor | None = None
    dup_weight: Tensor | None = None


def keys_of(latent: Tensor, k_rope: Tensor, up_weight: Tensor, heads: int, d: int) -> tuple[Tensor, Tensor]:
    """Return K (*b, t, heads, d) and V (*b, t, heads, dv) in the dtype of ``latent``, from the definition."""
    nope = d - k_rope.shape[-1]
    by_head = (latent @ up_weight.mT).squeeze(-2).unflatten(-1, (heads, -1))
    k_rope = k_rope.expand(*k_rope.shape[:-2], heads, -1)
    return torch.cat([by_head[..., :nope], k_rope], -1), by_head[..., nope:]


def latent_oracle(
    q: Tensor, latent: Tensor, k_rope: Tensor, up_weight: Tensor, dout: Tensor, mask: Masks, scale: Scale | None = None,
    dlse: Tensor | None = None,
) -> AttendedLatent:  # fmt: skip
    """Return dense latent attention and its gradients in float64."""
    tensors = (x.detach().double() for x in (q, latent, k_rope, up_weight, dout))
    return _attend(oracle, torch.float64, torch.float64, *tensors, mask, scale, dlse)


def latent_orders(
    q: Tensor, latent: Tensor, k_rope: Tensor, up_weight: Tensor, dout: Tensor, mask: Masks, scale: Scale | None = None,
    dlse: Tensor | None = None,
) -> list[AttendedLatent]:  # fmt: skip
    """Return four results in the dtype of q, with the orders of summation of `judge.dense`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tensors = [x.detach() for x in (q, latent, k_rope, up_weight, dout)]
    return [
        _attend(partial(dense, order=order), q.dtype, wide, *tensors, mask, scale, dlse) for order in range(4)
    ]  # fmt: skip


def _attend(
    judge: Callable[..., Results], narrow: torch.dtype, wide: torch.dtype, q: Tensor, latent: Tensor, k_rope: Tensor,
    up_weight: Tensor, dout: Tensor, mask: Masks, scale: Scale | None, dlse: Tensor | None,
) -> AttendedLatent:  # fmt: skip
    latent, weight = torch.where(latent.isfinite(), latent, 0).to(wide), up_weight.to(wide)
    k, v = (x.to(narrow) for x in keys_of(latent, k_rope.to(wide), weight, q.shape[-2], q.shape[-1]))
    of_keys = judge(q, k, v, dout, mask, scale, dlse)
    assert of_keys.dk is not None
    assert of_keys.dv is not None
    nope = q.shape[-1] - k_rope.shape[-1]
    rows = torch.cat([of_keys.dk[..., :nope], of_keys.dv], -1).to(wide).flatten(-2)
    dlatent, dk_rope = (rows @ weight).unsqueeze(-2), of_keys.dk[..., nope:].to(wide).sum(-2, keepdim=True)
    dup_weight = rows.flatten(0, -2).mT @ latent.flatten(0, -2)
    return AttendedLatent(*of_keys[:3], *(x.to(narrow) for x in (dlatent, dk_rope, dup_weight)))
