"""Hopper GPUs use the Gluon backend where it supports the inputs; others use Triton; a chosen backend is always used."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from canon.fast import backend, device
from canon.fast.kernels.cuda import launch as cuda
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.triton import launch as portable

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def heads(d, dtype, where="cuda"):
    return SimpleNamespace(shape=(1, 8, 2, d), dtype=dtype, device=torch.device(where))


@pytest.fixture
def machine(monkeypatch):
    """A machine with one GPU, of compute capability 9.0 unless the test sets another."""
    found = {"capability": (9, 0)}
    monkeypatch.setattr(device, "capability", lambda _: found["capability"])
    monkeypatch.setattr(portable, "INTERPRETED", False)
    return found


@pytest.mark.parametrize(
    ("d", "dv", "dtype", "method", "expected"),
    [
        (128, 128, BF16, "split", hopper),
        (256, 192, F16, "head_parallel", hopper),
        (128, 40, BF16, "fused", hopper),
        (136, 128, BF16, "fused", portable),
        (128, 264, BF16, "split", portable),
        (64, 64, F32, "split", portable),
    ],
)
def test_hopper_uses_gluon_where_it_supports_the_inputs(machine, d, dv, dtype, method, expected):
    assert device.kernels_for(heads(d, dtype), heads(dv, dtype), method) is expected


@pytest.mark.parametrize("capability", [(7, 5), (8, 7), (9, 1), (10, 0), (12, 0)])
def test_other_gpus_use_triton(machine, capability):
    machine["capability"] = capability
    assert device.kernels_for(heads(128, BF16), heads(128, BF16)) is portable


@pytest.mark.parametrize(("capability", "widest"), [((8, 0), 256), ((8, 6), 64), ((8, 9), 64)])
def test_auto_takes_cuda_on_ampere_and_ada_if_it_is_installed(machine, monkeypatch, capability, widest):
    def kernels(d, dv, dtype=BF16, method="split"):
        return device.kernels_for(heads(d, dtype), heads(dv, dtype), method)

    machine["capability"] = capability
    monkeypatch.setattr("canon.fast.kernels.cuda.program.is_installed", lambda: True)
    assert kernels(widest, widest) is kernels(32, 64, F16, "head_parallel") is cuda
    unsupported = kernels(40, 40), kernels(64, 64, F32), kernels(64, 64, BF16, "fused"), kernels(widest + 16, 64)
    assert set(unsupported) == {portable}
    monkeypatch.setattr("canon.fast.kernels.cuda.program.is_installed", lambda: False)
    assert kernels(64, 64) is portable


def test_cpus_and_the_interpreter_use_triton(machine, monkeypatch):
    assert device.kernels_for(heads(128, BF16, "cpu"), heads(128, BF16, "cpu")) is portable
    monkeypatch.setattr(portable, "INTERPRETED", True)
    assert device.kernels_for(heads(128, BF16), heads(128, BF16)) is portable


@pytest.mark.parametrize(
    ("chosen", "expected"), [("gluon", hopper), ("triton", portable), ("cuda", cuda), (None, hopper)]
)
def test_a_chosen_backend_is_never_replaced(machine, chosen, expected):
    with backend(chosen) if chosen else nullcontext():
        assert device.kernels_for(heads(128, BF16), heads(128, BF16)) is expected
        if chosen in ("gluon", "cuda"):  # its launches raise for inputs that it does not support
            assert device.kernels_for(heads(512, F32), heads(512, F32)) is expected
