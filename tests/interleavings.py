"""Interleavings of the simulator for tests, a layout, and random numbers."""

import pytest
import torch
from triton.experimental.gluon import language as gl

INTERLEAVINGS = [(order, seed) for order in ("late", "early", "random") for seed in range(3)]
every_interleaving = pytest.mark.parametrize(("order", "seed"), INTERLEAVINGS)
BLOCKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


def numbers(*shape):
    """Return normal numbers in bfloat16, the same in each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
