"""Checks of the arguments of `Mask` and `Layout`."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import gt
from typing import Any

import torch
from torch import Tensor

from canon.masks.arguments import flag, list_of, nested, shown, whole, whole_numbers
from canon.masks.band import Band, tight_bands

Ints = Sequence[int] | Tensor
Rows = Sequence[Ints] | Tensor  # (b, n)
Ranges = Sequence[Sequence[int]] | Tensor
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SLICE_TYPES = ("full", "causal", "inverse_causal", "bi_causal")  # MagiAttention's types 0 to 3


def document_ends(cu_seqlens: Ints) -> list[int]:
    """Return cu_seqlens as ints, from 0 on and ascending."""
    if isinstance(cu_seqlens, tuple | list) and any(hasattr(x, "bands") for x in cu_seqlens):
        raise TypeError(
            "cu_seqlens must be of one pack, got several masks: put position_ids (b, n) into the "
            "batch, which begin at 0 in each document, and leave cu_seqlens out"
        )
    ends = whole_numbers("cu_seqlens", cu_seqlens)
    if not ends or ends[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {ends[:4]}")
    if any(map(gt, ends, ends[1:])):
        place = next(place for place, (start, stop) in enumerate(pairwise(ends)) if stop < start)
        raise ValueError(
            f"cu_seqlens must not decrease, got {ends[place]} then {ends[place + 1]} at "
            f"entry {place + 1}"
        )
    return ends


def document_bands(
    cu_seqlens: Ints, causal: bool, window: tuple[int | None, int | None] | None
) -> tuple[list[Band], int]:
    """Return the bands of packed documents, and the number of their tokens."""
    ends = document_ends(cu_seqlens)
    flag("causal", causal)
    if window is not None and (not isinstance(window, Sequence) or len(window) != 2):
        raise TypeError(f"window must be a pair (left, right) or None, got {shown(window)}")
    lo, hi = window_bounds(*window or (None, None))
    low, high = -ends[-1] if lo is None else lo, 0 if causal else ends[-1] if hi is None else hi
    squares = [
        (a, b, a, b, low if low > a - b else a - b + 1, high if high < b - a else b - a - 1)
        for a, b in zip(ends, ends[1:], strict=False)
        if a < b
    ]  # tight, because low <= 0 <= high
    return tight_bands(squares), ends[-1]


def tree_bands(parents: Ints, lengths: Ints, starts: Ints | None) -> tuple[list[Band], int]:
    """Return the bands of a tree's nodes, and the number of its tokens."""
    before, sizes = whole_numbers("parents", parents), whole_numbers("lengths", lengths)
    begins = (
        [0, *accumulate(sizes)][: len(sizes)] if starts is None else whole_numbers("starts", starts)
    )
    if not len(before) == len(sizes) == len(begins):
        raise ValueError(
            f"{len(before)} parents, {len(sizes)} lengths and {len(begins)} starts: "
            "give one of each"
        )
    bands, path, end = [], [], 0

    def leave(parent: int) -> None:
        """Finish the nodes of the path behind ``parent``."""
        while path and path[-1] > parent:
            start, size = begins[node := path.pop()], sizes[node]
            if size:
                bands.append((start, end, start, start + size, start - end + 1, 0))

    for node, (parent, start, size) in enumerate(zip(before, begins, sizes, strict=True)):
        if size < 0:
            raise ValueError(f"lengths[{node}] must be >= 0, got {size}")
        if start < end:
            raise ValueError(
                f"starts[{node}] must be at least {end}, the end of the node before it, got {start}"
            )
        leave(parent)
        if parent != (path[-1] if path else -1):
            allowed = "-1" if not node else f"{node - 1}, an ancestor of node {node - 1}, or -1"
            raise ValueError(
                f"parents[{node}] must be {allowed}, because nodes come in depth-first order; got "
                f"{parent}"
            )
        path.append(node)
        end = start + size
    leave(-1)
    return tight_bands(bands), end


