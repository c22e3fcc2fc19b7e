"""Lists of items for the Hopper kernels: who does what, in which order, and who waits for whom."""

import heapq
import itertools

import numpy as np
import pytest
import torch

from canon import Band, Mask
from canon.fast.kernels.gluon import tile_scheduler
from canon.fast.kernels.gluon.tile_scheduler import Heads


def blind(made, rows):
    """Which rows nobody writes, as the schedule says."""
    found = np.zeros(rows, bool)
    for some in made.blind:
        found[some] = True
    return found


@pytest.mark.parametrize(("transposed", "full_first"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(
    "mask",
    [Mask.documents([0, 1, 1, 133, 134, 270]), Mask.window(309, 77, 4), Mask.causal(140).shift(6, 3).shift(-1, 0)],
    ids=["documents", "window", "queries without keys and keys without queries"],
)
def test_every_tile_of_every_head_is_somebodys_once(mask, transposed, full_first):
    heads, pack = Heads(2, 4, 4), 1 if transposed else 2
    device = torch.device("cpu")
    made = tile_scheduler.tile_schedule(
        mask, 128, 64, transposed, heads, pack, 1 << 20, device, 3, full_first=full_first
    )
    work = made.work.numpy()
    assert not work[1:7].any()  # item 0 has no rows
    assert work[7] == len(work)  # nobody takes turns
    items = work[8 : work[0]].reshape(-1, 8)
    assert len(items) == made.items
    dense_mask = mask.dense().numpy().T if transposed else mask.dense().numpy()
    seen = dense_mask.any(1)
    times = np.zeros((2, 4, len(seen)), int)
    for first, stop, batch, head, begin, end, line, column in items.tolist():
        assert line == 4 * batch + head
        assert column == work[begin], "that of the first span"
        assert head % pack == 0
        assert end > begin
        times[batch, head : head + pack, first:stop] += 1
        spans = work[begin:end].reshape(3, -1, 8)  # once for each of three heads
        assert (spans == spans[0]).all()
        partial = spans[0][:, 3] > 0
        assert not full_first or partial.tolist() == sorted(partial.tolist())
    assert times.max() == 1
    assert (times[:, :, seen] == 1).all()
    assert (times == ~blind(made, len(seen))).all()


@pytest.mark.parametrize(("places", "exact"), [(4, True), (5, False)])
def test_what_nobody_writes_is_told_place_by_place_while_they_are_few(places, exact):
    rows = 256 * places + 128  # tiles that see something, and between them tiles that see nothing
    mask = Mask([Band(start, start + 128, 0, 64) for start in range(0, rows, 256)], rows, 64)
    made = tile_scheduler.tile_schedule(mask, 128, 64, False, Heads(1, 1, 1), 1, 1, torch.device("cpu"))
    unseen = ~mask.dense().numpy().any(1)
    expected = unseen if exact else np.arange(rows) == np.clip(np.arange(rows), 128, rows - 129)
    assert len(made.blind) == (places if exact else 1)
    assert (blind(made, rows) == expected).all()


@pytest.mark.parametrize(
    ("mask", "strays"),
    [
        (Mask([Band(0, 128, 0, 64)], 256, 128), (False, False)),
        (Mask([Band(0, 100, 0, 64)], 128, 64), (True, False)),
        (Mask([Band(0, 128, 0, 60)], 128, 64), (False, True)),
    ],
    ids=["none", "queries", "keys"],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_strays_are_loaded_and_not_touched(mask, strays, transposed):
    rows, columns = (64, 128) if transposed else (128, 64)
    made = tile_scheduler.tile_schedule(mask, rows, columns, transposed, Heads(1, 1, 1), 1, 1, torch.device("cpu"))
    assert made.strays == strays


@pytest.mark.parametrize("heads", [Heads(1, 3, 1), Heads(2, 2, 1)], ids=repr)
@pytest.mark.parametrize(
    "mask",
    [Mask.causal(900), Mask.window(900, 300, 50), Mask.documents([0, 1, 300, 333, 900]), Mask.prefix(500, 77)],
    ids=repr,
)
def test_each_turn_waits_for_the_one_before_it(mask, heads):
    made = tile_scheduler.tile_schedule(mask, 128, 64, True, heads, 1, 1 << 20, torch.device("cpu"), 3, True)
    work = made.work.tolist()
    begin, left = work[7], {}
    assert len(work) - begin == (begin - work[0]) // 4, "two numbers for each span of eight"
    for at in range(8, work[0], 8):
        item = work[at : at + 8]
        each = (item[5] - item[4]) // 3
        for span in range(item[4], item[5], 8):
            head, (column, tiles) = (span - item[4]) // each, work[span : span + 2]
            awaited, number = work[begin + (span - work[0]) // 4 :][:2]
            assert column % 64 == 0
            assert number > 0
            for tile in range(column // 64, column // 64 + tiles):
                assert left.get((item[6], head, tile), 0) == awaited
                left[item[6], head, tile] = number
    assert len(left) == 3 * heads.batches * heads.number * -(-mask.queries // 64), "every tile of queries is added to"


def rectangle(queries, keys):
    return Mask([Band(0, queries, 0, keys)], queries, keys)


@pytest.mark.parametrize(
    ("mask", "heads", "each", "beside"),
    [
        (rectangle(16384, 16384), Heads(1, 8, 1), 4, 8),
        (rectangle(65536, 32768), Heads(1, 8, 1), 4, 4),  # 256 tiles add to a column
        (rectangle(2048, 262144), Heads(1, 8, 1), 4, 8),  # 2048 do, but all heads read but 34 MB
        (rectangle(32768, 262144), Heads(1, 8, 1), 4, 2),  # 67 MB each
        (Mask.documents(range(0, 65537, 4096)), Heads(1, 8, 1), 8, 8),  # 268 MB each, but 16 tiles add to a column
        (Mask.causal(512), Heads(8, 8, 1), 4, 32),  # until all programs have something to do
        (Mask.documents([0, 7]), Heads(1, 2, 1), 1, 2),
    ],
    ids=["all", "some", "small", "few", "documents", "short", "one tile"],
)
def test_heads_that_add_in_turn_stand_side_by_side_unless_they_drift_apart(mask, heads, each, beside):
    made = tile_scheduler.tile_schedule(
        mask, 128, 64, True, heads, 1, 512 * each * mask.queries, torch.device("cpu"), each, True
    )
    items = made.work[8 : made.work[0]].reshape(-1, 8)
    assert len({*items[: made.items * beside // (heads.batches * heads.number), 6].tolist()}) == beside
    assert len({*items[:beside, 6].tolist()}) == beside


def rows_in_turn(mask, heads, each, columns=64):
    """First rows of a line's tiles in the order of the list, and how many lines stand side by side."""
    bytes_each = 512 * each * mask.queries
    made = tile_scheduler.tile_schedule(mask, 128, columns, True, heads, 1, bytes_each, torch.device("cpu"), each, True)
    items = made.work[8 : made.work[0]].reshape(-1, 8)
    rows = items[items[:, 6] == 0, 0]
    return rows.tolist(), int((items[:, 0] == items[0, 0]).cumprod(0).sum())


@pytest.mark.parametrize(
    ("mask", "heads", "each", "beside"),
    [
        (Mask.causal(16384), Heads(1, 8, 1), 4, 4),
        (Mask.causal(65536), Heads(1, 8, 1), 4, 1),  # one head of keys has work for all programs
        (Mask.causal(8192), Heads(2, 8, 1), 4, 4),
        (Mask.causal(4096), Heads(4, 8, 1), 4, 8),
        (Mask.causal(2048), Heads(8, 8, 1), 4, 16),
        (Mask.causal(8192), Heads(4, 16, 1), 1, 16),
        (Mask.causal(700), Heads(1, 3, 1), 2, 3),  # not all waves are full
    ],
    ids=["16384", "65536", "8192", "4096", "2048", "8192, one query head each", "700"],
)
def test_unequal_tiles_that_add_in_turn_are_done_in_pairs(mask, heads, each, beside):
    rows, found = rows_in_turn(mask, heads, each)
    assert found == beside
    tiles = -(-mask.keys // 128)
    wave = min(tiles, round(132 / beside))
    starts = list(range(0, mask.keys, 128))
    assert rows[:wave] == starts[::-1][:wave], "the shortest, the shortest of all first"
    longest = starts[: min(wave, tiles - wave)]
    assert rows[wave : wave + len(longest)] == longest, "and the longest, the longest of all first"
    assert sorted(rows) == starts, "each once"


@pytest.mark.parametrize(
    ("mask", "each", "columns"),
    [
        (Mask.full(2048), 4, 64),
        (Mask.window(16384, 2048, 0), 4, 64),
        (Mask.documents([*range(0, 16384, 1000), 16384]), 4, 64),
        (Mask.causal(2048), 1, 128),
    ],
    ids=["equal", "nearly equal", "few add to one", "in wide columns a tile is not shorter by enough"],
)
def test_other_tiles_that_add_in_turn_come_longest_first(mask, each, columns):
    rows, _ = rows_in_turn(mask, Heads(1, 8, 1), each, columns)
    tiles, _, cost = tile_scheduler._costs(mask, 128, columns, True, each, columns)
    length = dict(zip(tiles[:, 0].tolist(), cost.tolist(), strict=True))
    assert sorted(rows, key=length.__getitem__, reverse=True) == rows


def test_regions_come_one_after_another_where_a_head_does_not_fit_the_cache():
    mask, heads = Mask.documents([0, 1000, 5000, 5500, 9000, 16384]), Heads(1, 2, 2)
    sizes = 1, 4 * tile_scheduler.L2_BYTES
    made = [tile_scheduler.tile_schedule(mask, 128, 128, False, heads, 1, size, torch.device("cpu")) for size in sizes]
    fits, parts = ([x.work[8 * item].item() for item in range(1, x.items, 2)] for x in made)
    assert sorted(fits) == sorted(parts)
    region = [4 * first // 16384 for first in parts]
    changes = [(x, y) for x, y in itertools.pairwise(region) if x != y]
    assert len(changes) == 3, "each is finished before the next begins"
    assert region[0] == 3, "the first has the longest document"


@pytest.mark.parametrize("slowest", [1.0, 0.9])
def test_processors_that_claim_end_together(slowest):
    made = tile_scheduler.tile_schedule(
        Mask.causal(16384), 128, 128, False, Heads(1, 32, 4), 1, 8 << 20, torch.device("cpu")
    )
    work = made.work.numpy()
    speeds = np.linspace(slowest, 1, 132)
    free = [(0.0, processor) for processor in range(132)]  # when, and who
    for begin, end in work[8 : work[0]].reshape(-1, 8)[:, 4:6]:
        time, processor = heapq.heappop(free)
        heapq.heappush(free, (time + work[begin + 1 : end : 8].sum() / speeds[processor], processor))
    times = [time for time, _ in free]
    # the mean is about 2001 tiles, and the last items have one each
    assert max(times) < 1.002 * np.mean(times)
