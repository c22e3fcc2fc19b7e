"""Bad arguments in a process without the checks of the test suite. `test_bad_arguments` runs this file."""

import os

import pytest
import torch
import torch.distributed as dist

from canon import fast, reference
from canon.testing import process_groups

both_halves = pytest.mark.parametrize("half", [reference, fast], ids=["reference", "fast"])


def inputs():
    return [torch.randn(1, 24, heads, 16) for heads in (4, 2, 2)]


BAD = {
    "a tensor as mask": (dict(mask=torch.ones(24, 24)), "mask must be a canon.Mask"),
    "a string as mask": (dict(mask="causal"), "mask must be a canon.Mask"),
    "a meta tensor": (dict(q=torch.empty(1, 24, 4, 16, device="meta")), "q is on the meta device"),
    "no tensor": (dict(k=None), "k must be a torch.Tensor"),
    "mixed dtypes": (dict(v=torch.zeros(1, 24, 2, 16, dtype=torch.float16)), "q, k, v must share one dtype"),
    "float8": (dict.fromkeys("qkv", torch.zeros(1, 24, 2, 16).to(torch.float8_e5m2)), "q, k, v must share one dtype"),
    "a sparse tensor": (dict(q=torch.zeros(1, 24, 4, 16).to_sparse()), "q must be a dense tensor"),
    "scale nan": (dict(scale=float("nan")), "scale must be finite"),
    "scale inf": (dict(scale=float("inf")), "scale must be finite"),
    "a learned scale": (dict(scale=torch.ones((), requires_grad=True)), "scale must be a number without a gradient"),
    "a string as scale": (dict(scale="1"), "scale must be a number"),
    "backward": (dict(backward="fast"), "backward='fast': expected one of"),
}
BAD_OF_RANKS = {
    "a string as layout": (dict(layout="zigzag"), "layout must be a canon.Layout"),
    "a list as option": (dict(stages=[1]), "unhashable"),
    "reduce_dtype": (dict(reduce_dtype="float32"), "reduce_dtype must be"),
}


def with_bad(half, function, bad):
    arguments = dict(zip("qkv", inputs(), strict=True)) | bad
    return getattr(half, function)(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@both_halves
@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named(half, name):
    bad, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        with_bad(half, "attention", bad)


@both_halves
@pytest.mark.parametrize("name", BAD | BAD_OF_RANKS)
def test_a_bad_argument_on_one_rank_raises_on_every_rank(half, name):
    bad, message = (BAD | BAD_OF_RANKS)[name]
    message = message.replace(r".", r"\.")

    def program():
        with pytest.raises((TypeError, ValueError), match=message):
            with_bad(half, "magi_attention", bad if dist.get_rank() == 1 else {})

    process_groups.threads(program, 3)


def outside():
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        return reference.ring_attention(*inputs(), group=group).shape
    with pytest.raises(ValueError, match="is not a member of"):
        reference.ring_attention(*inputs(), group=group)
    return None


def test_a_rank_outside_the_group_raises_alone():
    assert process_groups.processes(outside, 3)[2] is None


def test_a_group_without_torch_distributed_raises():
    with pytest.raises(TypeError, match="group must be a ProcessGroup, a DeviceMesh of one dimension or None"):
        reference.ring_attention(*inputs(), group="a group")


def test_a_dtensor_is_named():
    from torch.distributed.tensor import DTensor, init_device_mesh

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = DTensor.from_local(torch.zeros(1, 4, 2, 8), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"q is a DTensor: pass q\.to_local\(\)"):
            reference.attention(x, x, x)
    finally:
        dist.destroy_process_group()
