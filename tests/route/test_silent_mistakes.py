"""Mistakes that no size contradicts are warned of: heads before tokens, and shards of a plan
without its layout.
"""

import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from meshes import mesh

from canon import Layout, Mask, reference
from canon.fast.ahead.warm import DEFAULT
from canon.testing import process_groups

HEADS_FIRST = (
    r"fewer tokens than heads. If they are \(b, heads, t, width\), pass x.transpose\(1, "
    r"2\)"
)


def tensors(*shape, seed):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)]


@pytest.mark.parametrize("name", DEFAULT)
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
    run(mask, plan)  # a warning is an error in these tests
    run(mask, contiguous)
    run(Mask.documents([0, 20, 23, 32]))


CONTIGUOUS, ZIGZAG, STRIPED = (
    make(100, 2) for make in (Layout.contiguous, Layout.zigzag, Layout.striped)
)
WHOLE = tensors(1, 100, 2, 8, seed=7)


def called(name, cut, **options):
    """Divide q, k and v by a layout, and call a function twice, on two ranks. Return the
    warnings.
    """

    def program():
        rank = dist.get_rank()
        part = cut.shard_batch(dict(zip("qkv", WHOLE, strict=True)), rank)
        for _ in range(2):
            getattr(reference, name)(part["q"], part["k"], part["v"], **options)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        process_groups.threads(program, 2)
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    ("cut", "name", "options"),
    [
        (ZIGZAG, "magi_attention", {}),
        (ZIGZAG, "ring_attention", {}),
        (ZIGZAG, "strided_attention", {}),
        (CONTIGUOUS, "zigzag_attention", {}),
        (STRIPED, "zigzag_attention", {}),
        (CONTIGUOUS, "ring_attention", {"layout": ZIGZAG}),
    ],
)
def test_a_layout_that_has_not_divided_the_tokens_warns_once_on_each_rank(
    empty_cache, cut, name, options
):
    found = called(name, cut, **options)
    assert len(found) == 2
    for message in found:
        assert message.startswith(
            f"{name}: tensors of 100 tokens on 2 ranks were divided here, but none by the layout"
        )


def test_other_layouts_of_the_same_size_do_not_warn_if_they_may_have_divided_the_tokens(
    empty_cache, half
):
    """By shard, an index, redistribution, a data loader in another process, or in a batch."""
    ahead = Layout.zigzag_documents([0, 50, 100], 2)
    assert [ZIGZAG.shard(WHOLE[0], rank).shape[1] for rank in range(2)] == [50, 50]
    arrived = pickle.loads(pickle.dumps(Layout([[range(50, 100)], [range(50)]], 100)))
    short = Layout([[range(25, 50)], [range(25)]], 50)
    several = Layout.concat([short] * 2)
    halves = Layout([[range(0, 100, 2)], [range(1, 100, 2)]], 100)
    halves.positions(0)
    reverse = Layout([[range(75, 100), range(25, 50)], [range(25), range(50, 75)]], 100)

    def program():
        x = ZIGZAG.redistribute(ZIGZAG.shard(WHOLE[0], dist.get_rank()), reverse)
        for layout in (arrived, several, halves, reverse, ZIGZAG):
            half.ring_attention(x, x, x, layout=layout)
        masks = [Mask.window(50, 9), Mask.causal(50)]
        x = short.shard(WHOLE[0].view(2, 50, 2, 8), dist.get_rank())
        half.ring_attention(x, x, x, masks, short)

    half.prepare("magi_attention", Mask.causal(100), ahead, rank=0, heads=(2, 2),
                 widths=(8, 8), dtype=torch.float32, device="cpu")  # fmt: skip
    process_groups.threads(program, 2)


def test_a_mesh_takes_the_layout_that_was_divided(empty_cache, half):
    layout, other = half.dispatch(Mask.causal(100), 2).divided(2), Layout.zigzag(100, 4)

    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "heads"))
        for each in (layout, other):
            x = each.shard(WHOLE[0], dist.get_rank())
            half.magi_attention(x, x, x, layout=each, group=mesh)

    process_groups.threads(program, 4)  # a warning is an error here


def test_a_call_that_forgets_the_mask_of_its_plan_warns_on_each_rank(empty_cache, half):
    mask = Mask.documents([0, 40, 100])
    layout = half.dispatch(mask, 2)
    x = torch.zeros(1, 100, 2, 8)

    def program(layout, **options):
        part = layout.shard(x, dist.get_rank())
        half.ring_attention(part, part, part, layout=layout, **options)

    with pytest.warns(UserWarning, match="mask=None is causal.* begins at token 40") as found:
        process_groups.threads(lambda: program(layout), 2)
    assert len(found) == 2
    process_groups.threads(lambda: program(layout, mask=Mask.causal(100)), 2)
    for other in (half.dispatch(Mask.window(100, 9), 2), Layout(layout.ranges_per_rank, 100)):
        process_groups.threads(lambda other=other: program(other), 2)


def test_shard_batch_names_the_remedy_of_masks_that_other_functions_take(half, own_errors):
    masks = (Mask.causal(100), Mask.documents([0, 40, 100]))
    with pytest.raises(TypeError, match=r"put position_ids \(b, n\) into the batch"):
        half.dispatch(masks, 2).shard_batch({"labels": torch.zeros(2, 100).long()}, 0, masks)


@pytest.mark.usefixtures("own_errors")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_named(half, layout):
    q, kv = torch.nested.nested_tensor([torch.zeros(4, 2, 8)], layout=layout), torch.zeros(4, 2, 8)
    for function in (half.attention, half.ring_attention, half.decode_attention):
        with pytest.raises(TypeError, match="q is a NestedTensor: pass a plain torch.Tensor"):
            function(q, kv, kv)
