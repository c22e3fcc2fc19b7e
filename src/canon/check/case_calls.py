"""Call a function of a module for a case: its shards, its options, both passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from canon import reference
from canon.check.cases import DTYPES, OPTIONAL, REPLICATED, TAKE_A_LAYOUT, Case
from canon.check.exchanges import differs
from canon.check.inputs import Inputs, placed
from canon.masks.layout import mask_between
from canon.ranks.group import TOKENS_HEADS
from canon.reference import Layout
from canon.route.checks import accumulate_dtype
from canon.testing.judge import Attended, AttendedWithSink, Results
from canon.testing.latent_judge import AttendedLatent

# arguments with these values are not passed
DEFAULTS = {"scale": None, "backward": "auto", "return_lse": False}
_meshes: WeakKeyDictionary[Any, dict[int, dist.DeviceMesh]] = WeakKeyDictionary()  # by world


def call(module: Any, case: Case, x: Inputs, layout: Layout, rank: int) -> Results:
    """Return the results for this rank's shard of ``x``."""

    def shard(name: str, dim: int = -3) -> Tensor:
        full = getattr(x, name)
        whole = not case.distributed or (case.function in REPLICATED and name not in ("k", "v"))
        return full if whole else layout.shard(full, rank, full.dim() + dim)

    given = {name: placed(shard(name), case.shape.strides) for name in "qkv"}
    dout = placed(shard("dout"), case.shape.strides)
    # autograd passes the gradient of out.sum() as one number with strides of 0
    dout = dout.new_ones(()).expand(dout.shape) if case.used == "sum" else dout
    mine = replace(x, **given, dout=dout, dlse=shard("dlse", -1))
    before = {name: getattr(mine, name).clone() for name in (*"qkv", "dout", "dlse")}
    results = _CALLS.get(case.function, _attention)(module, case, mine, layout)
    changed = [name for name, t in before.items() if differs(t, getattr(mine, name)).any()]
    for name in changed:  # other cases share them
        getattr(mine, name).copy_(before[name])
    if changed:
        raise RuntimeError(f"{case.function} has changed {', '.join(changed)}")
    return results


def on_one_rank(case: Case) -> Case:
    """Return the same call of `attention` on one rank."""
    options = tuple((name, value) for name, value in case.options if name in OPTIONAL)
    return replace(case, function="attention", layout=None, options=options)


def _attention(module: Any, case: Case, x: Inputs, layout: Layout) -> Results:
    forward, plain = case.used.startswith("forward"), case.variant == "plain"
    # "plain": the mask is causal, or full in decoding; None and nothing mean the same. Only q has
    # a gradient.
    mask = None if plain else x.mask
    places = (mask, layout) if case.function in TAKE_A_LAYOUT else () if plain else (mask,)
    tensors = [x.q, x.k, x.v]
    if x.up_weight is not None:
        tensors = [x.q, x.k.squeeze(-2), x.v.squeeze(-2), placed(x.up_weight, case.shape.strides)]
    leaves = [t.detach().requires_grad_(not forward) for t in tensors]
    for frozen in leaves[1:] if plain else ():
        frozen.requires_grad_(False)
    options = {"scale": x.scale, "backward": case.method, "return_lse": case.returns_lse}
    options = {name: value for name, value in options.items() if value != DEFAULTS[name]}
    options |= case.options
    if "columns" in options:
        options["group"] = _mesh(options.pop("columns"), x.q.device.type)
    if "reduce_dtype" in options:
        options["reduce_dtype"] = DTYPES[options["reduce_dtype"]]
    arguments = (*leaves, *places)
    if case.has_sink:
        leaves.append(x.sink.detach().requires_grad_(not forward))
        options["sink"] = leaves[-1]
    function = partial(getattr(module, case.function), **options)
    # three layers, one differentiated twice
    in_model = case.mask == "causal" and not (case.planted or case.rank_invariant)
    others = [(1 - t.detach()).requires_grad_(not forward) for t in tensors] if in_model else []
    if in_model:
        function(*others, *places)
    results = function(*arguments)
    if in_model:
        function(*others, *places)
    _check_returned(case, results)
    out, lse = results if case.returns_lse else (results, None)
    differentiated = {"both": ((out, lse), (x.dout, x.dlse)), "lse": (lse, x.dlse)}
    outputs, of_outputs = differentiated.get(case.used, (out, x.dout))
    # lse depends on neither v nor the sink: their gradients are 0
    zeros = {"allow_unused": True, "materialize_grads": True} if case.used == "lse" else {}
    needed, grads = [leaf for leaf in leaves if leaf.requires_grad], ()
    passes = 0 if forward else 1 + in_model
    for left in reversed(range(passes)):
        grads = torch.autograd.grad(outputs, needed, of_outputs, retain_graph=left > 0, **zeros)
    return _results(case, x, out.detach(), None if lse is None else lse.detach(), grads)


