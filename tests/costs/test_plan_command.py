"""`canon plan` orders schedules, refuses those that do not fit, and reads measured links."""

import json

import pytest

from canon import Layout, Mask
from canon.__main__ import main
from canon.bench.shapes import mask_of
from canon.costs.network import ASSUMED, read_links
from canon.costs.schedule_costs import plan_of
from canon.plan_command import schedules

SMALL = ["plan", "--tokens", "8192", "--gpus", "8", "--hosts", "2", "--mask", "documents:2048"]


def planned(capsys, *words):
    """Return the plans that the command prints as JSON."""
    assert main([*SMALL, "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"] == "model"
    return found


def test_plans_of_all_schedules_and_meshes_are_sorted(capsys):
    rows = planned(capsys)["plans"]
    assert [row["both ms"] for row in rows] == sorted(row["both ms"] for row in rows)
    expected = sum(len(list(schedules(Mask.causal(64), 8 // n, n, 8))) for n in (1, 2, 4))
    assert len({(x["schedule"], x["tokens x heads"], x["options"]) for x in rows}) == expected
    assert {row["schedule"].split()[0] for row in rows} == {"ring", "strided", "magi"}
    assert all(row["forward ms"] < row["both ms"] and row["exposed ms"] >= 0 for row in rows)
    # heads divide the GPUs of a host, so rows stay inside: 8 columns would not
    assert {row["tokens x heads"] for row in rows} == {"8 x 1", "4 x 2", "2 x 4"}


def test_a_plan_beyond_the_memory_names_its_largest_tensor_and_comes_last(capsys):
    peaks = sorted(row["peak GB"] for row in planned(capsys)["plans"])
    limit = (peaks[0] + peaks[-1]) / 2
    rows = planned(capsys, "--memory", str(limit))["plans"]
    fit = [row["peak GB"] <= limit for row in rows]
    assert [not row["refused"] for row in rows] == fit == sorted(fit, reverse=True)
    (name,) = (x["refused"] for x in rows if x["options"] == "head_stride=8")
    plan = plan_of("strided_attention", mask_of(8192, "documents:2048"), Layout.zigzag(8192, 8),
                   (32, 8), (128, 128), head_stride=8)  # fmt: skip
    nbytes = plan.tensors()["dk and dv of all ranks"]
    assert nbytes == max(plan.tensors().values())
    assert name == f"{nbytes / 1e9:.1f} GB of dk and dv of all ranks"


def test_measured_links_replace_the_assumed_ones(capsys, tmp_path):
    path = tmp_path / "links.json"
    row = {"ranks": [0, 4], "one_host": False, "gb_s": 0.5, "us": 90}
    path.write_text(json.dumps({"results": [row, row | {"gb_s": 2}, row | {"gb_s": 0.7}]}))
    assert read_links(path)[:2] == ((ASSUMED.gb_s[0], 0.7), (ASSUMED.us[0], 90))
    slow = planned(capsys, "--links", str(path))
    assert slow["links"]["source"] == "measured, links.json"
    times = lambda found: {tuple(x.values())[:3]: x["both ms"] for x in found["plans"]}
    before, after = times(planned(capsys)), times(slow)
    assert all(after[name] > before[name] for name in before)
    path.write_text('{"results": [{"us": 3}]}')
    assert main([*SMALL, "--links", str(path)]) == 2
    assert "expected a record of canon bench links" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "text"), [
    (["--hosts", "3"], "--hosts 3: expected a divisor of the 8 GPUs"),
    (["--mask", "triangle"], "mask 'triangle': expected one of"),
    (["--heads", "9/2"], "9 query heads are not a multiple of 2 key heads"),
])  # fmt: skip
def test_invalid_arguments_are_refused(words, text, capsys):
    assert main([*SMALL, *words]) == 2
    assert text in capsys.readouterr().err


def test_the_table_names_its_source(capsys):
    assert main([*SMALL, "--memory", "0.01"]) == 0
    printed = capsys.readouterr().out
    assert "model; links: assumed" in printed
    assert "GB of" in printed
