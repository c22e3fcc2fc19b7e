"""The Triton kernels with small tiles, interpreted or, with --gpu, on a GPU: tiles, descriptors,
strides and repeated bits.

test_local.py compares `canon.fast` with the reference.
"""

import functools

import hopper
import pytest
import torch
from hopper import METHODS, SHORT, assert_exact, assert_methods, both_passes

from canon import Mask
from canon.fast import backward
from canon.fast.kernels.triton.config import Config, forced

pytestmark = pytest.mark.gpu
KERNELS = ("forward", "dq", "dkdv", "fused")
N = 52


def tiles(rows, columns, **options):
    """Force one tile size on all kernels."""
    return forced(**dict.fromkeys(KERNELS, Config(rows, columns, 4, 1, **options)))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Take small tiles, and fill new tensors with NaN: a test fails if a result is not written."""

    def empty(*shape, **options):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return torch.full(shape, torch.nan, **options)

    monkeypatch.setattr(torch, "empty", empty)
    with tiles(32, 16):
        yield


inputs = functools.partial(hopper.inputs, d=16, dv=16, dtype=torch.float64)


@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", SHORT.values(), ids=SHORT)
def test_every_method_equals_the_oracle(mask, method):
    assert_methods(both_passes, inputs(mask, h=4, g=2), mask, methods=[method])


@pytest.mark.parametrize(
    ("mask", "config"),
    [
        (Mask.documents([0, 20, 25, N], window=(17, 0)), Config(*x, 4, 1))
        for x in ((16, 16), (16, 64), (64, 16), (64, 64))
    ]
    + [
        (
            Mask.documents([0, 90, 110], window=(70, 3)),
            Config(16, 32, 4, 1, partial_columns=x, tma=True),
        )
        for x in (16, 32)
    ],
    ids=str,
)
def test_the_size_of_tiles_and_of_partial_tiles_does_not_matter(mask, config):
    with forced(**dict.fromkeys(KERNELS, config)):
        assert_methods(both_passes, inputs(mask), mask)


@pytest.mark.parametrize(
    ("d", "dv"),
    [
        *((16, 16), (24, 24), (40, 40), (80, 80), (64, 32), (32, 64), (8, 5), (192, 128)),
        (256, 256),
    ],
)
def test_head_widths(d, dv):
    mask = Mask.causal(20)
    with tiles(16, 16):  # float64 and 256 wide: larger ones do not fit into an H200
        assert_methods(both_passes, inputs(mask, d=d, dv=dv, h=2, g=2), mask)


def test_dk_and_dv_may_come_from_two_launches():
    mask = Mask.causal(N)
    with forced(dkdv=Config(32, 16, 4, 1, apart=True)):
        assert_methods(both_passes, inputs(mask, h=4, g=2), mask, methods=["split"])


STRIDED = {  # the same numbers, with other strides
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "width first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "part of a wider tensor": lambda x: torch.cat([x, x * torch.nan], 2)[:, :, : x.shape[2]],
    "a misaligned pointer": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
}


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
def test_any_strides(strided, tma):
    mask = Mask.causal(20)
    *tensors, dlse = inputs(mask, b=2, h=2, g=2)
    turned = dlse.transpose(1, 2).contiguous().transpose(1, 2)
    with tiles(16, 16, tma=tma):
        for method in METHODS:
            got = both_passes(*map(strided, tensors), turned, mask, method=method)
            assert_exact(got, *tensors, dlse, mask)


def test_parts_of_query_heads_are_capped_key_by_key(monkeypatch):
    mask = Mask.window(N, 30, 2)
    arguments = inputs(mask, b=2, h=4, g=2)
    expected = both_passes(*arguments, mask, method="head_parallel")
    monkeypatch.setattr(backward, "PARTIAL_BYTES", 2 * 4 * 32 * 8 * 20)  # of 20 keys
    got = both_passes(*arguments, mask, method="head_parallel")
    assert torch.equal(got.dq, expected.dq)
    assert_exact(got, *arguments, mask)
