"""Make the inputs of a case from documents, and the expected results. Cases with equal masks and
dtypes share both.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor

from canon.check.cases import DTYPES, Case, Masks, Shape
from canon.check.documents import Documents, projected
from canon.check.planted_values import hide, plant, reach, spread
from canon.reference import Layout, Mask
from canon.route.checks import Scale, default_scale
from canon.testing.judge import AttendedWithSink, Results, oracle, orders
from canon.testing.latent_judge import AttendedLatent, keys_of, latent_oracle, latent_orders
from canon.testing.roundings import sink_roundings

LAST = 5  # queries of `decode_attention`
FEW = 17  # queries
MANY_KEYS = {
    "few": 18_000,
    "few in a window": 5_000,
}  # at least: `canon.fast` cuts them into parts, the first on 4 ranks too


def placed(x: Tensor, shape: Shape, heads_first: bool = False) -> Tensor:
    """Return x with the strides that ``shape`` needs. ``heads_first``: heads before tokens."""
    if shape.strides is not None:
        return with_random_strides(x, Random(shape.strides))
    if shape.contiguous:
        return x
    # after each row
    with_gaps = lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 16)[..., : t.shape[-1]].copy_(t)
    return with_gaps(x.transpose(-3, -2)).transpose(-3, -2) if heads_first else with_gaps(x)


def with_random_strides(x: Tensor, draw: Random) -> Tensor:
    """Return a copy of x with axes in random order, and gaps of NaN."""
    axes = list(range(x.dim()))
    draw.shuffle(axes)
    offset, gaps = draw.choice([0, 1, 8]), [draw.choice([0, 0, 1, 8]) for _ in axes]
    sizes = [x.shape[axis] + gaps[axis] for axis in axes]
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
        """The scale and the soft-cap, with their defaults."""
        return default_scale(self.q, self.scale, self.softcap)


def with_latents(x: Inputs) -> Inputs:
    """Return inputs of `latent_attention`: a head of k is the latent, and a part of a head of v is
    k_rope.
    """
    (h, d), rank, dv = x.q.shape[-2:], x.k.shape[-1], x.v.shape[-1]
    rope = d // 4
    weight = weight_of((h * (d - rope + dv), rank), torch.Generator().manual_seed(2)).to(
        x.q.device, x.q.dtype
    )
    return replace(x, k=x.k[..., :1, :], v=x.v[..., :1, :rope], up_weight=weight)


def weight_of(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return the weight of a projection in float32: from a latent of variance 1 to K and V of
    variance 1.
    """
    return torch.randn(shape, generator=generator) * shape[1] ** -0.5


def with_projected_keys(x: Inputs) -> Inputs:
    """Return the inputs of `latent_attention` with K and V in float64,
    as the oracle projects them.
    """
    k, v = keys_of(*(t.double() for t in (x.k, x.v, x.up_weight)), x.q.shape[-2], x.q.shape[-1])
    return replace(x, k=k, v=v)


@lru_cache(maxsize=12)
def _inputs(
    mask_name: str, dtype_name: str, shape: Shape, documents: Documents, device: str, planted: str
) -> Inputs:
    documents = _sequence(mask_name, documents)
    dtype, tokens = DTYPES[dtype_name], documents.tokens
    rows = [
        projected(documents, Layout.zigzag(tokens, 3), shape.heads, shape.widths, row)
        for row in range(shape.batch or 1)
    ]
    q, k, v = (torch.stack(x) for x in zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator)
    if dtype.itemsize == 2:
        # 3 in the outer quarters of each document, -3 in its middle half: rounding of partial sums
        # shows
        positions = torch.cat([torch.arange(n) / max(1, n) for n in documents.lengths])[
            :, None, None
        ]
        offset = torch.where((positions < 0.25) | (positions >= 0.75), 3.0, -3.0)
        v, dout = v + offset, dout + offset
    if "cancelling" in mask_name:
        _cancel(q, k, v, 0.9 if "last" in mask_name else 0.4)
    dlse = 4 * torch.randn(q.shape[0], q.shape[2], tokens, generator=generator)
    sink = 2 * torch.randn(q.shape[2], generator=generator) + math.log(max(1, tokens) / 4)
    mask = _mask(mask_name, documents)
    masks = mask if isinstance(mask, tuple) else (mask,) * len(q)
    q, dout, dlse = (
        q[:, -masks[0].queries :],
        dout[:, -masks[0].queries :],
        dlse[..., -masks[0].queries :],
    )
    q, k, v, dout = (x.to(dtype).contiguous() for x in (q, k, v, dout))
    hide(masks, q, k, v, dout)
    if planted:
        plant(planted, masks, (q, k, v, dout))
    dlse, sink = (x.double() if dtype == torch.float64 else x for x in (dlse, sink))
    tensors = [x if shape.batch else x[0] for x in (q, k, v, dout, dlse)]
    return Inputs(*(x.to(device) for x in tensors), mask, shape.scale, sink.to(device))


def _cancel(q: Tensor, k: Tensor, v: Tensor, part: float) -> None:
    """Give two keys about a quarter of each query's weight, and opposite values: the first, and one
    after ``part`` of the keys.

    For most numbers of ranks they are on different ranks, in contiguous, zigzag and striped
    layouts.
    """
    tokens, d = k.shape[1], k.shape[-1]
    heavy = [0, min(tokens - 1, 6 * int(part * tokens / 6) + 1)]
    # a score of large * large / sqrt(d) = log(tokens)
    large = (math.log(max(2, tokens)) * d**0.5) ** 0.5
    q[..., 0], k[..., 0], k[:, heavy] = large, 0, 0
    k[:, heavy, :, 0] = large
    v[:, heavy] = torch.tensor([6.0, -6.0])[:, None, None]


