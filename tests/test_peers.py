"""Peers get the same inputs and masks as Canon; one that is missing, or fails, is said to be so and stops nobody else."""

import functools
import json
import pickle
from argparse import ArgumentParser
from types import SimpleNamespace

import pytest
import torch

from canon import fast
from canon.fast import device as fast_device
from canon.testing import bench, kernels, peers, schedule_peers, schedules, shapes, timing, world
from canon.testing.judge import dense

CPU = torch.device("cpu")
CEILINGS = {"matmul_tflops": 800.0, "copy_tbs": 4.0}


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


@pytest.fixture
def flash4(monkeypatch):
    """A module with the functions of flash-attn-4, computed densely, and the options that they were called with."""
    called = []

    def flash_attn_func(q, k, v, *, causal=False, window_size=(None, None), deterministic=False):
        called.append({"causal": causal, "window_size": window_size, "deterministic": deterministic})
        left, right = window_size
        mask = shapes.Mask.window(q.shape[1], left, 0 if causal else right)
        return Dense.apply(q, k, v, mask), None

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, deterministic
    ):
        ends = cu_seqlens_q.tolist()
        assert cu_seqlens_q.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k == max(b - a for a, b in zip(ends, ends[1:], strict=False))
        called.append({"deterministic": deterministic})
        return Dense.apply(q, k, v, shapes.Mask.documents(ends, causal=causal))  # newer versions return out alone

    module = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(peers, "_flash4_module", lambda: (module, "4.0.0b36"))
    return called


def test_who_can_do_a_mask_is_asked(flash4):
    canon = ["canon triton split", "canon triton fused", "canon triton head_parallel", "canon auto"]
    sdpa, flex, four = ["SDPA cudnn", "SDPA flash"], ["FlexAttention"], ["flash-attn-4", "flash-attn-4 deterministic"]
    if fast_device.AVAILABLE == ("triton",):
        assert names("1,64,4,2,16,causal") == canon + sdpa + flex + four
    assert set(canon) <= set(names("1,64,4,2,16,causal"))
    assert "canon triton head_parallel" not in names("1,64,4,4,16,causal")
    assert not set(sdpa) & set(names("1,64,4,2,16,documents:9"))
    assert names("1,64,4,2,16,window:9", "flash-attn") == four
    ours = peers.contenders(shapes.shape_of("1,64,4,2,16,causal"), CPU, "", others=False)
    assert all(contender.canon for contender in ours)


@pytest.mark.parametrize("mask", ["causal", "full", "window:9", "documents:15"])
def test_flash_attention_4_is_asked_for_the_same_mask(mask, flash4):
    shape = shapes.shape_of("2,40,4,2,16", mask)
    (rows,) = kernels.measure([shape], torch.bfloat16, CPU, "flash-attn-4", 1, CEILINGS)
    assert [row["contender"] for row in rows] == ["flash-attn-4", "flash-attn-4 deterministic"]
    assert all(row["agrees"] for row in rows)
    assert [("forward_ms" in row) for row in rows] == [True, False]  # the same forward pass
    assert [call["deterministic"] for call in flash4] == [False, True]


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


def test_sdpa_is_asked_for_the_same_mask():
    for mask in ("causal", "full"):
        shape = shapes.shape_of("2,40,4,4,16", mask)
        (rows,) = kernels.measure([shape], torch.float32, CPU, "SDPA flash", 1, CEILINGS)
        assert rows[0]["agrees"]
        assert rows[0]["forward_to_peer"] == 1.0


@pytest.mark.parametrize("mask", ["causal", "full", "full:16", "window:9", "documents:15"])
def test_flex_attention_sees_the_same_mask(mask):
    shape = shapes.shape_of("1,40,2,2,16", mask)
    i, j = torch.arange(shape.n)[:, None], torch.arange(shape.keys)
    seen = peers.visible(shape, CPU)(None, None, i, j).expand(shape.n, shape.keys)
    assert torch.equal(seen, shape.mask.dense())


