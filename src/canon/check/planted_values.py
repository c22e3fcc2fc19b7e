"""Write NaN to hidden tokens, and plant a NaN or an infinity into one element of a visible token.

The element is the middle one of the middle visible token, in the last sequence and head. Beyond the
results of the oracle, a kernel of canon, which multiplies hidden elements by 0, may reach of the
last sequence and key head:

    in      more elements that it may reach          and under a sink
    q       dk, the same column                      dv
    k       dq, the same column                      dv
    v       out, the same column; so dq and dk       dsink
    dout    dv, the same column

A module outside canon may reach `REACH`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canon.reference import Mask
from canon.testing.judge import Masks, Results, seen_tokens

VALUES, TENSORS = ("nan", "inf", "-inf"), ("q", "k", "v", "dout")
REACH = {  # outside canon: the results that a value may reach at any token
    "q": ("dk", "dv", "dsink"),
    "k": ("out", "lse", "dq", "dk", "dv", "dsink"),
    "v": ("out", "dq", "dk", "dsink"),
    "dout": ("dk", "dv", "dsink"),
}


def hide(masks: Sequence[Mask], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """Write NaN to queries and keys that no cell sees."""
    for row, mask in enumerate(masks):
        for seen, both in zip(seen_tokens(mask, "cpu"), ((q, dout), (k, v)), strict=True):
            for x in both:
                x[row, ~seen] = torch.nan


def plant(planted: str, masks: Sequence[Mask], tensors: Sequence[Tensor]) -> None:
    """Write a NaN or an infinity, as "nan in v", into the tensors."""
    value, name = planted.split(" in ")
    x = tensors[TENSORS.index(name)]
    x[-1, _planted_token(name, masks[-1]), -1, x.shape[-1] // 2] = float(value)


def _planted_token(name: str, mask: Mask) -> Tensor:
    seen = seen_tokens(mask, "cpu")[name in ("k", "v")].nonzero().flatten()
    return seen[len(seen) // 2 :][:1]


def _nowhere(results: Results) -> Any:
    masks = (x if x is None else torch.zeros_like(x, dtype=torch.bool) for x in results)
    return type(results)(*masks)


def spread(planted: str, exact: Results, share: int, mask: Masks) -> Results:
    """Return where the value may go. ``share``: query heads of a key head."""
    places, name = _nowhere(exact), planted.split(" in ")[1]
    moves = {"q": ("dk", 1), "k": ("dq", share), "v": ("out", share), "dout": ("dv", 1)}
    result, heads = moves[name]
    of_result = getattr(places, result)
    of_result[..., -heads:, of_result.shape[-1] // 2] = True
    if name == "v":
        places.dq[..., -share:, :] = places.dk[..., -1, :] = True
    if len(places) > 5:
        (places.dsink[-share:] if name == "v" else places.dv[..., -1, :]).fill_(True)
    return places


def reach(planted: str, exact: Results, share: int, mask: Masks) -> Results:
    """Return the same for a module outside canon."""
    places, name = _nowhere(exact), planted.split(" in ")[1]
    token = _planted_token(name, mask[-1] if isinstance(mask, tuple) else mask)
    of_query = {"q": ("out", "lse", "dq"), "dout": ("dq",)}.get(name, ())
    for result, place in places._asdict().items():
        if place is None:
            continue
        may = result in REACH[name]
        if result == "dsink":
            place[-share:] = may
            continue
        place = place.transpose(-1, -2)[..., None] if result == "lse" else place
        of_last = place[-1] if place.dim() == 4 else place
        of_last[:, -1 if result in ("dk", "dv") else slice(-share, None)] = may
        if result in of_query:
            of_last[token, -1] = True  # the query of the value
    return places


def exempted(got: Results, exact: Results, places: Any) -> Any:
    """Replace values by the oracle's at ``places`` where only those are finite."""

    def judged(mine: Tensor | None, true: Tensor, place: Tensor) -> Tensor | None:
        if mine is None:
            return None
        mine = mine.to(true.device)
        return torch.where(~mine.isfinite() & true.isfinite() & place, true.to(mine.dtype), mine)

    return type(got)(*map(judged, got, exact, places))
