"""The operators `canon::...`, for torch.compile, torch.export and dispatch modes such as selective checkpointing.

    canon::ring_attention             q, k, v, mask, layout, options -> out, lse, the largest scores (h,) or an empty tensor
    canon::ring_attention_backward    the gradients of out and lse, and all of that -> the needed ones of dq, dk, dv

There is a pair for each differentiable function, for both halves. `canon::latent_attention` has the tensors q, latent, k_rope,
up_weight. Eager calls do not use operators, because one costs more host time than an autograd Function. Both run the same
`Algorithm`. An operator finds its `Call` when it runs, not when it is traced.

A mask or a layout is an input of the compiled graph (`opaque`), so one graph serves all masks. Both are made outside of the
compiled region. A group travels as its name. Results own their memory and are contiguous, as the fake implementations say.

Limits: a replayed CUDA graph would compute with the mask of its capture, so Inductor's CUDA graphs leave the operators out.
The ranks do not compare the sink of a compiled call, so a sink that does not fit raises on its own rank only.
``keep_kv`` keeps as many rows as the mask needs: a compiled graph needs torch._dynamo.config.capture_dynamic_output_shape_ops.
A compiled function cannot use attributes or methods of masks and layouts, except `unshard` and `redistribute`.
FlopCounterMode counts FLOPs by the formulas of `flops.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.opaque import registered
from canon.ranks.group import group_named, name_of
from canon.route.autograd import NO_MAXIMA, NO_SECOND_DERIVATIVE, check_differentiation, surroundings
from canon.route.call import ALGORITHMS, Algorithm, Call, Half, call_of, tensors_of
from canon.route.checks import accumulate_dtype, batched, check_mask_type
from canon.route.flops import register_formulas
from canon.route.latent_arguments import NAMES as LATENT_NAMES
from canon.route.latent_arguments import sizes_of

MASK, LAYOUT = registered(Mask), registered(Layout, ("unshard", "redistribute"))
NO_MASK, NO_LAYOUT = Mask.full(0), Layout([[]], 0)  # an operator takes no optional opaque object
EXPORTS = torch.__version__ >= "2.13"
SCALE = "float? scale, float? softcap"
RANKS = f"{SCALE}, str group, ScalarType? reduce_dtype, str backward, bool return_max_logits, bool[] needs_grad"
STRIDES = ", ".join(f"int? {name}_stride" for name in ("forward_first", "backward_first", "backward_last"))
OPTIONS = {
    "attention": f"{SCALE}, str backward, bool rank_invariant, bool return_max_logits",
    "ring_attention": RANKS,
    "zigzag_attention": RANKS,
    "striped_attention": RANKS,
    "latent_attention": RANKS,
    "strided_attention": f"{RANKS}, bool rank_invariant, int? head_stride, {STRIDES}, str backward_schedule",
    "magi_attention": f"{RANKS}, bool rank_invariant, int? casts, bool? own_keys_first, int? stages, bool keep_kv",
}
TENSORS = {"latent_attention": LATENT_NAMES}  # of other functions: q, k, v
EXPECTED = (  # without and with a weight
    "q, k, v all (b, t, heads, width) or all packed (t, heads, width)",
    "q (b, t, h, d), latent and k_rope (b, t, 1, width), or all three without b, and up_weight (rows, rank)",
)
BODIES: dict[str, Callable] = {}  # by name of the operator; a dispatch mode can call them


def is_traced() -> bool:
    """Return whether a public function must call its operator: in a traced program, or in a dispatch mode."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def call_operator(
    algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Any, group: Any,
    options: dict[str, Any], weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (out, lse, largest scores) from the operator of a public function. Its body checks the arguments."""
    if not EXPORTS and torch.compiler._is_exporting_flag:  # in torch.compile, `is_exporting` of old versions is True
        raise RuntimeError("torch.export of canon needs torch >= 2.13: older versions do not take masks as constants")
    compiling, half, tensors = torch.compiler.is_compiling(), algorithm.half, tensors_of(algorithm, q, k, v, weight)
    if not compiling:
        register_formulas(OPTIONS, _options_by_name)
        check_differentiation(*tensors)
    if mask is not None:
        check_mask_type(mask)
    if not algorithm.is_local:
        needs_grad = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
        options = options | {"needs_grad": needs_grad, "group": name_of(group)}
    settings = _settings_at_compilation(half.name) if compiling else half.settings(None)
    operator = getattr(torch.ops.canon, algorithm.function).default
    mask, has_mask = (NO_MASK, False) if mask is None else (mask, True)
    layout, has_layout = (layout, True) if isinstance(layout, Layout) else (NO_LAYOUT, False)
    arguments = *tensors, mask, has_mask, layout, has_layout, half.name, settings
    out, lse, max_logits, *_ = operator(*arguments, **options)
    return out, lse, max_logits


def _settings_at_compilation(half: str) -> str | None:
    return ALGORITHMS[half, "attention"].half.settings(None)


# What torch.compiler.assume_constant_result sets; that function would import torch._dynamo with canon.
_settings_at_compilation._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@contextmanager
def _call(function: str, pass_name: str, tensors: Sequence[Tensor], options: Sequence[Any]) -> Iterator[Call]:
    """Find the call, with the settings of its half inside. If it has several ranks, they agree on its pass ``pass_name``."""
    mask, has_mask, layout, has_layout, half, settings, *values = options
    mask, layout = mask if has_mask else None, layout if has_layout else None
    algorithm, named = ALGORITHMS[half, function], dict(zip(_names(function), values, strict=True))
    group, needs_grad = group_named(named.pop("group", "")), named.pop("needs_grad", ())
    _check_settings(algorithm.half, settings)
    with algorithm.half.restored(settings):
        q, k, v, *weights = tensors
        call = call_of(algorithm, q, k, v, mask, layout, group, named, weight=weights[0] if weights else None)
        if call.ranks > 1:
            call.agree(pass_name, tuple(needs_grad))
        with surroundings(tensors[0], call, pass_name):
            yield call


def _check_settings(half: Half, settings: str | None) -> None:
    """Raise RuntimeError if another backend was chosen around a compiled function than at its compilation."""
    in_backward = torch._C._current_graph_task_id() != -1
    if not in_backward and (chosen := half.settings(None)) not in (None, settings):
        compiled = "outside of backend(...)" if settings is None else f"inside backend({settings!r})"
        raise RuntimeError(
            f"backend({chosen!r}) surrounds a function that was compiled {compiled}: compile another copy"
        )


def _names(function: str) -> list[str]:
    return [option.split()[1] for option in OPTIONS[function].split(", ")]


def _tensors(function: str) -> tuple[str, ...]:
    return TENSORS.get(function, ("q", "k", "v"))


def _options_by_name(function: str, values: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator after its first three tensors by name."""
    names = (*_tensors(function)[3:], "mask", "has_mask", "layout", "has_layout", "half", "settings", *_names(function))
    return dict(zip(names, values, strict=False)) | keywords


