"""The queries that see something of a step's keys, and the keys that are seen: all that the step computes.

Of packed documents few queries see what another rank sends, here and there among all: those whose document began there.
They are used in place where they stand side by side, and gathered where they do not. So no kernel passes over queries that
see nothing, to set their part to 0 or to merge it: on short documents that took as long as half of the attention itself.

Cost: of gathered queries q is copied, and in the backward pass dout, lse and delta.
"""

import numpy as np
import torch
from torch import Tensor

from canon.fast.device_plans import device_plan
from canon.fast.kernels.triton.rows import add_to_rows, pick_rows
from canon.fast.local import merge_into
from canon.reference.band import Band
from canon.reference.mask import Mask
from canon.reference.plan_cache import cached_plan


class ActiveQueries:
    """Some queries: ``pieces`` of them, in ascending order, and the ``mask`` of these alone over all keys."""

    def __init__(self, mask: Mask, pieces: tuple[range, ...]):
        self.mask, self.pieces = mask, pieces
        self._in_place = len(pieces) == 1

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes on the host."""
        return self.mask.nbytes + 100 * len(self.pieces)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return x at these queries; ``dim=2`` for (b, h, t). A view if the queries are one range, else a copy."""
        if self._in_place:
            return x.narrow(dim, self.pieces[0].start, len(self.pieces[0]))
        places = places_of(self, x.device)
        return pick_rows(x, places) if x.ndim == 4 else x.index_select(dim, places)

    def merge(self, running: list[Tensor], part: tuple[Tensor, Tensor]) -> None:
        """Merge a part of out (b, n, h, dv) and lse (b, h, n) into the running result of all queries."""
        if self._in_place:
            merge_into(self.take(running[0]), self.take(running[1], 2), *part)
        else:
            merge_into(*running, *part, rows=places_of(self, part[0].device))

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add a part of dq (b, n, h, d) to that of all queries."""
        if self._in_place:
            self.take(total).add_(part)
        else:
            add_to_rows(total, places_of(self, part.device), part)


@device_plan
def places_of(queries: ActiveQueries, device: torch.device) -> Tensor:
    """Return the numbers of these queries, on the device: int64."""
    places = np.concatenate([np.arange(piece.start, piece.stop) for piece in queries.pieces] or [np.arange(0)])
    return torch.from_numpy(places).to(device)


@cached_plan
def active_queries_of(mask: Mask, everyone: bool = False) -> ActiveQueries:
    """The queries that see a key, or ``everyone``."""
    if everyone:
        return ActiveQueries(mask, (range(mask.queries),))
    pieces: list[range] = []
    bands: list[Band] = []
    taken = 0  # queries of the pieces before
    for band in sorted(mask.bands, key=lambda band: band.q_start):
        if pieces and band.q_start <= pieces[-1].stop:
            pieces[-1] = range(pieces[-1].start, max(pieces[-1].stop, band.q_stop))
        else:
            taken += len(pieces[-1]) if pieces else 0
            pieces.append(range(band.q_start, band.q_stop))
        bands.append(band.shift(queries=taken - pieces[-1].start))
    return ActiveQueries(Mask(bands, sum(map(len, pieces)), mask.keys), tuple(pieces))


def seen_keys(mask: Mask) -> tuple[slice, Mask]:
    """The keys from the first to the last that some query sees, and the mask over them."""
    first = min((band.k_start for band in mask.bands), default=0)
    columns = range(first, max((band.k_stop for band in mask.bands), default=first))
    return slice(columns.start, columns.stop), mask.crop(keys=columns)
