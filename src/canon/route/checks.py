"""Checks of tensors and options, and their defaults. A wrong type raises TypeError, a value that
does not fit ValueError.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon.masks.arguments import nested, shown
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import are_noted, cached_plan
from canon.ranks.profiling import recorded
from canon.route.differentiation import check_differentiation

METHODS = ("auto", "fused", "split", "head_parallel")
# of |dS| = |P (dout v^T - delta)| in float16, where `canon.fast` rounds dS to the dtype of q
LARGEST_DS = 65504.0
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NAMES_OF_DTYPES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


class CappedScale(NamedTuple):
    """The scale of a call with a soft-cap: a score is softcap * tanh(scale * q k / softcap)."""

    scale: float
    softcap: float


Scale = float | CappedScale  # a number alone: a score is scale * q k


def split_scale(scale: Scale) -> tuple[float, float | None]:
    """Return the number and the soft-cap, if any."""
    return scale if isinstance(scale, CappedScale) else (scale, None)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial results and of lse: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def any_device(x: Tensor) -> None:
    """Accept every device."""


def batched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return packed tensors (t, h, d) with a batch axis, others unchanged."""
    return tuple(x.unsqueeze(0) if x.ndim == 3 else x for x in tensors)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v fit together."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        check_tensor(name, x)
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        wrong = "expected q, k, v all (b, t, heads, width) or all packed (t, heads, width)"
    elif q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1]:
        wrong = "q, k, v must share the batch, and k, v their tokens and heads"
    elif q.shape[-1] != k.shape[-1] or 0 in (q.shape[-1], v.shape[-1]):
        wrong = "q and k must have one width, and no width may be 0"
    else:
        wrong = ""
    if wrong:
        raise ValueError(f"{wrong}, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if 0 in (q.shape[-2], k.shape[-2]) or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} query heads are not a multiple of {k.shape[-2]} key heads")
    check_alike(("q", "k", "v"), (q, k, v))


