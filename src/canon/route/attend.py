"""The one route of every attention function, from a public call to the passes of its algorithm.

ring_attention(q, k, v, ...)      public signature and docstring (`public_ranks.py`), bound to both halves
attend(algorithm, q, k, v, ...)   autocast, one look-up of the `Call`, agreement between ranks, sink
Attention.forward                 an autograd Function (`autograd.py`); a traced program takes an operator (`operators.py`)
algorithm.forward(call, q, k, v)  the algorithm of a half
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canon.masks.layout import TILE, Layout
from canon.masks.mask import Mask
from canon.ranks.agreement import refused_together
from canon.ranks.group import place_in
from canon.route.autograd import Attention, check_differentiation
from canon.route.call import Algorithm, call_of, mask_and_layout, tensors_of
from canon.route.checks import autocast_dtype, batched, cast, check_mask_type, check_sink, kind_of_sink
from canon.route.operators import call_operator, is_traced
from canon.route.packing import attend_each, attend_packed, check_each_mask, differ, refuse_compilation, repeated
from canon.route.plan_arguments import check_size
from canon.route.sink_weights import weighted


def attend(
    algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Sequence[Mask] | None, layout: Layout | None,
    sink: Tensor | None, return_lse: bool, options: dict[str, Any], group: Any = None, weight: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Return out, or a tuple of out, lse and the largest scores. out and lse are differentiable in all tensors.

    Args: q, k, v with a batch axis, or packed without it; ``mask``, one for all or a sequence of them; ``options``, the
    other arguments of the public function by name; ``weight``, the fourth tensor of a function that has one.
    Raises NotImplementedError under torch.func transforms and forward-mode differentiation. A second derivative raises
    RuntimeError when it is computed. Arguments that do not fit raise as in `call_of`.
    """
    if torch._C._is_any_autocast_enabled() and (dtype := autocast_dtype(q)) is not None:
        q, k, v, weight = (cast(x, dtype) for x in (q, k, v, weight))
        with torch.autocast(q.device.type, enabled=False):
            return attend(algorithm, q, k, v, mask, layout, sink, return_lse, options, group, weight)
    if isinstance(mask, (tuple, list)):
        return _attend_each(algorithm, q, k, v, mask, layout, sink, return_lse, options, group, weight)
    if is_traced():
        check_sink(q, sink)
        out, lse, max_logits = call_operator(algorithm, q, k, v, mask, layout, group, options, weight)
    else:
        kind = None if sink is None else kind_of_sink(sink)
        call = call_of(algorithm, q, k, v, mask, layout, group, options, kind, weight)
        weights = () if weight is None else (weight,)
        if call.ranks > 1:
            grads = torch.is_grad_enabled()
            call.agree("forward", tuple([grads and x.requires_grad for x in (q, k, v, *weights)]))
        if sink is not None:
            check_sink(q, sink)  # the ranks agree on its kind: a wrong sink raises on all of them
        check_differentiation(q, k, v, weight)
        if q.ndim == 3:
            out, lse, max_logits = Attention.apply(*batched(q, k, v), call, *weights)
            out, lse = out.squeeze(0), lse.squeeze(0)
        else:
            out, lse, max_logits = Attention.apply(q, k, v, call, *weights)
    if sink is not None:
        under_sink = weighted if torch.compiler.is_compiling() else algorithm.half.under_sink
        out = under_sink(out, lse, sink)
    if options["return_max_logits"]:
        return (out, lse, max_logits) if return_lse else (out, max_logits)
    return (out, lse) if return_lse else out


def _attend_each(
    algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Mask], layout: Layout | None,
    sink: Tensor | None, return_lse: bool, options: dict[str, Any], group: Any, weight: Tensor | None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Return the results of `attend` with a mask for each sequence (`packing.py`)."""
    attend_one = lambda q, k, v, mask: attend(
        algorithm, q, k, v, mask, layout, sink, return_lse, options, group, weight
    )
    if algorithm.is_local:
        return attend_each(attend_one, q, k, v, masks, on_tiles=options["rank_invariant"] is True)
    refuse_compilation()
    checked, rank, ranks = place_in(algorithm.function, group)
    with refused_together(algorithm.function, checked, ranks):
        invariant = options.get("rank_invariant") is True
        algorithm.check(*tensors_of(algorithm, q, k, v, weight))
        layout = _layout_of_each(q, k, masks, layout, algorithm, invariant, rank, ranks)
    return attend_packed(attend_one, q, k, v, masks) if masks else attend_one(q, k, v, None)


def _layout_of_each(
    q: Tensor, k: Tensor, masks: Sequence[Mask], layout: Layout | None, algorithm: Algorithm,
    rank_invariant: bool, rank: int, ranks: int,
) -> Layout:  # fmt: skip
    """Return the layout of the packed batch, or of one sequence if the masks are equal. Raise if a mask does not fit it."""
    check_each_mask(q, k, masks, lambda q, k, mask, name: check_mask_type(mask, name))
    _, layout = mask_and_layout(algorithm, q, k, masks[0] if masks else None, layout, rank, ranks, rank_invariant)
    for place, mask in enumerate(masks):
        check_size(mask, layout, f"mask[{place}]")
    if not masks or not differ(masks):
        return layout
    if rank_invariant and layout.tokens % TILE:
        raise ValueError(
            f"{algorithm.function}: rank_invariant=True takes different masks for sequences of a multiple of {TILE} tokens, "
            f"got {layout.tokens}: pad them"
        )
    return repeated(layout, len(masks))
