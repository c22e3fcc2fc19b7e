"""`canon bench trees`: peers of a shared trunk compute the tree, or are absent, and Canon's speed
is relative to theirs.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from benching import CPU, no_clock  # noqa: F401 (a fixture)

from canon import Mask, reference
from canon.__main__ import main
from canon.bench import bench_command, packed_trees, peers, shapes
from canon.testing import process_groups

SHAPE = "1,40,2,1,16,tree:16+3x8"
FLASH = ["flash-attn-4 separate", "flash-attn-4 gathered", "flash-attn-4 gathered, summed"]


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal, max_seqlen_q, max_seqlen_k):
    """Compute what flash-attn-4 does: the last query of a sequence sees all its keys."""
    assert causal
    parts, ends = (
        [],
        [list(zip(x, x[1:], strict=False)) for x in (cu_seqlens_q.tolist(), cu_seqlens_k.tolist())],
    )
    for (start, stop), (first, last) in zip(*ends, strict=True):
        queries, keys = stop - start, last - first
        assert queries <= max_seqlen_q
        assert keys <= max_seqlen_k
        mask = Mask.causal(keys).crop(range(keys - queries, keys), range(keys))
        parts.append(reference.attention(q[start:stop], k[first:last], v[first:last], mask))
    return torch.cat(parts), None


@pytest.fixture
def calls(monkeypatch):
    """Pretend that flash-attn-4 is installed, and that torch compiles a dense FlexAttention. Return
    the calls.
    """
    calls = []

    def flash(*tensors, **options):
        calls.append(tuple(len(x) for x in tensors))
        return varlen(*tensors, **options)

    def flex(shape, device, kernel_options=None):
        if kernel_options:
            raise RuntimeError("no such kernel")
        return peers._masked_sdpa(shape, device)

    monkeypatch.setattr(
        peers, "flash4_module", lambda: (SimpleNamespace(flash_attn_varlen_func=flash), "4.0.0b36")
    )
    monkeypatch.setattr(peers, "flex", flex)
    return calls


def measured(only=""):
    rows = packed_trees.measure(shapes.shape_of(SHAPE), torch.bfloat16, CPU, 1, only)
    return {row["contender"]: row for row in rows}


def test_peers_compute_the_results_of_the_tree(calls):
    rows = measured()
    assert rows.pop("FlexAttention FLASH")["failed"] == "RuntimeError: no such kernel"
    assert list(rows) == ["canon auto", "FlexAttention", *FLASH]
    assert all(row["agrees"] for row in rows.values()), rows
    assert calls[0] == (3 * 24,) * 3, "three sequences of 24 tokens"
    assert calls[-1] == (40, 16 + 3 * 24, 16 + 3 * 24), "each query once"


@pytest.mark.parametrize("fault", ["a copy is lost", "keys of another branch"])
def test_a_wrong_sum_or_path_has_no_figure(calls, fault, monkeypatch):
    paths, added = packed_trees.Star.paths, packed_trees.added
    if fault == "a copy is lost":
        monkeypatch.setattr(packed_trees, "added", lambda x, *more: added(x, *more) - x[:, :40])
        wrong = {FLASH[0], FLASH[2]}
    else:
        monkeypatch.setattr(packed_trees.Star, "paths", lambda star: paths(star).roll(1, 0))
        wrong = {*FLASH}
    rows = measured(only="flash-attn")
    assert {name for name, row in rows.items() if "failed" in row} == wrong
    assert all("both_ms" not in rows[name] for name in wrong)


def test_speeds_are_relative_to_canon_by_both_clocks():
    canon = {
        "contender": "canon auto",
        "canon": True,
        "both_ms": [2.0, 2.0, 9.0],
        "both_wall_ms": [4.0],
    }
    peer = {"contender": "peer", "canon": False, "both_ms": [7.0], "both_wall_ms": [6.0]}
    shape = shapes.shape_of(SHAPE)
    packed_trees.add_ratios([canon, peer, {"contender": "absent", "canon": False}], shape)
    assert (peer["canon_by_both"], peer["canon_by_both_wall"], canon["canon_by_both"]) == (
        3.5,
        1.5,
        1.0,
    )
    assert canon["both_tflops"] == 3.5 * 4 * 2 * 16 * (40 * 41 / 2 - 3 * 64) / 2e9


def test_the_command_reports_absent_peers(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process_groups, "kernel_gpus", lambda: 1)
    monkeypatch.setattr(bench_command, "_device", lambda: CPU)
    monkeypatch.setattr(bench_command.record, "machine", dict)
    monkeypatch.setattr(peers, "flash4_module", lambda: (None, "not installed (no module)"))
    words = [
        "bench",
        "trees",
        "--only",
        "canon|separate",
        "--rounds",
        "1",
        "--record",
        str(tmp_path / "trees.json"),
    ]
    assert main([*words, "--shape", "1,40,4,2,16,causal"]) == 2
    assert "tree:TRUNK+BRANCHESxTOKENS" in capsys.readouterr().out
    assert main([*words, "--shape", SHAPE]) == 0
    assert "canon auto" in capsys.readouterr().out
    kept = json.loads((tmp_path / "trees.json").read_text())
    assert kept["peers"] == {"flash-attn-4": "not installed (no module)"}
    assert [row.get("declined") for row in kept["results"]] == [
        None,
        "ModuleNotFoundError: not installed (no module)",
    ]
    assert kept["command"].startswith(f"canon bench trees --shape {SHAPE} --only")
