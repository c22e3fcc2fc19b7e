"""Ring attention on any number of ranks equals the dense oracle, sends the bytes of its docstring, and repeats its bits."""

import functools

import pytest
import torch
import torch.distributed as dist
from sharded import assert_agrees, on_this_rank, whole

from canon import Layout, Mask, fast, reference
from canon.testing import process_groups, thread_group
from canon.testing.judge import oracle

HALVES = {"reference": reference, "fast": fast}
LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
FUNCTIONS = {"zigzag": "zigzag_attention", "striped": "striped_attention"}


@pytest.fixture(params=HALVES)
def half(request):
    return HALVES[request.param]


def packs(n):
    """Return masks over n tokens: causal, packed documents with empty and one-token ones, a window, full documents."""
    ends = sorted({0, min(1, n), n // 2, n})
    return [
        Mask.causal(n),
        Mask.documents([*ends, n]),
        Mask.window(n, 3, 5),
        Mask.documents([0, n // 3, n], causal=False),
    ]


def assert_equals_the_oracle(half, ranks, kind, mask, **sizes):
    layout, tensors = LAYOUTS[kind](mask.queries, ranks), whole(mask, **sizes)
    name = FUNCTIONS.get(kind, "ring_attention")
    extra = {} if kind in FUNCTIONS else {"layout": layout}
    attend = functools.partial(getattr(half, name), mask=mask, return_lse=True, **extra)
    for got in process_groups.threads(lambda: on_this_rank(attend, layout, tensors), ranks):
        assert_agrees(got, mask, *tensors)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_the_reference_equals_the_dense_oracle(ranks, kind):
    for n in (1, 3, 37, 50):  # fewer tokens than ranks; not divisible by them
        masks = packs(n)
        for mask in masks if n == 37 else masks[n % 2 :: 2]:
            assert_equals_the_oracle(reference, ranks, kind, mask)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_fast_equals_the_dense_oracle(ranks, kind):
    for mask in packs(29)[1:3]:
        assert_equals_the_oracle(fast, ranks, kind, mask, h=2, g=1)


@pytest.mark.parametrize("method", ["fused", "split", "head_parallel"])
def test_every_backward_and_any_layout(half, method):
    n = 31
    layout = Layout([[range(20, 31)], [], [range(0, 3), range(7, 20)], [range(3, 7)]], n)  # uneven; one rank is empty
    mask = Mask.block_causal([(5 * (i // 6)) % 7 for i in range(n)])
    tensors = whole(mask, b=2)
    attend = functools.partial(half.ring_attention, mask=mask, layout=layout, backward=method, return_lse=True)
    assert_agrees(process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 4)[0], mask, *tensors)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_more_ranks_than_tokens(half, kind):
    mask, layout = Mask.documents([0, 1, 3]), LAYOUTS[kind](3, 5)
    tensors = whole(mask)
    name = FUNCTIONS.get(kind, "ring_attention")
    attend = functools.partial(getattr(half, name), mask=mask, return_lse=True)
    for got in process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 5):
        assert_agrees(got, mask, *tensors)


def test_packed_tensors_and_default_mask_and_layout(half):
    q, k, v, dout, _ = whole(Mask.causal(12))
    layout = Layout.contiguous(12, 3)

    def program():
        shards = [layout.shard(x[0], dist.get_rank(), 0) for x in (q, k, v)]
        return layout.unshard(half.ring_attention(*shards), dim=0)

    for got in process_groups.threads(program, 3):
        torch.testing.assert_close(got, oracle(q, k, v, dout).out[0], rtol=0, atol=1e-12)


def test_tensors_of_any_strides(half):
    mask, layout = Mask.causal(22), Layout.zigzag(22, 2)
    q, k, v, dout, dlse = whole(mask, b=2, dv=8)
    v = v[:, :, :1].expand(-1, -1, 2, -1)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    attend = lambda q, k, v: half.zigzag_attention(
        q.transpose(0, 3).contiguous().transpose(0, 3), k, v, mask, return_lse=True
    )
    got = process_groups.threads(lambda: on_this_rank(attend, layout, (*strided, v, dout, dlse)), 2)[0]
    assert_agrees(got, mask, q, k, v, dout, dlse)


def test_unseen_tokens_may_be_nan(half):
    n = 26
    mask = Mask.documents([0, 9, n - 4], window=(3, 0))
    mask = Mask(mask.bands, n, n)  # four tokens of padding at the end
    clean = whole(mask)
    dirty = [x.clone() for x in clean]
    for x in dirty[:4]:
        x[:, -4:] = torch.nan
    dirty[4][:, :, -4:] = 0
    layout = Layout.zigzag(n, 3)
    attend = functools.partial(half.zigzag_attention, mask=mask, return_lse=True)
    got = process_groups.threads(lambda: on_this_rank(attend, layout, dirty), 3)[0]
    assert_agrees(got, mask, *dirty)


def test_without_a_process_group_it_is_one_rank(half):
    q, k, v, dout, _ = whole(Mask.causal(9))
    torch.testing.assert_close(half.zigzag_attention(q, k, v), oracle(q, k, v, dout).out, rtol=0, atol=1e-12)


def test_two_disjoint_groups_at_once(half):
    mask = Mask.causal(17)
    tensors = [whole(mask, seed=seed) for seed in (1, 2)]

    def program():
        groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4])]
        mine = int(dist.get_rank() > 2)
        layout = Layout.zigzag(17, 2 + (mine == 0))
        attend = functools.partial(half.zigzag_attention, mask=mask, group=groups[mine], return_lse=True)
        return on_this_rank(attend, layout, tensors[mine], groups[mine])

    for rank, got in enumerate(process_groups.threads(program, 5)):
        assert_agrees(got, mask, *tensors[int(rank > 2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_stay_in_float32(half, dtype):
    n = 90
    mask, layout = Mask.documents([0, 11, n]), Layout.zigzag(n, 5)
    tensors = whole(mask, d=16, dv=16, dtype=dtype)
    attend = functools.partial(half.zigzag_attention, mask=mask, return_lse=True)
    runs = [process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 5) for _ in range(2)]
    assert_agrees(runs[0][3], mask, *tensors)
    for first, second in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # the same bits


def test_gradients_are_sent_in_reduce_dtype(half):
    """Three ranks add 256, 1/3 and -256 to one key's dv: bfloat16 loses the third, float32 keeps it."""
    layout = Layout.contiguous(4, 4)
    parts = torch.tensor([0.0, 256.0, 1 / 3, -256.0])

    def program(reduce_dtype):
        rank = dist.get_rank()
        q, k = torch.zeros(2, 1, 1, 1, 16)
        v = torch.zeros(1, 1, 1, 16, requires_grad=True)
        mask = Mask.ranges([(0, 4)], [(0, 1)], ["full"], queries=4, keys=4)  # all queries see only the first key
        out = half.ring_attention(q, k, v, mask, layout, reduce_dtype=reduce_dtype)
        out.backward(parts[rank].expand_as(out))
        return v.grad[0, 0, 0, 0].item()

    exact = process_groups.threads(lambda: program(None), 4)[0]
    assert abs(exact - 1 / 3) <= 2**-16  # one rounding at 256, where float32 steps by 2**-15
    assert abs(process_groups.threads(lambda: program(torch.bfloat16), 4)[0] - 1 / 3) > 0.1


def test_bytes_sent_are_those_of_the_docstring(half, monkeypatch):
    sent = {}
    send = thread_group.ThreadGroup.send

    def counting(group, tensors, to, tag=0):
        sent.setdefault(dist.get_rank(), []).extend((x.dtype, x.numel()) for x in tensors)
        return send(group, tensors, to, tag)

    monkeypatch.setattr(thread_group.ThreadGroup, "send", counting)
    ranks, n, b, g, d, dv = 4, 32, 2, 2, 8, 6
    tensors = whole(Mask.causal(n), b=b, g=g, d=d, dv=dv, dtype=torch.bfloat16)
    layout = Layout.zigzag(n, ranks)
    attend = functools.partial(half.zigzag_attention, return_lse=True)
    process_groups.threads(lambda: on_this_rank(attend, layout, tensors), ranks)
    block = b * (n // ranks) * g * (d + dv)
    assert set(sent) == set(range(ranks))
    for operations in sent.values():
        items = {dtype: sum(n for of, n in operations if of == dtype) for dtype in {of for of, _ in operations}}
        assert items == {torch.bfloat16: 2 * (ranks - 1) * block, torch.float32: (ranks - 1) * block}


def run_as_processes(name):
    """Run one pass over gloo, in processes. A function of the module, so that it can be pickled."""
    half, layout, mask = HALVES[name], Layout.zigzag(29, 3), Mask.documents([0, 1, 17, 29])
    tensors = whole(mask)
    attend = functools.partial(half.zigzag_attention, mask=mask, return_lse=True)
    return on_this_rank(attend, layout, tensors)


@pytest.mark.parametrize("name", HALVES)
def test_runs_as_processes(name):
    mask = Mask.documents([0, 1, 17, 29])
    for got in process_groups.processes(functools.partial(run_as_processes, name), 3):
        assert_agrees(got, mask, *whole(mask))
