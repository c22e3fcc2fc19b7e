"""`canon bench` reads its shapes and measures nothing that disagrees."""

import pytest
import torch
from benching import CEILINGS, CPU, no_clock, options_of  # noqa: F401 (a fixture)

from canon import Mask
from canon.bench import bench_command, decoding, few_queries, kernels, layers, shapes, tune
from canon.bench.packs import sampled_packs
from canon.fast.kernels.gluon import config as hopper_config
from canon.fast.kernels.triton.config import Config
from canon.testing import process_groups, simulated_kernels

pytestmark = pytest.mark.interpreted


# ---------------------------------------------------------------------- shapes
def test_shapes_and_masks_are_read():
    shape = shapes.shape_of("2,64,4,2,16", "window:8")
    assert (shape.b, shape.n, shape.h, shape.g, shape.d) == (2, 64, 4, 2, 16)
    assert shape.mask == Mask.window(64, 8, 0)
    assert shape.operations == 4 * 2 * 4 * 16 * shape.mask.area
    assert shapes.shape_of("2,64,4,2,16,window:8") == shape
    narrow = shapes.shape_of("1,64,4,2,16,full:24")
    assert (narrow.n, narrow.keys, narrow.mask.area) == (64, 24, 64 * 24)
    assert shapes.shape_of("1,4096,4,2,16,pack:2").mask == Mask.documents(sampled_packs(4096, 3)[2])
    assert shapes.shape_of("1,40,4,2,16,prefix:9").mask == Mask.prefix(40, 9)
    assert shapes.shape_of("1,8,4,2,16,tree:4+2x2").mask == Mask.tree([-1, 0, 0], [4, 2, 2])
    assert shapes.shape_of("1,6,4,2,16,blocks:3+1+2").mask == Mask.block_causal([0, 0, 0, 1, 2, 2])
    wrong = [
        ("1,2,3", "causal"),
        ("1,64,4,2,16", "triangle"),
        ("1,64,4,2,16", "window"),
        ("x,1,1,1,1", "full"),
    ]
    wrong += [
        ("1,64,4,2,16", "pack"),
        ("1,64,4,2,16", "prefix:65"),
        ("1,64,4,2,16", "blocks:60+5"),
        ("1,64,4,2,16", "tree:60+2x3"),
        ("1,64,4,2,16", "tree:60+4x"),
    ]
    wrong += [
        ("1,64,4,3,16", "full"),
        ("1,64,4,2,16", None),
        ("1,64,4,2,16,full", "causal"),
        ("1,0,1,1,16", "full"),
    ]
    for text, mask in wrong:
        with pytest.raises(ValueError, match="expected"):
            shapes.shape_of(text, mask)


def test_masks_go_to_shapes_without_one_and_replace_those_of_the_defaults():
    assert len(shapes.shapes_of([], [], shapes.KERNELS)) == 9
    assert [s.mask_name for s in shapes.shapes_of(["1,8,1,1,16"], [], [])] == ["causal"]
    assert [s.mask_name for s in shapes.shapes_of(["1,8,1,1,16"], ["full", "window:2"], [])] == [
        "full",
        "window:2",
    ]
    assert [s.mask_name for s in shapes.shapes_of(["1,8,1,1,16,full"], [], [])] == ["full"]
    with pytest.raises(ValueError, match="without a mask"):
        shapes.shapes_of(["1,8,1,1,16,full"], ["causal"], [])
    replaced = shapes.shapes_of(
        [], ["full"], ["1,8,1,1,16,causal", "1,8,1,1,16,full", "1,16,1,1,16,causal"]
    )
    assert [(s.n, s.mask_name) for s in replaced] == [(8, "full"), (16, "full")]


def test_jobs_are_what_the_options_ask_for():
    assert len(kernels.jobs(options_of("kernels"))) == 9
    assert [
        len(job)
        for job in kernels.jobs(options_of("kernels", "--partial", "--shape", "1,64,2,2,16"))
    ] == [2]
    assert len(kernels.jobs(options_of("kernels", "--sweep", "64"))) == 9
    assert len(kernels.jobs(options_of("kernels", "--sweep"))) == 27
    for words in (
        ["--sweep", "wide"],
        ["--auto", "--mask", "full"],
        ["--partial", "--mask", "full"],
    ):
        with pytest.raises(ValueError):
            kernels.jobs(options_of("kernels", *words))


