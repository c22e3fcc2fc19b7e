"""Tile schedules of the Hopper kernels: every tile is in the schedule once, in the order that the
kernels rely on.
"""

import heapq
import itertools

import numpy as np
import pytest
import torch

from canon import Band, Mask
from canon.fast.kernels.gluon import dq_order, tile_scheduler
from canon.fast.kernels.gluon.tile_scheduler import Heads, Traversal, tile_schedule
from canon.fast.tables.cells import Cells
from canon.fast.tables.tile_costs import imbalance, needs_more_owners, tile_costs

CPU = torch.device("cpu")
ONE_HEAD = Heads(1, 1, 1)


def work_tiles_of(schedule):
    """The work tiles of a schedule, as an array (n, 8)."""
    return schedule.work[8 : schedule.work[0]].reshape(-1, 8)


def fully_masked(schedule, rows):
    """The rows that the schedule leaves to the launch (bool)."""
    found = np.zeros(rows, bool)
    for some in schedule.fully_masked_rows:
        found[some] = True
    return found


def ordered_schedule(mask, heads, each, columns=64):
    """The schedule of the fused kernel with ordered dq, for heads 128 wide."""
    read = 512 * each * mask.queries
    return tile_schedule(
        Cells(mask), Traversal(128, columns, True, heads, 1, each, read, ordered=True), CPU
    )


@pytest.mark.parametrize(
    ("transposed", "full_first"), [(False, False), (False, True), (True, False)]
)
@pytest.mark.parametrize(
    "mask",
    [
        Mask.documents([0, 1, 1, 133, 134, 270]),
        Mask.window(309, 77, 4),
        Mask.causal(140).shift(6, 3).shift(-1, 0),
    ],
    ids=["documents", "window", "queries without keys and keys without queries"],
)
def test_every_tile_of_every_head_is_in_the_schedule_once(mask, transposed, full_first):
    heads, pack = Heads(2, 4, 4), 1 if transposed else 2
    traversal = Traversal(128, 64, transposed, heads, pack, 3, 1 << 20, full_first=full_first)
    schedule = tile_schedule(Cells(mask), traversal, CPU)
    work = schedule.work.numpy()
    work_tiles = work_tiles_of(schedule).tolist()
    assert len(work_tiles) == schedule.work_tiles
    dense_mask = mask.dense().numpy().T if transposed else mask.dense().numpy()
    seen = dense_mask.any(1)
    times = np.zeros((2, 4, len(seen)), int)
    for first, stop, batch, head, begin, end, *_ in work_tiles:
        assert head % pack == 0
        assert end > begin
        times[batch, head : head + pack, first:stop] += 1
        spans = work[begin:end].reshape(3, -1, 8)  # once for each of three heads
        assert (spans == spans[0]).all()
        partial = spans[0][:, 3] > 0
        assert not full_first or partial.tolist() == sorted(partial.tolist())
    assert times.max() == 1
    assert (times[:, :, seen] == 1).all()
    assert (times == ~fully_masked(schedule, len(seen))).all()


@pytest.mark.parametrize(("ranges", "exact"), [(4, True), (5, False)])
def test_fully_masked_rows_are_exact_ranges_while_they_are_few(ranges, exact):
    rows = 256 * ranges + 128  # tiles with visible keys alternate with tiles without
    mask = Mask([Band(start, start + 128, 0, 64) for start in range(0, rows, 256)], rows, 64)
    schedule = tile_schedule(Cells(mask), Traversal(128, 64, False, ONE_HEAD, 1, 1, 1), CPU)
    unseen = ~mask.dense().numpy().any(1)
    expected = unseen if exact else np.arange(rows) == np.clip(np.arange(rows), 128, rows - 129)
    assert len(schedule.fully_masked_rows) == (ranges if exact else 1)
    assert (fully_masked(schedule, rows) == expected).all()


# ------------------------------------------------------- heads in flight, and the order of tiles
def rows_and_heads_in_flight(mask, heads, each, columns=64):
    """The first rows of one head's work tiles in the order of the schedule, and how many heads are
    in flight.
    """
    work_tiles = work_tiles_of(ordered_schedule(mask, heads, each, columns))
    rows = work_tiles[work_tiles[:, 6] == 0, 0]
    return rows.tolist(), int((work_tiles[:, 0] == work_tiles[0, 0]).cumprod(0).sum())


@pytest.mark.parametrize(
    ("mask", "each", "in_flight"),
    [
        (Mask.full(16384), 4, 8),
        (Mask.full(65536, 32768), 4, 4),  # 256 work tiles add to a tile of dq
        (Mask.full(32768, 262144), 4, 2),  # 2048 do, but two heads read only 134 MB
        (Mask.documents(range(0, 65537, 4096)), 8, 8),  # 268 MB each, but few additions
    ],
    ids=["all", "some", "few", "documents"],
)
def test_ordered_heads_are_in_flight_together_unless_their_ctas_drift_apart(mask, each, in_flight):
    assert rows_and_heads_in_flight(mask, Heads(1, 8, 1), each)[1] == in_flight


