"""The time of attention kernels, by the costs of their work tiles (`canon.fast.tables.tile_costs`).

A kernel takes as long as the mean SM, or as its longest work tile. A step takes some time more.

`RATES` and the latency inside a host were fitted to the records of two GPUs alone.
tests/costs/test_cost_records.py compares the model with four and eight.
"""

import numpy as np

from canon.fast.tables.cells import Cells
from canon.fast.tables.tile_costs import BOX, needs_more_owners, tile_costs
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan

TILE = 128
SMS = 132  # of an H200
MEMORY = 3.3e12  # bytes that row kernels read and write in a second


# Seconds of a full tile of width 128 on an SM, and of a step besides its kernels, by pass.
RATES = np.array([[1.498e-6, 33.4e-6], [4.92e-6, 102e-6]])


@cached_plan
def tile_work(mask: Mask, key_heads: int, share: int, backward: bool) -> float:
    """Return the full tiles that an SM computes in turn. ``share``: query heads of a key head."""
    more = backward and needs_more_owners(mask, TILE, TILE, key_heads, key_heads * share, SMS)
    each = share if backward and not more else 1
    found = tile_costs(Cells(mask), TILE, TILE, backward, each, BOX)
    costs = found.cost[found.active]
    return max(costs.sum() * key_heads * (share // each) / SMS, costs.max(initial=0))
