"""Inputs of a random case, and the answers to it: normally distributed tensors, with NaN in tokens that nothing sees.

The judge is the one of all cases. Its bounds widen by one rounding of each intermediate result (`canon.testing.roundings`),
because random cases may have few numbers. Where gradients travel in 16 bits, honest evaluations round the ranks' sums too.
"""

from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from canon.reference import Layout, Mask
from canon.testing.cases import DTYPES
from canon.testing.draws import Drawn, evaluated
from canon.testing.inputs import Expected, Inputs, unseen_tokens
from canon.testing.judge import Attended, dense, oracle, orders
from canon.testing.roundings import roundings


@dataclass(frozen=True)
class RandomSource:
    """The source of the cases of `canon.testing.draws`."""

    def mask(self, case: Drawn) -> Mask:
        """The mask of ``case``."""
        return evaluated(case.mask)

    def inputs(self, case: Drawn, device: str) -> Inputs:
        """The whole sequence, the same tensors on every rank."""
        return _inputs(case, device)

    def expected(self, case: Drawn, layout: Layout, device: str) -> Expected:
        """The answers that the judge compares with."""
        x = _inputs(case, device)
        wide = torch.promote_types(x.q.dtype, torch.float32) if case.function == "merge" else x.q.dtype
        tensors = [t.to(wide) for t in (x.q, x.k, x.v, x.dout)]
        some = (*tensors, x.mask, x.scale, x.dlse)
        honest = orders(*some)
        travels = DTYPES[dict(case.options).get("reduce_dtype", "float64")]
        if travels.itemsize == 2 and (layout.ranks > 1 or case.function == "strided_attention"):
            honest += [_reduced(some, layout, travels, answer, order) for order, answer in enumerate(honest)]
        return Expected(oracle(*some), honest, roundings(*some))


@lru_cache(maxsize=4)
def _inputs(case: Drawn, device: str) -> Inputs:
    mask, shape, dtype = evaluated(case.mask), case.shape, DTYPES[case.dtype]
    draw = Random(f"{case.seed}/{case.index}")
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    (h, g), (d, dv), b = shape.heads, shape.widths, shape.batch or 1
    sizes = [(mask.queries, h, d), (mask.keys, g, d), (mask.keys, g, dv), (mask.queries, h, dv)]
    q, k, v, dout = (torch.randn(b, *size, generator=generator) for size in sizes)
    lean = draw.choice([0, 0, 3])  # sums then grow, and roundings of partial sums show
    q, k, v, dout = (x.to(dtype) for x in (q, k, v + lean, dout + lean))
    dlse = 4 * torch.randn(b, h, mask.queries, generator=generator).to(torch.promote_types(dtype, torch.float32))
    dout = torch.zeros_like(dout) if case.used == "lse" else dout
    dlse = torch.zeros_like(dlse) if case.used in {"out", "no lse", "sum"} else dlse
    for x, axis in ((q, 0), (dout, 0), (k, 1), (v, 1)):
        x[:, unseen_tokens(mask, axis)] = torch.nan
    dout = torch.ones_like(dout) if case.used == "sum" else dout
    tensors = [x if shape.batch else x[0] for x in (q, k, v, dout, dlse)]
    return Inputs(*(x.to(device) for x in tensors), mask, shape.scale)


def _reduced(some: tuple, layout: Layout, travels: torch.dtype, answer: Attended, order: int) -> Attended:
    """Honest gradients of keys whose parts, one per rank's queries, are rounded and added up in the dtype that travels."""
    q, k, v, dout, mask, scale, dlse = some
    ranks = torch.randperm(layout.ranks, generator=torch.Generator().manual_seed(order)).tolist()
    totals: list[Tensor] = []
    for rank in ranks:
        mine = torch.zeros(layout.tokens, dtype=torch.bool, device=q.device)
        mine[layout.positions(rank).to(q.device)] = True
        part = dense(q, k, v, dout.masked_fill(~mine[:, None, None], 0), mask, scale, dlse.masked_fill(~mine, 0))
        parts = [x.to(travels) for x in (part.dk, part.dv)]
        totals = [total + x for total, x in zip(totals, parts, strict=True)] if totals else parts
    return answer._replace(dk=totals[0].to(answer.dk.dtype), dv=totals[1].to(answer.dv.dtype))
