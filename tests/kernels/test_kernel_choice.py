"""The choice of backward method, kernel backend, configuration and concurrent heads."""

from itertools import product

import pytest
import torch
from hopper import assert_methods, both_passes, inputs
from sharded import DEVICE

from canon import Layout, Mask
from canon.fast import backward, local
from canon.fast.device import backend
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.triton import config
from canon.fast.kernels.triton import launch as portable
from canon.fast.kernels.triton.config import KERNELS
from canon.fast.tables.cells import Cells
from canon.testing.compile import SHARED_LIMIT

pytestmark = pytest.mark.gpu
ANY_ORDER, IN_ORDER = backward.Method("auto", False), backward.Method("auto", True)


def test_auto_chooses_head_parallel_where_split_would_leave_multiprocessors_idle(monkeypatch):
    monkeypatch.setattr(backward, "kernels_for", lambda q, v: portable)

    def chosen(b, t, h, g, mask=None):
        q, k = (torch.empty(b, t, heads, 64, device="meta") for heads in (h, g))
        return backward.automatic(q, k, k, mask or Mask.causal(t), ANY_ORDER, 132)

    assert chosen(1, 16384, 32, 8) == "split"  # 1024 tiles of keys and key heads
    assert chosen(2, 1024, 8, 1) == "head_parallel"  # 16
    assert chosen(2, 1024, 8, 8) == "split"  # nothing is shared
    one_long = Mask.documents([0, 8192, *range(8200, 16384, 8)])  # many tiles, but few long ones
    assert chosen(1, 16384, 8, 1, one_long) == "head_parallel"
    assert chosen(1, 16384, 8, 1, Mask.documents(range(0, 16385, 8))) == "split"


def test_auto_that_repeats_its_bits_is_ordered_fused_on_hopper_where_order_costs_little(
    monkeypatch,
):
    def chosen(b, t, h, g, d=64, dv=64, mask=None, sends=False):
        q, k, v = (torch.empty(b, t, *shape, device="meta") for shape in ((h, d), (g, d), (g, dv)))
        how = IN_ORDER._replace(sends=sends)
        return backward.automatic(q, k, v, mask or Mask.causal(t), how, 132)

    assert chosen(1, 16384, 32, 32) == "split", "Triton's kernel adds in any order"
    monkeypatch.setattr(backward, "kernels_for", lambda q, v: hopper)
    assert chosen(0, 16384, 32, 32) == "split", "no work"
    assert chosen(1, 16384, 16, 16, 256) == "split", "wider than the fused kernel"
    equal = {"d": 128, "dv": 128, "mask": Mask.full(8192)}
    assert chosen(1, 8192, 32, 8, **equal) == "fused", "equal tiles hardly wait"
    assert chosen(1, 8192, 32, 8, **equal, sends=True) == "split", "dk and dv may be sent before dq"
    assert chosen(1, 2048, 32, 8, 128, 128, Mask.full(2048)) == "split"
    assert chosen(2, 1024, 8, 1) == "head_parallel"
    shard = Layout.zigzag(16384, 4).local_mask(Mask.causal(16384), 0, range(4))
    q, k = (torch.empty(1, t, heads, 128, device="meta") for t, heads in ((4096, 32), (16384, 8)))
    assert backward.automatic(q, k, k, shard, IN_ORDER, 132) == "split", (
        "gradients of other ranks' keys are sent before dq is computed"
    )


def test_backends_are_named():
    with pytest.raises(ValueError, match="'gluon', 'triton', 'cuda', 'torch'"), backend("tritn"):
        pass


@pytest.mark.parametrize("arch", [80, 90])
def test_configurations_fit_the_device_up_to_a_width_of_512(arch):
    for name, width in product(KERNELS, (64, 128, 256, 512)):
        chosen = config.fitting(name, width, width, 2, SHARED_LIMIT[arch], False, arch == 90)
        assert config.shared_bytes(name, chosen, width, width, 2) <= SHARED_LIMIT[arch]
        assert chosen != config.SMALLEST or name == "fused"


def test_too_little_shared_memory_names_need_and_limit():
    with pytest.raises(ValueError, match=r"needs at least \d+ bytes.*this device has 1000"):
        config.fitting("dkdv", 128, 128, 2, 1000, False, False)


@pytest.mark.parametrize(
    ("d", "dv", "method"), [(512, 512, "split"), (512, 512, "fused"), (300, 512, "head_parallel")]
)
def test_heads_up_to_512_wide_agree(d, dv, method):
    mask = Mask.window(150, 90, 3)
    assert_methods(both_passes, inputs(mask, d=d, dv=dv), mask, methods=[method])


def test_wider_heads_raise_and_name_the_limit():
    wide = torch.zeros(1, 4, 1, 520, device=DEVICE)
    with backend("triton"), pytest.raises(ValueError, match="up to 512 wide, got .* 1024 and 1024"):
        local.attention(wide, wide, wide)
    x = torch.zeros(1, 4, 1, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"up to \(256, 256\) wide, not \(512, 512\): use backend"):
        hopper.forward(x, x, x, Cells(Mask.causal(4)), 1.0, x, torch.zeros(1, 1, 4))
