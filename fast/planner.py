"""Which rank gets which chunks: the assignment of `canon.reference.planner`, over NumPy arrays.

The chunks, the starts, the order in which swaps are looked at, every tie and every integer are the reference's, so the
plans are equal. What is added:

- The keys of a sequence are cut into *cells* at the ends of all chunks' intervals, about two a chunk however many
  documents there are. A rank has the prefix sums of its *missing* cells' sizes (which no chunk of it needs) and of those
  that *one* chunk alone needs; what a chunk would add to a rank, or leave with it, is then a difference of two entries.
- All swaps of one rank with every other rank are scored in one go. The first rank with a gain swaps; the rest are
  scored again, as this rank has changed.
- Ranks that have not changed since, or that share no key while neither is over its limit, cannot gain and are left out.

Cost: O(chunks x ranks + chunks x cells) for a start; O(ranks x c^2 + cells) for a swap at c chunks a rank.
Memory: two tables of ranks x cells numbers. Nothing is sent.

Source: as `canon.reference.planner`.
"""

from fractions import Fraction

import numpy as np

from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan_arguments import checked_dispatch
from canon.reference.plan_cache import cached_plan

__all__ = ["dispatch"]

FAR = np.iinfo(np.int64).max
RESERVE = 8  # a free slot is kept the smallest area, and an eighth of what an average chunk to come is larger
HOPELESS = 2  # how many times the best peak x traffic found so far a start may have, to be worth swaps
TOGETHER = 64  # ranks whose swaps are scored in one go: more is wasted where the first of them swaps


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
            microsecond, and tokens whose K and V it receives; forward and backward together.
        swaps_per_chunk: how many swaps may be made, over all starts, for each chunk.

    Raises:
        ValueError: the mask is not square, or a number is out of its range.
        TypeError: an argument is of another type.

    Warns:
        UserWarning: an explicit chunk is so long that ranks hold no token, though there are tokens for all of them.

    Source: `canon.reference.planner`.
    """
    checked = checked_dispatch(mask, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk)
    return _dispatch(mask, *checked)


@cached_plan
def _dispatch(mask, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk) -> Layout:
    if not mask.queries:
        return Layout([[]] * ranks, 0)
    chunks = _Chunks(mask, ranks, chunk, imbalance, cells_per_us, tokens_per_us)
    slacks = (Fraction(1), (1 + imbalance) / 2, imbalance)
    starts = [_greedy(chunks, slack) for slack in slacks] + [_zigzag(chunks), _contiguous(chunks)]
    assignments = sorted((_Assignment(chunks, slots) for slots in starts), key=_Assignment.score)
    found = [(each.score(), each.slots.copy()) for each in assignments]
    swaps = swaps_per_chunk * chunks.count
    for assignment in assignments:  # the best first: it gets what it needs of the swaps
        (peak, best), (_, here) = min(score for score, _ in found), assignment.score()
        if peak == chunks.allowed and here > HOPELESS * best:
            continue
        swaps -= assignment.descend(swaps)
        found.append((assignment.score(), assignment.slots))
    slots = min(found, key=lambda x: x[0])[1]
    return Layout([chunks.tokens(numbers) for numbers in slots], mask.queries)


class _Chunks:
    """The chunks of a mask, and as many empty ones as make their number a multiple of the ranks."""

    def __init__(self, mask, ranks, chunk, imbalance, cells_per_us, tokens_per_us):
        self.count = -(-mask.queries // chunk)
        self.ranks, self.slots = ranks, -(-self.count // ranks)  # slots: chunks that a rank holds
        items = self.ranks * self.slots
        edges = np.minimum(np.arange(items + 1) * chunk, mask.queries)
        self.start, self.size = edges[:-1], np.diff(edges)
        self.small = self.size < chunk
        self.small_ones = int(self.small.sum())
        real = slice(self.count)
        self.area = np.zeros(items, np.int64)
        self.area[real], *needs = seen(mask, edges[:-1][real], edges[1:][real])
        own = np.arange(self.count), edges[:-1][real], edges[1:][real]
        self._cut_into_cells(*merged(*(np.append(*x) for x in zip(needs, own, strict=True)), mask.keys), items)
        self.bound = max(-(-int(self.area.sum()) // ranks), int(self.area.max(initial=0)))
        self.rates = cells_per_us, tokens_per_us
        self.allowed = int(self.bound * imbalance) * tokens_per_us

    def _cut_into_cells(self, owner, first, last, items):
        """Each chunk's intervals of keys as (first, last) numbers of cells, filled up with empty ones."""
        edges = np.unique(np.append(first, last))
        self.cells = np.diff(edges)  # their sizes
        place = np.arange(len(owner)) - np.searchsorted(owner, owner)
        self.first, self.last = np.zeros((2, items, place.max(initial=0) + 1), np.int64)
        self.first[owner, place], self.last[owner, place] = np.searchsorted(edges, first), np.searchsorted(edges, last)
        self.intervals: list[list[tuple[int, int]]] = [[] for _ in range(items)]  # the same, without empty ones
        ends = (x[owner, place].tolist() for x in (self.first, self.last))
        for number, *interval in zip(owner.tolist(), *ends, strict=True):
            self.intervals[number].append(tuple(interval))
        self.need_of_all = int(self.cells.sum())
        self.need = self.between(np.append(0, np.cumsum(self.cells)), np.arange(items))

    def between(self, prefix, numbers):
        """For each chunk: the sum, over its intervals, of what ``prefix`` (..., cells + 1) has summed up."""
        return (prefix[..., self.last[numbers]] - prefix[..., self.first[numbers]]).sum(-1)

    def cost(self, area, received):
        """max(computing, receiving), in units of a microsecond / (cells_per_us * tokens_per_us)."""
        return np.maximum(area * self.rates[1], received * self.rates[0])

    def tokens(self, numbers):
        """The tokens of chunks as ascending ranges; neighbouring chunks are one."""
        ranges: list[range] = []
        for start, size in zip(self.start[numbers].tolist(), self.size[numbers].tolist(), strict=True):
            if ranges and ranges[-1].stop == start:
                ranges[-1] = range(ranges[-1].start, start + size)
            else:
                ranges.append(range(start, start + size))
        return ranges


