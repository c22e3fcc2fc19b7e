"""Which kernels compute: the Hopper family where it can, the portable one elsewhere, and what was asked for, always."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from canon.fast import backend, device
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.triton import launch as portable

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def heads(d, dtype, where="cuda"):
    return SimpleNamespace(shape=(1, 8, 2, d), dtype=dtype, device=torch.device(where))


@pytest.fixture
def machine(monkeypatch):
    """A machine with one GPU, of compute capability 9.0 until told otherwise."""
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
def test_hopper_computes_what_it_can(machine, d, dv, dtype, method, expected):
    assert device.kernels_for(heads(d, dtype), heads(dv, dtype), method) is expected


@pytest.mark.parametrize("capability", [(8, 0), (9, 1), (10, 0), (12, 0)])
def test_other_gpus_have_the_portable_kernels(machine, capability):
    machine["capability"] = capability
    assert device.kernels_for(heads(128, BF16), heads(128, BF16)) is portable


def test_interpreted_and_on_cpus_kernels_are_portable(machine, monkeypatch):
    assert device.kernels_for(heads(128, BF16, "cpu"), heads(128, BF16, "cpu")) is portable
    monkeypatch.setattr(portable, "INTERPRETED", True)
    assert device.kernels_for(heads(128, BF16), heads(128, BF16)) is portable


@pytest.mark.parametrize(("asked", "expected"), [("gluon", hopper), ("triton", portable), (None, hopper)])
def test_a_family_that_was_asked_for_is_not_exchanged(machine, asked, expected):
    with backend(asked) if asked else nullcontext():
        assert device.kernels_for(heads(128, BF16), heads(128, BF16)) is expected
        if asked == "gluon":  # what it cannot do it says itself
            assert device.kernels_for(heads(512, F32), heads(512, F32)) is hopper
