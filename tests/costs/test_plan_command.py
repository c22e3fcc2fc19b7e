"""`canon plan` orders schedules, refuses those that do not fit, and reads measured links."""

import functools
import json

import pytest
import torch
import torch.distributed as dist

from canon import Layout, plan_command, reference
from canon.__main__ import main
from canon.bench.shapes import shape_of
from canon.costs.network import ASSUMED, read_links
from canon.testing import process_groups

SMALL = ["plan", "--tokens", "8192", "--gpus", "8", "--hosts", "2"]


def test_plans_are_sorted_and_those_beyond_the_memory_come_last_with_a_reason(capsys, tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"results": [{"one_host": False, "gb_s": 0.1, "us": 90}]}))
    assert read_links(path)[0].tolist() == [ASSUMED[0].tolist(), [0.1, 90]]
    found = []
    for words in ([], ["--memory", "0.1", "--links", str(path)]):
        assert main([*SMALL, "--json", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    rows, limited = (x["plans"] for x in found)
    assert [x["both ms"] for x in rows] == sorted(x["both ms"] for x in rows)
    assert {x["mesh"] for x in rows} == {"8 x 1", "4 x 2", "2 x 4"}  # a row is in one host
    sources = [f"assumed inside a host, {x} between hosts" for x in ("assumed", "measured")]
    assert [x["links"] for x in found] == sources
    taken = {(x["call"].partition("(")[0], x["mesh"]): x["None takes"] for x in rows}
    assert taken["strided_attention", "4 x 2"] == "head_stride=4"
    assert taken["magi_attention", "8 x 1"] == "casts=1, own_keys_first=False"
    assert limited[0]["both ms"] > rows[0]["both ms"]
    fit = [x["peak GB"] <= 0.1 for x in limited]
    refused = [x["both ms"] for x in limited if x["refused"]]
    assert refused == sorted(refused)
    assert [not x["refused"] for x in limited] == fit == sorted(fit, reverse=True)
    (reason,) = {x["refused"] for x in limited if x["schedule"] == "strided zigzag 8"}
    # one and a half times its own part, and two messages of 7 shards, in float32
    nbytes = 4 * 8192 * 8 * 256 * (1.5 / 8 + 14 / 8)
    assert reason == f"{nbytes / 1e9:.1f} GB of dk and dv of all ranks"


@pytest.mark.parametrize(("words", "text"), [
    (["--hosts", "3"], "--hosts 3: expected a divisor of the 8 GPUs"),
    (["--hosts", "0"], "--hosts 0: expected a divisor of the 8 GPUs"),
    (["--tokens", "1M"], "'1M' is no whole number: write it out, as 1048576"),
    (["--heads", "9/2"], "with h a multiple of g"),
    (["--links", __file__], "expected a record of canon bench links"),
    (["--links", "absent.json"], "no absent.json: run canon bench links first, or leave --links"),
    *((["--memory", x], f"{x}: expected a number of GB above 0") for x in ("nan", "-1", "80GB")),
])  # fmt: skip
def test_invalid_arguments_are_refused(words, text, capsys):
    assert main([*SMALL, *words]) == 2
    assert text in capsys.readouterr().err


def test_a_narrow_terminal_cuts_no_cell(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    assert " 12.58 " in printed
    assert "…" not in printed


@pytest.mark.parametrize("gb_s", [0, -50, float("nan"), float("inf")])
def test_links_that_carry_nothing_are_refused(gb_s, tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"results": [{"one_host": True, "gb_s": gb_s, "us": 9}]}))
    with pytest.raises(ValueError, match="expected a record of canon bench links.*above 0"):
        read_links(path)


@pytest.mark.parametrize("mask", ["causal", "documents:128"])
def test_the_recipe_of_each_plan_runs_as_printed(capsys, mask):
    words = ["plan", "--tokens", "512", "--gpus", "4", "--mask", mask]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert printed.endswith(plan_command._recipe(plans[0], untested=False) + "\n")
    kinds = {(x["mesh"], x["layout"].partition("(")[0]): x for x in reversed(plans)}
    assert len(kinds) >= 6
    for plan in kinds.values():
        recipe = plan_command._recipe(plan, untested=False)
        process_groups.threads(functools.partial(run_recipe, recipe, mask), 4)


def run_recipe(recipe, mask):
    """Run a recipe on CPU ranks, and compare its result with attention on one rank."""
    mask = shape_of(f"1,512,32,8,128,{mask}").mask
    x = torch.randn(1, 512, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    names = {"mask": mask, "attn": reference, "Layout": Layout}
    names["init_device_mesh"] = dist.init_device_mesh
    setup, call = recipe.replace('"cuda"', '"cpu"').rsplit("\n", 1)
    exec(setup, names)
    names |= dict.fromkeys("qkv", names["layout"].shard(x, dist.get_rank()))
    exec(call, names)
    expected = names["layout"].shard(reference.attention(x, x, x, mask), dist.get_rank())
    torch.testing.assert_close(names["out"], expected)


@pytest.mark.parametrize("kinds", [[], [True]])
def test_a_model_of_several_hosts_states_that_no_link_was_measured(kinds, capsys, tmp_path):
    path = tmp_path / "links.json"
    rows = [{"one_host": kind, "gb_s": 90, "us": 9} for kind in kinds]
    path.write_text(json.dumps({"results": rows}))
    assert main([*SMALL, "--links", str(path)]) == 0
    printed = capsys.readouterr().out
    # each function on three meshes
    assert sum("_attention(" in x for x in printed.splitlines() if x.startswith("│")) == 9
    assert "by a model, no link between hosts was measured" in printed
    assert main([*SMALL, "--memory", "0.001"]) == 0
    assert "no plan fits" in capsys.readouterr().out
