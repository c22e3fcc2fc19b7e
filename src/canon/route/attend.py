"""The one route of every attention function, from a public call to the passes of its algorithm
(`canon.reference` lists the steps). A traced program takes an operator.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canon.masks.arguments import flag
from canon.masks.layout import TILE, Layout, check_size
from canon.masks.mask import Mask, Masks
from canon.ranks.agreement import refused_together
from canon.route.algorithm import Algorithm
from canon.route.autograd import Attention, forward_pass
from canon.route.call import Arguments, Place, call_of, mask_and_layout, place_of
from canon.route.checks import (
    autocast_dtype,
    batched,
    cast,
    check_mask_type,
    check_sink,
    kind_of_sink,
    resolved,
)
from canon.route.differentiation import check_differentiation
from canon.route.operators import call_operator, is_traced
from canon.route.packing import (
    attend_each,
    attend_packed,
    block_diagonal,
    check_each_mask,
    differ,
    refuse_compilation,
    repeated,
)
from canon.route.plan_arguments import warn_of_planned
from canon.route.sink_weights import weighted


def attend(
    algorithm: Algorithm,
    tensors: tuple[Tensor, ...],
    mask: Masks | None,
    layout: Layout | None,
    sink: Tensor | None,
    return_lse: bool,
    options: dict[str, Any],
    group: Any = None,
) -> Tensor | tuple[Tensor, ...]:
    """Return out, or a tuple of out, lse and the largest scores.

    ``tensors``: those of the declaration, with a batch axis or packed. ``options``: the other
    arguments, in the order of the signature. Raises as `call_of`, and NotImplementedError under
    torch.func transforms and forward-mode differentiation.
    """
    q = tensors[0]
    if not isinstance(return_lse, bool):
        place = place_of(algorithm.declaration, group)
        with refused_together(algorithm.function, place.group, place.ranks):
            flag("return_lse", return_lse)
    if torch._C._is_any_autocast_enabled() and (dtype := autocast_dtype(q)) is not None:
        tensors = tuple(cast(x, dtype) for x in tensors)
        with torch.autocast(q.device.type, enabled=False):
            return attend(algorithm, tensors, mask, layout, sink, return_lse, options, group)
    if isinstance(mask, (tuple, list)):
        return _attend_each(algorithm, tensors, mask, layout, sink, return_lse, options, group)
    if is_traced():
        check_sink(q, sink)
        out, lse, max_logits = call_operator(
            algorithm, Arguments(tensors, mask, layout, group, options)
        )
    else:
        kind = None if sink is None else kind_of_sink(sink)
        arguments = Arguments(tensors, mask, layout, group, options, kind)
        call = call_of(algorithm, arguments)
        if any(map(Tensor.is_neg, tensors)):
            tensors = tuple(map(resolved, tensors))
            call = call_of(algorithm, arguments._replace(tensors=tensors))
        grads = torch.is_grad_enabled()
        needs_grad = tuple([grads and x.requires_grad for x in tensors])
        if call.ranks > 1:
            call.agree("forward", needs_grad)
        if sink is not None:
            check_sink(q, sink)  # the ranks agree on its kind
        check_differentiation(*tensors)
        given = batched(*tensors) if q.ndim == 3 else tensors
        if True in needs_grad:
            out, lse, max_logits = Attention.apply(call, *given)
        else:  # a graph would cost as much host time as the pass
            out, lse, max_logits, *_ = forward_pass(call, given)
        if q.ndim == 3:
            out, lse = out.squeeze(0), lse.squeeze(0)
    if sink is not None:
        if torch.compiler.is_compiling():
            out = weighted(out, lse, sink)
        else:
            out = algorithm.side.under_sink(out, lse, resolved(sink))
    if options["return_max_logits"]:
        return (out, lse, max_logits) if return_lse else (out, max_logits)
    return (out, lse) if return_lse else out


def _attend_each(
    algorithm: Algorithm,
    tensors: tuple[Tensor, ...],
    masks: Sequence[Mask],
    layout: Layout | None,
    sink: Tensor | None,
    return_lse: bool,
    options: dict[str, Any],
    group: Any,
) -> Tensor | tuple[Tensor, ...]:
    (q, k, v), more = tensors[:3], tensors[3:]
    attend_one = lambda q, k, v, mask: attend(
        algorithm, (q, k, v, *more), mask, layout, sink, return_lse, options, group
    )
    invariant = options.get("rank_invariant") is True
    if algorithm.declaration.is_local:
        return attend_each(attend_one, q, k, v, masks, on_tiles=invariant)
    refuse_compilation()
    place = place_of(algorithm.declaration, group)
    with refused_together(algorithm.function, place.group, place.ranks):
        algorithm.declaration.check(*tensors)
        layout = _layout_of_each(q, k, masks, layout, algorithm, invariant, place)
    return attend_packed(attend_one, q, k, v, masks) if masks else attend_one(q, k, v, None)


def _layout_of_each(
    q: Tensor, k: Tensor, masks: Sequence[Mask], layout: Layout | None, algorithm: Algorithm,
    rank_invariant: bool, place: Place,
) -> Layout:  # fmt: skip
    check_each_mask(q, k, masks, lambda q, k, mask, name: check_mask_type(mask, name))
    is_default = layout is None
    first = masks[0] if masks else None
    _, layout = mask_and_layout(algorithm.declaration, q, k, first, layout, place, rank_invariant)
    for number, mask in enumerate(masks):
        check_size(mask, layout, f"mask[{number}]")
    if not masks or not differ(masks):
        return layout
    if rank_invariant and layout.tokens % TILE:
        raise ValueError(
            f"{algorithm.function}: rank_invariant=True takes different masks for sequences of a "
            f"multiple of {TILE} tokens, got {layout.tokens}: pad them"
        )
    whole = block_diagonal(tuple(masks))
    warn_of_planned(algorithm.function, whole, layout, place.rank, place.columns, is_default, 6)
    return repeated(layout, len(masks))
