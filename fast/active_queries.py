"""Active queries: the queries of a step that see at least one of its keys. Only these are computed.

The step of the own keys computes all queries, because it initialises the results. In packed
documents, few queries see another rank's keys, and they lie scattered over the shard. One range of
active queries is a view; several are gathered into copies of q, and backward of dout, lse and
delta.
"""

import numpy as np
from torch import Tensor

from canon.fast.backward import QueryInputs
from canon.fast.device import rows_for
from canon.fast.local import launch_merge
from canon.fast.tables.device_plans import device_plan
from canon.masks.band import Band
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan


class ActiveQueries:
    """Some queries of a rank, in ascending ``ranges``, and their ``mask`` to the step's keys."""

    def __init__(self, mask: Mask, ranges: tuple[range, ...]):
        self.mask, self.ranges = mask, ranges
        self.in_place = len(ranges) == 1

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes + 100 * len(self.ranges)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return x at these queries. ``dim=2`` is for (b, h, t)."""
        if self.in_place:
            return x.narrow(dim, self.ranges[0].start, len(self.ranges[0]))
        indices = query_indices(self, x.device)
        return pick_rows(x, indices) if x.ndim == 4 else x.index_select(dim, indices)

    def take_inputs(self, inputs: QueryInputs) -> QueryInputs:
        dout, q, lse, delta = inputs
        return QueryInputs(self.take(dout), self.take(q), self.take(lse, 2), self.take(delta, 2))

    def copy_inputs(self, inputs: QueryInputs, copies: QueryInputs) -> None:
        rows, operations = query_indices(self, inputs.q.device), rows_for(inputs.q)
        operations.copy_rows(inputs.dout, copies.dout, rows)
        operations.copy_rows(inputs.q, copies.q, rows)
        operations.copy_statistics(inputs.lse, inputs.delta, (copies.lse, copies.delta), rows)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(
            self.mask.queries if axis == (1 if x.ndim == 4 else 2) else n
            for axis, n in enumerate(x.shape)
        )

    def merge(
        self, running: list[Tensor], part: tuple[Tensor, Tensor], result: Tensor | None = None
    ) -> None:
        """Merge out (b, n, h, dv) and lse (b, h, n) of these queries into ``running``, those of
        all. ``result``: write the merged out of all queries there, in its dtype.
        """
        if self.in_place:
            out = None if result is None else self.take(result)
            launch_merge(self.take(running[0]), self.take(running[1], 2), *part, result=out)
            others = slice(self.ranges[0].start), slice(self.ranges[0].stop, None)
        else:
            launch_merge(*running, *part, rows=query_indices(self, part[0].device))
            others = (slice(None),)
        if result is not None:
            for rows in others:
                rows_for(result).copy_tokens(running[0][:, rows], result[:, rows])

    def add(self, total: Tensor, part: Tensor) -> None:
        rows_for(part).add_to_rows(total, query_indices(self, part.device), part)


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[:, rows] (b, n, h, d) of x (b, t, h, d). ``rows`` is int64."""
    part = x.new_empty(x.shape[0], len(rows), *x.shape[2:])
    rows_for(x).copy_rows(x, part, rows)
    return part


@device_plan
def query_indices(queries: ActiveQueries) -> np.ndarray:
    """Return their indices, int64."""
    return np.concatenate(
        [np.arange(rows.start, rows.stop) for rows in queries.ranges] or [np.arange(0)]
    )


@device_plan
def row_indices(start: int, stop: int) -> np.ndarray:
    """Return start, ..., stop - 1, int64."""
    return np.arange(start, stop)


@cached_plan
def active_queries_of(mask: Mask, all_queries: bool = False) -> ActiveQueries:
    """Return the queries that see at least one key, or ``all_queries``."""
    if all_queries:
        return ActiveQueries(mask, (range(mask.queries),))
    ranges: list[range] = []
    bands: list[Band] = []
    before = 0  # active queries before the current range
    for band in sorted(mask.bands, key=lambda band: band.q_start):
        if ranges and band.q_start <= ranges[-1].stop:
            ranges[-1] = range(ranges[-1].start, max(ranges[-1].stop, band.q_stop))
        else:
            before += len(ranges[-1]) if ranges else 0
            ranges.append(range(band.q_start, band.q_stop))
        bands.append(band.shift(queries=before - ranges[-1].start))
    return ActiveQueries(Mask.of_disjoint(bands, sum(map(len, ranges)), mask.keys), tuple(ranges))


@cached_plan
def visible_keys(mask: Mask) -> tuple[slice, Mask]:
    """Return the keys from the first to the last visible one, and their mask."""
    first = min((band.k_start for band in mask.bands), default=0)
    keys = range(first, max((band.k_stop for band in mask.bands), default=first))
    return slice(keys.start, keys.stop), mask.crop(keys=keys)
