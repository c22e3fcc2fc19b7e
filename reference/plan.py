"""The vocabulary of plans: what is sent from whom to whom. No algorithm: both halves make these.

    CastPlan         for each cast and each rank: the pieces of other ranks' tokens that it receives, by source
    default_chunk    the tokens that a dispatch plan keeps together, where its caller does not say

A cast is one exchange, all to all. With ``stages=0`` there is one, and one step of attention after it; with
``stages=n`` step 0 uses a rank's own keys, and step i those of cast i - 1:

    stages=0    step 0: own keys and cast 0
    stages=2    step 0: own keys        step 1: cast 0        step 2: cast 1

A step's keys stand in one buffer: the own ones first, if it has them, then what came, in the order of the sources.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Rational, Real
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor

from canon.reference.arguments import place_in, shown, whole
from canon.reference.layout import Layout
from canon.reference.local_masks import mask_between
from canon.reference.mask import Mask
from canon.reference.plan_cache import cached_plan

LONGEST_CHUNK = 1024
CHUNKS_OF_A_RANK = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of rank ``source``, which lie there in the rows ``row``, ``row`` + 1, ..."""

    source: int
    tokens: range
    row: int


@dataclass(frozen=True)
class CastPlan:
    """Who receives what: ``received[cast][rank]`` are pieces by source, then by row. Pure, equal on all ranks."""

    mask: Mask
    layout: Layout
    stages: int
    received: tuple[tuple[tuple[Piece, ...], ...], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mask, self.layout, self.stages))

    @property
    def nbytes(self) -> int:
        """About how many bytes the plan takes on the host."""
        pieces = sum(len(each) for cast in self.received for each in cast)
        return 1000 + 300 * pieces + 100 * len(self.received) * self.layout.ranks**2

    @property
    def casts(self) -> int:
        """The number of exchanges; 0 if no rank needs another's keys."""
        return len(self.received)

    @property
    def steps(self) -> int:
        """The number of parts that attention is computed in."""
        return 1 + (self.casts if self.stages else 0)

    def holds_own(self, step: int) -> bool:
        """Whether the keys of the step begin with the rank's own."""
        return step == 0

    def cast_of(self, step: int) -> int | None:
        """The cast that a step waits for, or None."""
        cast = step - 1 if self.stages else step
        return cast if 0 <= cast < self.casts else None

    def keys(self, step: int, rank: int) -> tuple[range, ...]:
        """The tokens whose keys stand in the buffer of a step, in its order."""
        own = self.layout.ranges_per_rank[rank] if self.holds_own(step) else ()
        cast = self.cast_of(step)
        return own + (() if cast is None else tuple(piece.tokens for piece in self.received[cast][rank]))

    def local_mask(self, step: int, rank: int) -> Mask:
        """The mask between the queries of a rank and the buffer of a step, in local coordinates."""
        return _local_mask(self, step, rank)

    def receive_sizes(self, cast: int, rank: int) -> list[int]:
        """The tokens that ``rank`` receives from each rank."""
        return [sizes[rank] for sizes in self._sizes[cast]]

    def send_sizes(self, cast: int, rank: int) -> list[int]:
        """The tokens that ``rank`` sends to each rank."""
        return list(self._sizes[cast][rank])

    def send_rows(self, cast: int, rank: int) -> Tensor:
        """The rows that ``rank`` sends, those for rank 0 first, then those for rank 1, ...: int64, CPU."""
        rows = [torch.arange(p.row, p.row + len(p.tokens), device="cpu") for p in self._sent[cast][rank]]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device="cpu")

    def tokens_moved(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By rank, the tokens that it receives and those that it sends in all casts; a K and a V move with each."""
        ranks, casts = range(self.layout.ranks), range(self.casts)
        received = tuple(sum(sum(self.receive_sizes(cast, rank)) for cast in casts) for rank in ranks)
        return received, tuple(sum(sum(self.send_sizes(cast, rank)) for cast in casts) for rank in ranks)

    @cached_property
    def _sizes(self) -> list[list[list[int]]]:
        """[cast][source][destination]"""
        ranks = range(self.layout.ranks)
        sizes = [[[0 for _ in ranks] for _ in ranks] for _ in self.received]
        for cast, received in enumerate(self.received):
            for rank, pieces in enumerate(received):
                for piece in pieces:
                    sizes[cast][piece.source][rank] += len(piece.tokens)
        return sizes

    @cached_property
    def _sent(self) -> list[list[list[Piece]]]:
        """[cast][source]: pieces by destination, then by row."""
        sent: list[list[list[Piece]]] = [[[] for _ in received] for received in self.received]
        for cast, received in enumerate(self.received):
            for pieces in received:
                for piece in pieces:
                    sent[cast][piece.source].append(piece)
        return sent


@cached_plan
def _local_mask(plan: CastPlan, step: int, rank: int) -> Mask:
    return mask_between(plan.mask, plan.layout.ranges_per_rank[rank], plan.keys(step, rank))


def cut(pieces: tuple[Piece, ...], parts: int) -> list[tuple[Piece, ...]]:
    """Pieces of one source as ``parts`` lists of nearly equal numbers of tokens, in order; the first ones are larger."""
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
                some = piece.tokens[inside.start : inside.stop]
                lists[part].append(Piece(piece.source, some, piece.row + inside.start))
        start += len(piece.tokens)
    return [tuple(each) for each in lists]


def staged(remote: list[list[tuple[Piece, ...]]], stages: int) -> tuple[tuple[tuple[Piece, ...], ...], ...]:
    """``CastPlan.received`` from [rank][source] pieces: each pair's are cut in ``stages`` parts; empty casts are dropped."""
    parts = [[cut(pieces, max(1, stages)) for pieces in sources] for sources in remote]
    casts = (
        tuple(tuple(piece for pieces in sources for piece in pieces[cast]) for sources in parts)
        for cast in range(max(1, stages))
    )
    return tuple(cast for cast in casts if any(cast))


@dataclass(frozen=True)
class Sizes:
    """The tokens that a rank sends to each rank and receives from each, in one cast."""

    sent: list[int]
    received: list[int]


def check_rows(
    name: str, x: Tensor, plan: CastPlan, stage: int, group: dist.ProcessGroup | None, received: bool = False
) -> tuple[int, Sizes]:
    """This rank, and the sizes of its cast; ValueError unless ``x`` has a row for each of its (or the received) tokens."""
    rank, ranks = place_in(name.partition(":")[0], group)
    if ranks != plan.layout.ranks:
        raise ValueError(f"{name}: the plan is for {plan.layout.ranks} ranks, the group has {ranks}")
    if not 0 <= stage < plan.casts:
        raise ValueError(f"{name}: stage {stage} is not one of the plan's {plan.casts} casts, counted from 0")
    sizes = Sizes(plan.send_sizes(stage, rank), plan.receive_sizes(stage, rank))
    expected = sum(sizes.received) if received else plan.layout.size(rank)
    if x.shape[0] != expected:
        raise ValueError(f"{name} has {x.shape[0]} rows, rank {rank} of the plan has {expected} tokens here")
    return rank, sizes


def check_into(into: Tensor, y: Tensor, plan: CastPlan, rank: int) -> None:
    """Raise ValueError unless ``into`` has a row for each token of the rank, as wide as those of ``y``."""
    expected = (plan.layout.size(rank), *y.shape[1:])
    if tuple(into.shape) != expected:
        raise ValueError(f"group_reduce: into must be {expected}, the tokens of rank {rank}, got {tuple(into.shape)}")


def default_chunk(tokens: int, ranks: int) -> int:
    """Return the tokens of a chunk by default: 1024, or fewer where a rank would get less than 8 chunks of that size.

    With 8 chunks a rank, causal and packed masks balance within about 5 %. Chunks are multiples of 128, a kernel's tile, or
    else of 16, and shorter than 16 only where a rank holds fewer than 128 tokens.
    """
    most = min(LONGEST_CHUNK, tokens // (CHUNKS_OF_A_RANK * ranks))
    unit = next((unit for unit in (128, 16) if unit <= most), 1)
    return max(1, most // unit * unit)


def checked_dispatch(
    mask: Mask,
    ranks: int,
    chunk: int | None,
    imbalance: float,
    cells_per_us: int,
    tokens_per_us: int,
    swaps_per_chunk: int,
) -> tuple[int, int, Fraction, int, int, int]:
    """Return the arguments of `dispatch` after the mask, as ints and a fraction, with the chunk filled in.

    Raise TypeError or ValueError unless they are arguments of `dispatch`. Warn if an explicit chunk leaves a rank
    empty that a shorter one would not.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"dispatch: mask must be a Mask, got {shown(mask)}")
    if mask.queries != mask.keys:
        raise ValueError(f"tokens are dispatched with their keys: the mask is {mask.queries} x {mask.keys}, not square")
    ranks, swaps = whole("ranks", ranks, 1), whole("swaps_per_chunk", swaps_per_chunk, 0)
    cells_per_us, tokens_per_us = whole("cells_per_us", cells_per_us, 1), whole("tokens_per_us", tokens_per_us, 1)
    if isinstance(imbalance, bool) or not isinstance(imbalance, Real):
        raise TypeError(f"imbalance must be a number >= 1, got {shown(imbalance)}: pass a float")
    if not 1 <= imbalance < float("inf"):
        raise ValueError(f"imbalance is largest work over the lower bound, so at least 1; got {imbalance}")
    allowed = Fraction(imbalance) if isinstance(imbalance, Rational) else Fraction(float(imbalance))
    if max(mask.area * allowed * tokens_per_us, mask.keys * cells_per_us) >= 2**62:
        raise ValueError(
            f"cells_per_us={cells_per_us}, tokens_per_us={tokens_per_us} and imbalance={imbalance} are too large for "
            f"{mask.area} cells in 64 bits: the ratio of the two rates decides, so divide both"
        )
    tokens, together = mask.queries, checked_chunk(chunk, mask.queries, ranks)
    chunks = -(-tokens // together)
    if chunks < ranks <= tokens:
        warn(
            f"dispatch: chunk={chunk} leaves {ranks - chunks} of {ranks} ranks without a token, as {tokens} tokens make "
            f"no more chunks: pass chunk={default_chunk(tokens, ranks)}, the default",
            stacklevel=3,
        )
    return ranks, together, allowed, cells_per_us, tokens_per_us, swaps


def checked_chunk(chunk: int | None, tokens: int, ranks: int) -> int:
    """Return ``chunk`` or the default, at most ``tokens`` + 1. Raise unless it is a whole number >= 1 or None."""
    return default_chunk(tokens, ranks) if chunk is None else min(whole("chunk", chunk, 1), tokens + 1)


def check_cast(mask: Mask, layout: Layout, stages: int) -> None:
    """Raise TypeError or ValueError unless these are arguments of `cast_plan`."""
    for name, value, kind in (("mask", mask, Mask), ("layout", layout, Layout)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {shown(value)}")
    if (mask.queries, mask.keys) != (layout.tokens, layout.tokens):
        raise ValueError(f"the mask is {mask.queries} x {mask.keys}, the layout has {layout.tokens} tokens")
    whole("stages", stages, 0)
