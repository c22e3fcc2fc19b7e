"""Magi attention equals the dense oracle for any mask and layout, and repeats its bits."""

import functools

import pytest
import sharded
import torch
import torch.distributed as dist
from sharded import assert_agrees, on_this_rank

from canon import Layout, Mask
from canon.fast import magi as fast
from canon.reference import magi as reference
from canon.testing import process_groups
from canon.testing.judge import oracle

whole = functools.partial(sharded.whole, h=2, g=1)
HALVES = {"reference": reference, "fast": fast}


@pytest.fixture(params=HALVES)
def half(request):
    return HALVES[request.param]


def masks(n):
    """Return masks over n tokens: documents (empty, of one token, longer than a rank), a window, blocks, all slice types."""
    third = n // 3
    slices = [(0, third), (third, n), (0, third), (third, n)], [(0, third), (third, n), (third, n - 1), (0, third)]
    return {
        "documents": Mask.documents([0, 0, 1, n - 3, n - 3, n]),
        "full documents": Mask.documents([0, third, n], causal=False),
        "window": Mask.window(n, 3, 2),
        "block-causal": Mask.block_causal([(i // 3 * 5) % 7 for i in range(n)]),
        "slices": Mask.ranges(*slices, ["causal", "bi_causal", "inverse_causal", "full"], queries=n, keys=n),
    }


def planned(half, mask, ranks, chunk):
    """Return a balanced plan. With so few tokens, the default rates would prefer little traffic to balance."""
    return half.dispatch(mask, ranks, chunk=chunk, cells_per_us=1, tokens_per_us=1000)


def attending(half, mask, layout, **options):
    return functools.partial(half.magi_attention, mask=mask, layout=layout, return_lse=True, **options)


def check(half, mask, layout, tensors=None, **options):
    tensors = tensors or whole(mask)
    attend = attending(half, mask, layout, **options)
    for got in process_groups.threads(lambda: on_this_rank(attend, layout, tensors), layout.ranks):
        assert_agrees(got, mask, *tensors)


@pytest.mark.parametrize("stages", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_the_reference_equals_the_dense_oracle(ranks, stages):
    n = 29
    for mask in masks(n).values():
        check(reference, mask, planned(reference, mask, ranks, chunk=3), stages=stages, keep_kv=bool(ranks % 2))


@pytest.mark.parametrize(
    ("ranks", "stages", "name"),
    [
        (1, 1, "documents"),
        (2, 2, "slices"),
        (3, 0, "documents"),
        (4, 1, "block-causal"),
        (5, 3, "window"),
        (8, 1, "documents"),
    ],
)
def test_fast_equals_the_dense_oracle(ranks, stages, name):
    mask = masks(17)[name]
    check(fast, mask, planned(fast, mask, ranks, chunk=2), stages=stages, keep_kv=bool(stages % 2))


def on_one_rank_for_large_chunks(half, mask):
    with pytest.warns(UserWarning, match="2 of 3 ranks without a token"):
        return planned(half, mask, 3, chunk=1000)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped", "all on one rank", "large chunks"])
def test_any_layout(half, kind):
    n, mask = 19, Mask.documents([0, 4, 19])
    layout = {
        "contiguous": lambda: Layout.contiguous(n, 3),
        "zigzag": lambda: Layout.zigzag(n, 3),
        "striped": lambda: Layout.striped(n, 3),
        "all on one rank": lambda: Layout([[], [range(4, 19), range(0, 4)], []], n),
        "large chunks": lambda: on_one_rank_for_large_chunks(half, mask),
    }[kind]()
    check(half, mask, layout, stages=1)


@pytest.mark.parametrize("method", ["fused", "head_parallel"])
def test_batches_heads_in_groups_and_every_backward(half, method):
    mask = masks(13)["documents"]
    layout = planned(half, mask, 2, chunk=3)
    check(half, mask, layout, whole(mask, b=2, h=6, g=2), backward=method)


def test_default_mask_and_layout_and_packed_tensors(half):
    q, k, v, dout, _ = whole(Mask.causal(12))
    layout = Layout.contiguous(12, 3)

    def program():
        shards = [layout.shard(x[0], dist.get_rank(), 0) for x in (q, k, v)]
        return layout.unshard(half.magi_attention(*shards), dim=0)

    for got in process_groups.threads(program, 3):
        torch.testing.assert_close(got, oracle(q, k, v, dout).out[0], rtol=0, atol=1e-12)


def test_without_a_process_group_it_is_one_rank(half):
    q, k, v, dout, _ = whole(Mask.causal(9))
    torch.testing.assert_close(half.magi_attention(q, k, v, stages=2), oracle(q, k, v, dout).out, rtol=0, atol=1e-12)


def test_unseen_keys_may_be_nan(half):
    n = 21
    mask = Mask(Mask.documents([0, 8, n - 4], window=(3, 0)).bands, n, n)  # four tokens of padding at the end
    dirty = [x.clone() for x in whole(mask)]
    for x in dirty[:4]:
        x[:, -4:] = torch.nan
    dirty[4][:, :, -4:] = 0
    check(half, mask, planned(half, mask, 3, chunk=2), dirty, stages=1)


def test_a_refilled_cu_seqlens_is_another_mask(half):
    cu_seqlens = torch.tensor([0, 3, 15])
    for middle in (3, 11):
        cu_seqlens[1] = middle
        mask = Mask.documents(cu_seqlens)
        check(half, mask, planned(half, mask, 2, chunk=2))


def test_two_disjoint_groups_at_once(half):
    mask = Mask.documents([0, 5, 17])
    tensors = [whole(mask, seed=seed) for seed in (1, 2)]

    def program():
        groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4])]
        mine = int(dist.get_rank() > 2)
        layout = planned(half, mask, 2 + (mine == 0), chunk=2)
        return on_this_rank(attending(half, mask, layout, group=groups[mine]), layout, tensors[mine], groups[mine])

    for rank, got in enumerate(process_groups.threads(program, 5)):
        assert_agrees(got, mask, *tensors[int(rank > 2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_stay_in_float32_and_bits_repeat(half, dtype):
    mask = Mask.documents([0, 7, 60])
    layout, tensors = planned(half, mask, 3, chunk=4), whole(mask, d=16, dv=16, dtype=dtype)
    attend = attending(half, mask, layout, stages=2, keep_kv=dtype == torch.float32)
    runs = [process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 3) for _ in range(2)]
    assert_agrees(runs[0][1], mask, *tensors)
    for first, second in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_document_positions_fit_the_rotary_embedding(half):
    """Rotated by `document_positions`, queries and keys score by distance alone, on every layout."""
    cu_seqlens = [0, 5, 16]
    layout = planned(half, Mask.documents(cu_seqlens), 2, chunk=2)
    for rank in range(2):
        expected = [
            token - max(start for start in cu_seqlens[:-1] if start <= token) for token in layout.positions(rank)
        ]
        assert layout.document_positions(rank, cu_seqlens).tolist() == expected


def test_errors_are_raised_on_every_rank(half):
    mask = Mask.causal(8)
    q = torch.zeros(4, 1, 8)

    def refused(call):
        with pytest.raises(ValueError) as caught:
            call()
        return str(caught.value)

    def program():
        rank = dist.get_rank()
        plan = half.cast_plan(mask, Layout.contiguous(8, 2))
        return [
            refused(lambda: half.magi_attention(q, q, q, mask, stages=-1)),
            refused(lambda: half.magi_attention(q, q, q, mask, stages=rank)),
            refused(lambda: half.magi_attention(q, q, q, mask, keep_kv=bool(rank))),
            refused(lambda: half.magi_attention(q, q, q, mask, Layout.contiguous(8, 3))),
            refused(lambda: half.group_cast(q, plan, 1)),
            refused(lambda: half.group_cast(q[1:], plan, 0)),
            refused(lambda: half.group_cast(q, half.cast_plan(mask, Layout.contiguous(8, 3)), 0)),
            refused(lambda: half.group_reduce(q[: 4 * rank], plan, 0, q[:3])),
        ]

    told = [
        "stages must be a whole number >= 0, got -1",
        "stages",
        "keep_kv",
        "the layout is for 3 ranks, the group has 2",
        "stage 1 is not one of the plan's 1 casts",
        "group_cast: x has 3 rows",
        "the plan is for 3 ranks, the group has 2",
        "into must be (4, 1, 8)",
    ]
    for messages in process_groups.threads(program, 2):
        for expected, message in zip(told, messages, strict=True):
            assert expected in message


def run_as_processes(name):
    """Run one pass over gloo, in processes. A function of the module, so that it can be pickled."""
    half, mask = HALVES[name], Mask.documents([0, 1, 12, 19])
    layout = planned(half, mask, 3, chunk=2)
    return on_this_rank(attending(half, mask, layout, stages=2), layout, whole(mask))


@pytest.mark.parametrize("name", HALVES)
def test_runs_as_processes(name):
    mask = Mask.documents([0, 1, 12, 19])
    for got in process_groups.processes(functools.partial(run_as_processes, name), 3):
        assert_agrees(got, mask, *whole(mask))
