"""Judge a result of attention: compare its error with that of dense attention in the same dtype.

    exact = oracle(q, k, v, dout, mask)        float64, on the same rounded inputs
    honest = orders(q, k, v, dout, mask)       the dtype of q, four orders of summation
    verdict = agreement(got, exact, honest)    error <= 2 x honest error + one rounding, for each
                                               tensor and norm

**Bound.** The honest error is the largest of four evaluations. The factor 2 allows for other
roundings of a kernel. For float64 the bound is 1e-12.

**Norms.** L2, maximum, and worst token: ``max_t |error_t| / max(|oracle_t|, median_t |oracle_t|)``,
with L2 over heads and width. It finds an error in a late token, which has size 1 / sqrt(n).

**Roundings of `dense`.** Operands of matrix products are rounded to the dtype; sums, the softmax
and lse are float32, in base 2. For 16-bit inputs q k^T is summed as a tensor core does: 16 products
at a time, truncated (Fasi, Higham, Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores,
2021).

**NaN and infinities** reach exactly the cells that see them. The judge compares their places, and
errors elsewhere. Hidden tokens may hold NaN.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon.reference import Mask
from canon.route.checks import Scale, split_scale

Masks = Mask | tuple[Mask, ...]  # a tuple has a mask for each sequence of the batch

EXACT = 1e-12
UNIT = 2.0**-24  # one rounding of float32
NORMS = ("l2", "max", "token")
LOG2E = 1.4426950408889634
# scores in memory at a time
_BLOCK = {"cpu": 1 << 24, "cuda": 1 << 27}


class Attended(NamedTuple):
    """Results of attention; None for missing ones."""

    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


class AttendedWithSink(NamedTuple):
    """The same with dsink (h,), on several ranks the sum of their gradients."""

    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None


Results = Attended | AttendedWithSink


def results_of(five: Iterable[Tensor | None], dsink: Tensor | None) -> Results:
    """Return results, with dsink if there is one."""
    return Attended(*five) if dsink is None else AttendedWithSink(*five, dsink)


def oracle(
    q, k, v, dout, mask: Masks | None = None, scale: Scale | None = None, dlse=None, sink=None
) -> Results:
    """Return dense attention and its gradients in float64, from the definition.

    q (b, t, h, d), k (b, s, g, d), v (b, s, g, dv), dout (b, t, h, dv), lse and dlse (b, h, t),
    sink (h,). All may be without b. ``mask`` may be a tuple of b Masks."""
    return _attend(q, k, v, dout, mask, scale, dlse, sink, torch.float64, None, 0)


def dense(
    q,
    k,
    v,
    dout,
    mask: Masks | None = None,
    scale: Scale | None = None,
    dlse=None,
    sink=None,
    *,
    order: int = 0,
) -> Results:
    """Return the same in the dtype of q. ``order`` > 0 shuffles d and the keys, and merges 2 **
    order parts of the keys.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _attend(q, k, v, dout, mask, scale, dlse, sink, wide, q.dtype, order)


def orders(*given: Any, **named: Any) -> list[Results]:
    """Return the results of `dense` for four orders."""
    return [dense(*given, **named, order=order) for order in range(4)]


def by_sequence(function: Callable[..., Results]) -> Callable[..., Results]:
    """Let a function like `oracle` take packed tensors, and a tuple of masks."""

    def called(q, k, v, dout, mask=None, scale=None, dlse=None, sink=None, *more) -> Results:
        if q.dim() == 3:
            packed, dlse = (x[None] for x in (q, k, v, dout)), None if dlse is None else dlse[None]
            one = called(*packed, mask, scale, dlse, sink, *more)
            return results_of((x[0] for x in one[:5]), *(one[5:] or (None,)))
        if not isinstance(mask, tuple):
            return function(q, k, v, dout, mask, scale, dlse, sink, *more)
        parts = []
        for i, own in enumerate(mask):
            own_dlse = None if dlse is None else dlse[i : i + 1]
            parts.append(
                function(
                    *(x[i : i + 1] for x in (q, k, v, dout)), own, scale, own_dlse, sink, *more
                )
            )
        dsink = None if sink is None else torch.stack([part[5] for part in parts]).sum(0)
        return results_of(
            (torch.cat(x) for x in zip(*(part[:5] for part in parts), strict=True)), dsink
        )

    return called


