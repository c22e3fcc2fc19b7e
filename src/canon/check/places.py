"""Locate the largest error of a wrong result: the token, its rank, its row there, and the head."""

import torch
from torch import Tensor

from canon.reference import Layout
from canon.testing.judge import Results


def worst_places(faults: list[str], got: Results, exact: Results, layout: Layout | None) -> list[str]:
    """Return a line for each tensor that a fault names. ``layout`` is None for a function on one rank."""
    named = [name for name in got._fields if any(fault.startswith(f"{name} ") for fault in faults)]
    return [
        place(name, getattr(got, name), getattr(exact, name), layout)
        for name in named
        if getattr(got, name) is not None
    ]


def place(name: str, got: Tensor, exact: Tensor, layout: Layout | None) -> str:
    """Describe the worst token of a tensor (b, t, h, width), lse (b, h, t), or dsink (h,)."""
    got, exact = got.to(exact.device).double(), exact.double()
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
    others = f"; error at least half as large: tokens {_first_eight(bad)}" if len(bad) > 1 else ""
    return f"{line}: off by {float(worst):.2e}{others}"


def holder(layout: Layout, token: int) -> tuple[int, int]:
    """Return the rank that holds a token, and its row there."""
    for rank in range(layout.ranks):
        rows = (layout.positions(rank) == token).nonzero()
        if len(rows):
            return rank, int(rows[0])
    raise ValueError(f"no rank holds token {token}")


def _first_eight(tokens: list[int]) -> str:
    return ", ".join(map(str, tokens[:8])) + (f" and {len(tokens) - 8} more" if len(tokens) > 8 else "")
