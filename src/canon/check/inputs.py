"""Make the inputs of a case from documents, and the expected results."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor

from canon.check.cases import DTYPES, EXPRESSIONS, Case, Masks, Shape
from canon.check.documents import Documents, projected
from canon.check.planted_values import hide, plant
from canon.reference import Layout, Mask
from canon.route.checks import Scale, default_scale
from canon.testing.judge import Results, dense, oracle, orders
from canon.testing.latent_judge import (
    keys_of,
    latent_dense,
    latent_oracle,
    latent_orders,
    latent_roundings,
)
from canon.testing.roundings import roundings

LAST = 5  # queries of `decode_attention`
FEW = 17  # queries
MANY_KEYS = {
    "few": 18_000,
    "few in a window": 5_000,
}  # at least: `canon.fast` cuts them into parts, the first on 4 ranks too


def placed(x: Tensor, shape: Shape, heads_first: bool = False) -> Tensor:
    """Return x with the strides of ``shape``. ``heads_first``: heads before tokens."""
    if shape.strides is not None:
        return with_random_strides(x, Random(shape.strides))
    if shape.contiguous:
        return x
    # after each row
    with_gaps = lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 16)[..., : t.shape[-1]].copy_(t)
    return with_gaps(x.transpose(-3, -2)).transpose(-3, -2) if heads_first else with_gaps(x)


def with_random_strides(x: Tensor, draw: Random) -> Tensor:
    """Return a copy with axes in random order, and gaps of NaN."""
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
        return default_scale(self.q, self.scale, self.softcap)


def with_latents(x: Inputs) -> Inputs:
    """Return the same with a latent in k and k_rope in v."""
    (h, d), rank, dv = x.q.shape[-2:], x.k.shape[-1], x.v.shape[-1]
    rope = d // 4
    weight = weight_of((h * (d - rope + dv), rank), torch.Generator().manual_seed(2)).to(x.q)
    return replace(x, k=x.k[..., :1, :], v=x.v[..., :1, :rope], up_weight=weight)


def weight_of(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return a projection from a latent to K and V."""
    return torch.randn(shape, generator=generator) * shape[1] ** -0.5


def with_projected_keys(x: Inputs) -> Inputs:
    """Return the inputs with K and V in float64, as the oracle projects them."""
    k, v = keys_of(*(t.double() for t in (x.k, x.v, x.up_weight)), x.q.shape[-2], x.q.shape[-1])
    return replace(x, k=k, v=v)


@lru_cache(maxsize=12)
def _inputs(case: Case, documents: Documents, device: str) -> Inputs:
    documents, shape, dtype = _sequence(case.mask, documents), case.shape, DTYPES[case.dtype]
    layout, tokens = Layout.zigzag(documents.tokens, 3), documents.tokens
    each = [
        projected(documents, layout, shape.heads, shape.widths, row)
        for row in range(shape.batch or 1)
    ]
    q, k, v = (torch.stack(x) for x in zip(*each, strict=True))
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator)
    if dtype.itemsize == 2:
        # 3 in the outer quarters of each document, -3 in its middle half: rounding of partial sums
        # shows
        positions = torch.cat([torch.arange(n) / max(1, n) for n in documents.lengths])
        offset = torch.where((positions < 0.25) | (positions >= 0.75), 3.0, -3.0)[:, None, None]
        v, dout = v + offset, dout + offset
    if "cancelling" in case.mask:
        _cancel(q, k, v, 0.9 if "last" in case.mask else 0.4)
    dlse = 4 * torch.randn(q.shape[0], q.shape[2], tokens, generator=generator)
    sink = 2 * torch.randn(q.shape[2], generator=generator) + math.log(max(1, tokens) / 4)
    mask = mask_of(case.mask, documents)
    masks = mask if isinstance(mask, tuple) else (mask,) * len(q)
    last = slice(tokens - masks[0].queries, tokens)
    q, dout, dlse = q[:, last], dout[:, last], dlse[..., last]
    q, k, v, dout = (x.to(dtype).contiguous() for x in (q, k, v, dout))
    dlse, sink = (x.double() if dtype == torch.float64 else x for x in (dlse, sink))
    x = with_hidden(case, mask, (q, k, v, dout, dlse), sink, device)
    return with_latents(x) if case.has_latents else x


def with_hidden(
    case: Case, mask: Masks, tensors: Sequence[Tensor], sink: Tensor, device: str
) -> Inputs:
    """Return inputs of a batch, with hidden NaN and planted values."""
    masks = mask if isinstance(mask, tuple) else (mask,) * len(tensors[0])
    hide(masks, *tensors[:4])
    if case.planted:
        plant(case.planted, masks, tensors[:4])
    packed = [x.to(device) if case.shape.batch else x[0].to(device) for x in tensors]
    return Inputs(*packed, mask, case.shape.scale, sink.to(device))


