"""The simulator of Gluon kernels: arithmetic, types and addresses."""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false

import pytest
import torch
from interleavings import BLOCKED, numbers
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon import simulator


@gluon.jit
def arithmetic_kernel(x, out, n, scale, N: gl.constexpr):
    i = gl.arange(0, N, gl.SliceLayout(1, BLOCKED))
    a = gl.load(x + i, mask=i < n, other=0.0)
    b = (a.to(gl.float32) * scale).to(gl.bfloat16)
    gl.store(out + i, b)
    gl.store(out + N + i, a * b + 1)
    gl.store(out + 2 * N + i, gl.where((i & ~1) >= n, float("-inf"), gl.exp2(a.to(gl.float32))))
    gl.store(out + 3 * N, gl.max(a, 0) + gl.sum(gl.maximum(a, 0.5).to(gl.float32), 0))


def test_addresses_are_checked_where_they_are_not_masked():
    with simulator.simulated():
        for n, size, message in (
            (22, 97, "load of element 21 of 21"),
            (21, 96, "store of element 96 of 96"),
        ):
            with pytest.raises(
                simulator.Fault, match=f"{message}: out of bounds, at arithmetic_kernel"
            ):
                arithmetic_kernel[(1,)](numbers(21), torch.zeros(size), n, 0.3, N=32)


@gluon.jit
def numbers_kernel(out, start, big):
    t = -3
    gl.store(out, t // 2)  # of constants
    for _ in range(1):
        gl.store(out + 1, t // 2 * 10 + t % 2)  # of values
        t += 1
    if start > 0:
        t = 7
    gl.store(out + 2, (start - t) // 2 + t.to(gl.int32) % 4 + min(start, 9))
    gl.store(out + 3, big + start)


def test_numbers_are_values_where_a_loop_or_a_branch_changes_them():
    out = torch.full((4,), -99, dtype=torch.int32)
    with simulator.simulated():
        numbers_kernel[(1,)](out, 4, 2**31 - 5)
        assert out.tolist() == [-2, -11, -1 + 3 + 4, 2**31 - 1]
        with pytest.raises(
            simulator.Fault, match="int32 overflow: add gives 2147483648, at numbers_kernel"
        ):
            numbers_kernel[(1,)](out, 4, 2**31 - 4)
