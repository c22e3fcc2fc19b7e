"""Chunks on ranks: the score of an assignment, the swaps of two ranks, and the relief of the rank
that moves most.

- Each rank has two prefix sums: over its *missing* cells, which none of its chunks needs, and over
  those that exactly *one* needs. The keys that a chunk would add to a rank, or take away, are
  differences of two entries.
- Swaps of one rank with some others are scored at once. The first with a gain swaps; the others are
  scored again. Without a gain, the next scoring takes twice as many, up to `MOST_TOGETHER`. Lower
  bounds exclude most swaps before keys that two chunks share are counted. Chunks with many
  intervals have prefix sums of their own, over the keys that only they need.
- A relief counts the ranks that need each cell: before, and after each swap that keeps both ranks
  within their limits.
- Two ranks are skipped if unchanged since their last comparison. Two within their limits are also
  skipped, if they share no key or a lower bound of the traffic shows no gain.
"""

import numpy as np

from canon.fast.chunks import Chunks

FAR = np.iinfo(np.int64).max
WEIGHT = 5  # of a received token in the traffic
PARTNERS = 8  # ranks that move least, with which the rank that moves most may swap

LARGEST_BLOCK = 1 << 20  # swaps x cells, or x chunks, that a relief scores at once

# ranks in one scoring; scores behind the first gain are wasted
FEWEST_TOGETHER, MOST_TOGETHER = 32, 256


