"""The order of work tiles for which SMs that others hold cost little."""

import heapq

import numpy as np
import pytest
import torch

from canon import Mask
from canon.fast.kernels.gluon.tile_scheduler import (
    LATE_CTAS,
    SEVERAL,
    Heads,
    Traversal,
    tile_schedule,
)
from canon.fast.tables.cells import Cells

SMS = 132
MASKS = {
    "causal": Mask.causal(4096),
    "window": Mask.window(8192, 700),
    "documents": Mask.documents([0, 300, 2000, 2300, 7000, 8192]),
}


def schedule(mask, ctas, heads=32):
    """Return the work tiles of the forward kernel, (n, 8), and the cost of each one."""
    traversal = Traversal(128, 128, False, Heads(1, heads, 4), 1, 1, mask.keys * 512, ctas=ctas)
    work = tile_schedule(Cells(mask), traversal, torch.device("cpu")).work.numpy()
    work_tiles = work[8 : work[0]].reshape(-1, 8)
    cost = [1 + work[begin + 1 : end : 8].sum() for begin, end in work_tiles[:, 4:6].tolist()]
    return work_tiles, np.array(cost)


def end_of(cost, held):
    """Return when the kernel ends if the last ``held`` CTAs start when others end. A CTA begins
    with its own work tile.
    """
    free = [int(x) for x in cost[: SMS - held]]
    heapq.heapify(free)
    for work_tile in [*cost[SMS:], *cost[SMS - held : SMS]]:
        heapq.heappush(free, heapq.heappop(free) + int(work_tile))
    return max(free)


@pytest.mark.parametrize("held", [0, 8, 24, LATE_CTAS])
@pytest.mark.parametrize("mask", MASKS)
def test_late_ctas_delay_the_end_little(mask, held):
    _, cost = schedule(MASKS[mask], SMS)
    assert end_of(cost, held) < 1.04 * cost.sum() / (SMS - held)
    _, longest_first = schedule(MASKS[mask], 0)
    assert end_of(cost, 0) <= 1.02 * end_of(longest_first, 0)
    # without the short ones, the last work tile of a late CTA is a long one
    if held and mask == "causal":
        assert end_of(longest_first, held) > 1.1 * cost.sum() / (SMS - held)


@pytest.mark.parametrize("mask", MASKS)
def test_work_tiles_change_their_places_only(mask):
    (moved, cost), (longest_first, _) = schedule(MASKS[mask], SMS), schedule(MASKS[mask], 0)
    assert sorted(map(tuple, moved)) == sorted(map(tuple, longest_first))
    assert cost[SMS - LATE_CTAS : SMS].max() <= np.sort(cost)[2 * LATE_CTAS]


def test_few_work_tiles_keep_their_order():
    """Then the short ones are all needed at the end."""
    heads = 4 * (SEVERAL * SMS // 128 - 1)
    (some, _), (others, _) = (schedule(MASKS["causal"], ctas, heads) for ctas in (SMS, 0))
    assert len(some) < SEVERAL * SMS
    np.testing.assert_array_equal(some, others)
