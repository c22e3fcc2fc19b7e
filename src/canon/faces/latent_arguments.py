"""The arguments of `latent_attention`, and their checks. Inside canon, latent and k_rope have an
axis of one head: (b, t, 1, width).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
from canon.route.checks import check_alike, check_tensor

NAMES = "q", "latent", "k_rope", "up_weight"


class LatentSizes(NamedTuple):
    """The heads, and the widths of K without its shared part, that part, V, and the latent."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


def sizes_of(q: torch.Size, k_rope: torch.Size, up_weight: torch.Size) -> LatentSizes:
    """Return the sizes of valid arguments."""
    heads, nope = q[-2], q[-1] - k_rope[-1]
    return LatentSizes(heads, nope, k_rope[-1], up_weight[0] // heads - nope, up_weight[1])


def with_head(x: Tensor) -> Tensor:
    """Return (*b, t, width) as (*b, t, 1, width)."""
    return x.unsqueeze(-2) if isinstance(x, Tensor) and x.ndim else x


def check_latent(q: Tensor, latent: Tensor, k_rope: Tensor, up_weight: Tensor) -> None:
    """Raise unless the tensors fit together."""
    tensors = q, latent, k_rope, up_weight
    for name, x in zip(NAMES, tensors, strict=True):
        check_tensor(name, x)
    if not q.ndim == latent.ndim == k_rope.ndim or q.ndim not in (3, 4):
        wrong = (
            "expected q (b, t, h, d), latent (b, t, rank) and k_rope (b, t, rope), or all "
            "three without b"
        )
    elif not q.shape[:-2] == latent.shape[:-2] == k_rope.shape[:-2]:
        wrong = "q, latent and k_rope must share the batch and the tokens"
    elif 0 in (q.shape[-2], k_rope.shape[-1], latent.shape[-1]) or q.shape[-1] <= k_rope.shape[-1]:
        wrong = "q must be wider than k_rope, and no width may be 0"
    elif (
        up_weight.ndim != 2 or up_weight.shape[1] != latent.shape[-1] or _value_width(*tensors) < 1
    ):
        wrong = (
            "up_weight must be (h * (d - rope + dv), rank), the weight of a torch.nn.Linear "
            "from latents to K and V"
        )
    else:
        check_alike(NAMES, tensors)
        return
    of_token = (tuple(x.shape[:-2] + x.shape[-1:]) for x in (latent, k_rope))
    shapes = zip(NAMES, (tuple(q.shape), *of_token, tuple(up_weight.shape)), strict=True)
    raise ValueError(f"{wrong}, got {', '.join(f'{name} {shape}' for name, shape in shapes)}")


def _value_width(q: Tensor, latent: Tensor, k_rope: Tensor, up_weight: Tensor) -> int:
    rows, heads = up_weight.shape[0], q.shape[-2]
    return 0 if rows % heads else rows // heads - (q.shape[-1] - k_rope.shape[-1])


def value_width(shapes: Sequence[torch.Size]) -> int | torch.SymInt:
    """Return the width of V."""
    return sizes_of(shapes[0], shapes[2], shapes[3]).value


def projection_flops(shapes: Sequence[torch.Size], mask: Mask) -> int:
    """Return the FLOPs of one projection of the tokens that a query sees."""
    tokens = sum(map(len, mask.needed_keys([range(mask.queries)])))
    return 2 * shapes[0][0] * tokens * shapes[3].numel()


def latent_shapes(
    queries: int, keys: int, heads: tuple[int, int], widths: tuple[int, int]
) -> list[tuple[int, ...]]:
    """Return shapes without a batch axis. No plan depends on the widths of latent and k_rope."""
    if heads[0] != heads[1]:
        raise ValueError(
            "latent_attention projects a key head for each query head: heads must "
            f"be {heads[:1] * 2}"
        )
    (h, _), (d, dv) = heads, widths
    return [(queries, h, d), (keys, 1, 1), (keys, 1, 1), (h * (d - 1 + dv), 1)]


@cached_plan
def hidden_keys(mask: Mask) -> tuple[range, ...]:
    """Return the keys that no query sees."""
    seen = mask.needed_keys([range(mask.queries)])
    edges = zip([0, *(x.stop for x in seen)], [*(x.start for x in seen), mask.keys], strict=True)
    return tuple(range(*pair) for pair in edges if pair[0] < pair[1])


def visible_only(x: Tensor, mask: Mask) -> Tensor:
    """Return x (b, keys, 1, width) with 0 at hidden keys: a NaN there would reach a weight."""
    if hidden := hidden_keys(mask):
        x = x.clone()
        for keys in hidden:
            x[:, keys.start : keys.stop] = 0
    return x
