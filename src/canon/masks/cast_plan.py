"""A cast plan: the tokens that each rank sends to and receives from every other rank.

A cast is one all-to-all exchange of K and V; there is none if no rank needs another's. Picture:
`canon.reference.magi`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from canon.masks.layout import Layout, equal_parts, mask_between
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan

MANY_CELLS = 1 << 29  # visible cells of a rank, see `own_keys_come_first`


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of rank ``source``, its rows from ``row`` on."""

    source: int
    tokens: range
    row: int


Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class RankCasts:
    """The pieces of one rank: ``received[cast][source]`` and ``sent[cast][receiver]``."""

    received: tuple[tuple[Pieces, ...], ...]
    sent: tuple[tuple[Pieces, ...], ...]

    @classmethod
    def of(
        cls, received: Sequence[Sequence[Piece]], sent: Sequence[Sequence[Piece]], casts: int
    ) -> "RankCasts":
        """Divide the pieces of each pair of ranks into ``casts`` parts."""
        return cls(
            *(
                tuple(zip(*(cut(pieces, casts) for pieces in pairs), strict=True))
                for pairs in (received, sent)
            )
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the host (an estimate)."""
        pairs = [
            pieces for casts in (self.received, self.sent) for cast in casts for pieces in cast
        ]
        return 1000 + 60 * len(pairs) + 300 * sum(map(len, pairs))


@dataclass(frozen=True)
class CastPlan:
    """The exchanges of magi attention, equal on all ranks. ``casts_of(plan, rank)`` derives the
    pieces of a rank.
    """

    mask: Mask
    layout: Layout
    casts: int
    own_keys_first: bool
    casts_of: "Callable[[CastPlan, int], RankCasts]" = field(compare=False)
    granularity: int = 1  # casts send whole units of so many tokens

    @property
    def nbytes(self) -> int:
        """Bytes on the host besides mask and layout (an estimate)."""
        return 1000

    @property
    def steps(self) -> int:
        """The number of steps of attention."""
        return 1 + (self.casts if self.own_keys_first else 0)

    def holds_own(self, step: int) -> bool:
        """Return whether the buffer has the rank's own keys."""
        return step == 0

    def cast_of(self, step: int) -> int | None:
        """Return the cast that a step waits for, or None."""
        cast = step - self.own_keys_first
        return cast if 0 <= cast < self.casts else None

    def received(self, cast: int, rank: int) -> Pieces:
        """Return the pieces that a rank receives, by source."""
        return tuple(
            piece for pieces in self.casts_of(self, rank).received[cast] for piece in pieces
        )

    def keys(self, step: int, rank: int) -> tuple[range, ...]:
        """Return the tokens in the buffer of a step: own ones first, then by source."""
        own = self.layout.ranges_per_rank[rank] if self.holds_own(step) else ()
        cast = self.cast_of(step)
        return own + (
            () if cast is None else tuple(piece.tokens for piece in self.received(cast, rank))
        )

    def local_mask(self, step: int, rank: int) -> Mask:
        """Return the mask between a rank's queries and the buffer of a step."""
        return _local_mask(self, step, rank)

    def receive_sizes(self, cast: int, rank: int) -> list[int]:
        """Return the tokens from each rank."""
        return list(map(tokens_in, self.casts_of(self, rank).received[cast]))

    def send_sizes(self, cast: int, rank: int) -> list[int]:
        """Return the tokens for each rank."""
        return list(map(tokens_in, self.casts_of(self, rank).sent[cast]))

    def send_rows(self, cast: int, rank: int) -> Tensor:
        """Return the local rows to send, by receiver: int64, on the CPU."""
        sent = [piece for pieces in self.casts_of(self, rank).sent[cast] for piece in pieces]
        rows = [torch.arange(p.row, p.row + len(p.tokens), device="cpu") for p in sent]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device="cpu")


@cached_plan
def _local_mask(plan: CastPlan, step: int, rank: int) -> Mask:
    return mask_between(plan.mask, plan.layout.ranges_per_rank[rank], plan.keys(step, rank))


def tokens_in(pieces: Sequence[Piece]) -> int:
    """Return the number of tokens in some pieces."""
    return sum(len(piece.tokens) for piece in pieces)


def cut(pieces: Sequence[Piece], parts: int) -> list[Pieces]:
    """Divide the pieces of a pair of ranks as `equal_parts` does."""
    if parts == 1 or not pieces:
        return [tuple(pieces)] * parts
    rows = [range(piece.row, piece.row + len(piece.tokens)) for piece in pieces]
    tokens = equal_parts([piece.tokens for piece in pieces], parts)
    return [
        tuple(Piece(pieces[0].source, held, at.start) for held, at in zip(*part, strict=True))
        for part in zip(tokens, equal_parts(rows, parts), strict=True)
    ]


def planned_casts(
    mask: Mask,
    layout: Layout,
    casts: int,
    own_keys_first: bool | None,
    largest: int,
    received: int,
    casts_of: Callable,
    granularity: int = 1,
) -> CastPlan:
    """Return the plan of at most ``casts`` casts. ``largest``: the most tokens between two ranks.
    ``received``: those of all.
    """
    if own_keys_first is None:
        own_keys_first = own_keys_come_first(mask, layout, received)
    return CastPlan(mask, layout, min(casts, largest), own_keys_first, casts_of, granularity)


def own_keys_come_first(mask: Mask, layout: Layout, received: int) -> bool:
    """Return whether magi attention by default computes on own keys while its one cast is in
    flight.

    It does if a mean rank has at least 2^29 visible cells, and receives at least half as many
    tokens as it holds. An additional step costs launches, a merge and shorter kernels; it hides the
    cast. In the records (`tests/masks/test_defaults.py`) both passes take at most 1.01 times as
    long as with the best choice, and on average 1.001 times; with the choice of `canon.costs` 1.03
    and 1.003 times.
    """
    return 2 * received >= layout.tokens and mask.area >= MANY_CELLS * layout.ranks


@dataclass(frozen=True)
class PlanReport:
    """Areas of ranks in visible cells, traffic in tokens."""

    tokens: int
    areas: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    largest_chunk: int  # area

    @property
    def balance(self) -> float:
        """The largest area over its lower bound."""
        return max(self.areas) / self.lower_bound if self.lower_bound else 1.0

    @property
    def lower_bound(self) -> float:
        """max(mean area, largest chunk): a plan does not divide chunks."""
        return float(max(sum(self.areas) / len(self.areas), self.largest_chunk))

    @property
    def volume(self) -> float:
        """The received tokens over those of an all-gather."""
        return self._of_all_gather(sum(self.received))

    @property
    def worst_receive(self) -> float:
        """The most that a rank receives, as in `volume`."""
        return self._of_all_gather(max(self.received) * len(self.areas))

    @property
    def worst_send(self) -> float:
        """The most that a rank sends, likewise."""
        return self._of_all_gather(max(self.sent) * len(self.areas))

    def _of_all_gather(self, tokens: int) -> float:
        all_gather = (len(self.areas) - 1) * self.tokens
        return tokens / all_gather if all_gather else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.tokens} tokens on {len(self.areas)} ranks",
            f"balance        {self.balance:.3f}   largest area / max(mean, largest chunk)",
            f"volume         {self.volume:.3f}   of an all-gather",
            f"worst receive  {self.worst_receive:.3f}   of a rank's part of it",
            f"worst send     {self.worst_send:.3f}",
        ]
        return "\n".join(lines)
