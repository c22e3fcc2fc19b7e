"""Assign chunks to ranks by the algorithm of `canon.reference.planner`, over NumPy arrays: all plans are equal.

- Keys are cut into *cells* at the ends of all chunks' intervals. Each rank has two prefix sums: over its *missing* cells,
  which none of its chunks needs, and over those that exactly *one* needs. The keys that a chunk would add to a rank, or take
  away, are differences of two entries.
- Swaps of one rank with some others are scored at once. The first with a gain swaps; the others are scored again. Without a
  gain, the next scoring takes twice as many, up to `MOST_TOGETHER`. Lower bounds exclude most swaps before keys that two
  chunks share are counted. Chunks with many intervals have prefix sums of their own, over the keys that only they need.
- A relief counts the ranks that need each cell: before, and after each swap that keeps both ranks within their limits.
- Two ranks are skipped if unchanged since their last comparison. Two within their limits are also skipped, if they share no
  key or a lower bound of the traffic shows no gain.

Cost: O(chunks x ranks + chunks x cells) for a start; O(ranks x c^2 + cells) for a swap with c chunks a rank. Source: as
`canon.reference.planner`.
"""

from fractions import Fraction

import numpy as np

from canon.faces import public_plans
from canon.fast.needed_keys import areas_and_needs, union_of_intervals
from canon.masks.layout import Layout
from canon.masks.plan_cache import cached_plan

__all__ = ["dispatch"]

FAR = np.iinfo(np.int64).max
# Area of a free slot: s + (m - s) / RESERVE, with s the smallest area and m the mean to come.
RESERVE = 8
BATCH = 2  # swaps of a batch, for each rank
WEIGHT = 5  # of a received token in the traffic
PARTNERS = 8  # ranks that move least, with which the rank that moves most may swap

FEW_INTERVALS = 8  # of a chunk: up to so many, two chunks are compared interval by interval
LARGEST_TABLE = 1 << 25  # chunks x cells

LARGEST_BLOCK = 1 << 20  # swaps x cells, or x chunks, that a relief scores at once

FEWEST_TOGETHER, MOST_TOGETHER = 32, 256  # ranks in one scoring; scores behind the first gain are wasted


