"""The Hopper kernels agree with the oracle for all masks, head widths, groups, scales, strides and
schedules.
"""

import pytest
import torch
from hopper import (
    EMPTY,
    HOPPER_ONLY,
    METHODS,
    assert_exact,
    assert_methods,
    attend,
    forward,
    inputs,
)
from sharded import DEVICE

from canon import Mask
from canon.fast.kernels.gluon import launch
from canon.fast.kernels.gluon.config import Config
from canon.fast.tables.cells import Cells

pytestmark = HOPPER_ONLY
MASKS = {
    "causal": Mask.causal(300),
    "full": Mask.full(190),
    "window": Mask.window(309, 77, 4),
    "documents": Mask.documents([0, 1, 1, 133, 134, 270]),
    "documents that see all of themselves": Mask.documents([0, 129, 200], causal=False),
    "queries without keys and keys without queries": Mask.causal(140).shift(6, 3).shift(-1, 0),
    "a late rectangle": Mask.causal(260).crop(range(29, 260)),
    "blocks": Mask.block_causal([0] * 70 + [2] * 9 + [1] * 80, k_valid=[True] * 150 + [False] * 9),
    "one token": Mask.causal(1),
    "no bands": Mask([], 5, 7),
}


@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_method_equals_the_oracle(mask, method):
    assert_methods(attend, inputs(mask, h=4, g=2), mask, methods=[method])


@pytest.mark.parametrize(
    ("d", "dv"),
    [(64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (42, 24), (20, 130), (8, 5)],
)
def test_head_widths(d, dv):
    mask = Mask.documents([0, 70, 200])
    arguments = inputs(mask, d=d, dv=dv, h=2, g=2)
    orders = dict(zip(METHODS, ("late", "early", "random"), strict=True))
    for method in METHODS if max(d, dv) <= 128 else ("split", "head_parallel"):
        order = orders[method]
        assert_exact(attend(*arguments, mask, method=method, order=order, seed=d), *arguments, mask)


def test_heads_of_a_group_share_tiles_where_documents_are_short():
    ends = list(range(0, 301, 30))
    mask = Mask.documents(ends)
    assert launch.packing(Cells(mask), 128, 128, 8) == 8  # tiles of 16 tokens and 8 heads
    assert launch.packing(Cells(Mask.causal(4096)), 128, 128, 8) == 1
    arguments = inputs(mask, b=2, h=8, g=1)
    assert_exact(attend(*arguments, mask), *arguments, mask)


@pytest.mark.parametrize(
    ("mask", "b"), [*((mask, 1) for mask in EMPTY.values()), (Mask.causal(5), 0)]
)
def test_empty_inputs_and_an_empty_batch(mask, b):
    for method in METHODS:
        got = attend(*inputs(mask, b=b), mask, method=method)
        assert [x.shape[0] for x in got] == [b] * 5
        assert not any(x.any() for x in (got.out, got.dq, got.dk, got.dv))
        assert got.lse.isneginf().all()


# --- tensors that TMA cannot load or kernels cannot write, and uninitialised memory ---


def test_any_strides_and_any_alignment():
    mask = Mask.causal(140)
    q, k, v, dout, dlse = inputs(mask, b=2, h=4, g=2, d=40, dv=24)
    odd = torch.full((q.numel() + 2,), torch.nan, dtype=q.dtype, device=DEVICE)
    odd = odd[1:-1].view(q.shape).copy_(q)  # 2 bytes off, and NaN around it
    heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    # the width is not the last in memory
    backwards = v.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    same = dout[:, :1].expand_as(dout)  # stride 0
    assert_methods(attend, (odd, heads_first, backwards, same, dlse), mask, -0.3)


# --- the plain forward ---

PLAIN = Config(128, 64, 3, plain=True)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_plain_forward_equals_the_oracle(mask, dtype):
    for d, tiles, order in ((64, PLAIN, "late"), (128, Config(128, 128, 2, plain=True), "early")):
        arguments = inputs(mask, b=2, h=4, g=2, d=d, dv=d, dtype=dtype)
        assert_exact(forward(*arguments[:3], mask, tiles, order=order), *arguments, mask)