def test_both_passes_are_computed_by_the_family_that_is_asked_for(monkeypatch):
    asked = []
    attention = fast.attention

    class Asked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            asked.append(("forward", fast_device._chosen.get()))
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            asked.append(("backward", fast_device._chosen.get()))
            return dx

    monkeypatch.setattr(fast_device, "FAMILIES", ("triton", "other"))
    monkeypatch.setattr(fast_device, "AVAILABLE", ("other",))
    monkeypatch.setattr(fast, "attention", lambda q, *_, **__: Asked.apply(attention(q, *_, **__)))
    shape = shapes.shape_of("1,40,2,2,16,causal")
    kernels.measure([shape], torch.float32, CPU, "canon other split", 1, CEILINGS)
    assert set(asked) == {("forward", "other"), ("backward", "other")}


def test_a_family_that_declines_a_shape_is_noted_and_does_not_fail(monkeypatch):
    def backend(name):
        raise NotImplementedError(f"{name} has no kernel of width 16")

    monkeypatch.setattr(fast_device, "AVAILABLE", ("other",))
    monkeypatch.setattr(fast, "backend", backend)
    shape = shapes.shape_of("1,40,2,2,16,causal")
    (rows,) = kernels.measure([shape], torch.float32, CPU, "canon", 1, CEILINGS)
    assert [row["contender"] for row in rows] == ["canon other split", "canon other fused", "canon auto"]
    assert all("width 16" in row["declined"] and "failed" not in row for row in rows[:2])
    assert rows[2]["agrees"]
    monkeypatch.setattr(fast, "attention", lambda *_, **__: backend("any"))
    (rows,) = kernels.measure([shape], torch.float32, CPU, "canon auto", 1, CEILINGS)
    assert "failed" in rows[0]  # what a user asks for must work


# ---------------------------------------------------------------------- schedules
SHAPE = shapes.shape_of("1,64,2,2,16", "documents:20")
SHORT = shapes.shape_of("1,8,2,2,16,causal")


def test_schedules_agree_before_they_are_timed(monkeypatch):
    monkeypatch.setattr(schedules, "_timed", lambda run, device: (run(), (1.0, 0.5))[1])
    monkeypatch.setattr(schedules, "_exposed", lambda run, device: 0.0)
    program = schedules.Bench((SHAPE,), torch.float32, "", 1, "cpu")
    rows, others = world.threads(program, 2)
    assert [row["schedule"] for row in rows] == [row["schedule"] for row in others]
    found = {row["schedule"] for row in rows}
    assert {"ring zigzag", "strided zigzag 2, small ends", "magi, 2 stages", "one GPU"} <= found
    assert all(row["agrees"] for row in rows if row["schedule"] != "one GPU")
    assert all(
        row["forward_tflops"] > 0 and row["both_ms"] == [1.0] and row["both_launches_ms"] == [0.5] for row in rows
    )
    assert not any(row["peer"] for row in rows)
    assert schedules.table(rows).row_count == len(rows)


def test_what_was_measured_is_kept_after_each_shape(monkeypatch, tmp_path):
    """By rank 0, in the record: where a later shape fails, or the command is ended, it stands there."""
    monkeypatch.setattr(schedules, "_timed", lambda run, device: (run(), (1.0, 0.5))[1])
    monkeypatch.setattr(schedules, "_exposed", lambda run, device: 0.0)
    parser, path, told = ArgumentParser(), tmp_path / "record.json", []
    bench.add_arguments(parser)
    options = parser.parse_args(["schedules", "--record", str(path)])

    def keep(rows):
        pickle.loads(pickle.dumps(functools.partial(bench._keep, options)))(rows)  # as it comes to a rank
        told.append([row["shape"] for row in json.loads(path.read_text())["results"]])

    program = schedules.Bench((SHAPE, SHORT), torch.float32, "ring", 1, "cpu", keep=keep)
    rows, _ = world.threads(program, 2)
    assert told == [[str(SHAPE)] * 3, [row["shape"] for row in rows]]
    assert [row["shape"] for row in rows] == [str(SHAPE)] * 3 + [str(SHORT)] * 3


def test_exposed_is_what_no_kernel_covers():
    waiting, meeting = (0.0, 90.0, "at::cuda::spin_kernel(long)"), (92.0, 100.0, "ncclDevKernel_AllReduce")
    message = (100.0, 140.0, "ncclDevKernel_SendRecv")
    kernels = [(110.0, 120.0, "forward_kernel"), (115.0, 130.0, "merge_kernel"), (150.0, 160.0, "dq_kernel")]
    copied = (160.0, 165.0, "Memcpy DtoD")
    assert schedules.uncovered([message, waiting, copied, *kernels, meeting]) == 10 + 20 + 5
    assert schedules.uncovered(kernels) == 20
    assert schedules.uncovered([]) == 0