def check_alike(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless the tensors share a dtype of `DTYPES` and a device."""
    shared = f"{', '.join(names)} must"
    if len({x.dtype for x in tensors}) > 1 or tensors[0].dtype not in DTYPES:
        given = ", ".join(str(x.dtype) for x in tensors)
        raise ValueError(f"{shared} share one dtype of {NAMES_OF_DTYPES}, got {given}: cast them")
    if len({x.device for x in tensors}) > 1:
        given = ", ".join(str(x.device) for x in tensors)
        raise ValueError(f"{shared} be on one device, got {given}: move them")


def check_tensor(name: str, x: Any) -> None:
    """Raise unless ``x`` is a plain dense tensor with data, and as `check_differentiation`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if hasattr(x, "to_local"):
        raise TypeError(f"{name} is a DTensor: pass {name}.to_local(), the tokens of this rank")
    dispatch = getattr(type(x), "__torch_dispatch__", None)
    if x.is_nested or dispatch is not getattr(Tensor, "__torch_dispatch__", None):
        kind = "NestedTensor" if x.is_nested else f"{type(x).__name__}, a tensor subclass"
        raise TypeError(f"{name} is a {kind}: pass a plain torch.Tensor")
    if not torch.compiler.is_compiling():
        check_differentiation(x)
    if x.layout is not torch.strided or x.is_quantized:
        raise ValueError(
            f"{name} must be a dense tensor, got layout {x.layout}: pass {name}.to_dense()"
        )
    if x.device.type == "meta" and not are_noted():  # plans are made ahead on tensors without data
        raise ValueError(f"{name} is on the meta device and has no data: move it to a CPU or a GPU")


def check_mask(q: Tensor, k: Tensor, mask: Mask, name: str = "mask") -> None:
    """Raise unless the mask fits the tokens of q and k."""
    check_mask_type(mask, name)
    if (mask.queries, mask.keys) != (q.shape[-3], k.shape[-3]):
        raise ValueError(
            (
                f"{name} is {mask.queries} queries x {mask.keys} keys, q holds {q.shape[-3]} "
                f"tokens and k {k.shape[-3]}"
            )
            + transpose_hint((q, mask.queries), (k, mask.keys))
        )


def transpose_hint(*expected: tuple[Tensor, int]) -> str:
    """Return a remedy if the tensors have the expected tokens on the axis of heads."""
    swapped = all(x.ndim == 4 and x.shape[2] == tokens != x.shape[1] for x, tokens in expected)
    return ": pass x.transpose(1, 2) if tensors are (b, heads, t, width)" if swapped else ""


def warn_of_heads_first(function: str, q: Tensor, k: Tensor, mask: Any, layout: Any) -> None:
    """Warn if tensors may be (b, heads, t, width)."""
    if mask is None and layout is None and 0 < q.shape[-3] < q.shape[-2] == k.shape[-2]:
        warnings.warn(
            f"{function} reads tensors as (b, t, heads, width), and these have fewer tokens than "
            "heads. If they are (b, heads, t, width), pass x.transpose(1, 2). If they are not, "
            "pass a mask, as Mask.causal(tokens of the sequence)",
            stacklevel=6,  # the caller's line
        )


def check_mask_type(mask: Any, name: str = "mask") -> None:
    """Raise TypeError unless ``mask`` is a Mask."""
    refuse_numbers(mask, name)
    if isinstance(mask, (tuple, list)):
        raise TypeError(
            f"{name} must be one canon.Mask or None, got a {type(mask).__name__}: one Mask serves "
            "the whole batch here, so pack the sequences into one and pass Mask.concat(masks)"
        )
    if not isinstance(mask, Mask):
        expected = "a canon.Mask or None" if name == "mask" else "a canon.Mask"
        raise TypeError(
            f"{name} must be {expected}, got {type(mask).__name__}: build one with Mask.causal, ..."
        )


def check_layout_type(layout: Any) -> None:
    """Raise TypeError unless ``layout`` is a Layout or None."""
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(
            f"layout must be a canon.Layout or None, got {type(layout).__name__}: build one with "
            "Layout.zigzag, ..."
        )


def refuse_numbers(mask: Any, name: str = "mask") -> None:
    """Raise TypeError if ``mask`` holds whole numbers, such as cu_seqlens."""
    # a compiler cannot look for attributes of a Mask
    numbers = None if isinstance(mask, Mask) else nested(mask)
    if (
        isinstance(numbers, (tuple, list))
        and numbers
        and all(type(number) is int for number in numbers)
    ):
        raise TypeError(
            f"{name} must be a canon.Mask, got {shown(mask)}: for packed documents pass "
            "Mask.documents(cu_seqlens)"
        )


def check_gradients(
    dout: Tensor,
    q: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of `attention_backward` fit q, k, v."""
    of_out = (*q.shape[:-1], v.shape[-1])
    of_lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    for name, x, shape in (
        ("dout", dout, of_out),
        ("out", out, of_out),
        ("lse", lse, of_lse),
        ("dlse", dlse, of_lse),
        ("delta", delta, of_lse),
    ):
        if x is None:
            continue
        check_tensor(name, x)
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, as q is, got {x.device}: move it")
        wide = accumulate_dtype(q.dtype)
        if x.dtype != wide and (shape == of_lse or x.dtype != q.dtype):
            raise ValueError(f"{name} must be {wide} beside q in {q.dtype}, got {x.dtype}: cast it")
    if dlse is not None and delta is not None:
        raise ValueError(
            "pass dlse or delta, not both: delta = rowsum(dout * out) - dlse includes dlse"
        )


def check_method(name: str, method: str) -> None:
    """Raise ValueError unless ``method`` is one of the backward methods."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"{name}={method!r}: expected one of {', '.join(map(repr, METHODS))}")


def check_sink(q: Tensor, sink: Tensor | None) -> None:
    """Raise unless ``sink`` is None or has a logit for each head of q."""
    if sink is None:
        return
    check_tensor("sink", sink)
    if tuple(sink.shape) != (q.shape[-2],):
        raise ValueError(
            f"sink must be ({q.shape[-2]},), a logit for each query head, got {tuple(sink.shape)}"
        )
    if sink.dtype not in (torch.float32, q.dtype):
        names = dict.fromkeys(
            str(dtype).removeprefix("torch.") for dtype in (torch.float32, q.dtype)
        )
        raise ValueError(f"sink must be {' or '.join(names)}, got {sink.dtype}: cast it")
    if sink.device != q.device:
        raise ValueError(f"sink must be on {q.device}, as q is, got {sink.device}: move it")


def kind_of_sink(sink: Tensor | None) -> str | None:
    """Return all that decides the result of `check_sink`, to be compared."""
    if not isinstance(sink, Tensor):
        return None if sink is None else type(sink).__name__
    return (
        f"{type(sink).__name__} {tuple(sink.shape)} {sink.dtype} {sink.device.type} {sink.layout}"
    )


def default_mask(q: Tensor, k: Tensor, mask: Mask | None) -> Mask:
    """Return ``mask``, or the causal mask for None."""
    if mask is None:
        if q.shape[-3] != k.shape[-3]:
            raise ValueError(
                (
                    f"mask=None is causal and needs as many queries as keys, got {q.shape[-3]}, "
                    f"{k.shape[-3]}"
                )
                + transpose_hint((q, k.shape[-2]))
            )
        return cached(Mask.causal, q.shape[-3])
    check_mask(q, k, mask)
    return mask


def default_scale(q: Tensor, scale: float | None, softcap: float | None = None) -> Scale:
    """Return ``scale``, 1 / sqrt(d) for None, with the soft-cap."""
    number = q.shape[-1] ** -0.5 if scale is None else _number("scale", scale, "multiply q instead")
    cap = checked_softcap(softcap)
    return number if cap is None else CappedScale(number, cap)


def checked_dtype(name: str, dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """Return ``dtype``, one of `DTYPES`, or the default for None."""
    if dtype is None:
        return default
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"{name} must be None or one of {NAMES_OF_DTYPES}, got {dtype}")
    return dtype


def checked_softcap(softcap: float | None) -> float | None:
    """Return the soft-cap, None or a positive number."""
    if softcap is None:
        return None
    cap = _number("softcap", softcap, "it is a constant of the model")
    if not 1e-30 <= cap <= 1e30:  # else it, or its inverse, is no float32
        raise ValueError(f"softcap must be None or a number from 1e-30 to 1e30, got {cap}")
    return cap


def _number(name: str, x: Any, remedy: str) -> float:
    if isinstance(x, Tensor) and x.device.type != "cpu":
        raise TypeError(
            f"{name} is a tensor on {x.device}, for which each call would wait: pass "
            "a Python number"
        )
    if isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad:
        x = x.item()
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} must be a number without a gradient, got {shown(x)}: {remedy}")
    if not math.isfinite(number := float(x)):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def under_autocast(*names: str) -> Callable:
    """Decorate a function: under autocast, cast the arguments ``names`` to its dtype, and run
    without autocast. torch.profiler shows its name.
    """

    def _decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @wraps(function)
        def _called(*args, **kwargs):
            args, kwargs = map(resolved, args), {name: resolved(x) for name, x in kwargs.items()}
            with recorded(function.__name__):
                if not torch._C._is_any_autocast_enabled():
                    return function(*args, **kwargs)
                given = signature.bind(*args, **kwargs).arguments
                first = next(iter(given.values()))
                if (dtype := autocast_dtype(first)) is None:
                    return function(**given)
                given |= {name: cast(given[name], dtype) for name in names if name in given}
                with torch.autocast(first.device.type, enabled=False):
                    return function(**given)

        return _called

    return _decorate


def resolved(x: Any) -> Any:
    """Return a view of negated numbers as a copy: kernels read memory."""
    return x.resolve_neg() if isinstance(x, Tensor) and x.is_neg() else x


def autocast_dtype(x: Any) -> torch.dtype | None:
    """Return the dtype of autocast on the device of x, if it is on and x a tensor."""
    if not isinstance(x, Tensor) or x.device.type not in ("cpu", "cuda"):
        return None
    return (
        torch.get_autocast_dtype(x.device.type)
        if torch.is_autocast_enabled(x.device.type)
        else None
    )


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Return a floating tensor in ``dtype``; anything else, float64 too, unchanged."""
    return (
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
    )


@cached_plan
def cached(make: Any, *sizes: int) -> Any:
    """Return ``make(*sizes)``, a default mask or layout, from a cache."""
    return make(*sizes)
