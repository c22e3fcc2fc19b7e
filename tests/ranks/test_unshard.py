"""`Layout.unshard` gathers a sequence. Its gradient is sharded, or summed and rounded once."""

import pytest
import torch
import torch.distributed as dist
from band_strategies import KINDS
from hypothesis import given
from hypothesis import strategies as st

from canon import Layout
from canon.testing import process_groups


@given(st.integers(0, 9))
def test_one_rank_needs_no_process_group_to_unshard(n):
    layout = Layout.zigzag(n, 1)
    x = torch.randn(2, n, 3, requires_grad=True)
    assert layout.unshard(layout.shard(x, 0)).equal(x)
    (gradient,) = torch.autograd.grad((layout.unshard(x) * x.detach()).sum(), x)
    assert gradient.equal(x)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("n", "ranks"), [(13, 4), (2, 5), (16, 2), (0, 3)])
def test_unshard_puts_shards_together_and_its_gradient_takes_them_apart(kind, n, ranks):
    layout = KINDS[kind](n, ranks)
    x = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def program():
        rank = dist.get_rank()
        mine = layout.shard(x, rank, dim=2).requires_grad_()
        full = layout.unshard(mine, dim=2)
        (replicated,) = torch.autograd.grad((full * x).sum(), mine, retain_graph=True)
        full = layout.unshard(mine, dim=2, partial_grad=True)
        (summed,) = torch.autograd.grad((full * x * (rank + 1)).sum(), mine)
        return (
            full.equal(x)
            and replicated.equal(mine)
            and torch.allclose(summed, mine * ranks * (ranks + 1) / 2)
        )

    assert all(process_groups.threads(program, ranks))


def summed_gradients(layout, summands):
    """Return each rank's gradient of its shard, if rank r has ``summands[r]`` as the gradient of
    the full tensor.
    """

    def program():
        rank = dist.get_rank()
        mine = torch.zeros_like(layout.shard(summands[rank], rank)).requires_grad_()
        full = layout.unshard(mine, partial_grad=True)
        return torch.autograd.grad(full, mine, summands[rank])[0]

    return process_groups.threads(program, layout.ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_summed_in_float32_and_rounded_once(dtype, exchanged):
    layout = Layout.zigzag(101, 4)
    draw = torch.Generator().manual_seed(1)
    summands = [torch.randn(1, 101, 8, generator=draw).to(dtype) for _ in range(4)]
    # of four numbers of 8 or 11 bits: float32 and float64 round alike
    exact = sum(x.double() for x in summands)
    found = summed_gradients(layout, summands)
    for rank, gradient in enumerate(found):
        assert gradient.dtype == dtype
        assert gradient.equal(layout.shard(exact.float().to(dtype), rank))
    # each summand was already rounded to it
    assert {x.dtype for _, _, x, *_ in exchanged} == {dtype}
    assert all(
        again.equal(first)
        for again, first in zip(summed_gradients(layout, summands), found, strict=True)
    )


def test_gradients_are_added_in_rank_order():
    """In rank order, 1e8 + 1 loses the 1 in float32; float64 keeps it."""
    layout = Layout.contiguous(8, 4)
    for dtype, total in ((torch.float32, 1), (torch.float64, 2)):
        summands = [torch.full((1, 8, 2), value, dtype=dtype) for value in (1e8, 1, -1e8, 1)]
        for gradient in summed_gradients(layout, summands):
            assert gradient.dtype == dtype
            assert gradient.eq(total).all()


def test_a_second_derivative_raises():
    x = torch.randn(1, 4, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        Layout.contiguous(4, 1).unshard(x).pow(2).sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