def _cancel(q: Tensor, k: Tensor, v: Tensor, part: float) -> None:
    """Give two keys a quarter of each query's weight each, and opposite values."""
    tokens, d = k.shape[1], k.shape[-1]
    heavy = [0, min(tokens - 1, 6 * int(part * tokens / 6) + 1)]
    # a score of large * large / sqrt(d) = log(tokens)
    large = (math.log(max(2, tokens)) * d**0.5) ** 0.5
    q[..., 0], k[..., 0], k[:, heavy] = large, 0, 0
    k[:, heavy, :, 0] = large
    v[:, heavy] = torch.tensor([6.0, -6.0])[:, None, None]


def _sequence(mask: str, documents: Documents) -> Documents:
    times = max(1, -(-MANY_KEYS.get(mask, 0) // documents.tokens))
    return Documents(documents.names * times, documents.texts * times)


def block_causal(lengths: Sequence[int]) -> Mask:
    """Return a mask in which documents see themselves and earlier ones, except padding."""
    blocks = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(blocks)) / max(1, len(blocks))
    q_valid = (position < 0.6) | (position > 0.7)
    return Mask.block_causal(blocks, q_valid=q_valid, k_valid=(position < 0.65) | (position > 0.8))


def tree(lengths: Sequence[int]) -> Mask:
    """Return a tree with a node for each document, with a gap at its end."""
    depths = [min(place, (1, 2, 2)[place % 3]) for place in range(len(lengths))]
    parents = [
        max((i for i in range(place) if depths[i] < depths[place]), default=-1)
        for place in range(len(depths))
    ]
    nodes = [n - n // 8 for n in lengths]
    return Mask.tree([*parents, -1], [*nodes, 0], [0, *accumulate(lengths)])


def mask_of(name: str, documents: Documents) -> Masks:
    """Return a mask over the documents."""
    documents = _sequence(name, documents)
    n = documents.tokens
    names = {"Mask": Mask, "block_causal": block_causal, "tree": tree, "n": n, "FEW": FEW}
    names |= {"ends": documents.cu_seqlens, "lengths": documents.lengths, "LAST": min(LAST, n)}
    names |= {"last": range(max(0, n - LAST), n), "late": range(n - 2000, n - 2000 + FEW)}
    return eval(EXPRESSIONS[name], names)


@dataclass(frozen=True)
class Expected:
    """Exact and honest results, and distances that widen the bounds."""

    exact: Any
    honest: list[Any]
    roundings: Results | None = None


def judging(case: Case, x: Inputs) -> tuple[tuple[Callable[..., Any], ...], tuple]:
    """Return oracle, orders, dense and roundings, and their arguments."""
    tensors = [t for t in (x.q, x.k, x.v, x.up_weight, x.dout) if t is not None]
    if case.function == "merge":
        tensors = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    functions = oracle, orders, dense, roundings
    if case.has_latents:
        functions = latent_oracle, latent_orders, latent_dense, latent_roundings
    dlse, sink = x.dlse if case.has_dlse else None, x.sink if case.has_sink else None
    return functions, (*tensors, x.mask, x.scaling, dlse, sink)


@lru_cache(maxsize=12)
def _expected(case: Case, source: "FromDocuments", device: str) -> Expected:
    x, distances = source.inputs(case, device), None
    (exact_of, several, *_), arguments = judging(case, x)
    exact = exact_of(*arguments)
    if case.has_sink:
        keys = with_projected_keys(x) if case.has_latents else x
        given = x.q, keys.k, keys.v, x.dout, x.mask, x.scaling, None, x.sink
        distances = type(exact)(dsink=roundings(*given)[-1])
    return Expected(exact, several(*arguments), distances)


@dataclass(frozen=True)
class FromDocuments:
    """The inputs and results of the fixed cases."""

    documents: Documents

    def mask(self, case: Case) -> Masks:
        return mask_of(case.mask, self.documents)

    def inputs(self, case: Case, device: str) -> Inputs:
        return replace(_inputs(_key(case), self.documents, device), softcap=case.softcap)

    def expected(self, case: Case, layout: Layout, device: str) -> Expected:
        options = tuple(x for x in case.options if x[0] in ("sink", "softcap"))
        used = "both" if case.has_dlse else "out"
        return _expected(replace(_key(case), options=options, used=used), self, device)


def _key(case: Case) -> Case:
    """Return the case with the fields alone on which inputs depend."""
    like = "latent_attention" if case.has_latents else "attention"
    like = "merge" if case.function == "merge" else like
    return Case(like, case.mask, case.dtype, case.shape, planted=case.planted)
