"""The bench of new masks: without a GPU it times planning alone, for one GPU and for a rank of eight."""

import json

from canon.__main__ import main
from canon.bench import mask_time


def test_planning_is_timed_without_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "masks.json"
    words = ["bench", "masks", "--shape", "1,2048,8,2,64,documents:100", "--rounds", "2", "--record", str(path)]
    assert main(words) == 0
    assert "magi" in capsys.readouterr().out
    one, magi = json.loads(path.read_text())["results"]
    assert (one["case"], magi["case"]) == ("one GPU", f"magi, {mask_time.RANKS} ranks")
    for row in (one, magi):
        assert {"plan_ms", "pickle_ms", "load_ms"} <= row.keys()
        assert all(len(values) == 2 and min(values) > 0 for name, values in row.items() if name.endswith("_ms"))
    assert "first_ms" not in one
    assert min(magi["all_ms"]) > min(magi["dispatch_ms"])


def test_other_masks_are_refused(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "masks", "--mask", "causal"]) == 2
    assert "packed documents" in capsys.readouterr().out
