"""`canon bench` records what it measures, and says where it cannot measure."""

import json

import pytest
import torch
from benching import CEILINGS, CPU, no_clock, options_of  # noqa: F401 (a fixture)

from canon.__main__ import main
from canon.bench import bench_command
from canon.testing import process_groups, record

pytestmark = pytest.mark.interpreted


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