@cached_plan
def _dispatch(mask, sequences, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk) -> Layout:
    if not mask.queries:
        return Layout([[]] * ranks, 0)
    chunks = _Chunks(mask, sequences, ranks, chunk, imbalance, cells_per_us, tokens_per_us)
    slacks = (Fraction(1), (1 + imbalance) / 2, imbalance)
    starts = [_greedy(chunks, slack) for slack in slacks] + [_zigzag(chunks), _contiguous(chunks)]
    assignment = min((_Assignment(chunks, slots) for slots in starts), key=_Assignment.score)
    best, slots, swaps = assignment.score(), assignment.slots.copy(), swaps_per_chunk * chunks.count
    while swaps > 0:
        swaps -= assignment.swap(min(swaps, BATCH * ranks))
        if assignment.score() >= best:
            break
        best, slots = assignment.score(), assignment.slots.copy()
    assignment = _Assignment(chunks, slots)
    for _ in range(swaps_per_chunk * ranks):
        if not assignment.relieve():
            break
    return Layout([chunks.tokens(numbers) for numbers in assignment.slots], mask.queries // sequences)


class _Chunks:
    """The chunks of a mask, or of each of its sequences, filled up with empty ones to a multiple of the ranks.

    Work, cells, needs and moved tokens are times in 1 / (cells_per_us * tokens_per_us) microseconds.
    """

    def __init__(self, mask, sequences, ranks, chunk, imbalance, cells_per_us, tokens_per_us):
        n = mask.queries // sequences
        self.count = -(-n // chunk)
        self.ranks, self.slots = ranks, -(-self.count // ranks)  # chunks of a rank
        self.cells_per_us = cells_per_us
        total = self.ranks * self.slots
        edges = np.minimum(np.arange(total + 1) * chunk, n)
        self.start, self.size = edges[:-1], np.diff(edges)
        self.small = self.size < chunk
        self.small_ones = int(self.small.sum())
        self.area = np.zeros(total, np.int64)
        first = (np.arange(sequences)[:, None] * n + self.start[: self.count]).ravel()  # the chunks of all sequences
        own = np.tile(np.arange(self.count), sequences), first, first + np.tile(self.size[: self.count], sequences)
        area, piece, *keys = areas_and_needs(mask, *own[1:])
        self.area[: self.count] = area.reshape(sequences, -1).sum(0)
        needs = zip((piece % self.count, *keys), own, strict=True)
        self._cut_into_cells(*union_of_intervals(*map(np.append, *zip(*needs, strict=True)), mask.keys), total, own[1:])
        self.bound = max(-(-int(self.area.sum()) // ranks), int(self.area.max(initial=0)))
        self.allowed = int(self.bound * imbalance) * tokens_per_us
        self.work, self.own = self.area * tokens_per_us, self.size * sequences * self.cells_per_us

    def _cut_into_cells(self, owner, first, last, total, own):
        """Store each chunk's intervals of keys as (first, last) cells, filled up with empty ones, and those of own tokens."""
        edges = np.unique(np.concatenate([first, last, *own]))
        self.own_first, self.own_last = np.zeros((2, total, len(own[0]) // self.count), np.int64)
        for cell, token in zip((self.own_first, self.own_last), own, strict=True):
            cell[: self.count] = np.searchsorted(edges, token).reshape(-1, self.count).T
        self.cells = np.diff(edges) * self.cells_per_us
        place = np.arange(len(owner)) - np.searchsorted(owner, owner)
        self.first, self.last = np.zeros((2, total, place.max(initial=0) + 1), np.int64)
        self.first[owner, place], self.last[owner, place] = np.searchsorted(edges, first), np.searchsorted(edges, last)
        self.intervals: list[list[tuple[int, int]]] = [[] for _ in range(total)]  # without empty ones
        ends = (x[owner, place].tolist() for x in (self.first, self.last))
        for number, *interval in zip(owner.tolist(), *ends, strict=True):
            self.intervals[number].append(tuple(interval))
        self.needs = np.zeros((0, 0), bool)  # (chunks, cells), if chunks have many intervals
        if self.first.shape[1] > FEW_INTERVALS and total * len(self.cells) <= LARGEST_TABLE:
            begin, end = np.zeros((2, total, len(edges)), np.int64)
            begin[owner, np.searchsorted(edges, first)] = end[owner, np.searchsorted(edges, last)] = 1
            self.needs = (begin - end).cumsum(1)[:, :-1] > 0
        self.need_of_all = int(self.cells.sum())
        self.need = self.between(np.append(0, np.cumsum(self.cells)), np.arange(total))

    def between(self, prefix, numbers):
        """Return each chunk's sum over its intervals, from prefix sums (..., cells + 1)."""
        return (prefix[..., self.last[numbers]] - prefix[..., self.first[numbers]]).sum(-1)

    def own_sums(self, values):
        """Return the sums of ``values`` (..., cells) over the own tokens of each chunk."""
        prefix = np.zeros((*values.shape[:-1], values.shape[-1] + 1), np.int64)
        np.cumsum(values, axis=-1, out=prefix[..., 1:])
        return (prefix[..., self.own_last] - prefix[..., self.own_first]).sum(-1)

    def rows(self, numbers):
        """Return which cells each of these chunks needs: bool (..., cells)."""
        if len(self.needs):
            return self.needs[numbers]
        found = np.zeros((*numbers.shape, len(self.cells)), bool)
        for place in np.ndindex(numbers.shape):
            for first, last in self.intervals[numbers[place]]:
                found[place][first:last] = True
        return found

    def tokens(self, numbers):
        ranges: list[range] = []
        for start, size in zip(self.start[numbers].tolist(), self.size[numbers].tolist(), strict=True):
            if ranges and ranges[-1].stop == start:
                ranges[-1] = range(ranges[-1].start, start + size)
            else:
                ranges.append(range(start, start + size))
        return ranges


# ---------------------------------------------------------------------- starts: (ranks, slots) indices of chunks
def _contiguous(chunks: _Chunks) -> np.ndarray:
    """Deal neighbouring chunks to each rank, and an empty one to each of the first ranks."""
    return _filled(chunks, _counts(chunks, empty_first=True), lambda counts: [counts])


def _zigzag(chunks: _Chunks) -> np.ndarray:
    """Deal early and late halves. The last ranks get the empty chunks, as the first gets the short one."""
    counts = _counts(chunks, empty_first=chunks.slots == 1)
    return _filled(chunks, counts, lambda counts: [(counts + 1) // 2, counts // 2])


def _counts(chunks, empty_first):
    empty = chunks.ranks * chunks.slots - chunks.count
    rank = np.arange(chunks.ranks)
    return chunks.slots - (rank < empty if empty_first else rank >= chunks.ranks - empty)


def _filled(chunks, counts, halves):
    """Deal chunks in order to ranks 0, 1, ... for the first half, then to ..., 1, 0; empty ones last."""
    held: list[list[int]] = [[] for _ in counts]
    numbers = iter(range(chunks.ranks * chunks.slots))
    for second, half in enumerate(halves(counts)):
        for rank in range(chunks.ranks)[:: -1 if second else 1]:
            held[rank] += [next(numbers) for _ in range(half[rank])]
    for mine in held:
        mine += [next(numbers) for _ in range(chunks.slots - len(mine))]
    return np.array(held, np.int64)


def _greedy(chunks: _Chunks, slack: Fraction) -> np.ndarray:
    """Assign the largest chunk first, to the rank that it adds the fewest keys to, below slack times the lower bound."""
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
        if len(chunks.needs):
            added = chunks.between(missing, number)
        else:
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
    """Chunks on ranks, and the tables that score swaps."""

    def __init__(self, chunks: _Chunks, slots: np.ndarray):
        self.chunks, self.slots = chunks, slots.copy()
        self.load, self.received, self.cost = np.zeros((3, chunks.ranks), np.int64)
        self.has_small = np.zeros(chunks.ranks, bool)
        self.settled = np.zeros((chunks.ranks,) * 2, bool)  # pairs unchanged since they had no gain
        self.missing, self.once = np.zeros((2, chunks.ranks, len(chunks.cells) + 1), np.int64)
        self.sole_needs = np.zeros(slots.size, np.int64)  # for each chunk: keys that only it needs on its rank
        # for each chunk: prefix sums over the keys that only it needs on its rank
        self.sole = np.zeros((len(chunks.needs), chunks.needs.shape[1] + 1), np.int64)
        for first in range(0, chunks.ranks, 8):  # a few at a time: their tables fit into the cache
            self._update(np.arange(first, min(first + 8, chunks.ranks)))

    def _update(self, ranks):
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
        if len(self.sole):
            self.sole[held, 1:] = (chunks.needs[held] * (chunks.cells * (needed_by == 1))[:, None]).cumsum(2)
        self.sole_needs[held] = (once.take(last) - once.take(first)).sum(2)
        self.load[ranks], self.has_small[ranks] = chunks.work.take(held).sum(1), chunks.small.take(held).any(1)
        self.received[ranks] = chunks.need_of_all - missing[:, -1] - chunks.own.take(held).sum(1)
        self.cost[ranks] = np.maximum(self.load[ranks], self.received[ranks])

    def moved(self) -> np.ndarray:
        """Return for each rank the tokens that it receives or those that it sends, whichever are more."""
        self.demand = (np.diff(self.missing, axis=1) == 0).sum(0)  # for each cell: the ranks that need it
        sent = self.chunks.own_sums(self.chunks.cells * (self.demand - 1))[self.slots].sum(1)
        return np.maximum(self.received, sent)

    def score(self) -> tuple[int, int]:
        moved, chunks = self.moved(), self.chunks
        peak = int(max(self.load.max(), moved.max()))
        traffic = chunks.ranks * int(moved.max()) + WEIGHT * sum(self.received.tolist())
        return max(peak, chunks.allowed), peak * (traffic // chunks.cells_per_us)

    def relieve(self) -> bool:
        """Make the best swap of the rank that moves most, if it improves the score. Return whether one does."""
        chunks, moved, best = self.chunks, self.moved(), self.score()
        rank = int(moved.argmax())
        others = np.argsort(np.where(np.arange(chunks.ranks) == rank, FAR, moved), kind="stable")
        others = others[: min(PARTNERS, chunks.ranks - 1)]
        mine, theirs = self.slots[rank], self.slots[others]
        # Axes: others, mine, theirs. A swap that overloads one of the ranks cannot improve the score.
        work = chunks.work[theirs][:, None] - chunks.work[mine][:, None]
        load = np.maximum(self.load[rank] + work, self.load[others][:, None, None] - work)
        pairs = np.stack(np.nonzero((load <= best[0]) & self._keeps_one_small(rank, others)))
        if not pairs.size:
            return False
        rows, block = (chunks.rows(mine), chunks.rows(theirs)), max(1, LARGEST_BLOCK // self.once.shape[1])
        parts = np.split(pairs, range(block, pairs.shape[1], block), axis=1)
        moved, traffic = np.concatenate([self._relieved(rank, others, part, rows) for part in parts], axis=1)
        rest = np.array([np.delete(self.load, [rank, other]).max(initial=0) for other in others.tolist()])[pairs[0]]
        peak = np.maximum(np.maximum(load[tuple(pairs)], rest), moved)
        counted = np.maximum(peak, chunks.allowed)
        scores = [
            (int(counted[i]), int(peak[i]) * int(traffic[i] // chunks.cells_per_us), i)
            for i in np.flatnonzero(counted == counted.min()).tolist()
        ]
        least = min(scores)
        if least[:2] >= best:
            return False
        which, x, y = pairs[:, least[2]]
        other = int(others[which])
        self.slots[rank, x], self.slots[other, y] = self.slots[other, y], self.slots[rank, x]
        self._update(np.array([rank, other]))
        return True

    def _relieved(self, rank, others, pairs, rows):
        """Return after each swap the tokens that the busiest rank moves, and the traffic."""
        chunks, (which, x, y) = self.chunks, pairs
        give, take = self.slots[rank, x], self.slots[others[which], y]
        mine, theirs = rows
        gone, come = mine[x].astype(np.int64), theirs[which, y].astype(np.int64)
        here, there = mine.sum(0), theirs.sum(1)[which]  # chunks of the rank that need a cell
        here_then, there_then = here - gone + come > 0, there - come + gone > 0
        demand = self.demand + here_then - (here > 0) + there_then - (there > 0)
        of_chunks = chunks.own_sums(chunks.cells * (demand - 1))
        sent, each = of_chunks[:, self.slots].sum(2), np.arange(len(x))
        change = of_chunks[each, take] - of_chunks[each, give]
        sent[:, rank] += change
        sent[each, others[which]] -= change
        received, own = np.tile(self.received, (len(x), 1)), chunks.own[take] - chunks.own[give]
        received[:, rank] = here_then @ chunks.cells - chunks.own[self.slots[rank]].sum() - own
        received[each, others[which]] = there_then @ chunks.cells - chunks.own[self.slots[others]].sum(1)[which] + own
        moved = np.maximum(received, sent).max(1)
        return np.stack([moved, chunks.ranks * moved + WEIGHT * received.sum(1)])

    def swap(self, most: int) -> int:
        """Swap chunks of two ranks that gain, until a round has no gain, up to ``most`` times. Return the number of swaps."""
        ranks, swaps, settled, together = self.chunks.ranks, 0, self.settled, FEWEST_TOGETHER
        while swaps < most:
            before = swaps
            for rank in range(ranks):
                after = rank + 1  # the first rank to compare with
                while swaps < most and len(others := after + np.flatnonzero(~settled[rank, after:])[: 4 * together]):
                    may, *added = self._may_gain(rank, others)
                    settled[rank, others[~may]] = True
                    some = np.flatnonzero(may)[:together]
                    other = self._swap_with_first_of(rank, *(x[some] for x in (others, *added))) if len(some) else None
                    tried = others[some] if other is None else others[: np.searchsorted(others, other)]
                    settled[rank, tried] = True
                    together = min(2 * together, MOST_TOGETHER) if other is None else FEWEST_TOGETHER
                    if other is not None:
                        swaps, after = swaps + 1, other + 1
                        settled[[rank, other]] = settled[:, [rank, other]] = False
            if swaps == before:
                break
        return swaps

    def _may_gain(self, rank, others):
        """Return which of ``others`` may gain, and the keys that its chunks and theirs add there and here (others, chunks)."""
        chunks, mine, theirs, flat = self.chunks, self.slots[rank], self.slots[others], self.missing.reshape(-1)
        row = (others * self.missing.shape[1])[:, None, None]
        to_other = (flat.take(chunks.last[mine] + row) - flat.take(chunks.first[mine] + row)).sum(2)
        to_me = chunks.between(self.missing[rank], theirs)
        # The traffic of a swap changes by at least this sum: it does not count keys that the two chunks share.
        least = (to_other - self.sole_needs[mine]).min(1) + (to_me - self.sole_needs[theirs]).min(1)
        over = np.maximum(self.cost[others], self.cost[rank]) > chunks.allowed
        return over | ((to_other < chunks.need[mine]).any(1) & (least < 0)), to_other, to_me

    def _swap_with_first_of(self, rank, others, to_other, to_me):
        """Make the best swap with the first of ``others`` that gains. Return that rank, or None."""
        chunks, mine, theirs = self.chunks, self.slots[rank], self.slots[others]
        # Axes: others, mine, theirs. Keys that only the leaving chunk needed leave, unless the arriving one needs them.
        here = to_me[:, None] - self.sole_needs[mine][:, None]
        there = to_other[:, :, None] - self.sole_needs[theirs][:, None]
        work = chunks.work[theirs][:, None] - chunks.work[mine][:, None]
        own = chunks.own[theirs][:, None] - chunks.own[mine][:, None] if chunks.small_ones else 0
        received = here + (self.received[rank] - own), there + (self.received[others][:, None, None] + own)
        load = np.maximum(work + self.load[rank], self.load[others][:, None, None] - work)
        peak_now = np.maximum(self.cost[others], max(self.cost[rank], chunks.allowed))
        # Shared keys only add to a peak and to a change, so they are needed only where these bounds gain.
        peak, change = np.maximum(np.maximum(load, chunks.allowed), np.maximum(*received)), here + there
        gains = _gains(peak, change, peak_now[:, None, None])
        gains &= self._keeps_one_small(rank, others)
        pairs = np.nonzero(gains)
        which, x, y = pairs
        shared = self._shared(rank, others[which], mine[x], theirs[which, y])
        peak = np.maximum(
            peak[pairs], np.maximum(*(keys[pairs] + more for keys, more in zip(received, shared, strict=True)))
        )
        change = change[pairs] + sum(shared)
        gains = _gains(peak, change, peak_now[which])
        if not gains.any():
            return None
        first = which[gains.argmax()]
        best = np.lexsort((change, peak, which != first))[0]
        other, x, y = int(others[first]), x[best], y[best]
        self.slots[rank, x], self.slots[other, y] = self.slots[other, y], self.slots[rank, x]
        self._update(np.array([rank, other]))
        return other

    def _keeps_one_small(self, rank, others):
        """Return which swaps leave at most one small chunk on both ranks."""
        if not self.chunks.small_ones:
            return True
        small, theirs = self.chunks.small[self.slots[rank]][:, None], self.chunks.small[self.slots[others]][:, None]
        too_many = small & ~theirs & self.has_small[others][:, None, None]
        return ~too_many & (small | ~theirs | ~self.has_small[rank])

    def _shared(self, rank, others, mine, theirs):
        """Return the keys shared by the chunks of each pair, here and there, where no other chunk needs them."""
        first, last = self.chunks.first, self.chunks.last
        if len(self.sole):
            return self._sole_and_needed(mine, theirs), self._sole_and_needed(theirs, mine)
        first = np.maximum(first[mine][:, :, None], first[theirs][:, None])
        last = np.maximum(np.minimum(last[mine][:, :, None], last[theirs][:, None]), first)
        here, there = self.once[rank], self.once.reshape(-1)
        offset = (others * self.once.shape[1])[:, None, None]
        shared = here.take(last) - here.take(first), there.take(last + offset) - there.take(first + offset)
        return tuple(keys.sum((1, 2)) for keys in shared)

    def _sole_and_needed(self, chunks, others):
        """Return the keys that only a chunk needs on its rank, and that the other chunk of the pair needs, too."""
        sole, offset = self.sole.reshape(-1), (chunks * self.sole.shape[1])[:, None]
        return (sole.take(self.chunks.last[others] + offset) - sole.take(self.chunks.first[others] + offset)).sum(1)


def _gains(peak, change, peak_now):
    """Return where a swap lowers the peak, or keeps it and receives fewer keys."""
    return (peak < peak_now) | ((peak == peak_now) & (change < 0))


dispatch = public_plans.dispatch(_dispatch)
