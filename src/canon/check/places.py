"""Explain a wrong result: where its largest error is, and which mistake would give it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from canon.check.inputs import Inputs
from canon.reference import Layout
from canon.reference.tiles import scores_of
from canon.testing.judge import Results

CLOSE = 0.2  # a mistake explains an error if it leaves at most this part of it


def worst_places(faults: Sequence[str], got: Results, exact: Results, layout: Layout | None) -> list[str]:
    """Return a line for each tensor that a fault names. ``layout`` is None for a function on one rank."""
    return [place(name, getattr(got, name), getattr(exact, name), layout) for name in _named(faults, got)]


def _named(faults: Sequence[str], got: Results) -> list[str]:
    wrong = {fault.partition(" ")[0] for fault in faults}
    return [name for name, tensor in zip(got._fields, got, strict=True) if name in wrong and tensor is not None]


def place(name: str, got: Tensor, exact: Tensor, layout: Layout | None) -> str:
    """Describe the worst token of a tensor (b, t, h, width) or lse (b, h, t), the worst head of dsink, or row of dup_weight."""
    got, exact = got.to(exact.device).double(), exact.double()
    if name == "dup_weight":
        row = int((got - exact).norm(dim=-1).nan_to_num(torch.inf).argmax())
        return f"dup_weight is worst in row {row} of {len(exact)}"
    if name == "dsink":
        return f"dsink is worst at head {int((got - exact).abs().nan_to_num(torch.inf).argmax())}"
    same = (got == exact) | ~(got.isfinite() | exact.isfinite())
    error = torch.where(same, 0.0, (got - exact).abs()).nan_to_num(torch.inf, torch.inf)
    error = error.transpose(-1, -2) if name == "lse" else error.norm(dim=-1)  # (b, t, h)
    error = error if error.dim() == 3 else error[None]
    if not error.numel():
        return f"{name} is empty"
    worst = error.max()
    b, token, head = (int(i) for i in (error == worst).nonzero()[0])
    bad = (error >= worst / 2).any(-1).any(0).nonzero().flatten().tolist()
    line = f"{name} is worst at token {token}" + (f" of sequence {b}" if len(error) > 1 else "") + f", head {head}"
    if layout is not None:
        rank, row = holder(layout, token)
        line += f", which rank {rank} holds in row {row}"
    first = ", ".join(map(str, bad[:8])) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
    others = f"; error at least half as large: tokens {first}" if len(bad) > 1 else ""
    return f"{line}: off by {float(worst):.2e}{others}"


def holder(layout: Layout, token: int) -> tuple[int, int]:
    """Return the rank that holds a token, and its row there."""
    for rank in range(layout.ranks):
        rows = (layout.positions(rank) == token).nonzero()
        if len(rows):
            return rank, int(rows[0])
    raise ValueError(f"no rank holds token {token}")


def explained(faults: Sequence[str], got: Results, exact: Results, x: Inputs) -> list[str]:
    """Return the mistakes that explain faults: a factor of a tensor, or keys that a query sees or does not see."""
    named = _named(faults, got)
    factors = {name: _factor(getattr(got, name), getattr(exact, name)) for name in named}
    lines = [f"{name} is {factor:#.3g} times the expected" for name, factor in factors.items() if factor is not None]
    keys = _other_keys(got.out, exact.out, x) if "out" in named and factors["out"] is None else None
    return [keys, *lines] if keys else lines


def _factor(got: Tensor, exact: Tensor) -> float | None:
    got, exact = (t.to(exact.device).double().masked_fill(~exact.isfinite(), 0) for t in (got, exact))
    factor = (got * exact).sum() / exact.square().sum()
    explains = (got - factor * exact).norm() <= CLOSE * (got - exact).norm()  # False for NaN
    return factor.item() if explains and factor != 0 else None


def _other_keys(out: Tensor, exact: Tensor, x: Inputs) -> str | None:
    """Compare the worst query with attention over one key more, over one key less, and over the first keys."""
    out, exact, q, k, v = (t.to(exact.device).double() for t in (out, exact, x.q, x.k, x.v))
    out, exact, q, k, v = (t if t.dim() == 4 else t[None] for t in (out, exact, q, k, v))
    error = (out - exact).norm(dim=-1).nan_to_num(0.0)
    b, query, head = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    of_query = f"query {query}" + (f" of sequence {b}" if len(out) > 1 else "")
    mask = x.mask[b] if isinstance(x.mask, tuple) else x.mask
    visible = mask.crop(queries=range(query, query + 1)).dense()[0].to(out.device)
    if not visible.any():
        return f"{of_query} sees no key, so its out must be 0"
    k, v = (t[b, :, head // (q.shape[2] // k.shape[2])].nan_to_num() for t in (k, v))
    scores = scores_of(q[b, query, head][None], k, x.scaling)[0]
    weights = torch.exp(scores - scores.max())
    weighted = torch.cat([weights[:, None] * v, weights[:, None]], -1)  # the last column gives the denominators
    changed = visible.double() @ weighted + torch.where(visible, -1.0, 1.0)[:, None] * weighted
    sums = torch.cat([changed, weighted.cumsum(0)])
    distance = (sums[:, :-1] / sums[:, -1:] - out[b, query, head]).norm(dim=-1).nan_to_num(torch.inf)
    if distance.min() > CLOSE * error.max():
        return None
    prefix, key = divmod(int(distance.argmin()), mask.keys)
    if prefix:
        hidden, missing = int((~visible[: key + 1]).sum()), int(visible[key + 1 :].sum())
        also = f"; {hidden} of them are hidden" * (hidden > 0) + f"; it misses {missing} visible keys" * (missing > 0)
        return f"{of_query} sees the keys 0 to {key}{also}"
    return f"{of_query} does not see the visible key {key}" if visible[key] else f"{of_query} sees the hidden key {key}"