def _mesh(columns: int, kind: str) -> dist.DeviceMesh:
    """Return the mesh with ``columns`` or their common divisor with the ranks. Groups are never
    freed.
    """
    world, ranks = dist.distributed_c10d._get_default_group(), dist.get_world_size()
    found, columns = _meshes.setdefault(world, {}), gcd(columns, ranks)
    if columns not in found:
        shape = ranks // columns, columns
        found[columns] = dist.init_device_mesh(kind, shape, mesh_dim_names=TOKENS_HEADS)
    return found[columns]


def _check_returned(case: Case, results: Any) -> None:
    both = case.returns_lse
    given = results if both and isinstance(results, (tuple, list)) else (results,)
    if not (len(given) == 1 + both and all(isinstance(one, Tensor) for one in given)):
        kinds = ", ".join(type(one).__name__ for one in given)
        kinds = f"({kinds})" if given is results else kinds
        expected = "the tensors (out, lse), because return_lse=True" if both else "the tensor out"
        raise RuntimeError(f"{case.function} returned {kinds}, expected {expected}")


def _results(
    case: Case, x: Inputs, out: Tensor, lse: Tensor | None, grads: Sequence[Tensor]
) -> Any:
    """Give the gradients of latent and k_rope the axis of one head."""
    if x.up_weight is None:
        return (AttendedWithSink if case.has_sink else Attended)(out, lse, *grads)
    dq, *of_keys = grads or (None,)
    of_keys[:2] = [t.unsqueeze(-2) for t in of_keys[:2]]
    return AttendedLatent(out, lse, dq, *of_keys)


def _scaling(x: Inputs) -> dict[str, Any]:
    return {"scale": x.scale} | ({} if x.softcap is None else {"softcap": x.softcap})


def _forward(module: Any, case: Case, x: Inputs, layout: Layout) -> Results:
    part = {"out_dtype": accumulate_dtype(x.q.dtype)} if case.variant == "part" else {}
    return Attended(*module.attention_forward(x.q, x.k, x.v, x.mask, **_scaling(x), **part))


def _backward(module: Any, case: Case, x: Inputs, layout: Layout) -> Results:
    forward = module if hasattr(module, "attention_forward") else reference
    out, lse = forward.attention_forward(x.q, x.k, x.v, x.mask, **_scaling(x))
    options: dict[str, Any] = {"dlse": x.dlse if case.has_dlse else None}
    if case.variant == "part":
        delta = (x.dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2)
        delta = delta - x.dlse if case.has_dlse else delta
        options = {"delta": delta, "grad_dtype": accumulate_dtype(x.q.dtype)}
    options |= _scaling(x) | {"method": case.method}
    return Attended(
        None, None, *module.attention_backward(x.dout, x.q, x.k, x.v, out, lse, x.mask, **options)
    )


def _decode(module: Any, case: Case, x: Inputs, layout: Layout) -> Results:
    mine = layout.ranges_per_rank[dist.get_rank()]
    of_rank = lambda mask: mask_between(mask, (range(mask.queries),), mine)
    mask = tuple(map(of_rank, x.mask)) if isinstance(x.mask, tuple) else of_rank(x.mask)
    return _attention(module, case, replace(x, mask=mask), layout)


def _prepare(module: Any, case: Case, x: Inputs, layout: Layout) -> Results:
    h, g = case.shape.heads
    shape = {"heads": (h, h if case.has_latents else g), "widths": case.shape.widths}
    shape |= {"batch": x.q.shape[0] if x.q.dim() == 4 else 1}
    shape |= {"dtype": x.q.dtype, "device": x.q.device}
    module.prepare(case.variant, x.mask, layout, rank=dist.get_rank(), **shape).load()
    return _attention(module, replace(case, function=case.variant, variant=""), x, layout)


def merged_keys(x: Inputs) -> tuple[range, range]:
    """Return the keys of both parts."""
    return range(x.mask.keys // 3), range(x.mask.keys // 3, x.mask.keys)


def _merge(module: Any, case: Case, x: Inputs, layout: Layout) -> Results:
    """Merge two parts. Fully masked rows of out hold NaN."""
    parts: list[Tensor] = []
    for keys in merged_keys(x):
        k, v = (t[..., keys.start : keys.stop, :, :] for t in (x.k, x.v))
        out, lse = reference.attention_forward(
            x.q, k, v, x.mask.crop(keys=keys), scale=x.scale, out_dtype=accumulate_dtype(x.q.dtype)
        )
        parts += [out.masked_fill((lse == -torch.inf).transpose(-1, -2)[..., None], torch.nan), lse]
    return Attended(*module.merge(*parts))


_CALLS: dict[str, Callable[..., Results]] = {
    "attention_forward": _forward,
    "attention_backward": _backward,
    "merge": _merge,
    "decode_attention": _decode,
    "prepare": _prepare,
}
