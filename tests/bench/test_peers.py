"""Peers get the same inputs and masks as Canon; one that is missing, or fails, is said to be so and
stops nobody else.
"""

from types import SimpleNamespace

import pytest
import torch
from benching import CPU, no_clock, on_cpu  # noqa: F401 (a fixture)

from canon.bench import kernels, peers, shapes

NUMBERS = {
    "KEYS": "16",
    "LEFT": "9",
    "MEAN": "15",
    "NUMBER": "7",
    "TOKENS": "13",
    "A+BxC": "16+2x12",
}
MASKS = [
    ":".join(NUMBERS.get(word, word) for word in mask.split(":"))
    for mask in shapes.MASKS.split(", ")
]  # every kind


def names(text, only=""):
    return [contender.name for contender in peers.contenders(shapes.shape_of(text), on_cpu(only))]


@pytest.fixture
def flash4(monkeypatch):
    """Pretend that flash-attn-4 is installed."""
    monkeypatch.setattr(peers, "peer_module", lambda *_: (SimpleNamespace(), "4.0.0b36"))


@pytest.fixture
def short_packs(monkeypatch):
    """Packs of a few tokens: the distribution that is published has documents of thousands."""
    monkeypatch.setattr(
        shapes, "sampled_packs", lambda n, count: [[0, i + 1, i + 9, n] for i in range(count)]
    )


@pytest.mark.usefixtures("flash4")
def test_who_can_do_a_mask_is_asked():
    canon = ["canon triton split", "canon triton fused", "canon triton head_parallel", "canon auto"]
    sdpa = ["SDPA cudnn", "SDPA flash"]
    flex = ["FlexAttention"]
    four = ["flash-attn-4", "flash-attn-4 deterministic"]
    dense_ones = ["SDPA mask", "eager", "eager float32"]
    found = names("1,64,4,2,16,causal")
    assert [
        name for name in found if not name.startswith("canon")
    ] == sdpa + flex + dense_ones + four
    assert set(canon) <= set(found)
    assert [name for name in found if "cuda" in name] == [
        "canon cuda split",
        "canon cuda head_parallel",
    ]
    assert not set(dense_ones) & set(names("1,65536,4,2,16,causal")), "their scores are too large"
    cuda = peers.contenders(shapes.shape_of("1,64,4,2,16,causal"), on_cpu("canon cuda|canon auto"))
    auto = ["canon auto", "canon auto, rank invariant", "canon auto, repeatable"]
    assert [one.name for one in cuda] == ["canon cuda split", "canon cuda head_parallel", *auto]
    assert "canon triton head_parallel" not in names("1,64,4,4,16,causal")
    assert not set(sdpa) & set(names("1,64,4,2,16,documents:9"))
    assert names("1,64,4,2,16,window:9", "flash-attn") == four


def test_a_peer_that_is_not_installed_is_recorded_and_does_not_fail(monkeypatch):
    peers.peer_module.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    assert peers.installed()["flash-attn-4"].startswith("not installed")
    assert not any("flash-attn" in name for name in names("1,64,4,2,16,causal"))
    peers.peer_module.cache_clear()


def test_a_peer_that_fails_says_why_and_stops_nobody(monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(peers, "flex", broken)
    shape = shapes.shape_of("1,40,2,2,16,causal")
    rows = kernels.measure(shape, on_cpu(rounds=1))
    told = {row["contender"]: row for row in rows}
    assert told["FlexAttention"]["failed"] == "RuntimeError: no kernel"
    assert told["canon auto"]["agrees"]
    assert [table.row_count for table in kernels.tables(rows)] == [len(rows)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", ["4,4", "4,1"])
def test_dense_contenders_compute_the_same_mask(mask, heads, short_packs):
    shape = shapes.shape_of(f"2,40,{heads},16,{mask}")
    rows = kernels.measure(shape, on_cpu("SDPA mask|eager", 1, torch.bfloat16))
    assert [row["contender"] for row in rows] == ["SDPA mask", "eager", "eager float32"]
    assert all(row["agrees"] for row in rows), rows
    ratios = [float(row["worst"].split()[-1]) for row in rows]
    assert ratios[0] <= 1
    assert ratios[2] <= 1
    assert ratios[1] <= 4, "half of what is allowed: rounded scores"


@pytest.mark.parametrize("mask", MASKS)
def test_the_mask_function_of_flex_attention_is_the_mask(mask, short_packs):
    shape = shapes.shape_of(f"1,40,2,2,16,{mask}")
    i, j = torch.arange(shape.n)[:, None], torch.arange(shape.keys)
    seen = peers.visible(shape, CPU)(None, None, i, j).expand(shape.n, shape.keys)
    assert torch.equal(seen, shape.mask.dense())
