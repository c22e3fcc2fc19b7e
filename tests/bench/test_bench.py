"""`canon bench` reads its shapes and measures nothing that disagrees."""

from functools import partial

import pytest
import torch
from benching import no_clock, on_cpu, options_of  # noqa: F401 (a fixture)

from canon import Mask
from canon.bench import bench_command, decoding, kernels, mask_time, shapes, timing
from canon.bench.on_ranks import OnRanks
from canon.bench.packs import sampled_packs
from canon.fast.kernels.launcher import Gpu
from canon.masks.plan_cache import PLANS
from canon.testing import process_groups

pytestmark = pytest.mark.interpreted


# ---------------------------------------------------------------------- shapes
def test_shapes_and_masks_are_read():
    shape = shapes.shape_of("2,64,4,2,16,window:8")
    assert (shape.b, shape.n, shape.h, shape.g, shape.d) == (2, 64, 4, 2, 16)
    assert shape.mask == Mask.window(64, 8, 0)
    assert shape.operations == 4 * 2 * 4 * 16 * shape.mask.area
    assert shapes.shape_of("2,64,4,2,16").mask_name == "causal"
    narrow = shapes.shape_of("1,64,4,2,16,full:24")
    assert (narrow.n, narrow.keys, narrow.mask.area) == (64, 24, 64 * 24)
    assert shapes.shape_of("1,4096,4,2,16,pack:2").mask == Mask.documents(sampled_packs(4096, 3)[2])
    assert shapes.shape_of("1,40,4,2,16,prefix:9").mask == Mask.prefix(40, 9)
    assert shapes.shape_of("1,8,4,2,16,tree:4+2x2").mask == Mask.tree([-1, 0, 0], [4, 2, 2])
    for text in (
        "1,2,3,causal",
        "1,64,4,2,16,triangle",
        "1,64,4,2,16,window",
        "x,1,1,1,1,full",
        "1,64,4,2,16,pack",
        "1,64,4,2,16,prefix:65",
        "1,64,4,2,16,tree:60+2x3",
        "1,64,4,2,16,tree:60+4x",
        "1,64,4,3,16,full",
        "1,64,4,2,16,full,causal",
        "1,0,1,1,16,full",
    ):
        with pytest.raises(ValueError, match="expected"):
            shapes.shape_of(text)


def test_an_option_of_another_subject_and_numbers_below_1_are_refused(capsys):
    for what in bench_command.SUBJECTS:
        options_of(what)
    foreign, small = "unrecognized arguments: --", "must be at least 1, got 0"
    for line, message in {
        "host --cold": f"{foreign}cold",
        "plans --rounds 3": f"{foreign}rounds",
        "links --rounds 0": small,
        "plans --packs 0": small,
        "plans --ranks 0": small,
    }.items():
        with pytest.raises(SystemExit):
            options_of(*line.split())
        assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- measuring
def test_every_method_agrees_before_it_is_timed():
    shape = shapes.shape_of("1,24,2,1,16,documents:9")
    rows = kernels.measure(shape, on_cpu("canon triton", 1))
    names = ["split", "fused", "head_parallel"]
    assert [row["contender"] for row in rows] == [f"canon triton {name}" for name in names]
    assert all(row["agrees"] and row["backward_ms"] == [1.0] * 3 for row in rows)
    # they share one forward pass
    assert [("forward_ms" in row) for row in rows] == [True, False, False]
    assert rows[0]["forward_tflops"] == shape.operations / 1e9
    assert rows[0]["backward_tflops"] == 2.5 * shape.operations / 1e9


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_method_that_disagrees_gets_no_figure(factor, monkeypatch):
    from canon import fast

    attention = fast.attention
    monkeypatch.setattr(
        fast, "attention", lambda q, k, v, mask, **kw: attention(q, k, v, mask, **kw) * factor
    )
    shape = shapes.shape_of("1,40,2,2,16,causal")
    rows = kernels.measure(shape, on_cpu("canon triton split"))
    assert "disagrees" in rows[0]["failed"]
    assert "backward_ms" not in rows[0]


def test_decoding_is_judged_on_ranks_and_its_bits_compared(monkeypatch):
    monkeypatch.setattr(timing, "MOST_CALLS", 1)
    program = OnRanks(decoding.measure, (shapes.shape_of("1,3,4,2,64,full:300"),), on_cpu())
    rows, others = process_groups.threads(program, 2)
    assert rows == others
    assert [row["schedule"] for row in rows] == ["parts", "sums travel", "keys travel", "one GPU"]
    assert all(row["agrees"] and len(row["wall_ms"]) == 2 and "failed" not in row for row in rows)
    assert decoding.tables(rows)[0].row_count == len(rows)


def test_new_masks_are_timed_on_ranks_too():
    """The plans and the passes of a new mask; a known one is no part of them."""
    shape = shapes.shape_of("1,96,4,2,16,documents:30")
    lists = [[0, 20, 96], [0, 50, 70, 96]]
    program = partial(mask_time.magi_on_ranks, shape, torch.float32, lists, "cpu")
    times, others = process_groups.threads(program, 2)
    assert times == others, "those of the slowest rank"
    for row in times:
        parts = row["made_ms"] + row["dispatch_ms"] + row["first_ms"] - row["repeated_ms"]
        assert row["new_mask_ms"] == pytest.approx(parts)


def test_plans_made_ahead_are_those_of_another_process(empty_cache):
    """Only the plans of the mask are dropped: a trainer keeps its recordings."""
    shape = shapes.shape_of("1,512,4,2,64,documents:100")
    rows = mask_time.measure(shape, on_cpu())
    assert [row["case"] for row in rows] == ["one GPU", "magi, 8 ranks"]
    assert all(len(row["plan_ms"]) == 2 for row in rows)
    mask = Mask.documents([0, 100, 512])
    given = {"heads": (4, 2), "widths": (64, 64), "device": Gpu(*mask_time.H200)}
    PLANS.clear()
    PLANS.put("a recording", 1)
    _, copy = mask_time._planned("attention", mask, None, None, given)
    assert set(PLANS.plans) == {"a recording", *(key for key, _ in copy.plans)}


def test_a_cold_run_follows_a_read_of_another_buffer(monkeypatch):
    flushed = []
    monkeypatch.setattr(timing, "flush_of", lambda device: lambda: flushed.append(device))
    monkeypatch.setattr("canon.bench.measuring.flush_of", timing.flush_of)
    shape = shapes.shape_of("1,2,2,1,16,full:30")
    kernels.measure(shape, on_cpu("canon auto", 1))
    assert flushed == []
    rows = kernels.measure(shape, on_cpu("canon auto", 1, cold=True))
    assert len(flushed) == sum(
        name in row for row in rows for name in ("forward_ms", "backward_ms")
    )
