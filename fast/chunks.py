"""The chunks of a mask over NumPy arrays: areas, and needed keys as intervals of *cells*.

Keys are cut into cells at the ends of all chunks' intervals. So a sum over the keys of a chunk is a
difference of two entries of a prefix sum, for each of its intervals."""

import numpy as np

from canon.fast.needed_keys import areas_and_needs, union_of_intervals

FEW_INTERVALS = 8  # of a chunk: up to so many, two chunks are compared interval by interval
LARGEST_TABLE = 1 << 25  # chunks x cells


class Chunks:
    """The chunks of a mask, or of each of its sequences, filled up with empty ones to a multiple of
    the ranks. Work, cells, needs and moved tokens are times, as in `canon.reference.planner.Aim`.
    """

    def __init__(self, mask, sequences, ranks, chunk, imbalance, cells_per_us, tokens_per_us):
        n = mask.queries // sequences
        self.count = -(-n // chunk)
        self.ranks, self.slots = ranks, -(-self.count // ranks)  # chunks of a rank
        self.cells_per_us = cells_per_us
        total = self.ranks * self.slots
        edges = np.minimum(np.arange(total + 1) * chunk, n)
        self.size = np.diff(edges)
        self.small = self.size < chunk
        self.small_ones = int(self.small.sum())
        self.area = np.zeros(total, np.int64)
        # the chunks of all sequences
        first = (np.arange(sequences)[:, None] * n + edges[: self.count]).ravel()
        own = (
            np.tile(np.arange(self.count), sequences),
            first,
            first + np.tile(self.size[: self.count], sequences),
        )
        area, piece, *keys = areas_and_needs(mask, *own[1:])
        self.area[: self.count] = area.reshape(sequences, -1).sum(0)
        needs = zip((piece % self.count, *keys), own, strict=True)
        self._cut_into_cells(
            *union_of_intervals(*map(np.append, *zip(*needs, strict=True)), mask.keys),
            total,
            own[1:],
        )
        self.bound = max(-(-int(self.area.sum()) // ranks), int(self.area.max(initial=0)))
        self.allowed = int(self.bound * imbalance) * tokens_per_us
        self.work, self.own = self.area * tokens_per_us, self.size * sequences * self.cells_per_us

    def _cut_into_cells(self, owner, first, last, total, own):
        """Store each chunk's intervals of keys as (first, last) cells, with empty ones, and those
        of own tokens.
        """
        edges = np.unique(np.concatenate([first, last, *own]))
        self.own_first, self.own_last = np.zeros((2, total, len(own[0]) // self.count), np.int64)
        for cell, token in zip((self.own_first, self.own_last), own, strict=True):
            cell[: self.count] = np.searchsorted(edges, token).reshape(-1, self.count).T
        order = np.argsort(self.own_first.ravel(), kind="stable")
        held = (self.own_last - self.own_first).ravel()[order]
        self.owner = np.repeat(order // self.own_first.shape[1], held)  # the chunk of each cell
        self.cells = np.diff(edges) * self.cells_per_us
        place = np.arange(len(owner)) - np.searchsorted(owner, owner)
        self.first, self.last = np.zeros((2, total, place.max(initial=0) + 1), np.int64)
        self.first[owner, place], self.last[owner, place] = (
            np.searchsorted(edges, first),
            np.searchsorted(edges, last),
        )
        # without empty ones
        self.intervals: list[list[tuple[int, int]]] = [[] for _ in range(total)]
        ends = (x[owner, place].tolist() for x in (self.first, self.last))
        for number, *interval in zip(owner.tolist(), *ends, strict=True):
            self.intervals[number].append(tuple(interval))
        self.needs = np.zeros((0, 0), bool)  # (chunks, cells), if chunks have many intervals
        if self.first.shape[1] > FEW_INTERVALS and total * len(self.cells) <= LARGEST_TABLE:
            begin, end = np.zeros((2, total, len(edges)), np.int64)
            begin[owner, np.searchsorted(edges, first)] = end[
                owner, np.searchsorted(edges, last)
            ] = 1
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
