"""Plan a layout: assign chunks to ranks, so that ranks compute equally and move few keys.

A chunk has an *area*, the visible cells in its rows, and a *need*, its own tokens and the keys that
its queries see. A rank computes the sum of its areas, and receives the union of its needs without
its own tokens:

    22 causal tokens   aaaaaaaaaaaaaabbccdddd    chunk   area               need
    their chunks       0000111122223333444455    1       5+6+7+8    = 26    tokens 0 to 7 (of a)
                                                 3       13+14+1+2  = 30    tokens 0 to 15 (a and b)

With a mask for each sequence, areas, needs and moved tokens are sums over the sequences. An
exchange takes a rank as long as the larger of both directions, moved = max(received, sent).

Aim, in whole numbers, so that every rank on any machine decides alike:

    1. minimise the peak, max over ranks of max(area / cells_per_us, moved / tokens_per_us). A peak
       up to `allowed` counts as `allowed`: `imbalance` times the lower bound of the computing part,
       max(mean area, largest chunk)
    2. minimise the traffic, ranks x the largest moved + `WEIGHT` x the sum of received tokens

Four steps (the first three are worked by hand in notebooks/04_magi.md):

    starts    *greedy*: largest chunk first, to the rank that needs the fewest additional keys and
              keeps its area within a limit, else to the least loaded rank. Three limits, from
              perfect balance to the allowed imbalance. *contiguous* and *zigzag*
    choice    the start with the least (peak, real peak x traffic)
    swaps     two ranks exchange the two chunks with the least (peak, received tokens), in batches
              of `BATCH` swaps a rank, while these improve the score of the choice
    relief    the rank that moves most exchanges a chunk with one of the `PARTNERS` ranks that move
              least, at most `swaps_per_chunk` times for each rank, while that improves the score

No step makes the score worse, so a plan is never worse than zigzag or contiguous chunks.

All ranks have equally many slots. A *small* chunk is the short last one, or an empty one that fills
a free slot. A rank holds at most one small chunk, so token counts differ by at most one chunk.

Cost: a round of swaps scores chunks^2 / 2 of them. Limits: chunks are not cut, and all links
between ranks count as equally fast.

Sources: the problem and the chunks, MagiAttention (Zewei Tao and Yunpeng Huang, SandAI, 2025);
longest first, Graham, Bounds on multiprocessing timing anomalies (1969).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import combinations, product
from operator import or_

from canon.faces import public_plans
from canon.masks.layout import Layout, placed
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan

__all__ = ["dispatch"]

# The area of a free slot: the smallest chunk's, plus 1 / RESERVE of its difference to the mean
# chunk still to come. So a rank keeps room for the chunks that must fill its slots.
RESERVE = 8
BATCH = 2
WEIGHT = 5
PARTNERS = 8


@cached_plan
def _dispatch(
    mask, sequences, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk
) -> Layout:
    chunks = chunks_of(mask, sequences, ranks, chunk)
    aim = Aim(chunks, ranks, imbalance, cells_per_us, tokens_per_us)
    slacks = (Fraction(1), (1 + imbalance) / 2, imbalance)
    starts = [_greedy(chunks, ranks, int(aim.bound * slack)) for slack in slacks]
    starts += [zigzag(chunks, ranks), contiguous(chunks, ranks)]
    best, settled = min(starts, key=aim.score), set()
    swaps = swaps_per_chunk * sum(bool(chunk.tokens) for chunk in chunks)
    while swaps > 0:
        better, made = _swapped(best, aim, min(swaps, BATCH * ranks), settled)
        if aim.score(better) >= aim.score(best):
            break
        best, swaps = better, swaps - made
    for _ in range(swaps_per_chunk * ranks):
        better = _relieved(best, aim)
        if better is None:
            break
        best = better
    held = (placed([chunk.tokens for chunk in own]) for own in best)
    return Layout([[tokens for _, tokens in some] for some in held], mask.queries // sequences)


# ---------------------------------------------------------------------- chunks
@dataclass(frozen=True)
class Chunk:
    """Tokens, the area of their rows, and their need. Sets of tokens are integers with one bit for
    each token. ``size`` and ``own``: the number and the set of these in all sequences.
    """

    number: int
    tokens: range
    size: int
    own: int
    area: int
    need: int
    small: bool  # empty, or the short last chunk


Held = list[Chunk]  # the chunks of one rank, or of the sequence, ascending
Assignment = list[Held]  # by rank


def chunks_of(mask: Mask, sequences: int, ranks: int, chunk: int) -> Held:
    """Return the chunks of a sequence, and empty ones up to a multiple of the ranks."""
    n = mask.queries // sequences
    count = -(-n // chunk)
    pieces = [
        range(start, min(start + chunk, n))
        for start in range(0, -(-count // ranks) * ranks * chunk, chunk)
    ]
    return [chunk_of(mask, sequences, number, piece, chunk) for number, piece in enumerate(pieces)]


def chunk_of(mask: Mask, sequences: int, number: int, tokens: range, chunk: int) -> Chunk:
    """Return the chunk of ``tokens`` in all sequences, small if they are fewer than ``chunk``."""
    n = mask.queries // sequences
    rows = [
        range(tokens.start + i * n, tokens.stop + i * n) for i in range(sequences if tokens else 0)
    ]
    area, own = sum(mask.crop(queries=each).area for each in rows), _bits(rows)
    need = own | _bits(mask.needed_keys(rows))
    return Chunk(number, tokens, sum(map(len, rows)), own, area, need, len(tokens) < chunk)


def _bits(ranges: Iterable[range]) -> int:
    return reduce(or_, ((1 << tokens.stop) - (1 << tokens.start) for tokens in ranges if tokens), 0)


def area_of(held: Held) -> int:
    """Return the cells that a rank computes."""
    return sum(chunk.area for chunk in held)


def size_of(held: Held) -> int:
    """Return the number of tokens, in all sequences."""
    return sum(chunk.size for chunk in held)


def need_of(held: Iterable[Chunk]) -> int:
    """Return the tokens whose keys a rank with these chunks uses."""
    return reduce(or_, (chunk.need for chunk in held), 0)


def received_by(held: Held) -> int:
    """Return the number of tokens whose keys a rank receives."""
    return need_of(held).bit_count() - size_of(held)


def moved_by(assignment: Assignment) -> list[int]:
    """Return for each rank max(tokens received, tokens sent)."""
    needs = [need_of(held) for held in assignment]
    owns = [reduce(or_, (x.own for x in held), 0) for held in assignment]
    # not to itself
    sent = [sum((need & own).bit_count() for need in needs) - own.bit_count() for own in owns]
    return [max(received_by(held), each) for held, each in zip(assignment, sent, strict=True)]


class Aim:
    """The objective of a plan, with times in 1 / (cells_per_us * tokens_per_us) microseconds.

    ``bound``: the lower bound of the largest area. ``allowed``: the largest cost that is good
    enough.
    """

    def __init__(
        self, chunks: Held, ranks: int, imbalance: Fraction, cells_per_us: int, tokens_per_us: int
    ):
        self.rates = cells_per_us, tokens_per_us
        largest = max((chunk.area for chunk in chunks), default=0)
        self.bound = max(-(-area_of(chunks) // ranks), largest)
        self.allowed = int(self.bound * imbalance) * tokens_per_us

    def cost(self, area: int, tokens: int) -> int:
        """Return max(computing, moving tokens) of a rank."""
        cells_per_us, tokens_per_us = self.rates
        return max(area * tokens_per_us, tokens * cells_per_us)

    def score(self, assignment: Assignment) -> tuple[int, int]:
        """Return (peak, at least ``allowed``; peak x traffic). Smaller is better."""
        moved, received = moved_by(assignment), sum(map(received_by, assignment))
        peak = max(
            self.cost(area_of(held), each) for held, each in zip(assignment, moved, strict=True)
        )
        return max(peak, self.allowed), peak * (len(assignment) * max(moved) + WEIGHT * received)


# ----------------------------------------------------------------- assignments in sequence order
def contiguous(chunks: Held, ranks: int) -> Assignment:
    """Assign neighbouring chunks to a rank. The first ranks get one empty chunk each."""
    return _filled(chunks, [_counts(chunks, ranks)])


def zigzag(chunks: Held, ranks: int) -> Assignment:
    """Assign early and late chunks to each rank, half and half. The last ranks get the empty
    chunks, because the first has the short one.
    """
    if len(chunks) <= ranks:  # one slot: no halves
        return contiguous(chunks, ranks)
    counts = _counts(chunks, ranks)[::-1]
    return _filled(
        chunks, [[(count + 1) // 2 for count in counts], [count // 2 for count in counts]]
    )


def _counts(chunks: Held, ranks: int) -> list[int]:
    fewer, more = divmod(sum(bool(chunk.tokens) for chunk in chunks), ranks)
    return [fewer + (rank >= ranks - more) for rank in range(ranks)]


def _filled(chunks: Held, halves: list[list[int]]) -> Assignment:
    """Deal chunks to rank 0, 1, ..., then, with a second half, to rank ..., 1, 0. Empty ones come
    last.
    """
    numbers, slots = iter(chunks), len(chunks) // len(halves[0])
    assignment: Assignment = [[] for _ in halves[0]]
    for second, half in enumerate(halves):
        for rank in range(len(half))[:: -1 if second else 1]:
            assignment[rank] += [next(numbers) for _ in range(half[rank])]
    for held in assignment:
        held += [next(numbers) for _ in range(slots - len(held))]
    return assignment


# ---------------------------------------------------------------------- the greedy start
def _greedy(chunks: Held, ranks: int, limit: int) -> Assignment:
    """Assign the largest chunk first, to a rank with area <= ``limit`` that needs the fewest more
    keys.
    """
    slots = len(chunks) // ranks if chunks else 0
    most_full = ranks - sum(chunk.small for chunk in chunks)
    assignment: Assignment = [[] for _ in range(ranks)]
    order = sorted(chunks, key=lambda chunk: (-chunk.area, chunk.number))
    for place, chunk in enumerate(order):
        to_come = order[place + 1 :]
        smallest = order[-1].area
        reserve = smallest + (area_of(to_come) // max(1, len(to_come)) - smallest) // RESERVE
        area_then = {
            rank: area_of(held) + chunk.area + (slots - len(held) - 1) * reserve
            for rank, held in enumerate(assignment)
            if _has_room(held, chunk, slots, assignment, most_full)
        }
        fits = [rank for rank, area in area_then.items() if area <= limit]
        added = {rank: (chunk.need & ~need_of(assignment[rank])).bit_count() for rank in fits}
        near = [rank for rank in fits if added[rank] == min(added.values())] or list(area_then)
        assignment[min(near, key=lambda rank: (area_then[rank], rank))].append(chunk)
    return [sorted(held, key=lambda chunk: chunk.number) for held in assignment]


def _has_room(held: Held, chunk: Chunk, slots: int, assignment: Assignment, most_full: int) -> bool:
    """Return whether a rank may take the chunk and keep at most one small chunk. At most
    ``most_full`` ranks fill up without one, so that a slot stays free for each.
    """
    has_small = any(other.small for other in held)
    whole = len(held) - has_small
    if len(held) == slots or chunk.small:
        return len(held) < slots and not has_small
    full = sum(len(each) == slots and not any(other.small for other in each) for each in assignment)
    return whole < slots - 1 or (not has_small and full < most_full)


# ---------------------------------------------------------------------- swaps
def _swapped(
    assignment: Assignment, aim: Aim, most: int, settled: set[tuple[int, int]]
) -> tuple[Assignment, int]:
    """Return the assignment after up to ``most`` swaps, and their number. ``settled``: pairs
    without a gain.
    """
    assignment, made = assignment[:], 0
    while made < most:
        before = made
        for pair in combinations(range(len(assignment)), 2):
            if made == most or pair in settled:
                continue
            better = _best_swap(*(assignment[rank] for rank in pair), aim)
            if better is None:
                settled.add(pair)
            else:
                for rank, held in zip(pair, better, strict=True):
                    assignment[rank] = held
                settled -= {other for other in settled if set(other) & set(pair)}
                made += 1
        if made == before:
            break
    return assignment, made


def _best_swap(mine: Held, theirs: Held, aim: Aim) -> tuple[Held, Held] | None:
    """Return both ranks after the best swap of two chunks, the first of equal ones, or None."""

    def worth(cost_here: int, cost_there: int, traffic: int) -> tuple[int, int]:
        return max(cost_here, cost_there, aim.allowed), traffic

    received = [received_by(held) for held in (mine, theirs)]
    costs = [
        aim.cost(area_of(held), each) for held, each in zip((mine, theirs), received, strict=True)
    ]
    best, result = worth(*costs, sum(received)), None
    if not need_of(mine) & need_of(theirs) and max(costs) <= aim.allowed:
        return None  # no common key: a swap cannot save traffic
    rest_of_mine, rest_of_theirs = _rests(mine), _rests(theirs)
    areas, sizes = ([f(held) for held in (mine, theirs)] for f in (area_of, size_of))
    for x, y in product(range(len(mine)), range(len(theirs))):
        give, take = mine[x], theirs[y]
        if _has_two_small(mine, give, take) or _has_two_small(theirs, take, give):
            continue
        area, size = take.area - give.area, take.size - give.size
        here = (rest_of_mine[x] | take.need).bit_count() - sizes[0] - size
        there = (rest_of_theirs[y] | give.need).bit_count() - sizes[1] + size
        new = worth(aim.cost(areas[0] + area, here), aim.cost(areas[1] - area, there), here + there)
        if new < best:
            best, result = new, (_exchanged(mine, give, take), _exchanged(theirs, take, give))
    return result


def _relieved(assignment: Assignment, aim: Aim) -> Assignment | None:
    """Return the assignment after the best swap of the rank that moves most, or None. Ties: the
    partner that moves least.
    """
    moved, areas = moved_by(assignment), [area_of(held) for held in assignment]
    busiest, *others = sorted(range(len(assignment)), key=lambda rank: (-moved[rank], rank))
    best, result = aim.score(assignment), None
    for other in sorted(others, key=lambda rank: (moved[rank], rank))[:PARTNERS]:
        for give, take in product(mine := assignment[busiest], theirs := assignment[other]):
            if _has_two_small(mine, give, take) or _has_two_small(theirs, take, give):
                continue
            more = take.area - give.area
            if aim.cost(max(areas[busiest] + more, areas[other] - more), 0) > best[0]:
                continue
            after = assignment[:]
            after[busiest], after[other] = (
                _exchanged(mine, give, take),
                _exchanged(theirs, take, give),
            )
            if (score := aim.score(after)) < best:
                best, result = score, after
    return result


def _rests(held: Held) -> list[int]:
    return [need_of(held[:i] + held[i + 1 :]) for i in range(len(held))]


def _has_two_small(held: Held, leaves: Chunk, comes: Chunk) -> bool:
    return comes.small and not leaves.small and any(chunk.small for chunk in held)


def _exchanged(held: Sequence[Chunk], leaves: Chunk, comes: Chunk) -> Held:
    return sorted(
        [chunk for chunk in held if chunk is not leaves] + [comes], key=lambda chunk: chunk.number
    )


dispatch = public_plans.dispatch(_dispatch)
