"""Offsets beyond 32 bits: tensors whose tokens lie far apart, and results of many tokens."""

import pytest
import torch
from hopper import inputs
from sharded import DEVICE, all_equal
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon import Mask, simulator
from canon.fast import backend, backward, local
from canon.fast.kernels.gluon.epilogue import even_strides, row_offset
from canon.fast.kernels.gluon.few_queries import place_of_rows
from canon.fast.kernels.triton.config import Config, forced
from canon.fast.kernels.triton.rows import copy_tokens, take_rows, zero_rows
from canon.fast.tables.cells import Cells

pytestmark = pytest.mark.gpu
TOKENS = 18
MASK = Mask.causal(TOKENS)
APART = 1 << 27  # elements between tokens: the last ones begin behind 2^31


@pytest.fixture
def far_apart():
    """Return a function that copies x (1, t, h, d) so that its tokens are APART elements apart, all
    in one allocation.

    Most of it is never touched, so on a CPU it takes no memory.
    """
    room, used = torch.empty((TOKENS - 1) * APART + 2048, dtype=torch.bfloat16, device=DEVICE), 0

    def placed(x):
        nonlocal used
        start, used = used, used + x[0, 0].numel()
        return room.as_strided(x.shape, (0, APART, x.shape[3], 1), start).copy_(x)

    return placed


def test_rows_are_taken_copied_and_cleared_however_far_apart(far_apart):
    _, k, v, *_ = inputs(MASK, g=2, d=16, dv=16)
    rows = torch.arange(TOKENS - 1, -1, -1, device=DEVICE)
    out = far_apart(torch.zeros_like(torch.cat([k, v], -1)))
    take_rows(far_apart(k), v, rows, out)
    assert torch.equal(out, torch.cat([k, v], -1)[:, rows])
    copied = far_apart(torch.zeros_like(k))
    copy_tokens(far_apart(k), copied)
    assert torch.equal(copied, k)
    zero_rows(copied)
    assert not copied.any()


def test_both_passes_read_and_write_tokens_that_lie_far_apart(far_apart):
    tiles = Config(32, 32, 4, 1)
    q, k, v, dout, _ = inputs(MASK, d=16, dv=16)
    with backend("triton"), forced(forward=tiles, dq=tiles, dkdv=tiles):
        out, lse = local.attention_forward(q, k, v, MASK)
        out = out.to(q.dtype)
        grads = backward.attention_backward(dout, q, k, v, out, lse, MASK)
        again = far_apart(torch.zeros_like(dout)), torch.zeros_like(lse)
        local.forward_into(*map(far_apart, (q, k, v)), Cells(MASK), 0.25, *again)
        given = map(far_apart, (dout, q, k, v, out))
        again += backward.attention_backward(*given, lse, MASK)
    assert all_equal(again, (out, lse, *grads))


@gluon.jit
def offsets_kernel(result, rows, tokens, batch, head):
    """Write offsets of row ``rows`` that 32-bit products could not hold."""
    stride = gl.to_tensor(8)
    gl.store(result, row_offset(batch, rows, head, even_strides(tokens, stride, stride)))
    gl.store(result + 1, place_of_rows(batch, head, 0, rows, 1 << 10, tokens))


@pytest.mark.skipif(DEVICE == "cuda", reason="only the simulator detects an overflow")
def test_results_of_more_than_2_to_the_31_rows_are_addressed_in_64_bits():
    found = torch.zeros(2, dtype=torch.int64)
    with simulator.simulated():
        offsets_kernel[(1,)](found, (1 << 30) - 1, 1 << 30, 1 << 20, 5)  # pyright: ignore
    tokens = (1 << 20) * (1 << 30) + (1 << 30) - 1
    assert found.tolist() == [8 * tokens + 40, (((1 << 30) + 5) << 30) + (1 << 30) - 1]
