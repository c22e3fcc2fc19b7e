"""The operators `canon::...`, for torch.compile, torch.export and dispatch modes.

    canon::ring_attention             q, k, v, mask, layout, options -> out, lse, the largest scores
                                      (h,) or an empty tensor
    canon::ring_attention_backward    the gradients of out and lse, and all of that -> the needed
                                      ones of dq, dk, dv

A pair serves both halves. Eager calls take an autograd Function, which costs less host time. An
operator finds its `Call` when it runs. Masks and layouts are inputs of the graph (`opaque`), so one
graph serves all. A group travels as its name. Results own their memory and are contiguous.

Limits: Inductor's CUDA graphs leave the operators out, as a replay would have the mask of its
capture. A wrong sink of a compiled call raises on its own rank only. Others:
paper/in_your_program.md#torchcompile-and-torchexport.
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
from canon.route.algorithm import (
    ALGORITHMS,
    DECLARATIONS,
    PLACED,
    SIDES,
    Algorithm,
    Declaration,
    Side,
)
from canon.route.autograd import surroundings
from canon.route.call import Arguments, Call, call_of
from canon.route.checks import (
    accumulate_dtype,
    batched,
    check_layout_type,
    check_mask_type,
)
from canon.route.differentiation import NO_SECOND_DERIVATIVE, check_differentiation
from canon.route.flops import register_formulas

MASK, LAYOUT = registered(Mask), registered(Layout, ("unshard", "redistribute"))
NO_MASK, NO_LAYOUT = Mask.full(0), Layout([[]], 0)  # an operator takes no optional opaque object
EXPORTS = torch.__version__ >= "2.13"
BODIES: dict[str, Callable] = {}  # by name of the operator; a dispatch mode can call them


def is_traced() -> bool:
    """Return whether a public function must call its operator."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def call_operator(algorithm: Algorithm, given: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, largest scores) from the operator of a public function."""
    # in torch.compile, `is_exporting` of old versions is True
    if not EXPORTS and torch.compiler._is_exporting_flag:
        raise RuntimeError(
            "torch.export of canon needs torch >= 2.13: older versions do not take "
            "masks as constants"
        )
    tensors, mask, layout, group, options, _ = given
    compiling, side = torch.compiler.is_compiling(), algorithm.side
    if not compiling:
        register_formulas()
        check_differentiation(*tensors)
    if mask is not None:
        check_mask_type(mask)
    check_layout_type(layout)
    if not algorithm.declaration.is_local:
        needs_grad = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
        options = options | {"group": name_of(group), "needs_grad": needs_grad}
    settings = _settings_at_compilation(side.name) if compiling else side.settings(None)
    operator = getattr(torch.ops.canon, algorithm.function).default
    mask, has_mask = (NO_MASK, False) if mask is None else (mask, True)
    layout, has_layout = (NO_LAYOUT, False) if layout is None else (layout, True)
    arguments = *tensors, mask, has_mask, layout, has_layout, side.name, settings
    out, lse, max_logits, *_ = operator(*arguments, **options)
    return out, lse, max_logits


def _settings_at_compilation(side: str) -> str | None:
    return SIDES[side].settings(None)


# as torch.compiler.assume_constant_result, which would import torch._dynamo
_settings_at_compilation._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@contextmanager
def _call(
    function: str, pass_name: str, tensors: Sequence[Tensor], options: Sequence[Any]
) -> Iterator[Call]:
    """Find the call, with the settings of its half inside. Several ranks compare it."""
    named = DECLARATIONS[function].by_name(options)
    mask, has_mask, layout, has_layout, half, settings = (named.pop(name) for name in PLACED)
    mask, layout = mask if has_mask else None, layout if has_layout else None
    algorithm = ALGORITHMS[half, function]
    group, needs_grad = group_named(named.pop("group", "")), named.pop("needs_grad", ())
    _check_settings(algorithm.side, settings)
    with algorithm.side.restored(settings):
        call = call_of(algorithm, Arguments(tuple(tensors), mask, layout, group, named))
        if call.ranks > 1:
            call.agree(pass_name, tuple(needs_grad))
        with surroundings(tensors[0], call, pass_name):
            yield call


def _check_settings(side: Side, settings: str | None) -> None:
    in_backward = torch._C._current_graph_task_id() != -1
    if not in_backward and (chosen := side.settings(None)) not in (None, settings):
        compiled = (
            "outside of backend(...)" if settings is None else f"inside backend({settings!r})"
        )
        raise RuntimeError(
            f"backend({chosen!r}) surrounds a function that was compiled {compiled}: compile "
            "another copy"
        )


def _forward(declaration: Declaration, *given: Any) -> tuple[Tensor, ...]:
    tensors, options = _parted(declaration, given)
    packed = tensors[0].ndim == 3
    with _call(declaration.name, "forward", tensors, options) as call:
        if call.columns > 1 and declaration.keeps and call.options[declaration.keeps]:
            raise NotImplementedError(
                f"{declaration.name}: a compiled call over a mesh keeps no tensors: leave "
                f"{declaration.keeps} out"
            )
        tensors = batched(*tensors)
        out, lse, max_logits, *kept = call.forward(tensors)
        kept = [] if call.columns > 1 else kept  # the backward pass exchanges its tensors again
    results = [out.squeeze(0), lse.squeeze(0)] if packed else [out, lse]
    results.append(lse.new_empty(0, dtype=torch.float32) if max_logits is None else max_logits)
    if declaration.keeps:
        results.append(kept[0] if len(kept) == 1 else torch.cat([_rows(*tensors[1:3], 0), *kept]))
    return tuple(map(_alone, results))


