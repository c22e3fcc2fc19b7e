"""The layouts that have divided tensors in this process: a call with another one warns."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from canon.masks.layout import Layout

MOST = 10_000  # layouts; no call warns in a program with more of them

_cuts: set[tuple[int, int, int, int]] = set()  # tokens, ranks, a rank and its tokens
_possible: set[int] = set()  # hashes of the layouts that may have divided tensors


def note_possible(layout: "Layout") -> None:
    """Note that a layout may have divided tensors without `Layout.shard`."""
    if len(_possible) < MOST and not torch.compiler.is_compiling():
        _possible.add(hash(layout))


def note_cut(layout: "Layout", rank: int) -> None:
    """Note that a layout has divided a tensor, for ``rank``."""
    if len(_possible) < MOST and not torch.compiler.is_compiling():
        _possible.add(hash(layout))
        _cuts.add(_cut(layout, rank))


def only_others_cut(layout: "Layout", rank: int) -> bool:
    """Return whether only other layouts have divided tensors into as many tokens for ``rank``."""
    if len(_possible) >= MOST or hash(layout) in _possible:
        return False
    return _cut(layout, rank) in _cuts


def forget_cuts() -> None:
    """Forget all notes."""
    _cuts.clear()
    _possible.clear()


def _cut(layout: "Layout", rank: int) -> tuple[int, int, int, int]:
    return layout.tokens, layout.ranks, rank, layout.size(rank)