def _sequence(mask_name: str, documents: Documents) -> Documents:
    """Return the documents of a mask's sequence: all,
    or for few queries all of them several times.
    """
    times = max(1, -(-MANY_KEYS.get(mask_name, 0) // documents.tokens))
    return Documents(documents.names * times, documents.texts * times)


def _mask(name: str, documents: Documents) -> Masks:
    documents = _sequence(name, documents)
    cu_seqlens, tokens = documents.cu_seqlens, documents.tokens
    last = range(max(0, tokens - LAST), tokens)
    if name == "sequences":
        return Mask.documents(cu_seqlens), Mask.window(tokens, tokens // 3, 5)
    if name == "last of sequences":
        return tuple(
            mask.crop(queries=last)
            for mask in (Mask.causal(tokens), Mask.window(tokens, tokens // 2, 0))
        )
    if name == "last" or name == "last cancelling":
        return Mask.causal(len(last), tokens)
    if name == "last full":
        return Mask.full(len(last), tokens)
    if name == "few":
        return Mask.causal(FEW, tokens)
    if name == "few in a window":
        return Mask.window(tokens, tokens // 2, 5).crop(
            queries=range(tokens - 2000, tokens - 2000 + FEW)
        )
    # each document sees itself and all documents before it, except padding
    if name == "block_causal":
        blocks = torch.repeat_interleave(
            torch.arange(len(documents.lengths)), torch.tensor(documents.lengths)
        )
        position = torch.arange(tokens) / max(1, tokens)
        return Mask.block_causal(
            blocks,
            q_valid=(position < 0.6) | (position > 0.7),
            k_valid=(position < 0.65) | (position > 0.8),
        )
    if name == "tree":  # a node for each document, with a gap at its end
        depths = [min(place, (1, 2, 2)[place % 3]) for place in range(len(documents.lengths))]
        parents = [
            max((i for i in range(place) if depths[i] < depths[place]), default=-1)
            for place in range(len(depths))
        ]
        return Mask.tree([*parents, -1], [*(n - n // 8 for n in documents.lengths), 0], cu_seqlens)
    return {
        "documents": lambda: Mask.documents(cu_seqlens),
        "causal": lambda: Mask.causal(tokens),
        "wide": lambda: Mask.causal(tokens),
        "cancelling": lambda: Mask.causal(tokens),
        "window": lambda: Mask.window(tokens, tokens // 5, 16),
        "full": lambda: Mask.documents(cu_seqlens, causal=False),
    }[name]()


@lru_cache(maxsize=12)
def _expected_latent(
    given: tuple, with_lse: bool, with_sink: bool, softcap: float | None
) -> "Expected":
    x = with_latents(replace(_inputs(*given), softcap=softcap))
    tensors, sink = (x.q, x.k, x.v, x.up_weight, x.dout), x.sink if with_sink else None
    arguments = (*tensors, x.mask, x.scaling, x.dlse if with_lse else None, sink)
    few = None
    if sink is not None:
        keys = with_projected_keys(x)
        few = AttendedLatent(
            dsink=sink_roundings(x.q, keys.k, keys.v, x.dout, x.mask, x.scaling, sink)
        )
    return Expected(latent_oracle(*arguments), latent_orders(*arguments), few)


@lru_cache(maxsize=12)
def _expected(
    given: tuple, wide: bool, with_lse: bool, with_sink: bool, softcap: float | None
) -> "Expected":
    x = replace(_inputs(*given), softcap=softcap)
    tensors = [
        t.to(torch.promote_types(t.dtype, torch.float32)) if wide else t
        for t in (x.q, x.k, x.v, x.dout)
    ]
    sink = x.sink if with_sink else None
    arguments = (*tensors, x.mask, x.scaling, x.dlse if with_lse else None, sink)
    few = (
        None
        if sink is None
        else AttendedWithSink(dsink=sink_roundings(*tensors, x.mask, x.scaling, sink))
    )
    exact = oracle(*arguments)
    *_, planted = given
    places = planted_places(planted, exact, x) if planted else ()
    return Expected(exact, orders(*arguments), few, *places)


def planted_places(planted: str, exact: Results, x: Inputs) -> tuple[Results, Results]:
    """Return where a planted value may go beyond the oracle, in canon and in other modules."""
    share = x.q.shape[-2] // x.k.shape[-2]
    return spread(planted, exact, share), reach(planted, exact, share, x.mask)


@dataclass(frozen=True)
class Expected:
    """The oracle's result, honest results, and optional distances from `roundings` and places from
    `planted_places`.
    """

    exact: Any
    honest: list[Any]
    roundings: Results | None = None
    spread: Results | None = None
    reach: Results | None = None


@dataclass(frozen=True)
class FromDocuments:
    """Inputs and expected results of the fixed cases, from documents."""

    documents: Documents

    def mask(self, case: Case) -> Masks:
        return _mask(case.mask, self.documents)

    def inputs(self, case: Case, device: str) -> Inputs:
        x = replace(_inputs(*self._given(case, device)), softcap=case.softcap)
        return with_latents(x) if case.has_latents else x

    def _given(self, case: Case, device: str) -> tuple:
        return case.mask, case.dtype, case.shape, self.documents, device, case.planted

    def expected(self, case: Case, layout: Layout, device: str) -> Expected:
        with_lse = case.variant != "plain" and case.used in {"both", "lse"}
        if case.has_latents:
            return _expected_latent(
                self._given(case, device), with_lse, case.has_sink, case.softcap
            )
        return _expected(
            self._given(case, device),
            case.function == "merge",
            with_lse,
            case.has_sink,
            case.softcap,
        )