def block_squares(starts: Ints, stops: Ints, tokens: int) -> list[Band]:
    """Return the square of each block, sorted."""
    begins, ends = whole_numbers("starts", starts), whole_numbers("stops", stops)
    if len(begins) != len(ends):
        raise ValueError(f"{len(begins)} starts and {len(ends)} stops: give one of each")
    blocks = sorted(zip(begins, ends, range(len(ends)), strict=True))
    for start, stop, place in blocks:
        if not 0 <= start < stop <= tokens:
            raise ValueError(
                f"block {place} needs 0 <= start < stop <= {tokens}, the tokens of the mask, got "
                f"({start}, {stop})"
            )
    for (start, stop, place), (other_start, other_stop, other) in pairwise(blocks):
        if stop > other_start:
            raise ValueError(
                f"blocks {place} and {other} overlap, ({start}, {stop}) and ({other_start}, "
                f"{other_stop}): join them, or use Mask.union"
            )
    return [Band(start, stop, start, stop) for start, stop, _ in blocks]


def position_ends(position_ids: Ints | Rows) -> tuple[list[list[int]], bool]:
    """Return cu_seqlens of each sequence, and whether ``position_ids`` were (b, n)."""
    if getattr(position_ids, "ndim", 1) == 3:
        raise ValueError(
            f"position_ids must be (n,) or (b, n), got {shown(position_ids)}: positions (3, b, n) "
            "of a vision model do not count the tokens of documents, so use "
            "Mask.documents(cu_seqlens)"
        )
    several = _rows("position_ids", position_ids)
    found = []
    for row, numbers in enumerate([position_ids] if several is None else several):
        name = "position_ids" if several is None else f"position_ids[{row}]"
        positions = number_tensor(name, numbers)
        starts = positions == 0
        wrong = ~starts
        wrong[1:] &= positions[1:] != positions[:-1] + 1
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise ValueError(
                f"{name}[{place}] is {int(positions[place])}: a position is 0, at the start of a "
                "document, or one more than the position before it. Pass positions of the whole "
                "sequence; for padding use Mask.padding, for sequences that begin alike "
                "canon.trees"
            )
        found.append(
            [*starts.nonzero().flatten().tolist(), len(positions)] if len(positions) else [0]
        )
    return found, several is not None


def by_sequence(**arguments: Ints | Rows | None) -> list[dict[str, Ints | None]] | None:
    """Return the arguments of each sequence, or None if no argument is (b, n)."""
    rows = {name: _rows(name, values) for name, values in arguments.items() if values is not None}
    sizes = {name: len(several) for name, several in rows.items() if several is not None}
    if not sizes:
        return None
    if len(set(sizes.values())) > 1:
        raise ValueError(f"a batch has one number of sequences, got {sizes}")
    shared = {name: nested(values) for name, values in arguments.items() if name not in sizes}
    return [
        {**shared, **{name: rows[name][row] for name in sizes}}
        for row in range(next(iter(sizes.values())))
    ]


def _rows(name: str, values: Any) -> list[Any] | None:
    """Return (b, n) values as b rows, or None for values of one axis."""
    axes = getattr(values, "ndim", 1)
    if isinstance(values, list | tuple) and values:
        axes = 1 + getattr(values[0], "ndim", int(isinstance(values[0], list | tuple | range)))
    if axes not in (1, 2):
        raise ValueError(f"{name} must be (n,) or (b, n), got {shown(values)}")
    if axes == 1:
        return None
    return list(values.cpu().unbind()) if isinstance(values, Tensor) else list(values)


def number_tensor(name: str, values: Ints) -> Tensor:
    """Return whole numbers as an int64 tensor on the CPU."""
    if isinstance(values, Tensor) and values.ndim == 1 and values.dtype in INTEGERS:
        return values.to("cpu", torch.int64)
    return torch.tensor(whole_numbers(name, values), dtype=torch.int64, device="cpu")


def window_bounds(left: int | None, right: int | None) -> tuple[int | None, int | None]:
    """Return (lo, hi) of a window, None where it has no bound."""
    for name, value in (("left", left), ("right", right)):
        if value is not None and whole(f"window {name}", value) < -1:
            raise ValueError(f"window {name} must be >= 0, or None or -1 for no bound; got {value}")
    return None if left in (None, -1) else -int(left), None if right in (None, -1) else int(right)


