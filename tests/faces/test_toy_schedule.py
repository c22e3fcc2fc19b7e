"""A schedule is declared once: a new one in one file is checked, compared, compiled, prepared and
replayed.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from sharded import close, shards, whole
from toy_schedule import TOY, TOYS

from canon import Layout, Mask, fast, reference
from canon.masks.plan_cache import PLANS
from canon.testing import process_groups

MASK = Mask.documents([0, 7, 24])
LAYOUT = Layout.contiguous(24, 2)
SIZES = {"heads": (4, 2), "widths": (8, 6), "device": "cpu"}  # of `tensors`


def tensors():
    return [x.double() for x in whole(MASK)]


@pytest.mark.parametrize("descending", [False, True])
def test_it_computes_attention_and_its_gradients(half, descending):
    def program():
        mine = [x.requires_grad_() for x in shards(LAYOUT, tensors()[:3])]
        out = TOYS[half](*mine, MASK, LAYOUT, descending=descending)
        return out.detach(), *torch.autograd.grad(out.square().sum(), mine)

    full = [x.requires_grad_() for x in tensors()[:3]]
    exact = reference.attention(*full, MASK)
    expected = exact.detach(), *torch.autograd.grad(exact.square().sum(), full)
    for rank, found in enumerate(process_groups.threads(program, 2)):
        close(found, (LAYOUT.shard(x, rank) for x in expected))


def test_ranks_that_disagree_about_its_option_are_told_so(half):
    def program():
        mine = shards(LAYOUT, tensors()[:3])
        with pytest.raises(ValueError, match="descending: rank 0: False; rank 1: True"):
            TOYS[half](*mine, MASK, LAYOUT, descending=dist.get_rank() > 0)

    process_groups.threads(program, 2)


def test_an_unknown_option_and_a_wrong_shape_raise(half):
    with pytest.raises(TypeError, match="no option casts: expected descending, scale"):
        half.prepare("toy_attention", MASK, LAYOUT, rank=0, **SIZES, casts=1)
    q, k, v = tensors()[:3]
    with pytest.raises(ValueError, match="query heads"):
        TOYS[half](q[:, :, :3], k, v, MASK)


def test_its_operator_takes_its_options_and_compiles(half):
    assert TOY.schema.startswith("bool descending, float? scale")
    attend = partial(TOYS[half], mask=MASK, descending=True)
    run = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q, k, v = (x.requires_grad_() for x in tensors()[:3])
    expected = attend(q, k, v)
    assert torch.equal(run(q, k, v), expected)
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (run(q, k, v), expected)]
    assert all(map(torch.equal, *grads))


def test_its_plans_are_prepared(half):
    q, k, v = tensors()[:3]
    expected = TOYS[half](q, k, v, MASK, descending=True)
    PLANS.clear()
    plans = half.prepare(
        "toy_attention", MASK, Layout.contiguous(24, 1), dtype=q.dtype, **SIZES, descending=True
    )
    assert {type(key[0]).__name__ for key, _ in plans.plans} == {"function"}
    PLANS.clear()
    plans.load()
    assert torch.equal(TOYS[half](q, k, v, plans.mask, plans.layout, descending=True), expected)


def test_its_launches_are_replayed(replays):
    q, k, v = (x.float() for x in tensors()[:3])
    first, second = (TOYS[fast](q, k, v, MASK, descending=True) for _ in range(2))
    assert torch.equal(first, second)
    assert {*replays()} == {""}
