"""Peers get the same inputs and masks as Canon; one that is missing, or fails, is said to be so and stops nobody else."""

from types import SimpleNamespace

import pytest
import torch

from canon import Mask
from canon.bench import kernels, peers, shapes, timing
from canon.testing.judge import dense

CPU = torch.device("cpu")
CEILINGS = {"matmul_tflops": 800.0, "copy_tbs": 4.0}
NUMBERS = {"KEYS": "16", "LEFT": "9", "MEAN": "15", "NUMBER": "7", "TOKENS": "13", "A+B": "25+15"}
MASKS = [
    ":".join(NUMBERS.get(word, word) for word in mask.split(":")) for mask in shapes.MASKS.split(", ")
]  # every kind


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Every run takes a millisecond: CPU tests have no events to time between."""
    monkeypatch.setattr(timing, "milliseconds", lambda run, times=10, *, warm=2: [1.0 for _ in range(times)])


def names(text, only=""):
    return [contender.name for contender in peers.contenders(shapes.shape_of(text), CPU, only)]


class Dense(torch.autograd.Function):
    """Attention written out, with its gradients: what stands in for a peer's kernels here."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        ctx.save_for_backward(q, k, v)
        ctx.mask = mask
        return dense(q, k, v, torch.zeros_like(q), mask).out

    @staticmethod
    def backward(ctx, dout):
        given = dense(*ctx.saved_tensors, dout, ctx.mask)
        return given.dq, given.dk, given.dv, None


def attend_documents(q, k, v, cu_seqlens, longest):
    """Dense attention over packed documents, as varlen functions are given them."""
    ends = cu_seqlens.tolist()
    assert cu_seqlens.dtype == torch.int32
    assert longest == max(b - a for a, b in zip(ends, ends[1:], strict=False))
    return Dense.apply(*(x[None] for x in (q, k, v)), Mask.documents(ends))[0]


@pytest.fixture
def flash4(monkeypatch):
    """A module with the functions of flash-attn-4, computed densely, and the options that they were called with."""
    called = []

    def flash_attn_func(q, k, v, *, causal=False, window_size=(None, None), deterministic=False):
        called.append({"causal": causal, "window_size": window_size, "deterministic": deterministic})
        left, right = window_size
        if k.shape[1] != q.shape[1]:
            assert not causal
            assert left is right is None
            return Dense.apply(q, k, v, shapes.mask_of(q.shape[1], f"full:{k.shape[1]}")), None
        return Dense.apply(q, k, v, Mask.window(q.shape[1], left, 0 if causal else right)), None

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, deterministic
    ):
        assert causal
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k
        called.append({"deterministic": deterministic})
        return attend_documents(q, k, v, cu_seqlens_q, max_seqlen_q)  # newer versions return out alone

    module = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(peers, "_flash4_module", lambda: (module, "4.0.0b36"))
    return called


@pytest.fixture
def short_packs(monkeypatch):
    """Packs of a few tokens: the distribution that is published has documents of thousands."""
    monkeypatch.setattr(shapes, "sampled_packs", lambda n, count: [[0, i + 1, i + 9, n] for i in range(count)])


def test_who_can_do_a_mask_is_asked(flash4):
    canon = ["canon triton split", "canon triton fused", "canon triton head_parallel", "canon auto"]
    sdpa, flex, four = ["SDPA cudnn", "SDPA flash"], ["FlexAttention"], ["flash-attn-4", "flash-attn-4 deterministic"]
    dense_ones = ["SDPA mask", "eager", "eager float32"]
    found = names("1,64,4,2,16,causal")
    assert [name for name in found if not name.startswith("canon")] == sdpa + flex + dense_ones + four
    assert set(canon) <= set(found)
    assert [name for name in found if "cuda" in name] == ["canon cuda split", "canon cuda head_parallel"]
    assert not set(dense_ones) & set(names("1,65536,4,2,16,causal")), "their scores are too large"
    cuda = peers.contenders(shapes.shape_of("1,64,4,2,16,causal"), CPU, "canon", backend="cuda")
    auto = ["canon auto", "canon auto, rank invariant"]
    assert [one.name for one in cuda] == ["canon cuda split", "canon cuda head_parallel", *auto]
    assert "canon triton head_parallel" not in names("1,64,4,4,16,causal")
    assert not set(sdpa) & set(names("1,64,4,2,16,documents:9"))
    assert names("1,64,4,2,16,window:9", "flash-attn") == four
    ours = peers.contenders(shapes.shape_of("1,64,4,2,16,causal"), CPU, "", others=False)
    assert all(contender.canon for contender in ours)


@pytest.mark.parametrize("mask", MASKS)
def test_flash_attention_4_is_asked_for_the_same_mask(mask, flash4, short_packs):
    shape = shapes.shape_of("2,40,4,2,16", mask)
    (rows,) = kernels.measure([shape], torch.bfloat16, CPU, "flash-attn-4", 1, CEILINGS)
    if mask.startswith(("prefix", "blocks")):
        assert rows == [], "it has no such masks"
        return
    assert [row["contender"] for row in rows] == ["flash-attn-4", "flash-attn-4 deterministic"]
    assert all(row["agrees"] for row in rows)
    assert [("forward_ms" in row) for row in rows] == [True, False]  # the same forward pass
    assert [call["deterministic"] for call in flash4][:2] == [False, True]  # in the order of the rows


def test_a_peer_that_is_not_installed_is_recorded_and_does_not_fail(monkeypatch):
    peers._flash4_module.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    assert peers.installed()["flash-attn-4"].startswith("not installed")
    assert not any("flash-attn" in name for name in names("1,64,4,2,16,causal"))
    peers._flash4_module.cache_clear()


def test_a_peer_that_fails_says_why_and_stops_nobody(monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(peers, "_flex", broken)
    shape = shapes.shape_of("1,40,2,2,16,causal")
    (rows,) = kernels.measure([shape], torch.float32, CPU, "", 1, CEILINGS)
    told = {row["contender"]: row for row in rows}
    assert told["FlexAttention"]["failed"] == "RuntimeError: no kernel"
    assert told["canon auto"]["agrees"]
    assert [table.row_count for table in kernels.speeds(rows)] == [len(rows)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", ["4,4", "4,1"])
def test_dense_contenders_compute_the_same_mask(mask, heads, short_packs):
    shape = shapes.shape_of(f"2,40,{heads},16", mask)
    (rows,) = kernels.measure([shape], torch.bfloat16, CPU, "SDPA mask|eager", 1, CEILINGS)
    assert [row["contender"] for row in rows] == ["SDPA mask", "eager", "eager float32"]
    assert all(row["agrees"] for row in rows), rows
    ratios = [float(row["worst"].split()[-1]) for row in rows]
    assert ratios[0] <= 1
    assert ratios[2] <= 1
    assert ratios[1] <= 4, "half of what is allowed: rounded scores"


@pytest.mark.parametrize("mask", MASKS)
def test_the_mask_function_of_flex_attention_is_the_mask(mask, short_packs):
    shape = shapes.shape_of("1,40,2,2,16", mask)
    i, j = torch.arange(shape.n)[:, None], torch.arange(shape.keys)
    seen = peers.visible(shape, CPU)(None, None, i, j).expand(shape.n, shape.keys)
    assert torch.equal(seen, shape.mask.dense())
