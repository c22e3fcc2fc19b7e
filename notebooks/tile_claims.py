"""Distribute the tile schedule of the Hopper kernel for dk and dv over equally fast SMs, and count
their work.

A work tile is one tile of keys of one owner. Its cost is the number of tiles of queries that it
visits.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

import torch

from canon.fast.kernels.gluon import config
from canon.fast.kernels.gluon.tile_scheduler import Heads, Traversal, tile_schedule
from canon.fast.tables.cells import Cells
from canon.masks.mask import Mask

WorkTile = list[tuple[int, int]]  # (query head, tiles of queries visited)


@dataclass(frozen=True)
class Claims:
    """The work tiles that each SM has claimed."""

    by_sm: list[list[WorkTile]]

    @property
    def owners(self) -> int:
        """The number of work tiles."""
        return sum(map(len, self.by_sm))

    @property
    def visits(self) -> list[int]:
        """The tiles of queries that each SM visits."""
        return [
            sum(visits for work_tile in work_tiles for _, visits in work_tile)
            for work_tiles in self.by_sm
        ]

    @property
    def busiest(self) -> float:
        """The visits of the busiest SM over the mean."""
        return max(self.visits) * len(self.visits) / sum(self.visits)


def claims_of(
    mask: Mask, *, b: int, h: int, g: int, d: int, sms: int, by_query_head: bool = False
) -> Claims:
    """Return the work tiles of each SM. An SM that has finished claims the next work tile of the
    schedule.

    b, h, g, d: sequences, query heads, key heads and their width. ``by_query_head``: each query
    head has its own owners, as in "head_parallel". Otherwise the query heads of a key head share an
    owner, as in "split"."""
    heads = h if by_query_head else g
    tile, each = config.choose("dkdv" if d <= 128 else "dkdv_hdim256", d, d)[0], h // heads
    read = each * mask.queries * 2 * d * 2  # bytes of q and dout for an owner
    traversal = Traversal(tile.rows, tile.columns, True, Heads(b, heads, 1), 1, each, read)
    work = tile_schedule(Cells(mask), traversal, torch.device("cpu")).work.tolist()
    found, free = [[] for _ in range(sms)], [(0, sm) for sm in range(sms)]
    for row in range(8, work[0], 8):  # first row, stop, batch, owner, spans begin, end, ...
        owner, spans, stop = work[row + 3 : row + 6]
        visits = [work[span + 1] for span in range(spans, stop, 8)]
        size = len(visits) // each
        by_head = [sum(visits[i * size : (i + 1) * size]) for i in range(each)]
        time, sm = heappop(free)
        heappush(free, (time + sum(visits), sm))
        found[sm].append([(owner * each + i, count) for i, count in enumerate(by_head)])
    return Claims(found)
