"""The oracle of `latent_attention` for `canon.testing.judge`: project, attend densely, and project
the gradients back.

Honest results round K, V and their gradients to the dtype of q. ``latent`` and ``k_rope`` have the
axis of one head, (b, t, 1, width) or without b. Only hidden tokens may hold NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon.testing.judge import EXACT, UNIT, Results, dense, oracle
from canon.testing.roundings import roundings, rss


class AttendedLatent(NamedTuple):
    """Results of latent attention; dup_weight and dsink are sums over all ranks."""

    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dlatent: Tensor | None = None
    dk_rope: Tensor | None = None
    dup_weight: Tensor | None = None
    dsink: Tensor | None = None


def keys_of(
    latent: Tensor, k_rope: Tensor, up_weight: Tensor, heads: int, d: int
) -> tuple[Tensor, Tensor]:
    """Return K (*b, t, heads, d) and V (*b, t, heads, dv) in the dtype of ``latent``."""
    nope = d - k_rope.shape[-1]
    by_head = (latent @ up_weight.mT).squeeze(-2).unflatten(-1, (heads, -1))
    k_rope = k_rope.expand(*k_rope.shape[:-2], heads, -1)
    return torch.cat([by_head[..., :nope], k_rope], -1), by_head[..., nope:]


def latent_oracle(q, latent, k_rope, up_weight, dout, *options: Any) -> AttendedLatent:
    """Return dense latent attention and its gradients in float64. ``options``: as `oracle`'s."""
    tensors = (x.detach().double() for x in (q, latent, k_rope, up_weight, dout))
    return _attend(oracle, torch.float64, torch.float64, *tensors, *options)


def latent_orders(*given: Any) -> list[AttendedLatent]:
    """Return the same in the dtype of q, for four orders of `judge.dense`."""
    given = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
    dtypes = given[0].dtype, torch.promote_types(given[0].dtype, torch.float32)
    return [_attend(partial(dense, order=order), *dtypes, *given) for order in range(4)]


def _attend(
    judge: Callable[..., Results],
    narrow: torch.dtype,
    wide: torch.dtype,
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    up_weight: Tensor,
    dout: Tensor,
    *options: Any,
) -> AttendedLatent:
    latent, weight = torch.where(latent.isfinite(), latent, 0).to(wide), up_weight.to(wide)
    k, v = (
        x.to(narrow) for x in keys_of(latent, k_rope.to(wide), weight, q.shape[-2], q.shape[-1])
    )
    of_keys = judge(q, k, v, dout, *options)
    assert of_keys.dk is not None
    assert of_keys.dv is not None
    nope = q.shape[-1] - k_rope.shape[-1]
    rows = torch.cat([of_keys.dk[..., :nope], of_keys.dv], -1).to(wide).flatten(-2)
    dlatent = (rows @ weight).unsqueeze(-2)
    dk_rope = of_keys.dk[..., nope:].to(wide).sum(-2, keepdim=True)
    dup_weight = rows.flatten(0, -2).mT @ latent.flatten(0, -2)
    return AttendedLatent(
        *of_keys[:3], *(x.to(narrow) for x in (dlatent, dk_rope, dup_weight)), *of_keys[5:]
    )


def latent_roundings(q, latent, k_rope, up_weight, dout, *options: Any) -> AttendedLatent:
    """Return the distances of `roundings`, with the largest change when K and V move by one
    rounding up or down, drawn four times.
    """
    narrow = torch.finfo(q.dtype).eps if q.dtype.itemsize == 2 else 0.0
    wide = EXACT if q.dtype == torch.float64 else UNIT
    (h, d), nope = q.shape[-2:], q.shape[-1] - k_rope.shape[-1]
    c, weight = torch.where(latent.isfinite(), latent, 0).double(), up_weight.double()
    keys = keys_of(c, k_rope.double(), weight, h, d)
    sizes = keys_of(c.abs(), k_rope.double(), weight.abs(), h, d)
    sizes = [wide * size + narrow * x.abs() for size, x in zip(sizes, keys, strict=True)]
    sizes[0][..., nope:] = 0  # no rounding changes k_rope
    exact, draw = oracle(q, *keys, dout, *options), torch.Generator().manual_seed(0)
    reach = roundings(q, *keys, dout, *options)
    changes = []
    for _ in range(4):
        signs = (2 * torch.randint(2, x.shape, generator=draw).to(x.device) - 1 for x in keys)
        moved = (x + sign * size for x, sign, size in zip(keys, signs, sizes, strict=True))
        changed = oracle(q, *moved, dout, *options)
        changes.append([(x - y).abs().nan_to_num(0.0) for x, y in zip(changed, exact, strict=True)])
    reach = [x + torch.stack(moved).amax(0) for x, *moved in zip(reach, *changes, strict=True)]
    rows = torch.cat([exact.dk[..., :nope], exact.dv], -1).flatten(-2).abs()
    of_rows = torch.cat([reach[3][..., :nope], reach[4]], -1).flatten(-2) + narrow * rows
    dlatent = rss(of_rows, weight) + wide * rows @ weight.abs()
    rows, of_rows, c = (x.flatten(0, -2) for x in (rows, of_rows, c))
    dup_weight = rss(of_rows.mT, c) + wide * rows.mT @ c.abs()
    of_rope, dk_rope = (x[..., nope:] for x in (reach[3], exact.dk))
    dk_rope = of_rope.norm(dim=-2, keepdim=True) + wide * dk_rope.abs().sum(-2, keepdim=True)
    return AttendedLatent(*reach[:3], dlatent.unsqueeze(-2), dk_rope, dup_weight, *reach[5:])
