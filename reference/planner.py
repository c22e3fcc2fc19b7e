"""Which rank gets which chunks of a sequence, so that ranks compute equally and move few keys.

The sequence is cut in chunks, which stay whole. Each has an *area* (cells of the mask in its rows) and a *need* (the keys
that its queries see, and its own tokens). A rank computes the sum of its chunks' areas; it receives what its chunks
together need and are not themselves:

    documents    aaaaaaaaaaaaaa bb cc dddddd     chunk    area     need
    chunks       0000 1111 2222 3333 4444 55     1        22       0 and 1 of document a
                                                 3        9        12.. of a; b; c's first

The aim, in whole numbers, so that every rank on any machine decides alike:

    1. make  max over ranks of max(area / cells_per_us, received / tokens_per_us)  small; below `imbalance` times the lower
       bound of the computing part, max(mean area, largest chunk), it is small enough
    2. receive few tokens in all

and three steps towards it:

    starts    *greedy*: largest chunk first, to the rank that it adds the fewest needed tokens to and whose area stays below
              a limit, with room kept for the slots that are still free; for three limits from perfect balance to the
              imbalance allowed. *contiguous*, best for a window. *zigzag*, best for one causal document.
    swaps     pairs of ranks, one after another, exchange the two chunks that bring the most, until none gains or the number of
              swaps is used up; first from the best start, then from the others that are not far behind
    choice    the best of the starts and of what the swaps made of them; where several are balanced well enough, the one with
              the least peak x traffic, so that balance is not given away for nothing

Every rank gets as many chunks as the others, or one less: empty chunks fill up the last slots. A short last chunk counts as one
of those, and no rank gets two of them, so token counts differ by at most a chunk.

Cost: a round of swaps scores chunks^2 / 2 of them; `canon.fast.planner` makes the same plans sooner. Nothing is sent. It
does not move queries, cut chunks, or know one rank from another (nodes, faster links).

Sources: the problem and the chunks, MagiAttention (Zewei Tao and Yunpeng Huang, SandAI, 2025); longest first, Graham,
Bounds on multiprocessing timing anomalies (1969).
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, product

from canon.reference.chunks import (
    Aim,
    Assignment,
    Chunk,
    Held,
    area_of,
    chunks_of,
    is_real,
    need_of,
    received_by,
    size_of,
    tokens_of,
)
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan_arguments import checked_dispatch
from canon.reference.plan_cache import cached_plan

__all__ = ["dispatch"]

RESERVE = 8  # a free slot is kept the smallest area, and an eighth of what an average chunk to come is larger

HOPELESS = 2  # how many times the best peak x traffic found so far a start may have, to be worth swaps


def dispatch(
    mask: Mask,
    ranks: int,
    *,
    chunk: int | None = None,
    imbalance: float = 1.05,
    cells_per_us: int = 4400,
    tokens_per_us: int = 18,
    swaps_per_chunk: int = 1,
) -> Layout:
    """Which rank holds which tokens: chunks of the sequence, so that ranks work equally and move few keys.

    The plan minimises the largest over the ranks of max(computing, receiving), down to ``imbalance`` times the least
    that computing can take; among plans below that, the traffic. Pure, deterministic and equal on all ranks; cached.

    Args:
        mask: over the whole sequence, as many queries as keys.
        ranks: how many share it.
        chunk: tokens that stay together; the last chunk may be short. Each rank gets as many chunks as the others, or
            one less, and token counts differ by at most one chunk. None means 1024, or less for short sequences: at
            least 8 chunks a rank, because fewer balance badly (`canon.reference.plan_arguments.default_chunk`).
        imbalance: largest work over the lower bound, max(mean over the ranks, largest chunk), that is good enough.
        cells_per_us, tokens_per_us: the assumed rates: query-key pairs, of all heads, that a rank computes in a
            microsecond, and tokens whose K and V it receives; forward and backward together. (The defaults: 64 heads of
            width 128, 14 * 64 * 128 operations a cell at 500 TFLOP/s; 8 key heads, 16 KB a token at 300 GB/s.)
        swaps_per_chunk: how many swaps may be made, over all starts, for each chunk.

    Raises:
        ValueError: the mask is not square, or a number is out of its range.
        TypeError: an argument is of another type.

    Warns:
        UserWarning: an explicit chunk is so long that ranks hold no token, though there are tokens for all of them.

    Source: the module's docstring.
    """
    checked = checked_dispatch(mask, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk)
    return _dispatch(mask, *checked)


@cached_plan
def _dispatch(mask, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk) -> Layout:
    chunks = chunks_of(mask, ranks, chunk)
    aim = Aim(chunks, ranks, imbalance, cells_per_us, tokens_per_us)
    slacks = (Fraction(1), (1 + imbalance) / 2, imbalance)
    starts = [_greedy(chunks, ranks, int(aim.bound * slack)) for slack in slacks]
    starts += [_zigzag(chunks, ranks), _contiguous(chunks, ranks)]
    found = sorted(starts, key=aim.score)
    swaps = swaps_per_chunk * sum(map(is_real, chunks))
    for start in found[:]:  # the best first: it gets what it needs of the swaps
        peak, best = min(map(aim.score, found))
        if peak == aim.allowed and aim.score(start)[1] > HOPELESS * best:
            continue
        better, made = _descended(start, aim, swaps)
        swaps -= made
        found.append(better)
    best = min(found, key=aim.score)
    return Layout([tokens_of(held) for held in best], mask.queries)


# ---------------------------------------------------------------------- starts
def _contiguous(chunks: Held, ranks: int) -> Assignment:
    """Neighbours together; the first ranks get the empty chunks, one each."""
    return _filled(chunks, [_counts(chunks, ranks)])


def _zigzag(chunks: Held, ranks: int) -> Assignment:
    """A cheap and a dear half for each rank; the last ranks get the empty chunks, as the first has the short one."""
    if len(chunks) <= ranks:  # one slot: no halves
        return _contiguous(chunks, ranks)
    counts = _counts(chunks, ranks)[::-1]
    return _filled(chunks, [[(count + 1) // 2 for count in counts], [count // 2 for count in counts]])


def _counts(chunks: Held, ranks: int) -> list[int]:
    """Chunks that are not empty, for each rank: fewer on the first ones."""
    fewer, more = divmod(sum(map(is_real, chunks)), ranks)
    return [fewer + (rank >= ranks - more) for rank in range(ranks)]


def _filled(chunks: Held, halves: list[list[int]]) -> Assignment:
    """Chunks in order to rank 0, 1, ... for the first half, then to ..., 1, 0 for the second; empty ones at the end."""
    numbers, slots = iter(chunks), len(chunks) // len(halves[0])
    assignment: Assignment = [[] for _ in halves[0]]
    for turn, half in enumerate(halves):
        for rank in range(len(half))[:: -1 if turn else 1]:
            assignment[rank] += [next(numbers) for _ in range(half[rank])]
    for held in assignment:
        held += [next(numbers) for _ in range(slots - len(held))]
    return assignment


def _greedy(chunks: Held, ranks: int, limit: int) -> Assignment:
    """Largest chunk first, to the rank that already needs most of its keys, if its area stays below ``limit``."""
    slots, most_full = len(chunks) // ranks if chunks else 0, ranks - sum(chunk.small for chunk in chunks)
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
    """At most one small chunk a rank; so as many ranks as there are small chunks must keep a slot for one."""
    has_small = any(other.small for other in held)
    whole = len(held) - has_small
    if len(held) == slots or chunk.small:
        return len(held) < slots and not has_small
    full = sum(len(each) == slots and not any(other.small for other in each) for each in assignment)
    return whole < slots - 1 or (not has_small and full < most_full)


# ---------------------------------------------------------------------- swaps
def _descended(assignment: Assignment, aim: Aim, most: int) -> tuple[Assignment, int]:
    """The assignment after up to ``most`` swaps, pair after pair of ranks, until a round brings nothing; their number."""
    assignment, made = assignment[:], 0
    settled: set[tuple[int, int]] = set()  # pairs that had nothing to gain, and have not changed since
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
                settled = {other for other in settled if not set(other) & set(pair)}
                made += 1
        if made == before:
            break
    return assignment, made


def _best_swap(mine: Held, theirs: Held, aim: Aim) -> tuple[Held, Held] | None:
    """Both ranks after the exchange of two chunks that gains the most, or None. Ties: the first of mine, of theirs."""

    def worth(cost_here: int, cost_there: int, traffic: int) -> tuple[int, int]:
        return max(cost_here, cost_there, aim.allowed), traffic

    received = [received_by(held) for held in (mine, theirs)]
    costs = [aim.cost(area_of(held), each) for held, each in zip((mine, theirs), received, strict=True)]
    best, result = worth(*costs, sum(received)), None
    if not need_of(mine) & need_of(theirs) and max(costs) <= aim.allowed:
        return None  # no key in common: a swap cannot save any
    rest_of_mine, rest_of_theirs = _rests(mine), _rests(theirs)
    areas, sizes = ([f(held) for held in (mine, theirs)] for f in (area_of, size_of))
    for x, y in product(range(len(mine)), range(len(theirs))):
        give, take = mine[x], theirs[y]
        if _has_two_small(mine, give, take) or _has_two_small(theirs, take, give):
            continue
        area, size = take.area - give.area, len(take.tokens) - len(give.tokens)
        here = (rest_of_mine[x] | take.need).bit_count() - sizes[0] - size
        there = (rest_of_theirs[y] | give.need).bit_count() - sizes[1] + size
        new = worth(aim.cost(areas[0] + area, here), aim.cost(areas[1] - area, there), here + there)
        if new < best:
            best, result = new, (_exchanged(mine, give, take), _exchanged(theirs, take, give))
    return result


def _rests(held: Held) -> list[int]:
    """For each chunk, what the others need."""
    return [need_of(held[:i] + held[i + 1 :]) for i in range(len(held))]


def _has_two_small(held: Held, leaves: Chunk, comes: Chunk) -> bool:
    return comes.small and not leaves.small and any(chunk.small for chunk in held)


def _exchanged(held: Sequence[Chunk], leaves: Chunk, comes: Chunk) -> Held:
    return sorted([chunk for chunk in held if chunk is not leaves] + [comes], key=lambda chunk: chunk.number)
