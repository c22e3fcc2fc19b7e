"""A cast plan: the tokens that each rank sends to and receives from every other rank.

A cast is one all-to-all exchange of K and V; there is none if no rank needs another's:

    stages=0    step 0: own keys and cast 0
    stages=2    step 0: own keys        step 1: cast 0        step 2: cast 1

The buffer of a step holds first the rank's own keys, if used, then the received ones by source.
"""

from array import array
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from canon.masks.layout import Layout, mask_between
from canon.masks.mask import Mask
from canon.masks.pickles import FORMAT, check_format
from canon.masks.plan_cache import cached_plan


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of rank ``source``, as positions in the sequence. There they are the rows ``row``, ``row`` + 1, ..."""

    source: int
    tokens: range
    row: int


@dataclass(frozen=True)
class CastPlan:
    """The pieces that each rank receives in each cast, ``received[cast][rank]``, by source, then by row. Equal on all ranks."""

    mask: Mask
    layout: Layout
    stages: int
    received: tuple[tuple[tuple[Piece, ...], ...], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mask, self.layout, self.stages))

    def __reduce__(self):
        numbers = array("q")  # much faster to pickle than objects
        for cast, received in enumerate(self.received):
            for rank, pieces in enumerate(received):
                for p in pieces:
                    numbers.extend((cast, rank, p.source, p.tokens.start, p.tokens.stop, p.tokens.step, p.row))
        return _unpickled, (FORMAT, self.mask, self.layout, self.stages, self.casts, numbers)

    @property
    def nbytes(self) -> int:
        """Bytes on the host (an estimate)."""
        pieces = sum(len(each) for cast in self.received for each in cast)
        return 1000 + 300 * pieces + 100 * len(self.received) * self.layout.ranks**2

    @property
    def casts(self) -> int:
        """The number of exchanges; 0 if no rank needs another's keys."""
        return len(self.received)

    @property
    def steps(self) -> int:
        """The number of steps of attention."""
        return 1 + (self.casts if self.stages else 0)

    def holds_own(self, step: int) -> bool:
        """Return whether the buffer begins with the rank's own keys."""
        return step == 0

    def cast_of(self, step: int) -> int | None:
        """Return the cast that a step waits for, or None."""
        cast = step - 1 if self.stages else step
        return cast if 0 <= cast < self.casts else None

    def keys(self, step: int, rank: int) -> tuple[range, ...]:
        """Return the tokens in the buffer of a step, in order."""
        own = self.layout.ranges_per_rank[rank] if self.holds_own(step) else ()
        cast = self.cast_of(step)
        return own + (() if cast is None else tuple(piece.tokens for piece in self.received[cast][rank]))

    def local_mask(self, step: int, rank: int) -> Mask:
        """Return the mask between a rank's queries and the buffer of a step. Cached."""
        return _local_mask(self, step, rank)

    def receive_sizes(self, cast: int, rank: int) -> list[int]:
        """Return the tokens from each rank."""
        return [sizes[rank] for sizes in self._sizes[cast]]

    def send_sizes(self, cast: int, rank: int) -> list[int]:
        """Return the tokens for each rank."""
        return list(self._sizes[cast][rank])

    def send_rows(self, cast: int, rank: int) -> Tensor:
        """Return the local rows to send, by receiver: int64, on the CPU."""
        rows = [torch.arange(p.row, p.row + len(p.tokens), device="cpu") for p in self._sent[cast][rank]]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device="cpu")

    def tokens_moved(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (received, sent): the tokens of each rank in all casts."""
        ranks, casts = range(self.layout.ranks), range(self.casts)
        received = tuple(sum(sum(self.receive_sizes(cast, rank)) for cast in casts) for rank in ranks)
        return received, tuple(sum(sum(self.send_sizes(cast, rank)) for cast in casts) for rank in ranks)

    @cached_property
    def _sizes(self) -> list[list[list[int]]]:
        """Tokens by [cast][source][destination]."""
        ranks = range(self.layout.ranks)
        sizes = [[[0 for _ in ranks] for _ in ranks] for _ in self.received]
        for cast, received in enumerate(self.received):
            for rank, pieces in enumerate(received):
                for piece in pieces:
                    sizes[cast][piece.source][rank] += len(piece.tokens)
        return sizes

    @cached_property
    def _sent(self) -> list[list[list[Piece]]]:
        """By [cast][source], ordered by destination, then by row."""
        sent: list[list[list[Piece]]] = [[[] for _ in received] for received in self.received]
        for cast, received in enumerate(self.received):
            for pieces in received:
                for piece in pieces:
                    sent[cast][piece.source].append(piece)
        return sent


def _unpickled(version: int, mask: Mask, layout: Layout, stages: int, casts: int, numbers: array) -> CastPlan:
    """Return a pickled plan: ``numbers`` has seven for each piece."""
    check_format("CastPlan", version)
    received: list[list[list[Piece]]] = [[[] for _ in range(layout.ranks)] for _ in range(casts)]
    for cast, rank, source, start, stop, step, row in zip(*[iter(numbers)] * 7, strict=True):
        received[cast][rank].append(Piece(source, range(start, stop, step), row))
    return CastPlan(mask, layout, stages, tuple(tuple(map(tuple, each)) for each in received))


@cached_plan
def _local_mask(plan: CastPlan, step: int, rank: int) -> Mask:
    return mask_between(plan.mask, plan.layout.ranges_per_rank[rank], plan.keys(step, rank))


def cut(pieces: tuple[Piece, ...], parts: int) -> list[tuple[Piece, ...]]:
    """Divide the pieces of one source into ``parts`` lists of nearly equal size, in order."""
    if parts == 1 or not pieces:
        return [pieces] * parts
    tokens = sum(len(piece.tokens) for piece in pieces)
    ends = [-(-tokens * part // parts) for part in range(parts + 1)]
    lists: list[list[Piece]] = [[] for _ in range(parts)]
    start = 0
    for piece in pieces:
        for part, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
            inside = range(len(piece.tokens))[max(0, first - start) : max(0, last - start)]
            if inside:
                tokens_inside = piece.tokens[inside.start : inside.stop]
                lists[part].append(Piece(piece.source, tokens_inside, piece.row + inside.start))
        start += len(piece.tokens)
    return [tuple(each) for each in lists]


def staged(remote: list[list[tuple[Piece, ...]]], stages: int) -> tuple[tuple[tuple[Piece, ...], ...], ...]:
    """Return `CastPlan.received`, without empty casts, from the pieces by [rank][source]."""
    parts = [[cut(pieces, max(1, stages)) for pieces in sources] for sources in remote]
    casts = (
        tuple(tuple(piece for pieces in sources for piece in pieces[cast]) for sources in parts)
        for cast in range(max(1, stages))
    )
    return tuple(cast for cast in casts if any(cast))


@dataclass(frozen=True)
class PlanReport:
    """The quality of a plan: areas in visible cells, traffic in tokens."""

    tokens: int
    areas: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    largest_chunk: int  # the largest area of a chunk, which a plan may not divide

    @property
    def balance(self) -> float:
        """The largest area divided by its lower bound; 1 is perfect."""
        return max(self.areas) / self.lower_bound if self.lower_bound else 1.0

    @property
    def lower_bound(self) -> float:
        """max(mean area, largest chunk): a plan does not divide chunks."""
        return float(max(sum(self.areas) / len(self.areas), self.largest_chunk))

    @property
    def volume(self) -> float:
        """The tokens that all ranks receive, relative to an all-gather."""
        return sum(self.received) / self._all_gather if self._all_gather else 0.0

    @property
    def worst_receive(self) -> float:
        """The most tokens that a rank receives, relative to an all-gather."""
        return max(self.received) * len(self.areas) / self._all_gather if self._all_gather else 0.0

    @property
    def worst_send(self) -> float:
        """The most tokens that a rank sends, relative to an all-gather."""
        return max(self.sent) * len(self.areas) / self._all_gather if self._all_gather else 0.0

    @property
    def _all_gather(self) -> int:
        return (len(self.areas) - 1) * self.tokens

    def __str__(self) -> str:
        lines = [
            f"{self.tokens} tokens on {len(self.areas)} ranks",
            f"balance        {self.balance:.3f}   largest area / max(mean, largest chunk)",
            f"volume         {self.volume:.3f}   of an all-gather",
            f"worst receive  {self.worst_receive:.3f}   of a rank's part of it",
            f"worst send     {self.worst_send:.3f}",
        ]
        return "\n".join(lines)