def _forward(function: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights, options = _parted(function, rest)
    with _call(function, "forward", (q, k, v, *weights), options) as call:
        maxima = call.maxima(batched(q)[0]) if call.options["return_max_logits"] else NO_MAXIMA
        out, lse, *kept = call.algorithm.forward(call, *batched(q, k, v), *weights, **maxima)
        max_logits = call.largest(**maxima) if maxima else lse.new_empty(0, dtype=torch.float32)
    results = [out.squeeze(0), lse.squeeze(0)] if q.ndim == 3 else [out, lse]
    results.append(max_logits)
    if function == "magi_attention":
        results.append(kept[0] if len(kept) == 1 else torch.cat([_rows(k, v, 0), *kept]))
    return tuple(map(_alone, results))


def _parted(function: str, rest: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Any]]:
    """Return the weights of a function, and its other arguments after q, k and v."""
    number = len(_tensors(function)) - 3
    return rest[:number], rest[number:]


def _backward(
    function: str, needs_grad: list[bool], dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    *rest: Any,
) -> list[Tensor]:  # fmt: skip
    weights, (out, lse, kept, *options) = _parted(function, rest)
    saved = dout, dlse, q, k, v, out, lse
    if q.ndim == 3:
        saved = [None if x is None else x.unsqueeze(0) for x in saved]
    with _call(function, "backward", (q, k, v, *weights), options) as call:
        saved = *saved, *weights
        if call.options.get("keep_kv") and call.algorithm.kept_rows:
            saved = *saved, *kept[0].split(call.algorithm.kept_rows(call))
        grads = call.algorithm.backward(call, tuple(needs_grad), *saved)
    if q.ndim == 3:
        grads = *(None if x is None else x.squeeze(0) for x in grads[:3]), *grads[3:]
    return [_alone(x) for x, needed in zip(grads, needs_grad, strict=True) if needed]