def test_an_option_of_another_command_is_refused():
    for what in ("kernels", "tune", "schedules", "plans"):
        bench_command._check_owners(options_of(what))  # what is given by default belongs to all
    with pytest.raises(ValueError, match="belongs to tune"):
        bench_command._check_owners(options_of("kernels", "--config", "64,64,4,1"))
    with pytest.raises(
        ValueError, match="belongs to kernels and few and trees and layers and schedules"
    ):
        bench_command._check_owners(options_of("plans", "--rounds", "3"))


# ---------------------------------------------------------------------- measuring
def test_every_method_agrees_before_it_is_timed():
    shape = shapes.shape_of("1,24,2,1,16", "documents:9")
    (rows,) = kernels.measure([shape], torch.float32, CPU, "canon triton", 2, CEILINGS)
    names = ["split", "fused", "head_parallel"]
    assert [row["contender"] for row in rows] == [f"canon triton {name}" for name in names]
    assert all(row["agrees"] and row["backward_ms"] == [1.0] * 6 for row in rows)
    # they share one forward pass
    assert [("forward_ms" in row) for row in rows] == [True, False, False]
    assert rows[0]["forward_tflops"] == shape.operations / 1e9
    assert rows[0]["backward_tflops"] == 2.5 * shape.operations / 1e9
    assert "forward_to_peer" not in rows[0]  # there is no peer


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_method_that_disagrees_gets_no_figure(factor, monkeypatch):
    from canon import fast

    attention = fast.attention
    monkeypatch.setattr(
        fast, "attention", lambda q, k, v, mask, **kw: attention(q, k, v, mask, **kw) * factor
    )
    shape = shapes.shape_of("1,40,2,2,16", "causal")
    (rows,) = kernels.measure([shape], torch.float32, CPU, "canon triton split", 2, CEILINGS)
    assert "disagrees" in rows[0]["failed"]
    assert "backward_ms" not in rows[0]


def test_checkpointed_layers_are_judged_and_timed_for_every_kind_of_contender(monkeypatch):
    monkeypatch.setattr(layers, "LAYERS", 2)
    shape = shapes.shape_of("1,24,4,1,16", "prefix:9")
    rows = layers.measure(shape, torch.float32, CPU, 2, "eager|SDPA|auto|triton|cuda")
    names = ["canon auto", "SDPA mask", "eager", "eager float32", "canon triton", "canon cuda"]
    assert [row["contender"] for row in rows] == names
    assert all(
        row["agrees"] and row["both_ms"] == [1.0] * 6 and row["peak_mb"] is None
        for row in rows[:-1]
    )
    assert "support bfloat16" in rows[-1]["declined"]
    assert layers.tables(rows)[0].row_count == len(rows)


def test_decoding_is_judged_on_ranks_and_its_bits_compared():
    shape = shapes.shape_of("1,3,4,2,64", "full:300")
    rows, _ = process_groups.processes(
        decoding.Bench((shape,), torch.float32, "", 2, "cpu", calls=1), 2
    )
    assert [row["schedule"] for row in rows] == ["parts", "sums travel", "keys travel", "one GPU"]
    assert all(row["agrees"] and len(row["wall_ms"]) == 2 and "failed" not in row for row in rows)
    assert decoding.tables(rows)[0].row_count == len(rows)


def test_few_queries_are_judged_and_timed_beside_a_copy(monkeypatch):
    monkeypatch.setattr(few_queries, "FLUSHED", 1024)
    monkeypatch.setattr(
        few_queries, "_gpu_times", lambda run, flush, times: [run() is None or 2.0] * times
    )
    shape = shapes.shape_of("1,2,2,1,16", "full:5000")
    rows = few_queries.measure(shape, torch.bfloat16, CPU, 1, "auto")
    automatic, invariant, copy = rows
    assert automatic["contender"] == "canon auto"
    assert invariant["contender"] == "canon auto, rank invariant"
    assert all(
        row["agrees"] and row["tbs"] == row["bytes"] / 2e9 and row["of_copy"] for row in rows[:2]
    )
    assert copy["tbs"] == pytest.approx((5000 * 2 + 2 * 2 * 2) * 16 * 2 / copy["gpu_ms"][0] / 1e9)
    assert few_queries.tables(rows)[0].row_count == 3


