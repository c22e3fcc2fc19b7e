"""`canon plan` orders schedules, refuses those that do not fit, and reads measured links."""

import json

import pytest

from canon.__main__ import main
from canon.costs.network import ASSUMED, read_links

SMALL = ["plan", "--tokens", "8192", "--gpus", "8", "--hosts", "2"]


def test_plans_are_sorted_and_those_beyond_the_memory_come_last_with_a_reason(capsys, tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"results": [{"one_host": False, "gb_s": 0.1, "us": 90}]}))
    assert read_links(path).tolist() == [ASSUMED[0].tolist(), [0.1, 90]]
    found = []
    for words in ([], ["--memory", "0.1", "--links", str(path)]):
        assert main([*SMALL, "--json", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    rows, limited = (x["plans"] for x in found)
    assert [x["both ms"] for x in rows] == sorted(x["both ms"] for x in rows)
    assert {x["mesh"] for x in rows} == {"8 x 1", "4 x 2", "2 x 4"}  # a row is in one host
    assert [x["links"] for x in found] == ["assumed", f"measured, {path}"]
    assert limited[0]["both ms"] > rows[0]["both ms"]
    fit = [x["peak GB"] <= 0.1 for x in limited]
    assert [not x["refused"] for x in limited] == fit == sorted(fit, reverse=True)
    (reason,) = {x["refused"] for x in limited if x["schedule"] == "strided zigzag 8"}
    # one and a half times its own part, and two messages of 7 shards, in float32
    nbytes = 4 * 8192 * 8 * 256 * (1.5 / 8 + 14 / 8)
    assert reason == f"{nbytes / 1e9:.1f} GB of dk and dv of all ranks"


@pytest.mark.parametrize(("words", "text"), [
    (["--hosts", "3"], "--hosts 3: expected a divisor of the 8 GPUs"),
    (["--hosts", "0"], "--hosts 0: expected a divisor of the 8 GPUs"),
    (["--heads", "9/2"], "with h a multiple of g"),
    (["--links", __file__], "expected a record of canon bench links"),
])  # fmt: skip
def test_invalid_arguments_are_refused(words, text, capsys):
    assert main([*SMALL, *words]) == 2
    assert text in capsys.readouterr().err
