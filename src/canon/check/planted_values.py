"""Write NaN to hidden tokens, and plant a NaN or an infinity into one element of a visible token.

A text such as "nan in k" gives the value and the tensor. The element lies in the last sequence, the middle visible token, the
last head and the middle of the width. The oracle has the results that it must reach. In a module outside canon it may reach
any other. A kernel of canon multiplies hidden elements by 0, and 0 * NaN is NaN, so it may reach these:

    in      more elements that it may reach          and under a sink
    q       dk, the same column                      dv
    k       dq, the same column                      dv
    v       out, the same column; so dq and dk       dsink
    dout    dv, the same column
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canon.reference import Mask
from canon.testing.judge import Results

VALUES, TENSORS = ("nan", "inf", "-inf"), ("q", "k", "v", "dout")


def hide(masks: Sequence[Mask], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """Write NaN to queries that see no key and to keys that no query sees."""
    for row, mask in enumerate(masks):
        for axis, both in enumerate(((q, dout), (k, v))):
            unseen = unseen_tokens(mask, axis)
            for x in both:
                x[row, unseen] = torch.nan


def unseen_tokens(mask: Mask, axis: int) -> Tensor:
    """Return booleans: queries that see no key (axis 0), or keys that no query sees (axis 1)."""
    unseen = torch.ones(mask.keys if axis else mask.queries, dtype=torch.bool)
    for band in mask.bands:  # every row and column of a band is seen
        unseen[slice(band.k_start, band.k_stop) if axis else slice(band.q_start, band.q_stop)] = False
    return unseen


def plant(planted: str, masks: Sequence[Mask], tensors: Sequence[Tensor]) -> None:
    """Write the value into q (b, t, h, d), k (b, s, g, d), v (b, s, g, dv) or dout (b, t, h, dv)."""
    value, name = planted.split(" in ")
    x = tensors[TENSORS.index(name)]
    seen = (~unseen_tokens(masks[-1], int(name in ("k", "v")))).nonzero().flatten()
    x[-1, seen[len(seen) // 2 :][:1], -1, x.shape[-1] // 2] = float(value)


def everywhere(results: Results, value: bool = True) -> Any:
    """Return booleans with the shapes of the results."""
    return type(results)(*(None if x is None else torch.full_like(x, value, dtype=torch.bool) for x in results))


def spread(planted: str, exact: Results, share: int) -> Results:
    """Return booleans: the elements that the value may reach beyond the oracle. ``share``: query heads of a key head."""
    places = everywhere(exact, False)
    name = planted.split(" in ")[1]
    result, heads = {"q": ("dk", 1), "k": ("dq", share), "v": ("out", share), "dout": ("dv", 1)}[name]
    of_result = getattr(places, result)
    of_result[..., -heads:, of_result.shape[-1] // 2] = True
    if name == "v":
        places.dq[..., -share:, :] = places.dk[..., -1, :] = True
    if len(places) > 5:
        (places.dsink[-share:] if name == "v" else places.dv[..., -1, :]).fill_(True)
    return places
