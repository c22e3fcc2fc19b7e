"""Find the mistake that a wrong result looks as if a module had made: a factor of a tensor, or a
way to compute out and lse of the worst query.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from canon.check.inputs import Inputs
from canon.reference.tiles import scores_of
from canon.route.checks import Scale, default_scale
from canon.testing.judge import UNIT

CLOSE = 0.05  # a mistake explains an error if it leaves at most this part of it, beside rounding
MANY_KEYS = 8192  # beyond, the keys of a query are not varied
CLEAR = 0.25  # rounding is at most this part of an error that has a cause


def explained(
    faults: Sequence[str],
    got: Any,
    exact: Any,
    honest: Sequence[Any],
    x: Inputs,
    parts: Sequence[range] = (),
) -> list[str]:
    """Return the mistakes that explain faults. ``parts``: the keys of each part of `merge`."""
    wrong, factors = {fault.partition(" ")[0] for fault in faults}, {}
    for name in (name for name in got._fields if name in wrong):
        if getattr(got, name) is not None:
            mine, true, *theirs = (getattr(one, name) for one in (got, exact, *honest))
            factors[name] = _factor(mine, true, theirs)
    lines = [
        f"{name} is {factor:#.3g} times the expected"
        for name, factor in factors.items()
        if factor is not None
    ]
    if abs((factors.get("lse") or 0.0) * math.log(2) - 1) < 1e-3:
        lines.append("lse is as if its logarithm had base 2: it must be the natural one")
    if factors.get("out", 0) is None and got.lse is not None:
        lines = [*_of_worst_query(got, exact, honest, x), *lines]
    return [*_without_a_key(got, exact, x, parts), *lines] if "out" in wrong else lines


def _without_a_key(got: Any, exact: Any, x: Inputs, parts: Sequence[range]) -> list[str]:
    if got.out is None or bool(got.out.isfinite().all()):
        return []
    of_queries = lambda t: t.isfinite().all(-1).all(-1).reshape(-1, t.shape[-3]).all(0)
    wrong = (of_queries(exact.out) & ~of_queries(got.out.to(exact.out.device))).cpu()
    masks = x.mask if isinstance(x.mask, tuple) else (x.mask,)
    whole = "no key: there out must be 0, and lse -inf"
    texts = {range(masks[0].keys): whole} | {
        keys: f"no key of part {place}: its lse is -inf there, so its weight is 0, and its out may "
        "be NaN"
        for place, keys in enumerate(parts, 1)
    }
    lines, explained = [], torch.zeros_like(wrong)
    for keys, text in texts.items():
        sees = torch.stack([mask.dense()[:, keys.start : keys.stop].any(1) for mask in masks])
        explained |= ~sees.all(0)
        blind = (wrong & ~sees.all(0)).nonzero().flatten().tolist()
        if blind:
            more = f" and {len(blind) - 1} more, which see" if len(blind) > 1 else ", which sees"
            lines.append(f"out is not finite at query {blind[0]}{more} {text}")
    return [] if bool((wrong & ~explained).any()) else lines


def _factor(got: Tensor, exact: Tensor, honest: Sequence[Tensor]) -> float | None:
    hidden = ~exact.isfinite()
    got, *honest = (t.to(exact.device).double().masked_fill(hidden, 0) for t in (got, *honest))
    exact = exact.double().masked_fill(hidden, 0)
    rounding = max((float((one - exact).norm()) for one in honest), default=0.0)
    factor, error = float((got * exact).sum() / exact.square().sum()), float((got - exact).norm())
    small = CLOSE * min(error, abs(factor) * float(exact.norm())) + rounding
    explains = float((got - factor * exact).norm()) <= small and rounding <= CLEAR * error
    return factor if explains and factor != 0 else None  # False for NaN


def _of_worst_query(got: Any, exact: Any, honest: Sequence[Any], x: Inputs) -> list[str]:
    batched = lambda t: t if t.dim() == 4 else t[None]
    wide = lambda t: t.to(exact.out.device).double()
    out, true = (batched(wide(t)) for t in (got.out, exact.out))
    lse, true_lse = (wide(t).reshape(len(out), out.shape[2], -1) for t in (got.lse, exact.lse))
    error = (out - true).norm(dim=-1).nan_to_num(0.0)
    b, query, head = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    several = f" of sequence {b}" if len(out) > 1 else ""
    honest_outs = (batched(wide(one.out)) for one in honest)
    out, true, *others = (t[b, query, head] for t in (out, true, *honest_outs))
    lse, true_lse = (t[b, head, query] for t in (lse, true_lse))
    off, off_lse = float(error.max()), float((lse - true_lse).abs())
    rounding = max(float((one - true).norm().nan_to_num(torch.inf)) for one in others)
    if not rounding <= CLEAR * off:
        return []
    exactly = 64 * UNIT * (1 + float(lse.abs().nan_to_num(0.0, 0.0)))  # rounding
    near, near_lse = CLOSE * off + rounding, exactly
    near_lse += CLOSE * off_lse if math.isfinite(off_lse) else 0.0
    of_query = f"query {query}" + several
    sees = []
    if true_lse == -torch.inf:
        sees = [f"{of_query} sees no key, so its out must be 0"]
    for texts, outs, lses in _mistakes(exact, x, b, query, head):
        far = (outs - out).norm(dim=-1).nan_to_num(torch.inf)
        far_lse = torch.where(lses == lse, 0.0, (lses - lse).abs())
        fits = (far <= near) & (far_lse.nan_to_num(torch.inf) <= near_lse)
        if fits.any():
            fits &= far <= 1.001 * far[fits].min() + rounding / 8
            place = int((fits & (far_lse <= far_lse[fits].min() + exactly)).nonzero()[0])
            return [*sees, f"as if {of_query} {texts[place]}"]
    return sees


def _mistakes(
    exact: Any, x: Inputs, b: int, query: int, head: int
) -> Iterator[tuple[list[str], Tensor, Tensor]]:
    """Yield texts of mistakes, and a row of out and lse for each."""
    device = exact.out.device
    q, k, v = (
        (t if t.dim() == 4 else t[None])[b].to(device).double().nan_to_num()
        for t in (x.q, x.k, x.v)
    )
    mask = x.mask[b] if isinstance(x.mask, tuple) else x.mask
    visible = mask.crop(queries=range(query, query + 1)).dense().to(device)
    own, has_sink = head // (q.shape[1] // k.shape[1]), getattr(exact, "dsink", None) is not None
    sink = float(x.sink[head]) if has_sink else None

    def attended(
        seen: Tensor, scaling: Scale = x.scaling, key_head: int = own, sink: float | None = sink
    ) -> tuple[Tensor, Tensor]:
        scores = scores_of(q[query, head][None], k[:, key_head], scaling)[0]
        top = scores[seen.any(0)].max()
        weights = torch.exp(scores - top)[:, None]
        sums = seen.double() @ torch.cat([weights * v[:, key_head], weights], -1)
        lse = torch.log(sums[:, -1]) + top
        out = sums[:, :-1] / sums[:, -1:].masked_fill(sums[:, -1:] == 0, 1)
        return (out if sink is None else torch.sigmoid(lse - sink)[:, None] * out), lse

    if visible.any():
        plain = default_scale(x.q, None, x.softcap)
        if plain != x.scaling:
            text = f"had the default scale 1 / sqrt(d), not {x.scale:.3g}"
            yield [text], *attended(visible, plain)
        if x.softcap is not None:
            uncapped = default_scale(x.q, x.scale, None)
            yield ["had no soft-cap"], *attended(visible, uncapped)
        if has_sink:
            yield ["had no sink"], *attended(visible, sink=None)
        for other in (i for i in range(k.shape[1]) if i != own):
            text = f"in head {head} read head {other} of k and v, not {own}"
            yield [text], *attended(visible, key_head=other)
    if 1 < mask.keys <= MANY_KEYS:
        every = torch.ones(mask.keys, mask.keys, dtype=torch.bool, device=device)
        texts = [
            f"did not see the visible key {i}" if seen else f"saw the hidden key {i}"
            for i, seen in enumerate(visible[0].tolist())
        ]
        yield texts, *attended(visible ^ (every.tril() & every.triu()))
        yield [f"saw the keys 0 to {i}" for i in range(mask.keys)], *attended(every.tril())