@by_sequence
def _attend(
    q,
    k,
    v,
    dout,
    mask,
    scale,
    dlse,
    sink,
    wide: torch.dtype,
    narrow: torch.dtype | None,
    order: int,
) -> Results:
    mask = Mask.causal(q.shape[1]) if mask is None else mask
    scale, softcap = split_scale(q.shape[-1] ** -0.5 if scale is None else scale)
    group = q.shape[2] // k.shape[2]
    q_seen, k_seen = seen_tokens(mask, q.device)
    q, dout = (heads_first(x, q_seen, wide) for x in (q, dout))
    k, v = (heads_first(x, k_seen, wide).repeat_interleave(group, 1) for x in (k, v))
    dlse = q.new_zeros(q.shape[:3]) if dlse is None else dlse.to(wide).masked_fill(~q_seen, 0)
    widths, keys = _shuffled(q.shape[-1], order, q.device), _shuffled(mask.keys, order, q.device)
    q, k, v = q[..., widths], k[:, :, keys][..., widths], v[:, :, keys]

    def rounded(x: Tensor) -> Tensor:
        return x if narrow is None else x.to(narrow).to(wide)

    out, lse, dq = v.new_empty(dout.shape), q.new_empty(q.shape[:3]), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    sink = None if sink is None else sink.detach().to(wide)[:, None]
    dsink = None if sink is None else torch.zeros_like(sink[:, 0])
    with torch.no_grad(), _no_tf32():
        for rows, visible in row_blocks(mask, q):
            scores, slope = _capped(scale * LOG2E * _products(q[:, :, rows], k, narrow), softcap)
            scores.masked_fill_(~visible[:, keys], -torch.inf)
            out[:, :, rows], lse[:, :, rows] = _softmax(scores, v, 1 << order, rounded)
            seen_lse = _finite(lse[:, :, rows])
            seen = visible[:, keys] & (lse[:, :, rows, None] != -torch.inf)
            # the weight of the keys beside the sink
            a = q.new_ones(()) if sink is None else torch.sigmoid(seen_lse - sink)
            out[:, :, rows] = rounded(a[..., None] * out[:, :, rows])
            p = torch.exp2(scores - LOG2E * seen_lse[..., None])
            delta = (
                (dout[:, :, rows] * out[:, :, rows])
                .sum(-1)
                .masked_fill(lse[:, :, rows] == -torch.inf, 0)
            )
            ds = p * (
                a[..., None] * (dout[:, :, rows] @ v.mT) - (a * delta - dlse[:, :, rows])[..., None]
            )
            ds = rounded(slope * ds)
            dq[:, :, rows] = scale * _over_seen(ds, k, seen)
            dk += scale * _over_seen(ds.mT, q[:, :, rows], seen.mT)
            dv += _over_seen(rounded(a[..., None] * p).mT, dout[:, :, rows], seen.mT)
            if sink is not None and dsink is not None:
                dsink -= (torch.sigmoid(sink - seen_lse) * delta).sum((0, 2))
    dq = dq[..., widths.argsort()]
    dk = dk[:, :, keys.argsort()][..., widths.argsort()]
    dv = dv[:, :, keys.argsort()]
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    narrow = wide if narrow is None else narrow
    out, dq, dk, dv = (x.transpose(1, 2).to(narrow) for x in (out, dq, dk, dv))
    return results_of((out, lse, dq, dk, dv), dsink)