def slice_bands(
    q_ranges: Ranges, k_ranges: Ranges, types: Sequence[int | str] | Tensor
) -> tuple[list[Band], int, int]:
    """Return the bands of MagiAttention's slices, and the largest ends of queries and keys."""
    rows, columns = _pairs("q_ranges", q_ranges), _pairs("k_ranges", k_ranges)
    kinds = nested(types)
    if not isinstance(kinds, Sequence) or isinstance(kinds, str):
        raise TypeError(f"types must be a sequence with a type for each range, got {shown(kinds)}")
    if not len(rows) == len(columns) == len(kinds):
        raise ValueError(
            f"{len(rows)} q_ranges, {len(columns)} k_ranges and {len(kinds)} types: "
            "give one of each"
        )
    bands = []
    for (q0, q1), (k0, k1), kind in zip(rows, columns, map(_type_number, kinds), strict=True):
        lo, hi = k0 - q0 if kind & 2 else None, k1 - q1 if kind & 1 else None
        bands.append(Band(q0, q1, k0, k1, lo, hi))
    return bands, *(max((stop for _, stop in side), default=0) for side in (rows, columns))


def _type_number(kind: int | str) -> int:
    if kind in SLICE_TYPES:
        return SLICE_TYPES.index(kind)
    number = whole(f"slice type, if not one of {SLICE_TYPES},", kind, 0)
    if number >= len(SLICE_TYPES):
        raise ValueError(f"slice type must be 0 to 3 or one of {SLICE_TYPES}, got {number}")
    return number


def _pairs(name: str, ranges: Ranges) -> list[tuple[int, int]]:
    rows, pairs = nested(ranges), []
    for place, row in enumerate(rows if isinstance(rows, Iterable) else [rows]):
        pair = [row.start, row.stop] if isinstance(row, range) and row.step == 1 else row
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise TypeError(
                f"{name}[{place}] must be a pair (start, stop), or a range of step 1, "
                f"got {shown(row)}"
            )
        start, stop = whole_numbers(f"{name}[{place}]", pair)
        if not 0 <= start <= stop:
            raise ValueError(f"{name}[{place}] needs 0 <= start <= stop, got ({start}, {stop})")
        pairs.append((start, stop))
    return pairs


def crop_range(name: str, wanted: range | None, size: int) -> range:
    """Return the range of one side of a crop; None is all ``size`` tokens."""
    if wanted is None:
        return range(size)
    if not isinstance(wanted, range):
        raise TypeError(
            f"crop: {name} must be a range, got {shown(wanted)}: write range(start, stop)"
        )
    if wanted.step < 1 or (len(wanted) and not 0 <= wanted.start <= wanted[-1] < size):
        raise ValueError(f"crop: {name} {wanted} is not an ascending range inside 0..{size}")
    return wanted


RangesPerRank = tuple[tuple[range, ...], ...]


def checked_ranges(ranges_per_rank: Any, tokens: int) -> RangesPerRank:
    """Return the ranges of each rank, without empty ones, with one step and the smallest stop."""
    ranks = [
        list_of(f"ranges_per_rank[{rank}]", ranges, range)
        for rank, ranges in enumerate(list_of("ranges_per_rank", ranges_per_rank, Sequence))
    ]
    if not ranks:
        raise ValueError(
            "ranges_per_rank must hold a list of ranges for each of one or more ranks, got []"
        )
    pieces = [(piece, rank) for rank, ranges in enumerate(ranks) for piece in ranges if piece]
    for piece, rank in pieces:
        if min(piece[0], piece[-1]) < 0 or max(piece[0], piece[-1]) >= tokens:
            raise ValueError(f"{piece} of rank {rank} must lie inside the layout's {tokens} tokens")
    steps = {piece.step for piece, _ in pieces if len(piece) > 1} or {1}
    if len(steps) > 1 or min(steps) < 1:
        raise ValueError(f"the ranges of a layout must share one step >= 1, got {sorted(steps)}")
    (step,) = steps
    _check_partition(pieces, tokens, step)
    return tuple(
        tuple(range(piece[0], piece[-1] + 1, step) for piece in ranges if piece) for ranges in ranks
    )


def _check_partition(pieces: list[tuple[range, int]], tokens: int, step: int) -> None:
    once = f"a layout holds each of its {tokens} tokens once"
    due = list(range(min(step, tokens)))  # the next token of each residue class
    for piece, rank in sorted(pieces, key=lambda x: x[0].start):
        if piece.start != (token := due[piece.start % step]):
            raise ValueError(f"{once}: {piece} of rank {rank} comes where token {token} is due")
        due[piece.start % step] = piece[-1] + step
    if missing := [token for token in due if token < tokens]:
        raise ValueError(f"{once}: no rank holds token {missing[0]}")
