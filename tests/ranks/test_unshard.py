"""The gradient of `Layout.unshard` is summed in rank order and rounded once. `canon check` compares
its values, and `test_sums` adds many parts.
"""

import pytest
import torch
import torch.distributed as dist

from canon import Layout
from canon.testing import process_groups


@pytest.mark.parametrize(
    ("dtype", "total"), [(torch.bfloat16, 1), (torch.float32, 1), (torch.float64, 2)]
)
def test_gradients_are_sent_in_their_dtype_and_added_in_rank_order(dtype, total, exchanged):
    """In rank order, 1e8 + 1 loses the 1 in float32; float64 keeps it."""
    layout = Layout.contiguous(8, 4)
    summands = [torch.full((1, 8, 2), value, dtype=dtype) for value in (1e8, 1, -1e8, 1)]

    def program():
        mine = torch.zeros(1, 2, 2, dtype=dtype, requires_grad=True)
        full = layout.unshard(mine, partial_grad=True)
        return torch.autograd.grad(full, mine, summands[dist.get_rank()])[0]

    for gradient in process_groups.threads(program, 4):
        assert gradient.dtype == dtype
        assert gradient.eq(total).all()
    assert {x.dtype for _, _, x, *_ in exchanged} == {dtype}


def test_a_second_derivative_raises():
    x = torch.randn(1, 4, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        Layout.contiguous(4, 1).unshard(x).pow(2).sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
