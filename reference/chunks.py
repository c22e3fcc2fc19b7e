"""Chunks of a sequence, the work and traffic of a rank that holds some of them, and the score of a plan.

A set of tokens is an integer here, with one bit for each token: | is union, & is intersection, bit_count is the size.

Source: as `canon.reference.planner`, which assigns the chunks to ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from operator import or_

from canon.masks.mask import Mask


@dataclass(frozen=True)
class Chunk:
    """A chunk: its tokens, the area of its rows, and its need: the tokens whose keys it uses, including its own."""

    number: int
    tokens: range
    area: int
    need: int
    small: bool  # empty, or the short last chunk


Held = list[Chunk]  # the chunks of one rank, ascending
Assignment = list[Held]  # by rank


def chunks_of(mask: Mask, ranks: int, chunk: int) -> Held:
    """Return the chunks of the sequence, plus empty chunks that make their number a multiple of the ranks."""
    n = mask.queries
    count = -(-n // chunk)
    pieces = [range(start, min(start + chunk, n)) for start in range(0, -(-count // ranks) * ranks * chunk, chunk)]
    return [chunk_of(mask, number, piece, chunk) for number, piece in enumerate(pieces)]


def chunk_of(mask: Mask, number: int, tokens: range, chunk: int) -> Chunk:
    """Return the chunk of ``tokens``. It is small if it has fewer than ``chunk`` tokens."""
    need = reduce(or_, map(_bits, [tokens, *mask.needed_keys([tokens])]), 0)
    return Chunk(number, tokens, mask.crop(queries=tokens).area if tokens else 0, need, len(tokens) < chunk)


def _bits(tokens: range) -> int:
    """Return the tokens as a set."""
    return (1 << tokens.stop) - (1 << tokens.start) if tokens else 0


def is_real(chunk: Chunk) -> bool:
    """Return whether the chunk has tokens."""
    return len(chunk.tokens) > 0


def area_of(held: Held) -> int:
    """Return the number of cells that a rank with these chunks computes."""
    return sum(chunk.area for chunk in held)


def size_of(held: Held) -> int:
    """Return the number of tokens of these chunks."""
    return sum(len(chunk.tokens) for chunk in held)


def need_of(held: Iterable[Chunk]) -> int:
    """Return the set of tokens whose keys a rank with these chunks uses, including its own."""
    return reduce(or_, (chunk.need for chunk in held), 0)


def received_by(held: Held) -> int:
    """Return the number of tokens whose keys a rank with these chunks receives."""
    return need_of(held).bit_count() - size_of(held)


class Aim:
    """The objective of a plan. Costs are times, in units of 1 / (cells_per_us * tokens_per_us) microseconds.

    Attributes: ``bound``, the lower bound of the largest area; ``allowed``, the largest cost that is good enough.
    """

    def __init__(self, chunks: Held, ranks: int, imbalance: Fraction, cells_per_us: int, tokens_per_us: int):
        self.rates = cells_per_us, tokens_per_us
        largest = max((chunk.area for chunk in chunks), default=0)
        self.bound = max(-(-area_of(chunks) // ranks), largest)
        self.allowed = int(self.bound * imbalance) * tokens_per_us

    def cost(self, area: int, received: int) -> int:
        """Return the time of a rank, max(computing ``area`` cells, receiving ``received`` tokens)."""
        cells_per_us, tokens_per_us = self.rates
        return max(area * tokens_per_us, received * cells_per_us)

    def score(self, assignment: Assignment) -> tuple[int, int]:
        """Return (peak, at least ``allowed``; peak x traffic) with the peak cost over the ranks. Smaller is better."""
        received = [received_by(held) for held in assignment]
        peak = max(self.cost(area_of(held), each) for held, each in zip(assignment, received, strict=True))
        return max(peak, self.allowed), peak * sum(received)


def tokens_of(held: Held) -> list[range]:
    """Return the tokens of the chunks as ascending ranges. Neighbouring chunks make one range."""
    ranges: list[range] = []
    for chunk in held:
        if ranges and ranges[-1].stop == chunk.tokens.start:
            ranges[-1] = range(ranges[-1].start, chunk.tokens.stop)
        else:
            ranges.append(chunk.tokens)
    return ranges


# ---------------------------------------------------------------------- assignments in sequence order
def contiguous(chunks: Held, ranks: int) -> Assignment:
    """Assign neighbouring chunks to the same rank. The first ranks get one empty chunk each."""
    return _filled(chunks, [_counts(chunks, ranks)])


def zigzag(chunks: Held, ranks: int) -> Assignment:
    """Assign early chunks and late chunks to each rank, half and half, which balances a causal mask.

    The last ranks get the empty chunks, because the first rank has the short one.
    """
    if len(chunks) <= ranks:  # one slot: no halves
        return contiguous(chunks, ranks)
    counts = _counts(chunks, ranks)[::-1]
    return _filled(chunks, [[(count + 1) // 2 for count in counts], [count // 2 for count in counts]])


def _counts(chunks: Held, ranks: int) -> list[int]:
    """Return the number of chunks with tokens for each rank. The first ranks get fewer."""
    fewer, more = divmod(sum(map(is_real, chunks)), ranks)
    return [fewer + (rank >= ranks - more) for rank in range(ranks)]


def _filled(chunks: Held, halves: list[list[int]]) -> Assignment:
    """Assign chunks in order: first to rank 0, 1, ..., then, with a second half, to rank ..., 1, 0. Empty ones come last."""
    numbers, slots = iter(chunks), len(chunks) // len(halves[0])
    assignment: Assignment = [[] for _ in halves[0]]
    for second, half in enumerate(halves):
        for rank in range(len(half))[:: -1 if second else 1]:
            assignment[rank] += [next(numbers) for _ in range(half[rank])]
    for held in assignment:
        held += [next(numbers) for _ in range(slots - len(held))]
    return assignment
