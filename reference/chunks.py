"""Chunks of a sequence, what a rank that holds some of them computes and receives, and what makes a plan good.

A set of tokens is a whole number here, one bit for each token: | is union, & intersection, bit_count the size.

Source: as `canon.reference.planner`, which deals the chunks out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from operator import or_

from canon.reference.mask import Mask


@dataclass(frozen=True)
class Chunk:
    """One chunk: its tokens, the area of its rows, and the tokens that it needs, its own among them."""

    number: int
    tokens: range
    area: int
    need: int
    small: bool  # empty, or the short last one


Held = list[Chunk]  # of one rank, ascending
Assignment = list[Held]


def chunks_of(mask: Mask, ranks: int, chunk: int) -> Held:
    """The chunks of the sequence, and empty ones that make their number a multiple of the ranks."""
    n = mask.queries
    count = -(-n // chunk)
    pieces = [range(start, min(start + chunk, n)) for start in range(0, -(-count // ranks) * ranks * chunk, chunk)]
    return [chunk_of(mask, number, piece, chunk) for number, piece in enumerate(pieces)]


def chunk_of(mask: Mask, number: int, tokens: range, chunk: int) -> Chunk:
    """One chunk of ``mask``, of ``chunk`` tokens where it is not small."""
    need = reduce(or_, map(_bits, [tokens, *mask.needed_keys([tokens])]), 0)
    return Chunk(number, tokens, mask.crop(queries=tokens).area if tokens else 0, need, len(tokens) < chunk)


def _bits(tokens: range) -> int:
    return (1 << tokens.stop) - (1 << tokens.start) if tokens else 0


def is_real(chunk: Chunk) -> bool:
    """Whether it has tokens at all."""
    return len(chunk.tokens) > 0


def area_of(held: Held) -> int:
    """The cells that whoever holds these chunks computes."""
    return sum(chunk.area for chunk in held)


def size_of(held: Held) -> int:
    """The tokens that it has."""
    return sum(len(chunk.tokens) for chunk in held)


def need_of(held: Iterable[Chunk]) -> int:
    """The tokens whose keys it needs, its own among them."""
    return reduce(or_, (chunk.need for chunk in held), 0)


def received_by(held: Held) -> int:
    """The tokens whose keys it receives."""
    return need_of(held).bit_count() - size_of(held)


class Aim:
    """What makes a plan good. Costs are times, in units of a microsecond / (cells_per_us * tokens_per_us)."""

    def __init__(self, chunks: Held, ranks: int, imbalance: Fraction, cells_per_us: int, tokens_per_us: int):
        self.rates = cells_per_us, tokens_per_us
        largest = max((chunk.area for chunk in chunks), default=0)
        self.bound = max(-(-area_of(chunks) // ranks), largest)
        self.allowed = int(self.bound * imbalance) * tokens_per_us

    def cost(self, area: int, received: int) -> int:
        """max(computing, receiving)."""
        cells_per_us, tokens_per_us = self.rates
        return max(area * tokens_per_us, received * cells_per_us)

    def score(self, assignment: Assignment) -> tuple[int, int]:
        """The smaller, the better: (largest cost, no less than allowed; largest cost x traffic)."""
        received = [received_by(held) for held in assignment]
        peak = max(self.cost(area_of(held), each) for held, each in zip(assignment, received, strict=True))
        return max(peak, self.allowed), peak * sum(received)


def tokens_of(held: Held) -> list[range]:
    """The tokens of chunks as ascending ranges; neighbouring chunks are one."""
    ranges: list[range] = []
    for chunk in held:
        if ranges and ranges[-1].stop == chunk.tokens.start:
            ranges[-1] = range(ranges[-1].start, chunk.tokens.stop)
        else:
            ranges.append(chunk.tokens)
    return ranges