def test_what_fails_on_one_rank_is_left_out_on_all():
    each = schedule_peers.Schedule("unlucky", schedules.Layout.zigzag(64, 2), attend=lambda q, k, v: q)

    def attempt():
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("out of luck")
        return {"agrees": True}

    told = world.threads(lambda: schedules._tried(each, attempt, None), 2)
    assert told == [{"failed": "another rank failed"}, {"failed": "RuntimeError: out of luck"}]


def test_torch_context_parallel_is_for_causal_sequences_that_it_can_balance():
    def found(text, ranks, only=""):
        return [each.name for each in schedule_peers.torch_schedules(shapes.shape_of(text), ranks, only, "cpu")]

    ways = ["torch cudnn allgather", "torch cudnn alltoall", "torch flash allgather", "torch flash alltoall"]
    assert found("1,64,4,2,16,causal", 4) == ways
    assert found("1,64,4,2,16,causal", 4, "flash") == ways[2:]
    assert found("1,64,4,2,16,causal", 4, "flash allgather|cudnn") == ways[:3]
    assert found("1,60,4,2,16,causal", 4) == found("1,64,4,2,16,full", 4) == found("1,64,4,2,16,causal", 1) == []


def test_torch_context_parallel_that_cannot_run_is_said_to_on_every_rank():
    """It has no kernels for CPUs: the context opens and closes on both ranks, and every way of it is a row that failed."""
    shape = shapes.shape_of("1,64,2,1,16,causal")
    rows, others = world.processes(schedules.Bench((shape,), torch.float32, "", 1, "cpu", peers=True), 2)
    assert [row["schedule"] for row in rows] == [row["schedule"] for row in others]
    assert len(rows) == 4
    assert all("failed" in row and row["peer"] for row in rows + others)


def flash_forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """What torch's kernel for GPUs gives, computed densely."""
    n, m = q.shape[2], k.shape[2]
    mask = shapes.Mask.causal(n) if is_causal else shapes.mask_of(n, f"full:{m}")
    got = dense(*(x.transpose(1, 2) for x in (q, k, v, q)), mask)
    number = torch.empty((), dtype=torch.int64)
    return got.out.transpose(1, 2), got.lse, None, None, n, m, torch.zeros(2, dtype=torch.int64), number, number[None]


def flash_backward(dout, q, k, v, out, lse, _, __, ___, ____, dropout_p, is_causal, *seeds, scale=None):
    """With the lse of all keys, of which k and v may be a part."""
    scale, group = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    p = torch.exp(scale * q @ k.mT - lse[..., None])
    p = p.tril() if is_causal else p
    ds = scale * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return ds @ k, *(x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q, p.mT @ dout))


def scaled_dot_product_attention(q, k, v, *, is_causal, enable_gqa):
    """torch's, made to take its kernel for GPUs."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def on_stand_ins():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash_forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    schedules._timed = lambda run, device: (run(), (1.0, 0.5))[1]
    schedules._exposed = lambda run, device: (run(), 0.0)[1]
    shape = shapes.shape_of("2,64,4,2,16,causal")
    return schedules.measure(shape, torch.float32, CPU, "flash", 1, peers=True)


def test_torch_context_parallel_gets_the_same_tokens():
    """Shards, rotation and both passes are torch's own, over dense stand-ins for its kernels; each rank is a process."""
    for rows in world.processes(on_stand_ins, 2):
        assert [row["schedule"] for row in rows] == ["torch flash allgather", "torch flash alltoall"]
        assert all(row["agrees"] and row["both_ms"] == [1.0] and row["both_launches_ms"] == [0.5] for row in rows)


def test_a_world_of_peers_that_ends_badly_is_a_row():
    def late():
        raise TimeoutError("after 150 s rank 1 had not finished")

    (row,) = schedules.peer_rows(late)
    assert "rank 1 had not finished" in row["failed"]
    assert row["peer"]
    assert schedules.table([row]).row_count == 1
