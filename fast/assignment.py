"""Chunks on ranks: the score of an assignment, the swaps of two ranks, and the relief of the rank
that moves most.

- Each rank has two prefix sums: over its *missing* cells, which none of its chunks needs, and over
  those that exactly *one* needs. The keys that a chunk would add to a rank, or take away, are
  differences of two entries.
- Swaps of one rank with some others are scored at once. The first with a gain swaps, the others are
  scored again. Without a gain, the next scoring takes twice as many, up to `MOST_TOGETHER`.
- A relief counts the ranks that need each cell: before, and after each swap that keeps both ranks
  within their limits.
- Two ranks are skipped if unchanged since their last comparison, or if a lower bound shows no gain.
"""

import numpy as np

from canon.fast.chunks import Chunks

FAR = np.iinfo(np.int64).max
WEIGHT = 5  # of a received token in the traffic
PARTNERS = 8  # ranks that move least, with which the rank that moves most may swap
LARGEST_BLOCK = 1 << 20  # swaps x ranks that a relief scores at once, or one partner

# ranks in one scoring; scores behind the first gain are wasted
FEWEST_TOGETHER, MOST_TOGETHER = 32, 256


class Assignment:
    """Chunks on ranks, and the tables that score swaps."""

    def __init__(self, chunks: Chunks, slots: np.ndarray):
        self.chunks, self.slots = chunks, slots.copy()
        self.load, self.received, self.cost = np.zeros((3, chunks.ranks), np.int64)
        self.has_small = np.zeros(chunks.ranks, bool)
        self.settled = np.zeros((chunks.ranks,) * 2, bool)  # pairs without a gain
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
        """Return for each rank max(tokens received, tokens sent)."""
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
        """Make the best swap of the rank that moves most, and return True, if it improves the
        score.
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
        pairs = np.nonzero((load <= best[0]) & self._keeps_one_small(rank, others))
        if not len(pairs[0]):
            return False
        step = max(1, LARGEST_BLOCK // (mine.size**2 * chunks.ranks))
        parts = [others[start : start + step] for start in range(0, len(others), step)]
        scored = zip(*(self._relieved(rank, some) for some in parts), strict=True)
        moved, traffic = (np.concatenate(x)[pairs] for x in scored)
        rest = np.array(
            [np.delete(self.load, [rank, other]).max(initial=0) for other in others.tolist()]
        )[pairs[0]]
        peak = np.maximum(np.maximum(load[pairs], rest), moved)
        counted = np.maximum(peak, chunks.allowed)
        scores = [
            (int(counted[i]), int(peak[i]) * int(traffic[i] // chunks.cells_per_us), i)
            for i in np.flatnonzero(counted == counted.min()).tolist()
        ]
        least = min(scores)
        if least[:2] >= best:
            return False
        which, x, y = (place[least[2]] for place in pairs)
        other = int(others[which])
        self.slots[rank, x], self.slots[other, y] = self.slots[other, y], self.slots[rank, x]
        self._update(np.array([rank, other]))
        return True

    def _relieved(self, rank, others):
        """Return the tokens that the busiest rank moves, and the traffic, after each swap. Axes:
        others, mine, theirs.
        """
        chunks, mine, theirs = self.chunks, self.slots[rank], self.slots[others]
        needs = chunks.rows(mine)[None], chunks.rows(theirs)
        holders, sizes, give, take, of_mine, of_theirs = self._held_cells(mine, theirs, needs)
        here, there = (x.sum(2, keepdims=True) for x in (give, take))
        stay, others_stay = (here > give).astype(sizes.dtype), (there > take).astype(sizes.dtype)
        wanted = (here > 0) + (there > 0).astype(sizes.dtype)  # by the two ranks, now

        # by holder: what the rank, and the other one, need then
        here_then = (sizes * stay).sum(3)[..., None] + _products(sizes * (1 - stay), take)
        there_then = (sizes * others_stay).sum(3)[..., None, :]
        there_then = there_then + _products(give, sizes * (1 - others_stay))
        demand = here_then + there_then - (sizes * wanted).sum(3)[..., None]
        of_give = (of_mine * (stay + give - wanted)).sum(3)[..., None]
        of_give = of_give + _products(of_mine * (1 - stay), take)
        of_give += _products(of_mine * (1 - give), others_stay)
        of_take = (of_theirs * (take + others_stay - wanted)).sum(3)[..., None, :]
        of_take = of_take + _products(stay, of_theirs * (1 - take))
        of_take += _products(give, of_theirs * (1 - others_stay))

        whole = lambda x: x.sum(0).astype(np.int64)
        sent, received = (np.tile(x, (*here_then.shape[1:], 1)) for x in (self.sent, self.received))
        sent[..., holders] += np.moveaxis(demand, 0, 3).astype(np.int64)
        change = self.sends[theirs][:, None] - self.sends[mine][:, None] + whole(of_take - of_give)
        each, own = np.arange(len(others)), chunks.own[theirs][:, None] - chunks.own[mine][:, None]
        sent[..., rank] += change
        sent[each, :, :, others] -= change
        received[..., rank] = whole(here_then) - chunks.own[mine].sum() - own
        there = whole(there_then) - chunks.own[theirs].sum(1)[:, None, None]
        received[each, :, :, others] = there + own
        moved = np.maximum(received, sent).max(3)
        return moved, chunks.ranks * moved + WEIGHT * received.sum(3)

    def _held_cells(self, mine, theirs, needs):
        """Return the ranks that hold cells which the chunks need, and the sizes of these cells,
        filled up with 0; also which chunks need them, and the sizes of own ones. Axes: holders,
        others, chunks, cells.
        """
        chunks = self.chunks
        holder = np.empty(self.slots.size, np.int64)
        holder[self.slots] = np.arange(chunks.ranks)[:, None]
        # only the demand for these cells may change
        cells = np.flatnonzero(needs[0].any((0, 1)) | needs[1].any((0, 1)))
        of = holder[chunks.owner[cells]]
        cells, of = (x[np.argsort(of, kind="stable")] for x in (cells, of))
        holders, row, number = np.unique(of, return_inverse=True, return_counts=True)
        place = np.arange(len(cells)) - np.repeat(np.cumsum(number) - number, number)
        # products of floats are faster, and exact below 2^53
        is_exact = 8 * chunks.ranks * chunks.need_of_all < 1 << 53
        dtype = np.float64 if is_exact else np.int64

        def held(values):
            made = np.zeros((len(holders), *values.shape[:-1], number.max()), dtype)
            made[row, ..., place] = np.moveaxis(values, -1, 0)
            return made

        sizes, owner = chunks.cells[cells], chunks.owner[cells]
        owned = (sizes * (owner == x[..., None]) for x in (mine[None], theirs))
        return holders, *map(held, (sizes[None, None], *(x[..., cells] for x in needs), *owned))

    def swap(self, most: int) -> int:
        """Swap chunks of two ranks that gain, until a round has no gain, up to ``most`` times.
        Return the number of swaps.
        """
        ranks, swaps, settled, together = self.chunks.ranks, 0, self.settled, FEWEST_TOGETHER
        while swaps < most:
            before = swaps
            for rank in range(ranks):
                after = rank + 1
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
        """Return which of ``others`` may gain, and the keys that its chunks add there, and theirs
        here (others, chunks).
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
        if not self.chunks.small_ones:
            return True
        small = self.chunks.small[self.slots[rank]][:, None]
        theirs = self.chunks.small[self.slots[others]][:, None]
        too_many = small & ~theirs & self.has_small[others][:, None, None]
        return ~too_many & (small | ~theirs | ~self.has_small[rank])

    def _shared(self, rank, others, mine, theirs):
        """Return the keys shared by each pair of chunks, here and there, and needed by no other
        chunk.
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
        """Return the keys that only a chunk needs on its rank, and that the other of the pair
        needs, too.
        """
        sole, offset = self.sole.reshape(-1), (chunks * self.sole.shape[1])[:, None]
        return (
            sole.take(self.chunks.last[others] + offset)
            - sole.take(self.chunks.first[others] + offset)
        ).sum(1)


def _products(a, b):
    return a @ b.swapaxes(-1, -2)


def _gains(peak, change, peak_now):
    return (peak < peak_now) | ((peak == peak_now) & (change < 0))