def _parted(
    declaration: Declaration, given: Sequence[Any]
) -> tuple[Sequence[Tensor], Sequence[Any]]:
    number = len(declaration.tensors)
    return given[:number], given[number:]


def _backward(
    declaration: Declaration, needs_grad: list[bool], dout: Tensor, dlse: Tensor | None, *given: Any
) -> list[Tensor]:
    tensors, (out, lse, kept, *options) = _parted(declaration, given)
    packed = tensors[0].ndim == 3
    with _call(declaration.name, "backward", tensors, options) as call:
        of_results = [
            None if x is None else x.unsqueeze(0) if packed else x for x in (dout, dlse, out, lse)
        ]
        saved = (*batched(*tensors), *of_results[2:])
        if declaration.keeps and call.options[declaration.keeps] and call.algorithm.kept_rows:
            saved = *saved, *kept[0].split(call.algorithm.kept_rows(call))
        grads = call.passes[1](call, tuple(needs_grad), *of_results[:2], *saved)
    if packed:
        grads = (None if x is None else x.squeeze(0) if x.ndim == 4 else x for x in grads)
    return [_alone(x) for x, needed in zip(grads, needs_grad, strict=True) if needed]


def _alone(x: Tensor) -> Tensor:
    """Return a contiguous tensor that shares no memory."""
    size = x.numel() * x.element_size()  # 0: empty tensors may share it
    alone = size and x.is_contiguous() and x.untyped_storage().nbytes() == size
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _rows(k: Tensor, v: Tensor, count: int | torch.SymInt) -> Tensor:
    b, _, g, d = batched(k)[0].shape
    return k.new_empty(count, b, g, d + v.shape[-1])


def _fake_forward(declaration: Declaration, *given: Any) -> tuple[Tensor, ...]:
    tensors, rest = _parted(declaration, given)
    q, k, v, *weights = tensors
    no_weights = [x for x in weights if x.ndim != 2 or q.shape[-2] == 0]
    # other errors raise when it runs
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim or no_weights:
        shapes = ", ".join(
            f"{name} {tuple(x.shape)}" for name, x in zip(declaration.tensors, tensors, strict=True)
        )
        raise ValueError(f"expected {declaration.expected}, got {shapes}")
    *batch, t, h, _ = q.shape
    width = max(0, declaration.value_width(tuple(x.shape for x in tensors)))
    named = declaration.by_name(rest)
    max_logits = q.new_empty(h if named["return_max_logits"] else 0, dtype=torch.float32)
    lse = q.new_empty(*batch, h, t, dtype=accumulate_dtype(q.dtype))
    results = q.new_empty(*batch, t, h, width), lse, max_logits
    if not declaration.keeps:
        return results
    return *results, _rows(
        k, v, torch.library.get_ctx().new_dynamic_size() if named[declaration.keeps] else 0
    )


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


def _differentiate(
    declaration: Declaration, ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any
) -> tuple:
    # a checkpoint unpacks them once
    number, options, saved = len(declaration.tensors), ctx.options, ctx.saved_tensors
    tensors, (out, lse, *kept) = saved[:number], saved[number:]
    needs_grad = list(ctx.needs_input_grad[:number])
    if dout is None and dlse is None:
        return (None,) * (number + len(options))
    dout = torch.zeros_like(out) if dout is None else dout
    operator = getattr(torch.ops.canon, f"{declaration.name}_backward").default
    grads = iter(operator(needs_grad, dout, dlse, *tensors, out, lse, kept, *options))
    return *(next(grads) if needed else None for needed in needs_grad), *(None for _ in options)


def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


def declared(face: Callable[[Algorithm], Callable[..., Any]], **more: Any) -> Declaration:
    """Declare a public attention function, and register its operators."""
    declaration = Declaration(face, **more)
    DECLARATIONS[declaration.name] = declaration
    options = [
        f"{MASK} mask, bool has_mask, {LAYOUT} layout, bool has_layout, str half, str? settings",
        declaration.schema,
    ]
    options += [] if declaration.is_local else ["str group, bool[] needs_grad"]
    given = ", ".join([f"Tensor {name}" for name in declaration.tensors]), ", ".join(options)
    results = ["Tensor out", "Tensor lse", "Tensor max_logits"] + ["Tensor kept"] * bool(
        declaration.keeps
    )
    forward = _operator(
        declaration.name,
        f"({', '.join(given)}) -> ({', '.join(results)})",
        partial(_forward, declaration),
    )
    forward.register_fake(partial(_fake_forward, declaration))
    number = len(declaration.tensors)
    forward.register_autograd(
        partial(_differentiate, declaration), setup_context=partial(_save, number)
    )
    of_results = "bool[] needs_input_grad, Tensor dout, Tensor? dlse"
    saved = "Tensor out, Tensor lse, Tensor[] kept"
    schema = f"({of_results}, {given[0]}, {saved}, {given[1]}) -> Tensor[]"
    backward = _operator(f"{declaration.name}_backward", schema, partial(_backward, declaration))
    backward.register_fake(_fake_backward)
    backward.register_autograd(_refuse)
    return declaration


def _operator(name: str, schema: str, body: Callable) -> torch.library.CustomOpDef:
    BODIES[name] = body
    tags = [torch.Tag.cudagraph_unsafe]
    return torch.library.custom_op(
        f"canon::{name}", body, mutates_args=(), schema=schema, tags=tags
    )