def _alone(x: Tensor) -> Tensor:
    """Return a contiguous tensor that shares its memory with no other tensor."""
    alone = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _rows(k: Tensor, v: Tensor, count: int | torch.SymInt) -> Tensor:
    """Allocate a row (b, g, d + dv) of K and V for each of ``count`` tokens."""
    b, _, g, d = batched(k)[0].shape
    return k.new_empty(count, b, g, d + v.shape[-1])


def _fake_forward(function: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights, _ = _parted(function, rest)
    no_weights = [x for x in weights if x.ndim != 2 or q.shape[-2] == 0]
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim or no_weights:  # other errors raise when it runs
        given = zip(_tensors(function), (q, k, v, *weights), strict=True)
        raise ValueError(
            f"expected {EXPECTED[bool(weights)]}, got {', '.join(f'{name} {tuple(x.shape)}' for name, x in given)}"
        )
    *batch, t, h, _ = q.shape
    width = max(0, sizes_of(q.shape, v.shape, weights[0].shape).value) if weights else v.shape[-1]
    named = _options_by_name(function, rest, {})
    max_logits = q.new_empty(h if named["return_max_logits"] else 0, dtype=torch.float32)
    lse = q.new_empty(*batch, h, t, dtype=accumulate_dtype(q.dtype))
    results = q.new_empty(*batch, t, h, width), lse, max_logits
    if function != "magi_attention":
        return results
    return *results, _rows(k, v, torch.library.get_ctx().new_dynamic_size() if named["keep_kv"] else 0)


def _fake_backward(
    needs_grad: list[bool], dout: Tensor, dlse: Tensor | None, *tensors_and_options: Any
) -> list[Tensor]:
    tensors = tensors_and_options[: len(needs_grad)]
    return [x.new_empty(x.shape) for x, needed in zip(tensors, needs_grad, strict=True) if needed]


def _save(number: int, ctx: Any, inputs: tuple, output: tuple) -> None:
    out, lse, max_logits, *kept = output
    ctx.mark_non_differentiable(max_logits)
    ctx.save_for_backward(*inputs[:number], out, lse, *kept)
    ctx.options = inputs[number:]
    ctx.set_materialize_grads(False)


def _differentiate(function: str, ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple:
    number, options, saved = len(_tensors(function)), ctx.options, ctx.saved_tensors  # a checkpoint unpacks them once
    tensors, (out, lse, *kept) = saved[:number], saved[number:]
    needs_grad = list(ctx.needs_input_grad[:number])
    if dout is None and dlse is None:
        return (None,) * (number + len(options))
    dout = torch.zeros_like(out) if dout is None else dout
    operator = getattr(torch.ops.canon, f"{function}_backward").default
    grads = iter(operator(needs_grad, dout, dlse, *tensors, out, lse, kept, *options))
    return *(next(grads) if needed else None for needed in needs_grad), *(None for _ in options)


def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


def _define(function: str, options: str) -> None:
    """Register the operators of a function, their fake implementations and their autograd formulas."""
    options = f"{MASK} mask, bool has_mask, {LAYOUT} layout, bool has_layout, str half, str? settings, {options}"
    names = _tensors(function)
    tensors, results = ", ".join(f"Tensor {name}" for name in names), ["Tensor out", "Tensor lse", "Tensor max_logits"]
    if function == "magi_attention":
        results.append("Tensor kept")
    forward = _operator(function, f"({tensors}, {options}) -> ({', '.join(results)})", partial(_forward, function))
    forward.register_fake(partial(_fake_forward, function))
    forward.register_autograd(partial(_differentiate, function), setup_context=partial(_save, len(names)))
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
