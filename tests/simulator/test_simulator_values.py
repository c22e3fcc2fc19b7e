"""The simulator of Gluon kernels: arithmetic, types and addresses."""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false

import pytest
import torch
from interleavings import BLOCKED
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon import simulator


@gluon.jit
def copy_kernel(x, out, n, N: gl.constexpr):
    i = gl.arange(0, N, gl.SliceLayout(1, BLOCKED))
    gl.store(out + i, gl.load(x + i, mask=i < n, other=0.0))


@pytest.mark.parametrize(
    ("n", "size", "message"),
    [(22, 32, "load of element 21 of 21"), (21, 31, "store of element 31 of 31")],
)
def test_addresses_are_checked_where_they_are_not_masked(n, size, message):
    fault = pytest.raises(simulator.Fault, match=f"{message}: out of bounds, at copy_kernel")
    with simulator.simulated(), fault:
        copy_kernel[(1,)](torch.zeros(21), torch.zeros(size), n, N=32)


@gluon.jit
def numbers_kernel(out, start, big):
    gl.store(out, (start - 7) // 2 * 10 + (start - 7) % 2)
    gl.store(out + 1, big + start)


def test_divisions_truncate_and_sums_may_overflow():
    out = torch.full((2,), -99, dtype=torch.int32)
    with simulator.simulated():
        numbers_kernel[(1,)](out, 4, 2**31 - 5)
        assert out.tolist() == [-11, 2**31 - 1]
        with pytest.raises(
            simulator.Fault, match="int32 overflow: add gives 2147483648, at numbers_kernel"
        ):
            numbers_kernel[(1,)](out, 4, 2**31 - 4)