def _capped(scores: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    if softcap is None:
        return scores, 1.0
    ratio = torch.tanh(scores / (softcap * LOG2E))
    return softcap * LOG2E * ratio, 1 - ratio.square()


def _softmax(
    scores: Tensor, v: Tensor, parts: int, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    out = v.new_zeros(*scores.shape[:-1], v.shape[-1])
    lse = v.new_full((*scores.shape[:-1], 1), -torch.inf)
    for scores_part, v_part in zip(
        scores.tensor_split(parts, -1), v.tensor_split(parts, -2), strict=True
    ):
        if scores_part.shape[-1]:
            top = scores_part.amax(-1, keepdim=True)
            p = torch.exp2(scores_part - _finite(top))
            total = p.sum(-1, keepdim=True)
            part = _over_seen(rounded(p), v_part, scores_part > -torch.inf) / total.masked_fill(
                total == 0, 1
            )
            part_lse = (top + total.log2()) / LOG2E
            merged = torch.logaddexp(lse, part_lse)
            out = (
                torch.exp(lse - _finite(merged)) * out
                + torch.exp(part_lse - _finite(merged)) * part
            )
            lse = merged
    return out, lse[..., 0]


def _over_seen(weights: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """Return weights @ x over ``seen`` cells: a weight of 0 does not hide a NaN."""
    finite = x.isfinite()
    rest = (~finite).any(-1).flatten(0, 1).any(0)
    cells = weights[..., rest, None] * x.masked_fill(finite, 0)[:, :, None, rest]
    weights = weights.masked_fill(~seen, 0)
    return weights @ x.masked_fill(~finite, 0) + cells.masked_fill(~seen[..., rest, None], 0).sum(
        -2
    )


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0)


def heads_first(x: Tensor, seen: Tensor, wide: torch.dtype) -> Tensor:
    """Return x (b, t, h, d) as (b, h, t, d) in a dtype, with 0 in unseen tokens."""
    return x.detach().to(wide).masked_fill(~seen[:, None, None], 0).transpose(1, 2)


def _shuffled(n: int, order: int, device) -> Tensor:
    if order == 0:
        return torch.arange(n, device=device)
    return torch.randperm(n, generator=torch.Generator().manual_seed(order)).to(device)


def row_blocks(mask: Mask, q: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the `visible_blocks` that fit into memory."""
    step = max(1, _BLOCK[q.device.type] // max(1, q.shape[0] * q.shape[1] * mask.keys))
    yield from visible_blocks(mask, q.device, step)


def seen_tokens(mask: Mask, device) -> tuple[Tensor, Tensor]:
    """Return, as booleans, queries that see a key, and keys that a query sees."""
    queries = torch.zeros(mask.queries, dtype=torch.bool, device="cpu")
    keys = torch.zeros(mask.keys, dtype=torch.bool, device="cpu")
    for band in mask.bands:  # it has a cell in each of its rows and columns
        queries[band.q_start : band.q_stop] = True
        keys[band.k_start : band.k_stop] = True
    return queries.to(device), keys.to(device)


def visible_blocks(
    mask: Mask, device: torch.device | str = "cpu", step: int = 4096
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (queries, bool [queries, keys]), ``step`` rows of the mask at a time."""
    for start in range(0, mask.queries, step):
        rows = range(start, min(start + step, mask.queries))
        yield slice(rows.start, rows.stop), mask.crop(queries=rows).dense().to(device)


def _products(q: Tensor, k: Tensor, narrow: torch.dtype | None) -> Tensor:
    """Return q k^T, of 16-bit operands as a tensor core."""
    if narrow not in (torch.float16, torch.bfloat16):
        return q @ k.mT
    total = q.new_zeros(*q.shape[:3], k.shape[2])
    for start in range(0, q.shape[-1], 16):
        part = slice(start, start + 16)
        exact = (q[..., part].double() @ k[..., part].double().mT).add_(total)
        total = exact.float()
        total = torch.where(
            total.abs() > exact.abs(), torch.nextafter(total, torch.zeros_like(total)), total
        )
    return total


@contextmanager
def _no_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if before != "highest":  # the setting is global, so change it only if necessary
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Measure:
    """The error of a tensor in a norm, and its bound."""

    tensor: str
    norm: str
    error: float
    bound: float

    @property
    def ratio(self) -> float:
        return self.error / self.bound if self.bound else 0.0 if self.error == 0 else float("inf")

    def __str__(self) -> str:
        return f"{self.tensor} {self.norm} {short(self.ratio)}"


def short(ratio: float) -> str:
    """Return a ratio with two decimals, from 10^6 on as a power of ten."""
    return f"{ratio:.2f}" if ratio < 1e6 else f"{ratio:.0e}"


@dataclass(frozen=True)
class Agreement:
    """All measures, and all faults as text."""

    measures: tuple[Measure, ...]
    faults: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return not self.faults

    @property
    def worst(self) -> Measure | None:
        return max(self.measures, key=lambda m: m.ratio, default=None)

    def __str__(self) -> str:
        lines = [
            f"{m.tensor:4} {m.norm:5} error {m.error:.2e}  bound {m.bound:.2e}  {short(m.ratio):>6}"
            for m in self.measures
        ]
        return "\n".join([*lines, *self.faults])


def agreement(
    got: Results,
    exact: Results,
    honest: Results | list[Results],
    roundings: Results | None = None,
) -> Agreement:
    """Compare the errors of ``got`` and ``honest``. The distances of ``roundings`` widen the
    bounds. Raises ValueError if all tensors are None, or a shape is wrong."""
    measures, faults = [], []
    honest, none = honest if isinstance(honest, list) else [honest], (None,) * len(exact)
    for name, mine, true, size, *theirs in zip(
        exact._fields, got, exact, roundings or none, *honest, strict=True
    ):
        if mine is not None:
            if mine.shape != true.shape:
                raise ValueError(
                    f"{name} has shape {tuple(mine.shape)}, expected {tuple(true.shape)}"
                )
            more_measures, more_faults = judged(name, mine.detach(), true, theirs, size)
            measures += more_measures
            faults += more_faults
    if all(x is None for x in got):
        raise ValueError("nothing to judge: every tensor is None")
    return Agreement(tuple(measures), tuple(faults))


def judged(
    name: str,
    got: Tensor,
    exact: Tensor,
    honest: list[Tensor],
    roundings: Tensor | None = None,
) -> tuple[list[Measure], list[str]]:
    """Return measures and faults of the tensor ``name`` (..., tokens, heads, width)."""
    kept, unseen, missing = honest[0].dtype, exact == -torch.inf, ~got.to(exact.device).isfinite()
    # if their places are not those of the oracle
    wrong = [Measure(name, "nan/inf", float("inf"), 0.0)]
    if name == "lse" and not torch.equal(got.to(exact.device) == -torch.inf, unseen):
        return wrong, [
            f"lse is -inf at {int((got == -torch.inf).sum())} places, the oracle at "
            f"{int(unseen.sum())}"
        ]
    if stray := int((missing & exact.isfinite()).sum()):
        return wrong, [f"{name} has {stray} values that are not finite"]
    if hidden := int((~missing & ~exact.isfinite()).sum()):
        return wrong, [
            f"{name} is finite at {hidden} places that a visible NaN or infinity reaches"
        ]
    got, exact, *honest = (
        x.to(exact.device).double().masked_fill(missing, 0) for x in (got, exact, *honest)
    )
    # below it, the oracle's own value may be rounding
    floor = torch.zeros_like(exact) if roundings is None else roundings.to(exact.device)
    floor = floor.masked_fill(missing, 0)
    significant = bool((exact.abs() > floor).any())
    faults = [f"{name} is zero everywhere"] if significant and not bool(got.any()) else []
    rounded = exact.to(kept).double()
    errors, measures = [*(x - exact for x in (got, rounded, *honest)), floor], []
    for norm in NORMS:
        error, once, *theirs, distance = relative(name, norm, errors, exact)
        bound = (EXACT if kept == torch.float64 else 2 * max(theirs) + once) + distance
        measures.append(Measure(name, norm, error, bound))
        if not error <= bound:
            faults.append(
                f"{name} is off by {error:.2e} in the {norm} norm; its dtype explains "
                f"at most {bound:.2e}"
            )
    return measures, faults


def relative(name: str, norm: str, errors: list[Tensor], exact: Tensor) -> list[float]:
    """Return the sizes of ``errors`` relative to ``exact``."""
    if not exact.numel():
        return [0.0] * len(errors)
    size = _norms(name, norm, exact)
    if norm == "token" and bool(size.any()):
        size = size.clamp(min=size[size > 0].median())
    size = size.masked_fill(size == 0, 1)
    return torch.stack([(_norms(name, norm, x) / size).amax() for x in errors]).tolist()


def _norms(name: str, norm: str, x: Tensor) -> Tensor:
    """Return a norm, or those of the tokens. "lse" is (..., h, t), "dsink" (h,)."""
    if norm == "max":
        return x.abs().amax()
    if norm == "l2":
        return x.norm()
    if name == "dsink":
        return x.abs()
    return x.norm(dim=-2) if name == "lse" else x.flatten(-2).norm(dim=-1)
