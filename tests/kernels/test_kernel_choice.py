"""The choice of backward method, kernel backend, configuration and concurrent heads."""

import pytest
import torch
from sharded import DEVICE

from canon import Layout, Mask
from canon.fast import backward, local
from canon.fast.device import backend
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.triton import config
from canon.fast.kernels.triton import launch as portable
from canon.fast.kernels.triton.config import KERNELS

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
    def chosen(b, t, h, g, d, dv=64):
        q, k, v = (torch.empty(b, t, *shape, device="meta") for shape in ((h, d), (g, d), (g, dv)))
        return backward.automatic(q, k, v, Mask.causal(t), IN_ORDER, 132)

    assert chosen(1, 16384, 32, 32, 64) == "split", "Triton's kernel adds in any order"
    monkeypatch.setattr(backward, "kernels_for", lambda q, v: hopper)
    assert chosen(1, 16384, 32, 32, 64) == "fused"
    assert chosen(0, 16384, 32, 32, 64) == "split", "no work"
    assert chosen(1, 16384, 32, 32, 64, 128) == "fused"
    assert chosen(1, 20480, 20, 4, 128) == "split", "CTAs would idle at the end"
    assert chosen(1, 16384, 16, 16, 256) == "split", "wider than the fused kernel"
    for n, sends, method in ((8192, False, "fused"), (8192, True, "split"), (2048, False, "split")):
        q, k = (torch.empty(1, n, heads, 128, device="meta") for heads in (32, 8))
        how = IN_ORDER._replace(sends=sends)
        assert backward.automatic(q, k, k, Mask.full(n), how, 132) == method, (
            "equal tiles hardly wait, but their gradients may be sent before dq is computed"
        )
    assert chosen(2, 1024, 8, 1, 64) == "head_parallel"
    q, k = (torch.empty(1, t, heads, 128, device="meta") for t, heads in ((4096, 32), (16384, 8)))
    shard = Layout.zigzag(16384, 4).local_mask(Mask.causal(16384), 0, range(4))
    assert backward.automatic(q, k, k, shard, IN_ORDER, 132) == "split", (
        "gradients of other ranks' keys are sent before dq is computed"
    )


def test_fused_raises_under_deterministic_algorithms(deterministic):
    mask = Mask.causal(64)
    q, k, v = (torch.randn(1, 64, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    for method in ("auto", "split", "head_parallel"):
        local.attention(q, k, v, mask, backward=method).sum().backward()
    with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
        local.attention(q, k, v, mask, backward="fused").sum().backward()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="adds to dq in any order"):
        local.attention(q, k, v, mask, backward="fused").sum().backward()


def test_backends_are_named():
    with pytest.raises(ValueError, match="'gluon', 'triton', 'cuda', 'torch'"), backend("tritn"):
        pass
    with backend("triton"):
        x = torch.zeros(1, 3, 1, 16, device=DEVICE)
        local.attention_forward(x, x, x, Mask.causal(3))


def test_configurations_that_do_not_fit_are_skipped():
    sizes = []
    for limit in (232448, 166912, 101376):  # sm_90, sm_80, sm_86 and sm_89
        chosen = [
            config.fitting(name, d, d, 2, limit, False, limit > 200000)
            for name in KERNELS
            for d in (64, 128, 256)
        ]
        sizes.append(sum(c.rows * c.columns for c in chosen))
    assert sizes == sorted(sizes, reverse=True)


def test_too_little_shared_memory_names_need_and_limit():
    with pytest.raises(ValueError, match=r"needs at least \d+ bytes.*this device has 1000"):
        config.fitting("dkdv", 128, 128, 2, 1000, False, False)