def test_tuning_tries_what_it_is_given_and_drops_what_disagrees(monkeypatch):
    shape = shapes.shape_of("1,40,2,1,16", "causal")
    rows = tune.tune(shape, torch.float32, CPU, "", [Config(32, 16, 4, 1)])
    assert {row["kernel"] for row in rows} == {"forward", "dq", "dkdv", "fused"}
    assert all(row["tflops"] > 0 for row in rows)
    assert [row["table"] for row in rows[:2]] == [True, False]
    assert tune.tables(rows)[0].row_count == len(rows)
    launched = []

    def wrong(q, k, v, mask, scale, out, lse):
        launched.append(1)
        out.fill_(len(launched))
        lse.fill_(1)

    monkeypatch.setattr(tune.launch, "forward", wrong)
    rows = tune.tune(shape, torch.float32, CPU, "forward", [Config(32, 16, 4, 1)])
    assert "differs from the table's configuration" in rows[1]["failed"]


def test_candidates_are_read():
    assert tune.config_of("64,32,4,3") == Config(64, 32, 4, 3)
    assert tune.config_of("128, 64, 8, 2, tma, partial_columns=32") == Config(
        128, 64, 8, 2, tma=True, partial_columns=32
    )
    for text in (
        "64,32,4",
        "64,32,4,3,2",
        "64,32,4,3,fast",
        "64,32,4,3,tma=2",
        "64,32,4,3,apart,7",
        "",
    ):
        with pytest.raises(ValueError, match="expected rows,columns,warps,stages"):
            tune.config_of(text)
    assert tune.config_of("128,64,2,ping_pong", "gluon") == hopper_config.Config(
        128, 64, 2, ping_pong=True
    )
    assert tune.config_of("192,128,4,2,ping_pong", "gluon") == hopper_config.Config(
        192, 128, 4, 2, ping_pong=True
    )
    assert tune.config_of("128,128,3,1,plain", "gluon") == hopper_config.PLAIN[128, 128]
    assert tune.config_of("128,64,2,stale_maximum", "gluon") == hopper_config.Config(
        128, 64, 2, stale_maximum=True
    )
    with pytest.raises(ValueError, match="expected rows,columns,stages,buffers"):
        tune.config_of("128,64,2,tma", "gluon")


def test_the_hopper_kernels_are_tuned_alike():
    shape = shapes.shape_of("1,140,2,1,64", "causal")
    candidates = [hopper_config.Config(128, 64, 2), hopper_config.Config(128, 128, 9)]
    with simulated_kernels.simulated():
        rows = tune.tune(shape, torch.bfloat16, CPU, "forward", candidates, "gluon")
    assert [row["config"] for row in rows] == ["128,128,4,2,ping_pong", "128,64,2,1", "128,128,9,1"]
    assert rows[1]["tflops"] > 0
    assert "bytes of shared memory" in rows[2]["failed"]
    with simulated_kernels.simulated():
        _, row = tune.tune(
            shape, torch.bfloat16, CPU, "dq", [hopper_config.Config(128, 128, 4, 2)], "gluon"
        )
    assert row["failed"] == "dq does not read buffers"
    with simulated_kernels.simulated():
        _, row = tune.tune(
            shape,
            torch.bfloat16,
            CPU,
            "dq",
            [hopper_config.Config(128, 64, 2, v_stages=1)],
            "gluon",
        )
        _, other = tune.tune(
            shape,
            torch.bfloat16,
            CPU,
            "dkdv",
            [hopper_config.Config(128, 64, 2, v_stages=1)],
            "gluon",
        )
    assert row["tflops"] > 0
    assert other["failed"] == "dkdv does not read v_stages"
    with pytest.raises(ValueError, match='not torch.float32: use backend\\("triton"\\)'):
        tune.candidates(options_of("tune", "--backend", "gluon", "--dtype", "float32"))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_hopper_grid_goes_from_the_table_of_long_masks_to_that_of_short_ones_and_back(d):
    short, long = (shapes.shape_of(f"1,{n},1,1,{d}", "causal") for n in (140, 8192))
    q = torch.empty(1, 1, 1, d)
    tables = [tune.BACKENDS["gluon"].table("forward", q, q, q, q, shape) for shape in (short, long)]
    assert tables == [hopper_config.choose("forward", d, d, seen)[0] for seen in (1, 32)]
    grids = [set(tune.BACKENDS["gluon"].grid("forward", table, short)) for table in tables]
    assert set(tables) <= grids[0] == grids[1]
    assert any(c.rows == 192 for c in grids[0]) == (d < 256)
    backward = hopper_config.choose("dq", d, d)[0]
    assert backward == tune.BACKENDS["gluon"].table("dq", q, q, q, q, long)
    grid = tune.BACKENDS["gluon"].grid("dq", backward, long)
    assert {(c.rows, c.ping_pong, c.stale_maximum) for c in grid} == {(128, False, False)}