# ---------------------------------------------------------------------- what a mask asks of pieces of the queries
def seen(mask: Mask, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The area of each piece start:stop of the queries, and the keys that it sees as (piece, first, last) intervals.

    The pieces are ascending and disjoint. Closed forms, one for each (band, piece) that meet; intervals may overlap.
    """
    bands = np.array([(b.q_start, b.q_stop, b.k_start, b.k_stop, b.lo, b.hi) for b in mask.bands], np.int64)
    bands = bands.reshape(-1, 6)
    first = np.searchsorted(stop, bands[:, 0], "right")
    count = np.maximum(np.searchsorted(start, bands[:, 1], "left") - first, 0)
    band = np.repeat(np.arange(len(bands)), count)
    piece = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
    row, row_stop, column, column_stop, lo, hi = bands[band].T
    row, row_stop = np.maximum(row, start[piece]), np.minimum(row_stop, stop[piece])
    area = np.zeros(len(start), np.int64)
    np.add.at(area, piece, _sum_min(row, row_stop, hi + 1, column_stop) - _sum_max(row, row_stop, lo, column))
    return area, piece, np.maximum(column, row + lo), np.minimum(column_stop, row_stop + hi)


def _sum_min(start, stop, offset, most):
    """The sum of min(i + offset, most) over start <= i < stop."""
    turn = np.clip(most - offset, start, stop)
    return _sum(start, turn) + (turn - start) * offset + (stop - turn) * most


def _sum_max(start, stop, offset, least):
    """The sum of max(i + offset, least) over start <= i < stop."""
    turn = np.clip(least - offset, start, stop)
    return _sum(turn, stop) + (stop - turn) * offset + (turn - start) * least


def _sum(start, stop):
    return (stop * (stop - 1) - start * (start - 1)) // 2


def merged(owner: np.ndarray, first: np.ndarray, last: np.ndarray, tokens: int):
    """The union of each owner's intervals, by owner and ascending, none touching the next: (owner, first, last)."""
    shift = owner * (tokens + 1)  # owners side by side on one axis: one sweep for all
    order = np.argsort(first + shift, kind="stable")
    owner, first, shift = owner[order], first[order], shift[order]
    reached = np.maximum.accumulate(last[order] + shift)
    new = np.append(True, (first + shift)[1:] > reached[:-1])[: len(first)]
    end = np.append(new[1:], True)[: len(first)]
    return owner[new], first[new], (reached - shift)[end]


# ---------------------------------------------------------------------- starts: (ranks, slots) numbers of chunks
def _contiguous(chunks: _Chunks) -> np.ndarray:
    """Neighbours together; the first ranks get the empty chunks, one each."""
    return _filled(chunks, _counts(chunks, empty_first=True), lambda counts: [counts])


def _zigzag(chunks: _Chunks) -> np.ndarray:
    """A cheap and a dear half for each rank; the last ranks get the empty chunks, as the first has the short one."""
    counts = _counts(chunks, empty_first=chunks.slots == 1)
    return _filled(chunks, counts, lambda counts: [(counts + 1) // 2, counts // 2])


def _counts(chunks, empty_first):
    """Chunks that are not empty, for each rank."""
    empty = chunks.ranks * chunks.slots - chunks.count
    rank = np.arange(chunks.ranks)
    return chunks.slots - (rank < empty if empty_first else rank >= chunks.ranks - empty)


def _filled(chunks, counts, halves):
    """Chunks in order to rank 0, 1, ... for the first half, then to ..., 1, 0 for the second; empty ones at the end."""
    held: list[list[int]] = [[] for _ in counts]
    numbers = iter(range(chunks.ranks * chunks.slots))
    for turn, half in enumerate(halves(counts)):
        for rank in range(chunks.ranks)[:: -1 if turn else 1]:
            held[rank] += [next(numbers) for _ in range(half[rank])]
    for mine in held:
        mine += [next(numbers) for _ in range(chunks.slots - len(mine))]
    return np.array(held, np.int64)


def _greedy(chunks: _Chunks, slack: Fraction) -> np.ndarray:
    """Largest chunk first, to the rank that already needs most of its keys, below slack times the lower bound."""
    ranks, slots, limit = chunks.ranks, chunks.slots, int(chunks.bound * slack)
    load, whole = np.zeros((2, ranks), np.int64)  # area; chunks that are not small
    free = np.full(ranks, slots)
    small_free, complete, may_be = np.ones(ranks, bool), 0, ranks - chunks.small_ones
    missing = np.tile(np.append(0, np.cumsum(chunks.cells)), (ranks, 1))
    sizes = np.tile(chunks.cells, (ranks, 1))  # 0 once a cell is needed
    held: list[list[int]] = [[] for _ in range(ranks)]
    left, smallest = int(chunks.area.sum()), int(chunks.area.min())
    order = np.argsort(-chunks.area, kind="stable").tolist()
    smalls, areas = chunks.small.tolist(), chunks.area.tolist()
    for place, number in enumerate(order):
        small, area = smalls[number], areas[number]
        left -= area
        reserve = smallest + (left // max(1, len(order) - place - 1) - smallest) // RESERVE
        room = free > 0
        if small:
            room &= small_free
        elif chunks.small_ones:
            room &= (whole < slots - 1) | (small_free & (complete < may_be))
        load_then = load + area + (free - 1) * reserve
        added = sum(missing[:, last] - missing[:, first] for first, last in chunks.intervals[number])
        added = np.where(room & (load_then <= limit), added, FAR)
        if (fewest := added.min()) < FAR:
            room = added == fewest
        rank = int(np.where(room, load_then, FAR).argmin())
        held[rank].append(number)
        load[rank] += area
        free[rank] -= 1
        if small:
            small_free[rank] = False
        else:
            whole[rank] += 1
            complete += bool(whole[rank] == slots)
        for first, last in chunks.intervals[number]:
            sizes[rank, first:last] = 0
        sizes[rank].cumsum(out=missing[rank, 1:])
    return np.sort(np.array(held, np.int64), axis=1)


# ---------------------------------------------------------------------- swaps
class _Assignment:
    """Chunks on ranks, and what the next swap is scored by."""

    def __init__(self, chunks: _Chunks, slots: np.ndarray):
        self.chunks, self.slots = chunks, slots.copy()
        self.load, self.received, self.cost = np.zeros((3, chunks.ranks), np.int64)
        self.has_small = np.zeros(chunks.ranks, bool)
        self.missing, self.once = np.zeros((2, chunks.ranks, len(chunks.cells) + 1), np.int64)
        self.alone = np.zeros(slots.size, np.int64)  # of each chunk: keys that no other chunk of its rank needs
        for first in range(0, chunks.ranks, 8):  # a few at a time: their tables fit the cache
            self._renew(np.arange(first, min(first + 8, chunks.ranks)))

    def _renew(self, ranks):
        """All that is known of these ranks, from the chunks in their slots."""
        chunks = self.chunks
        self.slots[ranks] = held = np.sort(self.slots[ranks], axis=1)
        row, width = np.arange(len(ranks)), self.once.shape[1]
        first, last = (x.take(held, 0) + (row * width)[:, None, None] for x in (chunks.first, chunks.last))
        begin, end = (np.bincount(x.ravel(), minlength=len(ranks) * width) for x in (first, last))
        needed_by = (begin - end).reshape(-1, width).cumsum(1)[:, :-1]
        missing, once = np.zeros((2, len(ranks), width), np.int64)
        np.cumsum(chunks.cells * (needed_by == 0), axis=1, out=missing[:, 1:])
        np.cumsum(chunks.cells * (needed_by == 1), axis=1, out=once[:, 1:])
        self.missing[ranks], self.once[ranks] = missing, once
        self.alone[held] = (once.take(last) - once.take(first)).sum(2)
        self.load[ranks], self.has_small[ranks] = chunks.area.take(held).sum(1), chunks.small.take(held).any(1)
        self.received[ranks] = chunks.need_of_all - missing[:, -1] - chunks.size.take(held).sum(1)
        self.cost[ranks] = chunks.cost(self.load[ranks], self.received[ranks])

    def score(self) -> tuple[int, int]:
        """(largest cost, no less than allowed; largest cost x traffic)."""
        peak = int(self.cost.max())
        return max(peak, self.chunks.allowed), peak * int(self.received.sum())

    def descend(self, most: int) -> int:
        """Swap where two ranks gain, pair after pair, until a whole round brings nothing; the swaps made."""
        ranks, made, settled = self.chunks.ranks, 0, np.zeros((self.chunks.ranks,) * 2, bool)
        while made < most:
            before = made
            for rank in range(ranks):
                after = rank + 1  # the first rank that is still to come
                while made < most:
                    others = after + np.flatnonzero(~settled[rank, after:])
                    if not len(others):
                        break
                    may, added = self._may_gain(rank, others)
                    settled[rank, others[~may]] = True
                    others, added = others[may][:TOGETHER], added[may][:TOGETHER]
                    other = self._swap_with_first_of(rank, others, added) if len(others) else None
                    tried = others if other is None else others[others < other]
                    settled[rank, tried] = True
                    if other is not None:
                        made += 1
                        settled[[rank, other]] = settled[:, [rank, other]] = False
                    elif len(others) < TOGETHER:
                        break
                    after = int(others[-1] if other is None else other) + 1
            if made == before:
                break
        return made

    def _may_gain(self, rank, others):
        """Which share a key with ``rank``, or are over their limit, as it may be; and (others, chunks of ``rank``) the keys
        that a chunk would add to those that they need."""
        chunks, mine, flat = self.chunks, self.slots[rank], self.missing.reshape(-1)
        row = (others * self.missing.shape[1])[:, None, None]
        added = (flat.take(chunks.last[mine] + row) - flat.take(chunks.first[mine] + row)).sum(2)
        over = np.maximum(self.cost[others], self.cost[rank]) > chunks.allowed
        return over | (added < chunks.need[mine]).any(1), added

    def _swap_with_first_of(self, rank, others, to_other):
        """Make the best swap with the first of the ``others`` where one gains; which rank that is, or None."""
        chunks, mine, theirs = self.chunks, self.slots[rank], self.slots[others]
        shared_here, shared_there, to_me = self._shared(rank, mine, others, theirs)
        # Axes from here: others, mine, theirs. What a leaver alone needed goes, unless who comes needs it too.
        here = shared_here + (to_me[:, None] - self.alone[mine][:, None])
        there = shared_there + (to_other[:, :, None] - self.alone[theirs][:, None])
        load, received, cost = (x[others] for x in (self.load, self.received, self.cost))
        area = chunks.area[theirs][:, None] - chunks.area[mine][:, None]
        size = chunks.size[theirs][:, None] - chunks.size[mine][:, None] if chunks.small_ones else 0
        peak = np.maximum(
            chunks.cost(area + self.load[rank], here + (self.received[rank] - size)),
            chunks.cost(load[:, None, None] - area, there + (received[:, None, None] + size)),
        )
        np.maximum(peak, chunks.allowed, out=peak)
        if chunks.small_ones:
            small, their_small = chunks.small[mine][:, None], chunks.small[theirs][:, None]
            there_has_small = self.has_small[others][:, None, None]
            peak[(small & ~their_small & there_has_small) | (~small & their_small & self.has_small[rank])] = FAR
        peak = peak.reshape(len(others), -1)
        lowest = peak.min(1)
        change = np.where(peak == lowest[:, None], (here + there).reshape(peak.shape), FAR)
        peak_now = np.maximum(cost, max(self.cost[rank], chunks.allowed))
        gains = (lowest < peak_now) | ((lowest == peak_now) & (change.min(1) < 0))
        which = int(gains.argmax())
        if not gains[which]:
            return None
        other, (x, y) = int(others[which]), divmod(int(change[which].argmin()), chunks.slots)
        self.slots[rank, x], self.slots[other, y] = self.slots[other, y], self.slots[rank, x]
        self._renew(np.array([rank, other]))
        return other

    def _shared(self, rank, mine, others, theirs):
        """Keys that a chunk of mine and one of theirs both need, and that none else here, or none else there, needs; and
        the keys that theirs would add here."""
        chunks, intervals = self.chunks, self.chunks.first.shape[1]
        my_first, my_last = (x.take(mine, 0).reshape(-1, 1) for x in (chunks.first, chunks.last))
        first, last = (x.take(theirs, 0).reshape(len(others), 1, -1) for x in (chunks.first, chunks.last))
        added = (self.missing[rank].take(last) - self.missing[rank].take(first))[:, 0]
        first, last = np.maximum(first, my_first), np.minimum(last, my_last)
        np.maximum(last, first, out=last)
        here, there = self.once[rank], self.once.reshape(-1)
        offset = (others * self.once.shape[1])[:, None, None]
        shared = here.take(last) - here.take(first), there.take(last + offset) - there.take(first + offset)
        if intervals == 1:
            return *shared, added
        split = (len(others), len(mine), intervals, theirs.shape[1], intervals)
        return *(x.reshape(split).sum((2, 4)) for x in shared), added.reshape(*theirs.shape, intervals).sum(2)