@pytest.mark.parametrize(
    ("mask", "heads", "each", "in_flight"),
    [
        (Mask.causal(16384), Heads(1, 8, 1), 4, 4),
        (Mask.causal(65536), Heads(1, 8, 1), 4, 1),  # one key head has work for all SMs
        (Mask.causal(8192), Heads(4, 16, 1), 1, 16),
        (Mask.causal(700), Heads(1, 3, 1), 2, 3),  # not all sets are full
        (Mask.causal(20480), Heads(1, 4, 1), 5, 4),  # with 2 heads, most SMs would idle at the end
    ],
    ids=["16384", "65536", "8192, one query head each", "700", "20480"],
)
def test_ordered_work_tiles_of_unequal_length_alternate(mask, heads, each, in_flight):
    rows, found = rows_and_heads_in_flight(mask, heads, each)
    assert found == in_flight
    tiles = -(-mask.keys // 128)
    together = min(tiles, round(132 / in_flight))
    starts = list(range(0, mask.keys, 128))
    assert rows[:together] == starts[::-1][:together], "the shortest, the shortest of all first"
    longest = starts[: min(together, tiles - together)]
    assert rows[together : together + len(longest)] == longest, (
        "and the longest, the longest of all first"
    )
    assert sorted(rows) == starts, "each once"


def test_an_empty_batch_has_an_ordered_schedule_without_work():
    assert ordered_schedule(Mask.causal(16384), Heads(0, 8, 1), 4).work_tiles == 0


@pytest.mark.parametrize(
    ("mask", "each", "columns"),
    [
        (Mask.full(2048), 4, 64),
        (Mask.window(16384, 2048, 0), 4, 64),
        (Mask.documents([*range(0, 16384, 1000), 16384]), 4, 64),
        (Mask.causal(2048), 1, 128),
    ],
    ids=["equal", "nearly equal", "few additions", "wide columns"],
)
def test_other_ordered_work_tiles_come_longest_first(mask, each, columns):
    rows, _ = rows_and_heads_in_flight(mask, Heads(1, 8, 1), each, columns)
    tiles, _, cost = tile_costs(Cells(mask), 128, columns, True, each, columns)
    length = dict(zip(tiles[:, 0].tolist(), cost.tolist(), strict=True))
    assert sorted(rows, key=length.__getitem__, reverse=True) == rows


def orders_and_times(tokens, heads, each, last_sets, monkeypatch):
    """The work tiles of a causal mask and when they end: with the shortest tiles of so many sets
    last, and without.
    """
    mask, read = Mask.causal(tokens), 512 * each * tokens
    traversal = Traversal(128, 64, True, heads, 1, each, read, even_ends=last_sets)
    costs = tile_costs(Cells(mask), 128, 64, True, each, traversal.boxes)
    cost_of = dict(zip(costs.tiles[:, 0].tolist(), costs.cost.tolist(), strict=True))
    orders, times = [], []
    for least in (tile_scheduler.GAIN, 1.0):  # with 1.0, no tile moves
        monkeypatch.setattr(tile_scheduler, "GAIN", least)
        schedule = tile_schedule.__wrapped__(Cells(mask), traversal).work
        work_tiles = schedule[8 : schedule[0]].reshape(-1, 8)
        orders.append(work_tiles.tolist())
        ends = [0.0] * dq_order.SMS
        for first in work_tiles[:, 0].tolist():
            heapq.heapreplace(ends, ends[0] + cost_of[first])
        times.append(max(ends))
    assert sorted(orders[0]) == sorted(orders[1])
    return orders, times


@pytest.mark.parametrize(
    "last_sets", [tile_scheduler.ALL_SETS, tile_scheduler.LAST_SETS], ids=["all", "last"]
)
@pytest.mark.parametrize(
    ("tokens", "heads", "each", "gain"),
    [
        (8192, Heads(2, 8, 1), 5, 0.09),
        (24576, Heads(1, 4, 1), 6, 0.05),
        (512, Heads(32, 8, 1), 4, 0),
        (8192, Heads(4, 16, 1), 1, 0),
    ],
)
def test_short_work_tiles_come_last_only_where_that_evens_the_ends(
    tokens, heads, each, gain, last_sets, monkeypatch
):
    orders, times = orders_and_times(tokens, heads, each, last_sets, monkeypatch)
    assert (orders[0] != orders[1]) == (gain > 0)
    assert times[0] <= times[1] * (1 - gain)


def test_launches_that_add_to_dq_take_short_work_tiles_from_few_sets(monkeypatch):
    orders, _ = orders_and_times(12288, Heads(3, 6, 1), 8, tile_scheduler.LAST_SETS, monkeypatch)
    moved = [i for i, (even, before) in enumerate(zip(*orders, strict=True)) if even != before]
    sets = len({head for *_, head, _ in orders[0]})  # each of one key head
    assert len(orders[0]) // sets * (sets - tile_scheduler.LAST_SETS) <= min(moved)


def test_regions_follow_one_another_if_a_head_does_not_fit_the_cache():
    mask, heads = Mask.documents([0, 1000, 5000, 5500, 9000, 16384]), Heads(1, 2, 2)
    sizes = 1, 4 * dq_order.L2_BYTES
    schedules = [
        tile_schedule(Cells(mask), Traversal(128, 128, False, heads, 1, 1, size), CPU)
        for size in sizes
    ]
    fits, parts = (work_tiles_of(schedule)[::2, 0].tolist() for schedule in schedules)
    assert sorted(fits) == sorted(parts)
    region = [4 * first // 16384 for first in parts]
    changes = [(x, y) for x, y in itertools.pairwise(region) if x != y]
    assert len(changes) == 3, "each is finished before the next begins"
    assert region[0] == 3, "the first has the longest document"


# ------------------------------------------------------------------ balance


@pytest.mark.parametrize("sms", [2, 20, 132])
@pytest.mark.parametrize(
    "mask",
    [Mask.causal(2048), Mask.causal(300), Mask.documents([0, 100, 3000, 3100]), Mask([], 9, 9)],
    ids=repr,
)
def test_bounds_decide_about_owners_as_the_imbalances_do(mask, sms):
    by_key, by_query = (imbalance(mask, 128, 64, owners, 8 // owners, sms) for owners in (2, 8))
    assert needs_more_owners(mask, 128, 64, 2, 8, sms) == (by_key > 1.25 * by_query)
