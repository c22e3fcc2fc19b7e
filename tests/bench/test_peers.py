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
def short_packs(monkeypatch):
    """Packs of a few tokens: the distribution that is published has documents of thousands."""
    monkeypatch.setattr(
        shapes, "sampled_packs", lambda n, count: [[0, i + 1, i + 9, n] for i in range(count)]
    )


def test_who_can_do_a_mask_is_asked(monkeypatch):
    monkeypatch.setattr(peers, "peer_module", lambda *_: (SimpleNamespace(), "4.0.0b36"))
    sdpa = ["SDPA cudnn", "SDPA flash"]
    four = ["flash-attn-4", "flash-attn-4 deterministic"]
    found = names("1,64,4,2,16,causal")
    others = [name for name in found if not name.startswith("canon")]
    assert others == [*sdpa, "FlexAttention", "SDPA mask", *four]
    assert {f"canon triton {x}" for x in ("split", "fused", "head_parallel")} <= set(found)
    assert "SDPA mask" not in names("1,65536,4,2,16,causal"), "its scores are too large"
    auto = ["canon auto", "canon auto, rank invariant", "canon auto, repeatable"]
    cuda = ["canon cuda split", "canon cuda head_parallel", *auto]
    assert names("1,64,4,2,16,causal", "canon cuda|canon auto") == cuda
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


def test_a_dense_mask_has_grouped_heads():
    shape = shapes.shape_of("2,40,4,1,16,prefix:13")
    (row,) = kernels.measure(shape, on_cpu("SDPA mask", 1, torch.bfloat16))
    assert row["agrees"], row


@pytest.mark.parametrize("mask", MASKS)
def test_the_mask_function_of_flex_attention_is_the_mask(mask, short_packs):
    shape = shapes.shape_of(f"1,40,2,2,16,{mask}")
    i, j = torch.arange(shape.n)[:, None], torch.arange(shape.keys)
    seen = peers.visible(shape, CPU)(None, None, i, j).expand(shape.n, shape.keys)
    assert torch.equal(seen, shape.mask.dense())
