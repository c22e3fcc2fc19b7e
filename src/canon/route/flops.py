"""The FLOPs of the operators, for `torch.utils.flop_counter.FlopCounterMode`. Visible cells count, not the dense square.

    cells       of the mask, between this rank's queries and the keys of all ranks; so the ranks' counts add up
    forward     2 cells b h (d + dv)
    backward    2 cells b h (d + dv) for the scores and dout v^T, 2 cells b h d for dq, 2 cells b h (d + dv) for dk and dv

`latent_attention` also projects the tokens that this rank's queries see, by up_weight (rows, rank): 2 b tokens rows rank FLOPs
more forward. Backward has as many more for K and V, for the gradient of the latents, and for that of up_weight.

Unneeded gradients count 0. The repeated scores of ``backward="split"`` count 0, as in torch's formula of
`scaled_dot_product_attention`. With ``rank_invariant=True``, dk and dv are computed, but not counted, by the owner of the keys.

`torch.utils.flop_counter` imports Triton, and `canon.reference` must not. So formulas are registered after a program has
imported it: at a call under a dispatch mode. Under such a mode, torch runs compiled functions in eager mode.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.ranks.group import group_named
from canon.route.call import ALGORITHMS, mask_and_layout
from canon.route.checks import batched, default_mask
from canon.route.latent_arguments import sizes_of

Named = Callable[[str, tuple, dict[str, Any]], dict[str, Any]]


def register_formulas(functions: Iterable[str], named: Named) -> None:
    """Register the formulas if flop_counter is loaded, also with the counters that are active.

    ``named(function, arguments, keywords)`` returns all arguments of an operator after q, k and v, by name.
    """
    if (counting := sys.modules.get("torch.utils.flop_counter")) is None:
        return
    formulas = {}
    for function in functions:
        formulas[getattr(torch.ops.canon, function)] = partial(_forward, named, function)
        formulas[getattr(torch.ops.canon, f"{function}_backward")] = partial(_backward, named, function)
    modes: list[Any] = [x for x in _get_current_dispatch_mode_stack() if isinstance(x, counting._FlopCounterMode)]
    for registry in (counting.flop_registry, *(mode.counter.flop_registry for mode in modes)):
        for operator, formula in formulas.items():
            registry.setdefault(operator, formula)


def _forward(
    named: Named, function: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any, **keywords: Any
) -> int:
    options = named(function, rest, keywords)
    local = _local_mask(function, q, k, options)
    return 2 * _cells(q, local) * (q.shape[-1] + _value_width(q, v, options)) + _projection(q, local, options)


def _backward(
    named: Named, function: str, needs_grad: list[bool], dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
    v: Tensor, *rest: Any, out_val: Any, **keywords: Any,
) -> int:  # fmt: skip
    weights = 1 if function == "latent_attention" else 0
    options = named(function, (*rest[:weights], *rest[weights + 3 :]), keywords)  # without out, lse and kept
    local = _local_mask(function, q, k, options)
    d, both = q.shape[-1], q.shape[-1] + _value_width(q, v, options)
    attended = 2 * _cells(q, local) * (both + d * needs_grad[0] + both * any(needs_grad[1:]))
    return attended + (1 + any(needs_grad[1:3]) + any(needs_grad[3:])) * _projection(q, local, options)


def _value_width(q: Tensor, v: Tensor, options: dict[str, Any]) -> int:
    weight = options.get("up_weight")
    return v.shape[-1] if weight is None else sizes_of(q.shape, v.shape, weight.shape).value


def _projection(q: Tensor, local: Mask, options: dict[str, Any]) -> int:
    """Return the FLOPs of one projection of the visible keys of each sequence, 0 for a function without one."""
    if (weight := options.get("up_weight")) is None:
        return 0
    tokens = sum(map(len, local.needed_keys([range(local.queries)])))
    return 2 * batched(q)[0].shape[0] * tokens * weight.numel()


def _cells(q: Tensor, local: Mask) -> int:
    """Return the visible cells, over all sequences and query heads."""
    q = batched(q)[0]
    return local.area * q.shape[0] * q.shape[2]


def _local_mask(function: str, q: Tensor, k: Tensor, options: dict[str, Any]) -> Mask:
    """Return the mask between this rank's queries and all keys."""
    mask: Mask | None = options["mask"] if options["has_mask"] else None
    layout: Layout | None = options["layout"] if options["has_layout"] else None
    (q, k), algorithm = batched(q, k), ALGORITHMS[options["half"], function]
    if algorithm.is_local:
        return default_mask(q, k, mask)
    group = group_named(options["group"])
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    mask, layout = mask_and_layout(algorithm, q, k, mask, layout, rank, ranks, options.get("rank_invariant", False))
    return layout.local_mask(mask, rank, range(ranks))
