"""The rules of ``rank_invariant=True``: out, lse, dq, dk and dv have the same bits on any number of ranks.

The unit of each sum is 128 x 128 tokens, cut at multiples of 128 in the whole sequence. The owner of a result adds them in
the order of the sequence. So each piece of a layout begins at a multiple of 128 tokens (`owner_computes.py`).
"""

from typing import Any

from canon.masks.arguments import shown
from canon.masks.band import Band
from canon.masks.layout import TILE, Layout, placed
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan

Piece = tuple[int, range]  # the first row in a buffer, and the tokens
# Options that fix an order of sums themselves: the values that the option allows, the reason, and the remedy.
ALLOWED: dict[str, tuple[tuple, str, str]] = {
    "backward": (("auto", "split", "head_parallel"), "adds to dq key tile by key tile", 'with backward="auto"'),
    "reduce_dtype": ((None,), "rounds partial sums of dk and dv on their way", "without reduce_dtype"),
    "stages": ((0,), "adds the keys of one cast after another", "with own_keys_first=False or None"),
    "backward_schedule": (("scatter",), "adds dk and dv rank after rank", 'with backward_schedule="scatter"'),
}


def contiguous_tiles(tokens: int, ranks: int) -> Layout:
    """Return the default layout of the option."""
    return Layout.contiguous(tokens, ranks, TILE)


def check_rank_invariant(function: str, rank_invariant: Any, **options: Any) -> None:
    """Raise TypeError or ValueError unless ``rank_invariant`` is a bool that the other options do not contradict."""
    if not isinstance(rank_invariant, bool):
        raise TypeError(f"{function}: rank_invariant must be True or False, got {shown(rank_invariant)}")
    for name, value in options.items() if rank_invariant else ():
        allowed, reason, remedy = ALLOWED.get(name, ((value,), "", ""))
        if value not in allowed:
            raise ValueError(
                f"{function}: {name}={value!r} {reason}, which contradicts rank_invariant=True: call "
                f"{function}(..., rank_invariant=True) {remedy}"
            )


def check_tiled(function: str, layout: Layout) -> None:
    """Raise ValueError unless all pieces begin at multiples of 128 tokens, in the sequence and on their rank."""
    if (wrong := _misplaced(layout)) is None:
        return
    rank, row, piece = wrong
    n, ranks = layout.tokens, layout.ranks
    place = (
        f"tokens {piece.start}, {piece.start + piece.step}, ..."
        if piece.step > 1
        else f"tokens {piece.start}:{piece.stop}"
    )
    raise ValueError(
        f"{function}: rank_invariant=True needs pieces that begin at multiples of {TILE} tokens, in the sequence and on their "
        f"rank; rank {rank} holds {place} from its row {row} on: pass Layout.contiguous({n}, {ranks}, multiple_of={TILE}), "
        f"Layout.zigzag({n}, {ranks}, multiple_of={TILE}) or dispatch(mask, {ranks}, rank_invariant=True)"
    )


@cached_plan
def pieces_of(layout: Layout, rank: int) -> tuple[Piece, ...]:
    """Return (row, tokens) of each piece of a rank, in local order. A piece that continues the previous one is joined to it."""
    return tuple(placed(layout.ranges_per_rank[rank]))


@cached_plan
def transposed(mask: Mask) -> Mask:
    """Return the mask with queries and keys exchanged: its `needed_keys` are the queries that see some keys."""
    bands = [Band(b.k_start, b.k_stop, b.q_start, b.q_stop, -b.hi, -b.lo) for b in mask.bands]
    return Mask.of_disjoint(bands, mask.keys, mask.queries)


def _misplaced(layout: Layout) -> tuple[int, int, range] | None:
    """Return (rank, row, tokens) of the first piece that begins inside a tile, or None."""
    for rank in range(layout.ranks):
        for row, tokens in pieces_of(layout, rank):
            if tokens.start % TILE or row % TILE or tokens.step != 1:
                return rank, row, tokens
    return None
