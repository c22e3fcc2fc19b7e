"""Make the inputs of a case, and the expected results."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor

from canon.check.cases import DTYPES, Case, Masks
from canon.check.planted_values import hide, plant
from canon.route.checks import Scale, default_scale
from canon.testing.judge import Results, oracle, orders
from canon.testing.latent_judge import (
    keys_of,
    latent_oracle,
    latent_orders,
    latent_roundings,
)
from canon.testing.roundings import roundings


def placed(x: Tensor, strides: tuple[int, int] | None) -> Tensor:
    """Return x, or a copy with axes in random order and gaps of NaN. ``strides``: a seed, and a
    unit of the gaps. Beyond unit 1, the last axis stays the innermost one.
    """
    if strides is None:
        return x
    draw, unit = Random(strides[0]), strides[1]
    axes = list(range(x.dim() - (unit > 1)))
    draw.shuffle(axes)
    axes = [*axes, *range(len(axes), x.dim())]
    offset, gaps = unit * draw.choice([0, 1, 8]), [unit * draw.choice([0, 0, 1, 8]) for _ in axes]
    sizes = [x.shape[axis] + gap for axis, gap in zip(axes, gaps, strict=True)]
    memory = x.new_full((offset + prod(sizes),), torch.nan)
    whole = memory[offset:].view(sizes).permute([axes.index(axis) for axis in range(len(axes))])
    return whole[tuple(slice(n) for n in x.shape)].copy_(x)


@dataclass(frozen=True)
class Inputs:
    """Tensors of the whole sequence, equal on every rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    mask: Masks
    scale: float | None
    sink: Tensor
    softcap: float | None = None
    # of `latent_attention`: then k is the latent, v k_rope, with the axis of a head
    up_weight: Tensor | None = None

    @property
    def scaling(self) -> Scale:
        return default_scale(self.q, self.scale, self.softcap)


def inputs(case: Case, device: str) -> Inputs:
    """Return the inputs."""
    return replace(_inputs(case.of_inputs, device), softcap=case.softcap)


@lru_cache(maxsize=4)
def _inputs(case: Case, device: str) -> Inputs:
    mask, shape, dtype = case.masks, case.shape, DTYPES[case.dtype]
    masks = mask if isinstance(mask, tuple) else (mask,) * (shape.batch or 1)
    generator = torch.Generator().manual_seed(case.number)
    normal = lambda *sizes: torch.randn(sizes, generator=generator)
    (h, g), (d, dv), queries, keys = shape.heads, shape.widths, masks[0].queries, masks[0].keys
    rank, rope = shape.latent or (0, 0)
    of_keys = [(1, rank), (1, rope)] if rank else [(g, d), (g, dv)]
    q, dout = (normal(len(masks), queries, h, width) for width in (d, dv))
    k, v = (normal(len(masks), keys, *size) for size in of_keys)
    if case.documents:  # an equal byte gives a similar token
        text = torch.tensor(list(b"".join(case.documents.texts)))
        q, k, v = ((x + normal(256, *x.shape[2:])[text[-x.shape[1] :]]) / 2**0.5 for x in (q, k, v))
    if case.offset:
        v, dout = (_with_offset(x, case) for x in (v, dout))
    if "cancelling" in case.mask:
        _cancel(q, k, v, 0.9 if "last" in case.mask else 0.4)
    dout = torch.zeros_like(dout) if case.used == "lse" else dout
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    wide = torch.promote_types(dtype, torch.float32)
    dlse = 4 * normal(len(masks), h, queries).to(wide)
    sink = 2 * normal(h).to(wide) + math.log(max(1, keys) / 4)
    hide(masks, q, k, v, dout)
    if case.planted:
        plant(case.planted, masks, (q, k, v, dout))
    dout = torch.ones_like(dout) if case.used == "sum" else dout
    packed = [x.to(device) if shape.batch else x[0].to(device) for x in (q, k, v, dout, dlse)]
    x = Inputs(*packed, mask, shape.scale, sink.to(device))
    if not rank:
        return x
    weight = normal(h * (d - rope + dv), rank) * rank**-0.5
    return replace(x, up_weight=weight.to(device, dtype))


def _with_offset(x: Tensor, case: Case) -> Tensor:
    """Add the offset in the outer quarters of each document, and subtract it in its middle half:
    then the rounding of partial sums shows.
    """
    lengths = case.documents.lengths if case.documents else (x.shape[1],)
    place = torch.cat([torch.arange(n) / max(1, n) for n in lengths])
    place = place[len(place) - x.shape[1] :, None, None]
    return x + torch.where((place < 0.25) | (place >= 0.75), case.offset, -case.offset)


def _cancel(q: Tensor, k: Tensor, v: Tensor, part: float) -> None:
    """Give two keys a quarter of each query's weight each, and opposite values. Raise scores by
    100, where exp overflows.
    """
    tokens, d = k.shape[1], k.shape[-1]
    heavy = [0, min(tokens - 1, 6 * int(part * tokens / 6) + 1)]
    # a score of large * large / sqrt(d) = log(tokens)
    large = (math.log(max(2, tokens)) * d**0.5) ** 0.5
    q[..., 0], k[..., 0], k[:, heavy] = large, 0, 0
    k[:, heavy, :, 0] = large
    q[..., 1] = k[..., 1] = 35
    v[:, heavy] = torch.tensor([6.0, -6.0])[:, None, None]


def with_projected_keys(x: Inputs) -> Inputs:
    """Return the inputs with K and V in float64, as the oracle projects them."""
    k, v = keys_of(*(t.double() for t in (x.k, x.v, x.up_weight)), x.q.shape[-2], x.q.shape[-1])
    return replace(x, k=k, v=v)


@dataclass(frozen=True)
class Expected:
    """Exact and honest results, and distances that widen the bounds: of random cases, which may
    have few elements, of float32, where a plain sum rounds more than honest products, and of sinks.
    """

    exact: Any
    honest: list[Any]
    roundings: Results | None = None


def expected(case: Case, device: str) -> Expected:
    """Return the expected results."""
    options = tuple(x for x in case.options if x[0] in ("sink", "softcap"))
    used = case.used if case.used in ("both", "lse", "sum") else "out"
    return _expected(replace(case.of_inputs, options=options, used=used), device)


@lru_cache(maxsize=4)
def _expected(case: Case, device: str) -> Expected:
    x = inputs(case, device)
    tensors = [t for t in (x.q, x.k, x.v, x.up_weight, x.dout) if t is not None]
    if case.function == "merge":
        tensors = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    functions = oracle, orders, roundings
    if case.has_latents:
        functions = latent_oracle, latent_orders, latent_roundings
    dlse, sink = x.dlse if case.has_dlse else None, x.sink if case.has_sink else None
    exact, honest, distances = (
        partial(function, *tensors, x.mask, x.scaling, dlse, sink) for function in functions
    )
    found = Expected(exact(), honest())
    if case.documents is None or case.dtype == "float32":
        return replace(found, roundings=distances())
    if case.has_sink:
        return replace(found, roundings=type(found.exact)(dsink=distances()[-1]))
    return found
