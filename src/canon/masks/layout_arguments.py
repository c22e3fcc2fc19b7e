"""Checks of the ranges of a `Layout`: each token is on exactly one rank."""

from collections.abc import Sequence
from typing import Any

from canon.masks.arguments import shown

RangesPerRank = tuple[tuple[range, ...], ...]


def checked_ranges(ranges_per_rank: Any, tokens: int) -> RangesPerRank:
    """Return the ranges of each rank, without empty ones, each with the common step and the smallest stop.

    Raises TypeError unless each rank has a sequence of ranges; ValueError if a range leaves 0 .. ``tokens`` - 1, the steps
    differ, or a token is missing or held twice.
    """
    _check_types(ranges_per_rank, tokens)
    steps = {piece.step for ranges in ranges_per_rank for piece in ranges if len(piece) > 1} or {1}
    if len(steps) > 1 or min(steps) < 1:
        raise ValueError(f"the ranges of a layout must share one step >= 1, got {sorted(steps)}")
    (step,) = steps
    held = tuple(tuple(range(p[0], p[-1] + 1, step) for p in ranges if len(p)) for ranges in ranges_per_rank)
    _check_partition(held, tokens, step)
    return held


def _check_types(ranges_per_rank: Any, tokens: int) -> None:
    """Raise unless each rank has a sequence of ranges, all inside 0 .. ``tokens`` - 1."""
    if not isinstance(ranges_per_rank, Sequence):
        raise TypeError(f"ranges_per_rank must be a list with a list of ranges by rank, got {shown(ranges_per_rank)}")
    if not ranges_per_rank:
        raise ValueError("ranges_per_rank must hold a list of ranges for each of one or more ranks, got []")
    for rank, ranges in enumerate(ranges_per_rank):
        if not isinstance(ranges, Sequence) or isinstance(ranges, range):
            raise TypeError(f"ranges_per_rank[{rank}] must be a list of ranges, got {shown(ranges)}: put it in a list")
        for place, piece in enumerate(ranges):
            name = f"ranges_per_rank[{rank}][{place}]"
            if not isinstance(piece, range):
                raise TypeError(f"{name} must be a range, got {shown(piece)}: write range(start, stop)")
            if piece and not (0 <= piece[0] < tokens and 0 <= piece[-1] < tokens):
                raise ValueError(f"{name} must lie inside the layout's {tokens} tokens, got {piece}")


def _check_partition(held: RangesPerRank, tokens: int, step: int) -> None:
    """Raise unless each token is held exactly once: the pieces of each residue class of the step form one chain."""
    pieces = sorted(((piece, rank) for rank, ranges in enumerate(held) for piece in ranges), key=lambda x: x[0].start)
    expected = list(range(min(step, tokens)))  # the next token of each residue class
    for piece, rank in pieces:
        due = expected[piece.start % step] if piece.start % step < len(expected) else None
        if piece.start != due or piece[-1] >= tokens:
            raise ValueError(
                f"a layout holds each of its {tokens} tokens once: {piece} of rank {rank} comes where "
                f"token {due} is due"
            )
        expected[piece.start % step] = piece[-1] + step
    missing = [token for token in expected if token < tokens]
    if missing:
        raise ValueError(f"a layout holds each of its {tokens} tokens once: no rank holds token {missing[0]}")
