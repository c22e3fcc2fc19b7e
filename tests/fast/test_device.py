"""Hopper GPUs use Gluon where it supports the inputs; other GPUs Triton; all else PyTorch; a chosen
backend is always used.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask, fast, reference
from canon.fast import backend, device
from canon.fast.kernels import launcher
from canon.fast.kernels.cuda import launch as cuda
from canon.fast.kernels.gluon import backend as gluon_backend
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.torch import launch as plain
from canon.fast.kernels.triton import backend as triton_backend
from canon.fast.kernels.triton import config
from canon.fast.kernels.triton import launch as portable
from canon.testing import process_groups

pytestmark = pytest.mark.interpreted

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def heads(d, dtype, where="cuda"):
    return SimpleNamespace(shape=(1, 8, 2, d), dtype=dtype, device=torch.device(where))


@pytest.fixture
def machine(monkeypatch):
    """A machine with one GPU, of compute capability 9.0 unless the test sets another."""
    found = {"capability": (9, 0)}
    monkeypatch.setattr(gluon_backend, "capability", lambda _: found["capability"])
    monkeypatch.setattr(portable, "INTERPRETED", False)
    return found


@pytest.mark.parametrize("capability", [(9, 0), (7, 5), (8, 0), (9, 1), (10, 0)])
@pytest.mark.parametrize(
    ("d", "dv", "dtype", "method", "on_hopper"),
    [
        (128, 128, BF16, "split", hopper),
        (256, 192, F16, "head_parallel", hopper),
        (128, 40, BF16, "fused", hopper),
        (136, 128, BF16, "fused", portable),
        (128, 264, BF16, "split", portable),
        (64, 64, F32, "split", portable),
    ],
)
def test_only_hopper_uses_gluon_where_it_supports_the_inputs(
    machine, capability, d, dv, dtype, method, on_hopper
):
    machine["capability"] = capability
    expected = on_hopper if capability == (9, 0) else portable
    assert device.kernels_for(heads(d, dtype), heads(dv, dtype), method) is expected


def test_gpus_of_amd_take_no_kernels_and_no_tables_of_hopper(monkeypatch):
    mi250 = SimpleNamespace(
        major=9, minor=0, multi_processor_count=104, shared_memory_per_block_optin=1 << 16
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mi250)
    monkeypatch.setattr(portable, "INTERPRETED", False)
    for hip, expected in (("6.2", portable), (None, hopper)):
        monkeypatch.setattr(launcher, "_gpus", {})
        monkeypatch.setattr(torch.version, "hip", hip)
        assert device.kernels_for(heads(128, BF16), heads(128, BF16)) is expected
        assert config.is_hopper(torch.device("cuda")) == (expected is hopper)


def test_the_interpreter_uses_triton(machine, monkeypatch):
    monkeypatch.setattr(portable, "INTERPRETED", True)
    for where in ("cpu", "cuda"):
        assert device.kernels_for(heads(128, BF16, where), heads(128, BF16, where)) is portable


@pytest.mark.parametrize("where", ["cpu", "cuda", "mps"])
def test_tensors_that_no_other_backend_serves_use_torch(machine, where, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    if where == "cuda":
        monkeypatch.setattr(triton_backend, "INSTALLED", False)
    x = heads(128, BF16, where)
    assert device.kernels_for(x, x) is plain
    with backend("triton"):
        assert device.kernels_for(x, x) is portable
        with pytest.raises(RuntimeError, match=r'use backend\("torch"\)'):
            device.check_inputs(x)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("gluon", hopper), ("triton", portable), ("cuda", cuda), ("torch", plain), (None, hopper)],
)
def test_a_chosen_backend_is_never_replaced(machine, chosen, expected):
    with backend(chosen) if chosen else nullcontext():
        assert device.kernels_for(heads(128, BF16), heads(128, BF16)) is expected
        if chosen in ("gluon", "cuda"):  # its launches raise for inputs that it does not support
            assert device.kernels_for(heads(512, F32), heads(512, F32)) is expected


@pytest.mark.parametrize("name", ["gluon", "cuda"])
def test_a_chosen_backend_without_a_gpu_raises_before_a_message(name):
    q = torch.ones(1, 8, 2, 8, dtype=BF16)
    with (
        backend(name),
        pytest.raises(
            ValueError, match='kernels need .* got .*(cpu|CPU).*: use backend\\("triton"\\)'
        ),
    ):
        device.check_inputs(q)


def test_cpu_tensors_compute_and_a_chosen_backend_raises_on_every_rank_before_a_message(
    monkeypatch,
):
    monkeypatch.delenv("TRITON_INTERPRET")
    plan = fast.cast_plan(Mask.causal(16), Layout.contiguous(16, 2))

    def program():
        rank, x = dist.get_rank(), torch.ones(1, 8, 2, 8)
        for function in (
            lambda q: fast.ring_attention(q, q, q),
            lambda q: fast.decode_attention(q, q, q),
            lambda q: fast.group_cast(q[0], plan, 0),
            lambda q: fast.group_reduce(q[0, : 8 * rank], plan, 0, q[0].clone()),
        ):
            function(x)
            with (
                backend("triton"),
                pytest.raises(RuntimeError, match="Triton kernels need tensors on a CUDA device"),
            ):
                function(x)
            reference.ring_attention(x, x, x)
        q = x.to("meta") if rank else x
        with pytest.raises(ValueError, match="rank 1: q is on the meta device"):
            fast.ring_attention(q, q, q)  # only rank 0 has CPU tensors

    process_groups.threads(program, 2)
