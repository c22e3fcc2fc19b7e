"""`canon bench` reads its shapes, measures nothing that disagrees, and says so where it cannot measure."""

import json

import pytest
import torch

from canon import Mask
from canon.__main__ import main
from canon.fast.kernels.triton.config import Config
from canon.testing import bench, schedules, tune, world

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Runs everything once: CPU tests have no events to time between."""

    def take_turns(runs, rounds):
        for run, times in runs:
            run()
            times += [1.0] * rounds

    monkeypatch.setattr(bench, "_take_turns", take_turns)
    monkeypatch.setattr(tune, "milliseconds", lambda run: [1.0])


def test_shapes_and_masks_are_read():
    shape = bench.shape_of("2,64,4,2,16", "window:8")
    assert (shape.b, shape.n, shape.h, shape.g, shape.d) == (2, 64, 4, 2, 16)
    assert shape.mask == Mask.window(64, 8, 0)
    assert shape.operations == 4 * 2 * 4 * 16 * shape.mask.area
    for shape, mask in (
        ("1,2,3", "causal"),
        ("1,64,4,2,16", "triangle"),
        ("1,64,4,2,16", "window"),
        ("x,1,1,1,1", "full"),
    ):
        with pytest.raises(ValueError, match="expected"):
            bench.shape_of(shape, mask)


def test_documents_are_the_same_everywhere_and_fill_the_sequence():
    ends = bench.documents(5000, 100)
    assert ends == bench.documents(5000, 100)
    assert ends[0] == 0
    assert ends[-1] == 5000
    assert all(a < b for a, b in zip(ends, ends[1:], strict=False))
    assert 25 < len(ends) < 100


def test_every_method_agrees_before_it_is_timed():
    rows = bench.measure(bench.shape_of("1,40,4,2,16", "documents:15"), torch.float32, CPU, "canon", 2)
    assert [row["contender"] for row in rows] == ["canon split", "canon fused", "canon head_parallel"]
    assert all(row["agrees"] and row["backward_ms"] == [1.0, 1.0] for row in rows)
    assert [("forward_ms" in row) for row in rows] == [True, False, False]  # they share one forward pass


def test_a_method_that_disagrees_gets_no_figure(monkeypatch):
    from canon import fast

    attention = fast.attention
    monkeypatch.setattr(fast, "attention", lambda q, k, v, mask, **kw: attention(q, k, v, mask, **kw) * 1.01)
    rows = bench.measure(bench.shape_of("1,40,2,2,16", "causal"), torch.float32, CPU, "canon split", 2)
    assert "disagrees" in rows[0]["failed"]
    assert "backward_ms" not in rows[0]


def test_tuning_tries_what_it_is_given_and_drops_what_disagrees(monkeypatch):
    shape = bench.shape_of("1,40,2,1,16", "causal")
    rows = tune.tune(shape, torch.float32, CPU, "", [Config(32, 16, 4, 1)])
    assert {row["kernel"] for row in rows} == {"forward", "dq", "dkdv", "fused"}
    assert all(row["tflops"] > 0 for row in rows)
    assert [row["table"] for row in rows[:2]] == [True, False]
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
    for text in ("64,32,4", "64,32,4,3,2", "64,32,4,3,fast", "64,32,4,3,tma=2", "64,32,4,3,apart,7", ""):
        with pytest.raises(ValueError, match="expected rows,columns,warps,stages"):
            tune.config_of(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "kernels"]) == 2
    assert "there is none here" in capsys.readouterr().out


def test_plans_are_reported_and_recorded(tmp_path):
    path = tmp_path / "plans.json"
    assert main(["bench", "plans", "--packs", "1", "--ranks", "8", "--record", str(path)]) == 0
    rows = {row["kind"]: row for row in json.loads(path.read_text())["results"]}
    assert set(rows) == {"packs", "one causal document", "a window of 1024", "1000 documents"}
    assert rows["one causal document"]["volume"] == [0.75]
    assert all(len(row["ms"]) == 1 for row in rows.values())


def test_schedules_agree_before_they_are_timed(monkeypatch):
    monkeypatch.setattr(schedules, "_timed", lambda run, device: (run(), 1.0)[1])
    monkeypatch.setattr(schedules, "_exposed", lambda run, device: 0.0)
    program = schedules.Bench((("1,64,2,2,16", "documents:20"),), torch.float32, "", 1, "cpu")
    rows, others = world.threads(program, 2)
    assert [row["schedule"] for row in rows] == [row["schedule"] for row in others]
    names = [row["schedule"] for row in rows]
    assert {"ring zigzag", "strided zigzag 2, small ends", "magi, 2 stages", "one GPU"} <= set(names)
    assert all(row["agrees"] for row in rows if row["schedule"] != "one GPU")
    assert all(row["forward_tflops"] > 0 and row["both_ms"] == [1.0] for row in rows)