class Assignment:
    """Chunks on ranks, and the tables that score swaps."""

    def __init__(self, chunks: Chunks, slots: np.ndarray):
        self.chunks, self.slots = chunks, slots.copy()
        self.load, self.received, self.cost = np.zeros((3, chunks.ranks), np.int64)
        self.has_small = np.zeros(chunks.ranks, bool)
        self.settled = np.zeros((chunks.ranks,) * 2, bool)  # pairs unchanged since they had no gain
        self.missing, self.once = np.zeros((2, chunks.ranks, len(chunks.cells) + 1), np.int64)
        # for each chunk: keys that only it needs on its rank
        self.sole_needs = np.zeros(slots.size, np.int64)
        # for each chunk: prefix sums over the keys that only it needs on its rank
        self.sole = np.zeros((len(chunks.needs), chunks.needs.shape[1] + 1), np.int64)
        for first in range(0, chunks.ranks, 8):  # a few at a time: their tables fit into the cache
            self._update(np.arange(first, min(first + 8, chunks.ranks)))

    def _update(self, ranks):
        chunks = self.chunks
        self.slots[ranks] = held = np.sort(self.slots[ranks], axis=1)
        row, width = np.arange(len(ranks)), self.once.shape[1]
        first, last = (
            x.take(held, 0) + (row * width)[:, None, None] for x in (chunks.first, chunks.last)
        )
        begin, end = (np.bincount(x.ravel(), minlength=len(ranks) * width) for x in (first, last))
        needed_by = (begin - end).reshape(-1, width).cumsum(1)[:, :-1]
        missing, once = np.zeros((2, len(ranks), width), np.int64)
        np.cumsum(chunks.cells * (needed_by == 0), axis=1, out=missing[:, 1:])
        np.cumsum(chunks.cells * (needed_by == 1), axis=1, out=once[:, 1:])
        self.missing[ranks], self.once[ranks] = missing, once
        if len(self.sole):
            self.sole[held, 1:] = (
                chunks.needs[held] * (chunks.cells * (needed_by == 1))[:, None]
            ).cumsum(2)
        self.sole_needs[held] = (once.take(last) - once.take(first)).sum(2)
        self.load[ranks], self.has_small[ranks] = (
            chunks.work.take(held).sum(1),
            chunks.small.take(held).any(1),
        )
        self.received[ranks] = chunks.need_of_all - missing[:, -1] - chunks.own.take(held).sum(1)
        self.cost[ranks] = np.maximum(self.load[ranks], self.received[ranks])

    def moved(self) -> np.ndarray:
        """Return for each rank the tokens that it receives or those that it sends, whichever are
        more.
        """
        # for each cell: the ranks that need it; for each chunk: the tokens that its rank sends
        self.demand = (np.diff(self.missing, axis=1) == 0).sum(0)
        self.sends = self.chunks.own_sums(self.chunks.cells * (self.demand - 1))
        self.sent = self.sends[self.slots].sum(1)
        return np.maximum(self.received, self.sent)

    def score(self) -> tuple[int, int]:
        moved, chunks = self.moved(), self.chunks
        peak = int(max(self.load.max(), moved.max()))
        traffic = chunks.ranks * int(moved.max()) + WEIGHT * sum(self.received.tolist())
        return max(peak, chunks.allowed), peak * (traffic // chunks.cells_per_us)

    def relieve(self) -> bool:
        """Make the best swap of the rank that moves most, if it improves the score. Return whether
        one does.
        """
        chunks, moved, best = self.chunks, self.moved(), self.score()
        rank = int(moved.argmax())
        others = np.argsort(np.where(np.arange(chunks.ranks) == rank, FAR, moved), kind="stable")
        others = others[: min(PARTNERS, chunks.ranks - 1)]
        mine, theirs = self.slots[rank], self.slots[others]
        # Axes: others, mine, theirs. A swap that overloads one of the ranks cannot improve the
        # score.
        work = chunks.work[theirs][:, None] - chunks.work[mine][:, None]
        load = np.maximum(self.load[rank] + work, self.load[others][:, None, None] - work)
        pairs = np.stack(np.nonzero((load <= best[0]) & self._keeps_one_small(rank, others)))
        if not pairs.size:
            return False
        needs = chunks.rows(mine), chunks.rows(theirs)
        holder = np.empty(self.slots.size, np.int64)  # of each chunk
        holder[self.slots] = np.arange(chunks.ranks)[:, None]
        # only the demand for these cells may change, here in the order of their holders
        cells = np.flatnonzero(needs[0].any(0) | needs[1].any((0, 1)))
        cells = cells[np.argsort(holder[chunks.owner[cells]], kind="stable")]
        rows = cells, holder[chunks.owner[cells]], needs[0][:, cells], needs[1][..., cells]
        block = max(1, LARGEST_BLOCK // (len(cells) + chunks.ranks))
        parts = np.split(pairs, range(block, pairs.shape[1], block), axis=1)
        moved, traffic = np.concatenate(
            [self._relieved(rank, others, part, rows) for part in parts], axis=1
        )
        rest = np.array(
            [np.delete(self.load, [rank, other]).max(initial=0) for other in others.tolist()]
        )[pairs[0]]
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
        cells, holders, mine, theirs = rows
        sizes = chunks.cells[cells]
        gone, come = mine[x].astype(np.int64), theirs[which, y].astype(np.int64)
        here, there = mine.sum(0), theirs.sum(1)[which]  # chunks of the rank that need a cell
        here_then, there_then = here - gone + come > 0, there - come + gone > 0
        demand = here_then.astype(np.int64) - (here > 0) + there_then - (there > 0)  # its change
        holding, first = np.unique(holders, return_index=True)
        sent, each = np.tile(self.sent, (len(x), 1)), np.arange(len(x))
        sent[:, holding] += np.add.reduceat(sizes * demand, first, axis=1)
        of_take, of_give = (
            self.sends[some]
            + np.where(chunks.owner[cells] == some[:, None], sizes * demand, 0).sum(1)
            for some in (take, give)
        )
        change = of_take - of_give
        sent[:, rank] += change
        sent[each, others[which]] -= change
        received, own = np.tile(self.received, (len(x), 1)), chunks.own[take] - chunks.own[give]
        received[:, rank] = here_then @ sizes - chunks.own[self.slots[rank]].sum() - own
        received[each, others[which]] = (
            there_then @ sizes - chunks.own[self.slots[others]].sum(1)[which] + own
        )
        moved = np.maximum(received, sent).max(1)
        return np.stack([moved, chunks.ranks * moved + WEIGHT * received.sum(1)])

    def swap(self, most: int) -> int:
        """Swap chunks of two ranks that gain, until a round has no gain, up to ``most`` times.
        Return the number of swaps.
        """
        ranks, swaps, settled, together = self.chunks.ranks, 0, self.settled, FEWEST_TOGETHER
        while swaps < most:
            before = swaps
            for rank in range(ranks):
                after = rank + 1  # the first rank to compare with
                while swaps < most and len(
                    others := after + np.flatnonzero(~settled[rank, after:])[: 4 * together]
                ):
                    may, *added = self._may_gain(rank, others)
                    settled[rank, others[~may]] = True
                    some = np.flatnonzero(may)[:together]
                    other = (
                        self._swap_with_first_of(rank, *(x[some] for x in (others, *added)))
                        if len(some)
                        else None
                    )
                    tried = (
                        others[some] if other is None else others[: np.searchsorted(others, other)]
                    )
                    settled[rank, tried] = True
                    together = (
                        min(2 * together, MOST_TOGETHER) if other is None else FEWEST_TOGETHER
                    )
                    if other is not None:
                        swaps, after = swaps + 1, other + 1
                        settled[[rank, other]] = settled[:, [rank, other]] = False
            if swaps == before:
                break
        return swaps

    def _may_gain(self, rank, others):
        """Return which of ``others`` may gain, and the keys that its chunks and theirs add there
        and here (others, chunks).
        """
        chunks = self.chunks
        mine = self.slots[rank]
        theirs = self.slots[others]
        flat = self.missing.reshape(-1)
        row = (others * self.missing.shape[1])[:, None, None]
        to_other = (flat.take(chunks.last[mine] + row) - flat.take(chunks.first[mine] + row)).sum(2)
        to_me = chunks.between(self.missing[rank], theirs)
        # The traffic of a swap changes by at least this sum: it does not count keys that the two
        # chunks share.
        least = (to_other - self.sole_needs[mine]).min(1) + (to_me - self.sole_needs[theirs]).min(1)
        over = np.maximum(self.cost[others], self.cost[rank]) > chunks.allowed
        return over | ((to_other < chunks.need[mine]).any(1) & (least < 0)), to_other, to_me

    def _swap_with_first_of(self, rank, others, to_other, to_me):
        """Make the best swap with the first of ``others`` that gains. Return that rank, or None."""
        chunks, mine, theirs = self.chunks, self.slots[rank], self.slots[others]
        # Axes: others, mine, theirs. Keys that only the leaving chunk needed leave, unless the
        # arriving one needs them.
        here = to_me[:, None] - self.sole_needs[mine][:, None]
        there = to_other[:, :, None] - self.sole_needs[theirs][:, None]
        work = chunks.work[theirs][:, None] - chunks.work[mine][:, None]
        own = chunks.own[theirs][:, None] - chunks.own[mine][:, None] if chunks.small_ones else 0
        received = (
            here + (self.received[rank] - own),
            there + (self.received[others][:, None, None] + own),
        )
        load = np.maximum(work + self.load[rank], self.load[others][:, None, None] - work)
        peak_now = np.maximum(self.cost[others], max(self.cost[rank], chunks.allowed))
        # Shared keys only add to a peak and to a change, so they are needed only where these bounds
        # gain.
        peak = np.maximum(np.maximum(load, chunks.allowed), np.maximum(*received))
        change = here + there
        gains = _gains(peak, change, peak_now[:, None, None])
        gains &= self._keeps_one_small(rank, others)
        pairs = np.nonzero(gains)
        which, x, y = pairs
        shared = self._shared(rank, others[which], mine[x], theirs[which, y])
        peak = np.maximum(
            peak[pairs],
            np.maximum(*(keys[pairs] + more for keys, more in zip(received, shared, strict=True))),
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
        small = self.chunks.small[self.slots[rank]][:, None]
        theirs = self.chunks.small[self.slots[others]][:, None]
        too_many = small & ~theirs & self.has_small[others][:, None, None]
        return ~too_many & (small | ~theirs | ~self.has_small[rank])

    def _shared(self, rank, others, mine, theirs):
        """Return the keys shared by the chunks of each pair, here and there, where no other chunk
        needs them.
        """
        first, last = self.chunks.first, self.chunks.last
        if len(self.sole):
            return self._sole_and_needed(mine, theirs), self._sole_and_needed(theirs, mine)
        first = np.maximum(first[mine][:, :, None], first[theirs][:, None])
        last = np.maximum(np.minimum(last[mine][:, :, None], last[theirs][:, None]), first)
        here, there = self.once[rank], self.once.reshape(-1)
        offset = (others * self.once.shape[1])[:, None, None]
        shared = (
            here.take(last) - here.take(first),
            there.take(last + offset) - there.take(first + offset),
        )
        return tuple(keys.sum((1, 2)) for keys in shared)

    def _sole_and_needed(self, chunks, others):
        """Return the keys that only a chunk needs on its rank, and that the other chunk of the pair
        needs, too.
        """
        sole, offset = self.sole.reshape(-1), (chunks * self.sole.shape[1])[:, None]
        return (
            sole.take(self.chunks.last[others] + offset)
            - sole.take(self.chunks.first[others] + offset)
        ).sum(1)


def _gains(peak, change, peak_now):
    """Return where a swap lowers the peak, or keeps it and receives fewer keys."""
    return (peak < peak_now) | ((peak == peak_now) & (change < 0))
