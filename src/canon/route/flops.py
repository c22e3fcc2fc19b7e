"""The FLOPs of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

    cells       of the mask, between this rank's queries and all keys
    forward     2 cells b h (d + dv)
    backward    2 cells b h (d + dv) for the scores and dout v^T, 2 cells b h d for dq, 2 cells b h
                (d + dv) for dk and dv

`latent_attention` also projects the tokens that this rank's queries see: 2 b tokens rows rank FLOPs
by up_weight (rows, rank), and in backward as many for K and V, for the gradient of the latents, and
for that of up_weight. Unneeded gradients and the repeated scores of ``backward="split"`` count 0,
as in torch's formula of `scaled_dot_product_attention`. So do dk and dv of rank_invariant=True.

`torch.utils.flop_counter` imports Triton, and `canon.reference` must not. So formulas are
registered at a call under a dispatch mode.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.rows import united
from canon.ranks.group import group_named
from canon.route.algorithm import DECLARATIONS, Declaration
from canon.route.call import mask_and_layout, place_of
from canon.route.checks import batched, default_mask


def register_formulas() -> None:
    """Register the formulas if flop_counter is loaded, also with active counters."""
    if (counting := sys.modules.get("torch.utils.flop_counter")) is None:
        return
    formulas = {}
    for function, declaration in DECLARATIONS.items():
        formulas[getattr(torch.ops.canon, function)] = partial(_forward, declaration)
        backward = getattr(torch.ops.canon, f"{function}_backward")
        formulas[backward] = partial(_backward, declaration)
    modes: list[Any] = [
        x for x in _get_current_dispatch_mode_stack() if isinstance(x, counting._FlopCounterMode)
    ]
    for registry in (counting.flop_registry, *(mode.counter.flop_registry for mode in modes)):
        for operator, formula in formulas.items():
            registry.setdefault(operator, formula)


def _forward(declaration: Declaration, *given: Any, out_val: Any, **keywords: Any) -> int:
    number = len(declaration.tensors)
    options = declaration.by_name(given[number:]) | keywords
    return _flops(declaration, given[:number], options)


def _backward(
    declaration: Declaration,
    needs_grad: list[bool],
    dout: Tensor,
    dlse: Tensor | None,
    *given: Any,
    out_val: Any,
    **keywords: Any,
) -> int:
    number = len(declaration.tensors)  # out, lse and kept follow
    options = declaration.by_name(given[number + 3 :]) | keywords
    needed = needs_grad[0], any(needs_grad[1:])
    projections = 1 + any(needs_grad[1:3]) + any(needs_grad[3:])
    return _flops(declaration, given[:number], options, *needed, projections)


def _flops(
    declaration: Declaration,
    tensors: Sequence[Tensor],
    options: dict[str, Any],
    dq: bool = False,
    dkdv: bool = False,
    projections: int = 1,
) -> int:
    q, k, *_ = tensors = batched(*tensors)
    shapes = tuple(x.shape for x in tensors)
    mask, columns = _local_mask(declaration, q, k, options)
    cells = mask.area * q.shape[0] * q.shape[2] // columns
    d, both = q.shape[-1], q.shape[-1] + declaration.value_width(shapes)
    more = projections * declaration.more_flops(shapes, mask)
    return 2 * cells * (both + d * dq + both * dkdv) + more


def _local_mask(
    declaration: Declaration, q: Tensor, k: Tensor, options: dict[str, Any]
) -> tuple[Mask, int]:
    """Return the mask of this rank's queries, and the ranks that share the heads."""
    mask: Mask | None = options["mask"] if options["has_mask"] else None
    layout: Layout | None = options["layout"] if options["has_layout"] else None
    if declaration.is_local:
        return default_mask(q, k, mask), 1
    place = place_of(declaration, group_named(options["group"]))
    invariant = options.get("rank_invariant", False)
    mask, layout = mask_and_layout(declaration, q, k, mask, layout, place, invariant)
    rows = layout if place.columns == 1 else united(layout, place.columns)
    return rows.local_mask(mask, place.rank // place.columns, range(rows.ranks)), place.columns
