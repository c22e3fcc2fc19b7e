"""The contract of ``rank_invariant=True``, and its rules.

**Contract.** The bits of a query's out and lse depend on the query, and on the keys and values that
it sees: their order and their positions modulo 128. They also depend on scale, soft-cap, sink,
dtype, widths, kernel backend (Triton for return_max_logits=True), GPU model and versions, and on
nothing else. Calls with equal bits: paper/in_your_program.md#the-same-bits-on-any-number-of-ranks.
The proof: paper/in_your_program.md#why-the-bits-are-equal.

Limits: o of -0 may become 0. A NaN reaches others in its tile. On "cuda" bits also depend on the
bands, because a tile is visited once for each. CPU products need one thread, and widths of a
multiple of 8, to which others are filled up.
"""

from collections.abc import Mapping
from typing import Any

from canon.masks.arguments import flag
from canon.masks.band import Band
from canon.masks.layout import TILE, Layout, placed
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan

Piece = tuple[int, range]  # the first row in a buffer, and the tokens
Contradictions = Mapping[str, tuple[tuple, str, str]]
# options that fix an order of sums: the allowed values, the reason, and the remedy
COMMON: Contradictions = {
    "backward": (
        ("auto", "split", "head_parallel"),
        "adds to dq key tile by key tile",
        'with backward="auto"',
    ),
    "reduce_dtype": (
        (None,),
        "rounds partial sums of dk and dv on their way",
        "without reduce_dtype",
    ),
}


def check_rank_invariant(
    function: str, contradictions: Contradictions, options: Mapping[str, Any]
) -> None:
    """Raise unless ``rank_invariant`` is a bool that the other options do not contradict."""
    rank_invariant = options.get("rank_invariant", False)
    flag(f"{function}: rank_invariant", rank_invariant)
    for name, (allowed, reason, remedy) in (
        {**COMMON, **contradictions}.items() if rank_invariant else ()
    ):
        if options.get(name, allowed[0]) not in allowed:
            raise ValueError(
                f"{function}: {name}={options[name]!r} {reason}, which contradicts "
                f"rank_invariant=True: call {function}(..., rank_invariant=True) {remedy}"
            )


def check_tiled(function: str, layout: Layout, columns: int = 1) -> None:
    """Raise ValueError unless all pieces begin at multiples of 128. ``layout``: of the rows of a
    mesh with so many ``columns``.
    """
    n, ranks = layout.tokens, layout.ranks
    holder, parts = ("row", f".divided({columns})") if columns > 1 else ("rank", "")
    for rank in range(ranks):
        for row, tokens in pieces_of(layout, rank):
            if tokens.start % TILE or row % TILE or tokens.step != 1:
                raise ValueError(
                    f"{function}: rank_invariant=True needs pieces that begin at multiples of "
                    f"{TILE} tokens, in the sequence and on their {holder}; {holder} {rank} holds "
                    f"{tokens} from its token {row} on: pass "
                    f"Layout.contiguous({n}, {ranks}, multiple_of={TILE}){parts}, "
                    f"Layout.zigzag({n}, {ranks}, multiple_of={TILE}){parts} or "
                    f"dispatch(mask, {ranks}, rank_invariant=True){parts}"
                )


@cached_plan
def pieces_of(layout: Layout, rank: int) -> tuple[Piece, ...]:
    """Return (row, tokens) of each piece of a rank, joined where one continues another."""
    return tuple(placed(layout.ranges_per_rank[rank]))


@cached_plan
def transposed(mask: Mask) -> Mask:
    """Return the mask with queries and keys exchanged."""
    bands = [Band(b.k_start, b.k_stop, b.q_start, b.q_stop, -b.hi, -b.lo) for b in mask.bands]
    return Mask.of_disjoint(bands, mask.keys, mask.queries)
