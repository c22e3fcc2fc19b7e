"""Name the place of the largest error of a wrong result: token, head and rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from canon.reference import Layout
from canon.testing.judge import Results


def worst_places(
    faults: Sequence[str], got: Results, exact: Results, layout: Layout | None
) -> list[str]:
    """Return a line for each tensor that a fault names. Without a layout all ranks are equal."""
    wrong = {fault.partition(" ")[0] for fault in faults}
    named = [
        name
        for name, tensor in zip(got._fields, got, strict=True)
        if name in wrong and tensor is not None
    ]
    return [place(name, getattr(got, name), getattr(exact, name), layout) for name in named]


def place(name: str, got: Tensor, exact: Tensor, layout: Layout | None) -> str:
    """Describe the worst token or head of a tensor, or row of dup_weight."""
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
    line = (
        f"{name} is worst at token {token}"
        + (f" of sequence {b}" if len(error) > 1 else "")
        + f", head {head}"
    )
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
