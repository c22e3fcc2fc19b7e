"""`canon bench` computes speeds, ratios and verdicts, and records them, and says where it cannot
measure.
"""

import json

import pytest
import torch
from benching import CEILINGS, CPU, no_clock, options_of  # noqa: F401 (a fixture)

from canon.__main__ import main
from canon.bench import bench_command, roofline, shapes
from canon.testing import process_groups, record

pytestmark = pytest.mark.interpreted


# ---------------------------------------------------------------------- what speeds are worth
def test_a_roofline_is_the_lower_of_products_and_traffic():
    shape = shapes.shape_of("2,1000,4,2,16,full")
    # q, out; k, v; lse
    moved = 2 * (2 * 1000 * 4 * 16 * 2) + 2 * (2 * 1000 * 2 * 16 * 2) + 4 * 2 * 1000 * 4
    assert roofline.compulsory_bytes(shape, 2, "forward") == moved
    # lse is read once
    assert roofline.compulsory_bytes(shape, 2, "backward") == 2 * moved - 4 * 2 * 1000 * 4
    ceilings = {"matmul_tflops": 800.0, "copy_tbs": 1.0}
    assert roofline.roofline(shape, 2, "forward", ceilings) == pytest.approx(
        shape.operations / moved
    )
    assert roofline.roofline(shape, 2, "forward", {"matmul_tflops": 1.0, "copy_tbs": 1.0}) == 1.0


def made_up(contender, forward=None, backward=None, shape="1,1000,4,2,16,full"):
    shape = shapes.shape_of(shape)
    row = {
        "contender": contender,
        "forward_of": contender.rpartition(" ")[0] or contender,
        "shape": str(shape),
    }
    row |= {
        "canon": contender.startswith("canon"),
        "n": shape.n,
        "d": shape.d,
        "mask": shape.mask_name,
    }
    row |= {f"{name}_ms": [ms] for name, ms in (("forward", forward), ("backward", backward)) if ms}
    return row


def test_ratios_are_to_the_fastest_peer_of_each_pass():
    rows = [
        made_up("canon triton split", 2.0, 4.0),
        made_up("slow", 8.0, 8.0),
        made_up("fast", 1.0, 16.0),
    ]
    roofline.add_speeds(
        [*rows, made_up("absent")], shapes.shape_of("1,1000,4,2,16,full"), 2, CEILINGS
    )
    assert [row["forward_to_peer"] for row in rows] == pytest.approx([0.5, 0.125, 1.0])
    assert [row["backward_to_peer"] for row in rows] == pytest.approx([2.0, 1.0, 0.5])
    assert rows[0]["forward_roofline"] == pytest.approx(
        rows[0]["forward_tflops"]
        / roofline.roofline(shapes.shape_of("1,1000,4,2,16,full"), 2, "forward", CEILINGS)
    )


# ---------------------------------------------------------------------- the command
@pytest.mark.parametrize("what", ["kernels", "schedules"])
def test_without_a_gpu_it_says_so(what, monkeypatch, capsys):
    for there, told in ((False, "there is none here"), (True, "unset TRITON_INTERPRET")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert main(["bench", what]) == 2
        assert told in capsys.readouterr().out


def test_the_command_measures_shows_and_keeps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process_groups, "kernel_gpus", lambda: 1)
    monkeypatch.setattr(bench_command, "_device", lambda several: CPU)
    monkeypatch.setattr(record, "machine", lambda: {"gpus": ["none"]})
    path = tmp_path / "kernels.json"
    words = [
        "--shape",
        "1,40,2,2,16,window:9",
        "--only",
        "canon",
        "--dtype",
        "float32",
        "--rounds",
        "1",
    ]
    assert main(["bench", "kernels", *words, "--record", str(path)]) == 0
    kept = json.loads(path.read_text())
    given = options_of(*kept["command"].split()[2:])
    assert given == options_of("kernels", *words)  # the record's command asks for the same again
    assert "packs" not in kept["command"]
    assert kept["ceilings"] == CEILINGS
    assert [row["contender"] for row in kept["results"]][-3:] == [
        "canon auto",
        "canon auto, rank invariant",
        "canon auto, repeatable",
    ]
    assert all(row["agrees"] for row in kept["results"] if not row.get("declined"))
    declined = {row["contender"] for row in kept["results"] if row.get("declined")}
    assert all("gluon" in name or "cuda" in name for name in declined), "these have no float32"
    assert "canon auto" in capsys.readouterr().out
