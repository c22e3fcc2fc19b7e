"""Mistakes that no size contradicts are warned of: heads before tokens, and shards of a plan
without its layout.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from meshes import mesh

from canon import Layout, Mask
from canon.testing import process_groups

HEADS_FIRST = (
    r"fewer tokens than heads. If they are \(b, heads, t, width\), pass x.transpose\(1, "
    r"2\)"
)


def tensors(*shape, seed):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)]


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "ring_attention",
        "zigzag_attention",
        "striped_attention",
        "strided_attention",
        "magi_attention",
    ],
)
@pytest.mark.parametrize("shape", [(2, 3, 29, 8), (3, 29, 8)])
def test_heads_before_tokens_are_warned_of_in_the_first_call(half, name, shape):
    function, x = getattr(half, name), tensors(*shape, seed=0)
    with pytest.warns(UserWarning, match=rf"{name} .*{HEADS_FIRST}") as warned:
        function(*x)
    assert len(warned) == 1
    function(*x)  # an error in this test session, if it warned
    if name != "attention":
        with pytest.warns(UserWarning, match=HEADS_FIRST):
            process_groups.threads(lambda: function(*x), 2)


def test_a_warning_that_is_an_error_on_one_rank_raises_on_both(half):
    def program():
        with pytest.raises(
            ValueError,
            match=r"arguments: rank 0: fine; rank 1: magi_attention "
            rf".*{HEADS_FIRST}",
        ):
            half.magi_attention(*tensors(1, 9 - dist.get_rank(), 9, 8, seed=6))
        half.ring_attention(*tensors(1, 4, 1, 8, seed=7))  # the group stays usable

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        process_groups.threads(program, 2)


def test_few_tokens_are_not_warned_of_if_they_cannot_be_heads(half):
    few = tensors(1, 3, 31, 8, seed=2)
    half.attention(*few, Mask.causal(3))
    half.ring_attention(*few, layout=Layout.contiguous(3, 1))
    half.attention(
        few[0], few[1][:, :, :1], few[2][:, :, :1]
    )  # grouped heads: taken for (b, h, t, d), they would not fit
    half.attention(*(x[:, :0] for x in few))
    half.decode_attention(few[0], *tensors(1, 40, 31, 8, seed=3)[:2])


FORGOTTEN = "magi_attention: dispatch has planned a layout for this mask.*pass layout="
DOCUMENTS = Mask.documents([0, 20, 22, 32])
MASKS = {
    "one mask": DOCUMENTS,
    "equal masks": (DOCUMENTS, DOCUMENTS),
    "different masks": (Mask.documents([0, 3, 29, 32]), DOCUMENTS),
}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", MASKS)
def test_a_planned_layout_that_is_not_passed_is_warned_of(half, kind, heads):
    mask, tokens = MASKS[kind], 16 // heads
    plan = half.dispatch(mask, 2, chunk=4).divided(heads)
    contiguous = Layout.contiguous(32, 2 * heads)
    assert plan != contiguous
    assert {plan.size(rank) for rank in range(plan.ranks)} == {tokens}
    x = tensors(2, tokens, 2, 8, seed=4)

    def attend(*given):
        group = None if heads == 1 else mesh(2, heads)
        half.magi_attention(*x, *given, group=group)

    run = lambda *given: process_groups.threads(lambda: attend(*given), plan.ranks)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        run(mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(mask, plan)
        run(mask, contiguous)
        run(Mask.documents([0, 20, 23, 32]))


def test_sizes_that_no_default_layout_gives_name_the_remedy(half):
    sizes, mask = (20, 12), Mask.causal(32)

    def program(name):
        expected = (
            "the layout gives rank 0 16 tokens, q holds 20: pass the layout that divided the tokens"
        )
        with pytest.raises(ValueError, match=expected):
            getattr(half, name)(*tensors(1, sizes[dist.get_rank()], 2, 8, seed=5), mask)

    for name in ("ring_attention", "strided_attention", "magi_attention"):
        process_groups.threads(lambda name=name: program(name), 2)
