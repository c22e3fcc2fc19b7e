"""Make the inputs of a random case, and the expected results. One rounding of each intermediate
result widens the bounds: cases may have few elements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from canon.check.cases import DTYPES, Masks
from canon.check.draws import Drawn, evaluated
from canon.check.inputs import Expected, Inputs, judging, weight_of, with_hidden
from canon.reference import Layout, Mask

# Dense float16 attention has dP = dout v^T in float16, which overflows long before dS does, and
# functions under test have it in float32. So near the range it takes a smaller dout.
SMALLER = 256


@dataclass(frozen=True)
class RandomSource:
    """Inputs and expected results of random cases."""

    def mask(self, case: Drawn) -> Masks:
        return evaluated(case.mask)

    def inputs(self, case: Drawn, device: str) -> Inputs:
        return replace(_inputs(case, device), softcap=case.softcap)

    def expected(self, case: Drawn, layout: Layout, device: str) -> Expected:
        x = self.inputs(case, device)
        (exact_of, several, once, distances), arguments = judging(case, x)
        exact = exact_of(*arguments)
        if case.ds:
            arguments = _with_gradients(arguments, 1 / SMALLER)
        honest = several(*arguments)
        reduce_dtype = DTYPES[dict(case.options).get("reduce_dtype", "float64")]
        if reduce_dtype.itemsize == 2 and (
            layout.ranks > 1 or case.function == "strided_attention"
        ):
            honest += [
                _reduced(once, arguments, layout, reduce_dtype, one, order)
                for order, one in enumerate(honest)
            ]
        if case.ds:
            arguments = _with_gradients(arguments, SMALLER)
            honest = [type(one)(*one[:2], *map(_larger, one[2:])) for one in honest]
        return Expected(exact, honest, distances(*arguments))


def _with_gradients(arguments: tuple, factor: float) -> tuple:
    *tensors, dout, mask, scale, dlse, sink = arguments
    return *tensors, dout * factor, mask, scale, None if dlse is None else dlse * factor, sink


def _larger(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else (SMALLER * gradient.double()).to(gradient.dtype)


@lru_cache(maxsize=4)
def _inputs(case: Drawn, device: str) -> Inputs:
    mask, shape, dtype = evaluated(case.mask), case.shape, DTYPES[case.dtype]
    masks = mask if isinstance(mask, tuple) else (mask,) * (shape.batch or 1)
    draw = Random(f"{case.seed}/{case.index}")
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    (h, g), (d, dv), b = shape.heads, shape.widths, shape.batch or 1
    queries, keys = masks[0].queries, masks[0].keys
    of_keys = [(keys, 1, width) for width in shape.latent or ()] or [(keys, g, d), (keys, g, dv)]
    sizes = [(queries, h, d), *of_keys, (queries, h, dv)]
    q, k, v, dout = (torch.randn(b, *size, generator=generator) for size in sizes)
    # an offset makes sums large, so that rounding of partial sums gives large errors
    offset = draw.choice([0, 0, 3])
    q, k, v, dout = (x.to(dtype) for x in (q, k, v + offset, dout + offset))
    if case.ds:
        q, k, v, dout = _near_the_range(q, k, v, dout, masks, case, draw.choice([1, 30, 1000]))
    wide = torch.promote_types(dtype, torch.float32)
    dlse = 4 * torch.randn(b, h, queries, generator=generator).to(wide)
    sink = (2 + 3 * torch.randn(h, generator=generator)).to(wide)
    dout = torch.zeros_like(dout) if case.used == "lse" else dout
    dlse = torch.zeros_like(dlse) if case.used in {"out", "no lse", "sum"} else dlse
    x = with_hidden(case, mask, (q, k, v, dout, dlse), sink, device)
    if case.used == "sum":
        x = replace(x, dout=torch.ones_like(x.dout))
    if shape.latent:
        rank, rope = shape.latent
        weight = weight_of((h * (d - rope + dv), rank), generator).to(device, dtype)
        x = replace(x, up_weight=weight)
    return x


def _near_the_range(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, masks: Sequence[Mask], case: Drawn, size: float
) -> tuple[Tensor, ...]:
    """Return a dout with which dS reaches ``case.ds`` of float16's range, for a uniform P."""
    most = torch.finfo(torch.float16).max
    scale = 1.0 if case.shape.scale is None else abs(case.shape.scale)
    q, k, v, share = q / 128, k / 128, v * size, q.shape[2] // k.shape[2]
    used = float(dout.abs().max()) / most if dout.numel() else 0.0
    for row, mask in enumerate(masks):
        p = mask.dense().double()
        p = (p / p.sum(-1, keepdim=True).clamp(min=1))[None]
        heads_first = [x[row].double().transpose(0, 1) for x in (q, k, v, dout)]
        q_row, k_row, v_row, dy = (
            x.repeat_interleave(h, 0)
            for x, h in zip(heads_first, (1, share, share, 1), strict=True)
        )
        dp = dy @ v_row.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        grads = (scale * ds @ k_row, scale * ds.mT @ q_row, p.mT @ dy)
        grads = (grads[0], *(x.unflatten(0, (-1, share)).sum(1) for x in grads[1:]))
        if dp.numel():
            sizes = float(ds.abs().max()) / case.ds, *(2 * float(x.abs().max()) for x in grads)
            used = max(used, *(size / most for size in sizes))
    return q, k, v, (dout.float() / max(used, 1e-6)).half()


def _reduced(
    once: Callable[..., Any],
    arguments: tuple,
    layout: Layout,
    reduce_dtype: torch.dtype,
    honest: Any,
    order: int,
) -> Any:
    """Return ``honest`` with the gradients of keys as sums of parts of the ranks."""
    *tensors, dout, mask, scale, dlse, sink = arguments
    names = ("dlatent", "dk_rope") if hasattr(honest, "dlatent") else ("dk", "dv")
    ranks = torch.randperm(layout.ranks, generator=torch.Generator().manual_seed(order)).tolist()
    totals: list[Tensor] = []
    for rank in ranks:
        mine = torch.zeros(layout.tokens, dtype=torch.bool, device=dout.device)
        mine[layout.positions(rank).to(dout.device)] = True
        of_rank = None if dlse is None else dlse.masked_fill(~mine, 0)
        part = once(*tensors, dout.masked_fill(~mine[:, None, None], 0), mask, scale, of_rank, sink)
        parts = [getattr(part, name).to(reduce_dtype) for name in names]
        totals = [total + x for total, x in zip(totals, parts, strict=True)] if totals else parts
    grads = (x.to(getattr(honest, name).dtype) for name, x in zip(names, totals, strict=True))
    return honest._replace(**dict(zip(names, grads, strict=True)))
