"""`Layout.redistribute` moves each token to its rank in another layout, and gradients back."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from band_strategies import layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from canon import Layout
from canon.testing import process_groups


def moved(layout, to, dim):
    """Redistribute on every rank. Return whether tokens, gradients and second derivatives are those
    of indexing.
    """
    shape = [2, 3, 2]
    shape[dim] = layout.tokens
    x, weight = torch.randn(
        2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    rank = dist.get_rank()
    mine = layout.shard(x, rank, dim).requires_grad_()
    there = layout.redistribute(mine, to, dim=dim)
    expected = to.shard(x, rank, dim)
    (gradient,) = torch.autograd.grad(
        (there.pow(2) * to.shard(weight, rank, dim)).sum(), mine, create_graph=True
    )
    (second,) = torch.autograd.grad(gradient.sum(), mine)
    weight = layout.shard(weight, rank, dim)
    return (
        there.equal(expected)
        and gradient.allclose(2 * mine * weight)
        and second.allclose(2 * weight)
    )


@settings(max_examples=25)
@given(st.data(), st.integers(0, 13), st.integers(1, 4), st.integers(-1, 2))
def test_tokens_move_to_the_other_layout_and_gradients_back(data, n, ranks, dim):
    layout, to = (data.draw(layouts(n, ranks)) for _ in range(2))
    assert all(process_groups.threads(partial(moved, layout, to, dim), ranks))


def move_on_processes():
    layout, to, rank = Layout.zigzag(11, 4), Layout.striped(11, 4), dist.get_rank()
    x = torch.arange(22).view(2, 11)
    moved = lambda x: layout.redistribute(layout.shard(x, rank), to).equal(to.shard(x, rank))
    whole = lambda x: layout.unshard(layout.shard(x, rank)).equal(x)
    return [moved(each) and whole(each) for each in (x, x % 3 == 0, x.bfloat16(), x.short())]


def test_processes_move_integers_booleans_and_bfloat16():
    assert process_groups.processes(move_on_processes, 4) == [[True] * 4] * 4


def test_no_rank_holds_the_full_tensor(exchanged):
    layout, to = Layout.contiguous(12, 4), Layout.zigzag(12, 4)
    process_groups.threads(lambda: layout.redistribute(torch.zeros(1, 3), to), 4)
    sizes = sorted((len(output), len(x)) for _, output, x, *_ in exchanged)
    # one exchange each
    assert sizes == [(to.size(r), layout.size(r)) for r in range(4)] == [(3, 3)] * 4


@pytest.mark.usefixtures("own_errors")
def test_cached_positions_cannot_be_changed_through_the_layout():
    layout = Layout.zigzag(8, 2)
    x = torch.arange(8)[None]
    assert layout.shard(x, 0).tolist() == [[0, 1, 6, 7]]
    layout.positions(0).zero_()
    assert layout.shard(x, 0).tolist() == [[0, 1, 6, 7]]
    for wrong in (False, [0], 2):  # equal to a known key, unhashable, or too large
        with pytest.raises((TypeError, ValueError), match="^rank"):
            layout.shard(x, wrong)
