"""The operators `canon::...`, for torch.compile, torch.export and dispatch modes such as selective checkpointing.

    canon::ring_attention             q, k, v, mask, layout, options -> out, lse
    canon::ring_attention_backward    the gradients of out and lse, and all of that -> the needed ones of dq, dk, dv

There is a pair for each differentiable function, for both halves. Eager calls do not use them, because an operator costs
about 10 us more than an autograd Function. Both run the same `Passes`: the function that checks the arguments, on all ranks
together, returns the forward and the backward pass of a call. An operator calls it when it runs, not when it is traced.

A mask or a layout is an input of the compiled graph (`opaque`), so one graph serves all masks. Both are made outside of the
compiled region. A group travels as its name. Results own their memory and are contiguous, as the fake implementations say.

Limits: a replayed CUDA graph would compute with the mask of its capture, so Inductor's CUDA graphs leave the operators out.
The ranks do not compare the sink of a compiled call, so a sink that does not fit raises on its own rank only.
``keep_kv`` keeps as many rows as the mask needs: a compiled graph needs torch._dynamo.config.capture_dynamic_output_shape_ops.
A compiled function cannot use attributes or methods of masks and layouts. FlopCounterMode counts no FLOPs of an operator.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.opaque import registered
from canon.runtime.autograd import NO_SECOND_DERIVATIVE, check_differentiation, surroundings
from canon.runtime.checks import accumulate_dtype, batched, check_mask_type
from canon.runtime.group import group_named, name_of
from canon.runtime.passes import MAKERS, Passes

MASK, LAYOUT = registered(Mask), registered(Layout)
NO_MASK, NO_LAYOUT = Mask.full(0), Layout([[]], 0)  # an operator takes no optional opaque object
EXPORTS = torch.__version__ >= "2.13"
RANKS = "float? scale, str group, ScalarType? reduce_dtype, str backward, bool[] needs_grad"
STRIDES = ", ".join(f"int? {name}_stride" for name in ("forward_first", "backward_first", "backward_last"))
OPTIONS = {
    "attention": "float? scale, str backward, bool rank_invariant",
    "ring_attention": RANKS,
    "zigzag_attention": RANKS,
    "striped_attention": RANKS,
    "strided_attention": f"{RANKS}, bool rank_invariant, int head_stride, {STRIDES}, bool pack_first, str backward_schedule",
    "magi_attention": f"{RANKS}, bool rank_invariant, int stages, bool keep_kv",
}
BODIES: dict[str, Callable] = {}  # by name of the operator; a dispatch mode can call them


def is_traced() -> bool:
    """Return whether a public function must call its operator: in a traced program, or in a dispatch mode."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def call_operator(
    half: str, function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Any,
    *, kernels: str | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out, lse) from the operator of a public function. Its body checks the arguments.

    ``kernels``: the kernel backend of `canon.fast.backend`. ``options``: the other arguments of the function.
    """
    if torch.compiler.is_exporting() and not EXPORTS:
        raise RuntimeError("torch.export of canon needs torch >= 2.13: older versions do not take masks as constants")
    if not torch.compiler.is_compiling():
        check_differentiation(q, k, v)
    if mask is not None:
        check_mask_type(mask)
    if function != "attention":
        options["needs_grad"] = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
        options["group"] = name_of(options["group"])
    operator = getattr(torch.ops.canon, function).default
    mask, has_mask = (NO_MASK, False) if mask is None else (mask, True)
    layout, has_layout = (layout, True) if isinstance(layout, Layout) else (NO_LAYOUT, False)
    out, lse, *_ = operator(q, k, v, mask, has_mask, layout, has_layout, half, kernels, **options)
    return out, lse


def _passes(function: str, pass_name: str, tensors: Sequence[Tensor], options: Sequence[Any]) -> Passes:
    """Return the passes of a call. If it has several ranks, they agree on its pass ``pass_name``."""
    mask, has_mask, layout, has_layout, half, kernels, *values = options
    mask, layout = mask if has_mask else None, layout if has_layout else None
    named = dict(zip(_names(function), values, strict=True)) | ({} if kernels is None else {"kernels": kernels})
    make = MAKERS[half, function]
    if function == "attention":
        return make(function, *tensors, mask, layout, **named)
    named["group"], needs_grad = group_named(named["group"]), named.pop("needs_grad")
    # Below autograd no tensor needs a gradient. The ranks compare whether it is needed, as in eager calls.
    tensors = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, needs_grad, strict=True)]
    with torch.set_grad_enabled(any(needs_grad)):
        return make(function, *tensors, mask, layout, pass_name=pass_name, **named)


def _names(function: str) -> list[str]:
    return [option.split()[1] for option in OPTIONS[function].split(", ")]


def _forward(function: str, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    passes = _passes(function, "forward", (q, k, v), options)
    with surroundings(q, passes.call, "forward"):
        out, lse, *kept = passes.forward(*batched(q, k, v))
    results = [out.squeeze(0), lse.squeeze(0)] if q.ndim == 3 else [out, lse]
    if function == "magi_attention":
        results.append(kept[0] if len(kept) == 1 else torch.cat([_rows(k, v, 0), *kept]))
    return tuple(map(_alone, results))


def _backward(
    function: str, needs_grad: list[bool], dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, kept: list[Tensor], *options: Any,
) -> list[Tensor]:  # fmt: skip
    passes = _passes(function, "backward", (q, k, v), options)
    saved = dout, dlse, q, k, v, out, lse
    if q.ndim == 3:
        saved = [None if x is None else x.unsqueeze(0) for x in saved]
    if passes.kept_rows is not None:
        saved = *saved, *kept[0].split(passes.kept_rows())
    with surroundings(q, passes.call, "backward"):
        grads = passes.backward(tuple(needs_grad), *saved)
    grads = [x.squeeze(0) if q.ndim == 3 else x for x, needed in zip(grads, needs_grad, strict=True) if needed]
    return list(map(_alone, grads))


def _alone(x: Tensor) -> Tensor:
    """Return a contiguous tensor that shares its memory with no other tensor."""
    alone = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _rows(k: Tensor, v: Tensor, count: int | torch.SymInt) -> Tensor:
    """Allocate a row (b, g, d + dv) of K and V for each of ``count`` tokens."""
    b, _, g, d = batched(k)[0].shape
    return k.new_empty(count, b, g, d + v.shape[-1])


def _fake_forward(function: str, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        raise ValueError(
            "expected q, k, v all (b, t, heads, width) or all packed (t, heads, width), "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    *batch, t, h, _ = q.shape
    results = q.new_empty(*batch, t, h, v.shape[-1]), q.new_empty(*batch, h, t, dtype=accumulate_dtype(q.dtype))
    if function != "magi_attention":
        return results
    keep_kv = options[-1]
    return *results, _rows(k, v, torch.library.get_ctx().new_dynamic_size() if keep_kv else 0)


def _fake_backward(
    needs_grad: list[bool], dout: Tensor, dlse: Tensor | None, *tensors_and_options: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, needed in zip(tensors_and_options[:3], needs_grad, strict=True) if needed]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]
    ctx.set_materialize_grads(False)


def _differentiate(function: str, ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple:
    q, k, v, out, lse, *kept = ctx.saved_tensors
    needs_grad, options = list(ctx.needs_input_grad[:3]), ctx.options
    if dout is None and dlse is None:
        return (None,) * (3 + len(options))
    dout = torch.zeros_like(out) if dout is None else dout
    operator = getattr(torch.ops.canon, f"{function}_backward").default
    grads = iter(operator(needs_grad, dout, dlse, q, k, v, out, lse, kept, *options))
    return *(next(grads) if needed else None for needed in needs_grad), *(None for _ in options)


def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


def _define(function: str, options: str) -> None:
    """Register the operators of a function, their fake implementations and their autograd formulas."""
    options = f"{MASK} mask, bool has_mask, {LAYOUT} layout, bool has_layout, str half, str? kernels, {options}"
    tensors, results = "Tensor q, Tensor k, Tensor v", ["Tensor out", "Tensor lse"]
    if function == "magi_attention":
        results.append("Tensor kept")
    forward = _operator(function, f"({tensors}, {options}) -> ({', '.join(results)})", partial(_forward, function))
    forward.register_fake(partial(_fake_forward, function))
    forward.register_autograd(partial(_differentiate, function), setup_context=_save)
    of_results = "bool[] needs_input_grad, Tensor dout, Tensor? dlse"
    schema = f"({of_results}, {tensors}, Tensor out, Tensor lse, Tensor[] kept, {options}) -> Tensor[]"
    backward = _operator(f"{function}_backward", schema, partial(_backward, function))
    backward.register_fake(_fake_backward)
    backward.register_autograd(_refuse)


def _operator(name: str, schema: str, body: Callable) -> torch.library.CustomOpDef:
    BODIES[name] = body
    tags = [torch.Tag.cudagraph_unsafe]
    return torch.library.custom_op(f"canon::{name}", body, mutates_args=(), schema=schema, tags=tags)


for _function, _options in OPTIONS.items():
    _define(_function, _options)
