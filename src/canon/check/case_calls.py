"""Call a function of a module for a case: its shards, its options, both passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon import reference
from canon.check.cases import DTYPES, OPTIONAL, REPLICATED, TAKE_A_LAYOUT, Case
from canon.check.inputs import Inputs, placed
from canon.masks.layout import mask_between
from canon.reference import Layout
from canon.route.checks import accumulate_dtype
from canon.testing.judge import Attended, AttendedWithSink, Results
from canon.testing.latent_judge import AttendedLatent

# arguments with these values are not passed
DEFAULTS = {"scale": None, "backward": "auto", "return_lse": False}


def call(module: Any, case: Case, x: Inputs, layout: Layout, rank: int) -> Results:
    """Return the results of ``module`` for this rank's shard of ``x``. Local functions get the
    whole sequence.
    """
    whole = lambda full, rank, dim: full
    of_keys = layout.shard if case.distributed else whole
    of_queries = whole if case.function in REPLICATED else of_keys
    sharders = zip((x.q, x.k, x.v, x.dout), (of_queries, of_keys, of_keys, of_queries), strict=True)
    shards = (shard(t, rank, t.dim() - 3) for t, shard in sharders)
    q, k, v, dout = (placed(t, case.shape, heads_first=True) for t in shards)
    # autograd passes the gradient of out.sum() as one number with strides of 0
    if case.used == "sum":
        dout = dout.new_ones(()).expand(dout.shape)
    dlse = of_queries(x.dlse, rank, x.dlse.dim() - 1)
    function: Callable = _CALLS.get(case.function, _attention)
    return function(module, case, q, k, v, dout, dlse, x, layout)


def on_one_rank(case: Case) -> Case:
    """Return the case of `attention` that has the bits of the rank-invariant ``case``."""
    options = tuple((name, value) for name, value in case.options if name in OPTIONAL)
    return replace(case, function="attention", layout=None, options=options)


def _attention(module, case, q, k, v, dout, dlse, x, layout) -> Results:
    forward = case.used.startswith("forward")
    tensors = (q, k, v)
    if x.up_weight is not None:
        tensors = (q, k.squeeze(-2), v.squeeze(-2), placed(x.up_weight, case.shape))
    leaves = [t.detach().requires_grad_(not forward) for t in tensors]
    if case.variant == "plain":  # the mask is causal: None means the same
        out = getattr(module, case.function)(
            *leaves, *((None, layout) if case.function in TAKE_A_LAYOUT else ())
        )
        _check_returned(case, out)
        return _results(
            case, x, out, None, () if forward else torch.autograd.grad(out, leaves, dout)
        )
    arguments = (*leaves, x.mask, layout) if case.function in TAKE_A_LAYOUT else (*leaves, x.mask)
    options = _options(case) | {
        "scale": x.scale,
        "backward": case.method,
        "return_lse": case.returns_lse,
    }
    options = {name: value for name, value in options.items() if value != DEFAULTS.get(name, ...)}
    if case.has_sink:
        leaves.append(x.sink.detach().requires_grad_(not forward))
        options["sink"] = leaves[-1]
    results = getattr(module, case.function)(*arguments, **options)
    _check_returned(case, results)
    out, lse = results if case.returns_lse else (results, None)
    if forward:
        return _results(case, x, out, lse)
    outputs, grads = {"both": ((out, lse), (dout, dlse)), "lse": (lse, dlse)}.get(
        case.used, (out, dout)
    )
    unused = case.used == "lse"  # lse depends on neither v nor the sink: their gradients are 0
    grads = torch.autograd.grad(
        outputs, leaves, grads, allow_unused=unused, materialize_grads=unused
    )
    return _results(case, x, out, lse, grads)


def _check_returned(case: Case, results: Any) -> None:
    """Raise RuntimeError unless a function returned out, or out and lse, as tensors."""
    both = case.returns_lse and case.variant != "plain"
    given = results if both and isinstance(results, (tuple, list)) else (results,)
    if not (len(given) == 1 + both and all(isinstance(one, Tensor) for one in given)):
        kinds = ", ".join(type(one).__name__ for one in given)
        kinds = f"({kinds})" if given is results else kinds
        expected = "the tensors (out, lse), because return_lse=True" if both else "the tensor out"
        raise RuntimeError(f"{case.function} returned {kinds}, expected {expected}")


def _results(
    case: Case, x: Inputs, out: Tensor, lse: Tensor | None, grads: Sequence[Tensor] = ()
) -> Any:
    """Return the results. Gradients of latent and k_rope get the axis of one head."""
    out, lse = out.detach(), None if lse is None else lse.detach()
    if x.up_weight is not None:
        return AttendedLatent(
            out, lse, *grads[:1], *(t.unsqueeze(-2) for t in grads[1:3]), *grads[3:]
        )
    return (AttendedWithSink if case.has_sink else Attended)(out, lse, *grads)


def _options(case: Case) -> dict[str, Any]:
    options = dict(case.options)
    return options | {name: DTYPES[options[name]] for name in ("reduce_dtype",) if name in options}


def _softcap(x: Inputs) -> dict[str, Any]:
    return {} if x.softcap is None else {"softcap": x.softcap}


def _forward(module, case, q, k, v, dout, dlse, x, layout) -> Results:
    options = _softcap(x) | (
        {"out_dtype": accumulate_dtype(q.dtype)} if case.variant == "part" else {}
    )
    return Attended(*module.attention_forward(q, k, v, x.mask, scale=x.scale, **options))


def _backward(module, case, q, k, v, dout, dlse, x, layout) -> Results:
    forward = module if hasattr(module, "attention_forward") else reference
    out, lse = forward.attention_forward(q, k, v, x.mask, scale=x.scale, **_softcap(x))
    options: dict[str, Any] = {"dlse": dlse if case.used in {"both", "lse"} else None}
    if case.variant == "part":
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2) - dlse
        options = {"delta": delta, "grad_dtype": accumulate_dtype(q.dtype)}
    options |= _softcap(x)
    grads = module.attention_backward(
        dout, q, k, v, out, lse, x.mask, scale=x.scale, method=case.method, **options
    )
    return Attended(None, None, *grads)


def _decode(module, case, q, k, v, dout, dlse, x, layout) -> Results:
    mine = layout.ranges_per_rank[dist.get_rank()]
    of_rank = lambda mask: mask_between(mask, (range(mask.queries),), mine)
    if case.variant == "plain":  # every query sees every key: None means the same
        out = module.decode_attention(q, k, v)
        _check_returned(case, out)
        return Attended(out)
    mask = tuple(map(of_rank, x.mask)) if isinstance(x.mask, tuple) else of_rank(x.mask)
    options = _softcap(x) | ({"sink": x.sink} if case.has_sink else {})
    results = module.decode_attention(
        q, k, v, mask, scale=x.scale, return_lse=case.returns_lse, **options
    )
    _check_returned(case, results)
    out, lse = results if case.returns_lse else (results, None)
    return AttendedWithSink(out, lse) if case.has_sink else Attended(out, lse)


def _prepare(module, case, q, k, v, dout, dlse, x, layout) -> Results:
    batch = q.shape[0] if q.dim() == 4 else 1
    h = case.shape.heads[0]
    heads = (h, h) if case.has_latents else case.shape.heads
    shape = dict(batch=batch, heads=heads, widths=case.shape.widths, dtype=q.dtype, device=q.device)
    plans = module.prepare(case.variant, x.mask, layout, rank=dist.get_rank(), **shape)
    plans.load()
    return _attention(module, replace(case, function=case.variant), q, k, v, dout, dlse, x, layout)


def _merge(module, case, q, k, v, dout, dlse, x, layout) -> Results:
    """Merge two parts of the keys, one third and two thirds, that the reference computed. Fully
    masked rows of out hold NaN.
    """
    middle, n = x.mask.keys // 3, x.mask.keys
    parts: list[Tensor] = []
    for keys in (range(0, middle), range(middle, n)):
        kv_part = (t[..., keys.start : keys.stop, :, :] for t in (k, v))
        out, lse = reference.attention_forward(
            q, *kv_part, x.mask.crop(keys=keys), scale=x.scale, out_dtype=accumulate_dtype(q.dtype)
        )
        parts += [out.masked_fill((lse == -torch.inf).transpose(-1, -2)[..., None], torch.nan), lse]
    return Attended(*module.merge(*parts))


_CALLS = {"attention_forward": _forward, "attention_backward": _backward, "merge": _merge,
          "decode_attention": _decode, "prepare": _prepare}  # fmt: skip
