"""Strided attention equals the dense oracle for all strides, ranks and layouts, and repeats its bits."""

import contextlib
import functools

import pytest
import sharded
import torch
import torch.distributed as dist
from sharded import assert_agrees, on_this_rank

from canon import Layout, Mask, fast, reference
from canon.testing import process_groups
from canon.testing.judge import oracle

whole = functools.partial(sharded.whole, h=8, g=4)
HALVES = {"reference": reference, "fast": fast}
LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
PATTERNS = {  # for 4 key heads
    "one by one": {},
    "in twos": dict(head_stride=2),
    "all at once": dict(head_stride=4),
    "a small first": dict(head_stride=2, forward_first_stride=1, backward_first_stride=1),
    "a small last": dict(head_stride=4, backward_last_stride=1),
    "both": dict(head_stride=2, forward_first_stride=1, backward_first_stride=1, backward_last_stride=1),
    "apart": dict(head_stride=4, forward_first_stride=3, backward_first_stride=2),
    "ring": dict(head_stride=4, forward_first_stride=1, backward_schedule="ring"),
}
UNEVEN = [[range(20, 31)], [], [range(0, 3), range(7, 20)], [range(3, 7)]]  # 31 tokens; one rank is empty


@pytest.fixture(params=HALVES)
def half(request):
    return HALVES[request.param]


@pytest.fixture
def unwritten_is_nan():
    """Fill the result of torch.empty with NaN, so that a read of unwritten memory fails the test."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def attend_with(half, mask, layout, **options):
    return functools.partial(half.strided_attention, mask=mask, layout=layout, return_lse=True, **options)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_equals_the_dense_oracle(half, ranks, kind, unwritten_is_nan):
    n = 29  # not divisible by the number of ranks
    masks = [Mask.documents([0, 1, 1, n // 2, n]), Mask.window(n, 3, 5), Mask.causal(n)]
    layout = LAYOUTS[kind](n, ranks)
    for number, options in enumerate(PATTERNS.values()):
        if half is fast and number % 3 != (ranks + len(kind)) % 3:
            continue  # the interpreter is slow
        mask = masks[(number + ranks) % len(masks)]
        tensors = whole(mask, h=4 if half is fast else 8)
        attend = attend_with(half, mask, layout, **options)
        for got in process_groups.threads(lambda: on_this_rank(attend, layout, tensors), ranks):
            assert_agrees(got, mask, *tensors)


def test_results_do_not_depend_on_strides(half):
    mask, layout = Mask.documents([0, 5, 16], causal=False), Layout.zigzag(16, 2)
    tensors = whole(mask, h=4, g=4)
    results = []
    for options in PATTERNS.values():
        attend = attend_with(half, mask, layout, **options)
        results.append(process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 2)[0])
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, same, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*fused.* adds to dq in any order")
@pytest.mark.parametrize("method", ["fused", "split", "head_parallel"])
def test_every_backward_uneven_and_empty_shards(half, method, unwritten_is_nan):
    layout = Layout(UNEVEN, 31)
    mask = Mask.block_causal([(5 * (i // 6)) % 7 for i in range(31)])
    tensors = whole(mask, b=2, h=4, g=2)
    attend = attend_with(half, mask, layout, backward=method, head_stride=2, backward_first_stride=1)
    assert_agrees(process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 4)[0], mask, *tensors)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_more_ranks_than_tokens(half, kind, unwritten_is_nan):
    mask, layout = Mask.documents([0, 1, 3]), LAYOUTS[kind](3, 5)
    tensors = whole(mask, h=2, g=2)
    attend = attend_with(half, mask, layout)
    for got in process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 5):
        assert_agrees(got, mask, *tensors)


def test_packed_tensors_and_default_mask_and_layout(half):
    q, k, v, dout, _ = whole(Mask.causal(12), h=4, g=2)
    layout = Layout.contiguous(12, 3)

    def program():
        shards = [layout.shard(x[0], dist.get_rank(), 0) for x in (q, k, v)]
        return layout.unshard(half.strided_attention(*shards), dim=0)

    for got in process_groups.threads(program, 3):
        torch.testing.assert_close(got, oracle(q, k, v, dout).out[0], rtol=0, atol=1e-12)


def test_tensors_of_any_strides(half):
    mask, layout = Mask.causal(14), Layout.zigzag(14, 2)
    q, k, v, dout, dlse = whole(mask, b=2, h=4, g=2, dv=8)
    v, dout = v[:, :, :1].expand(-1, -1, 2, -1), dout[:, :1].expand(-1, 14, -1, -1)

    def attend(q, k, v):
        q = q.transpose(0, 3).contiguous().transpose(0, 3)
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        v = v[:, :, :1].expand(-1, -1, 2, -1)
        assert not any(x.is_contiguous() for x in (q, k, v))
        return half.strided_attention(q, k, v, mask, layout, head_stride=2, backward_last_stride=1, return_lse=True)

    got = process_groups.threads(lambda: on_this_rank(attend, layout, (q, k, v, dout, dlse)), 2)[0]
    exact = oracle(q, k, v, dout, mask, dlse=dlse)
    both = torch.stack([exact.dv.sum(2), torch.zeros_like(exact.dv[:, :, 0])], 2)  # the expansion's own gradient
    for one, true in zip(got, exact._replace(dv=both), strict=True):
        torch.testing.assert_close(one, true, rtol=0, atol=1e-12)


def test_unseen_tokens_may_be_nan(half, unwritten_is_nan):
    n = 26
    mask = Mask.documents([0, 9, n - 4], window=(3, 0))
    mask = Mask(mask.bands, n, n)  # four tokens of padding at the end
    dirty = [x.clone() for x in whole(mask, h=4, g=2)]
    for x in dirty[:4]:
        x[:, -4:] = torch.nan
    dirty[4][:, :, -4:] = 0
    layout = Layout.zigzag(n, 3)
    for options in (dict(), dict(head_stride=2, backward_schedule="ring")):
        attend = attend_with(half, mask, layout, **options)
        got = process_groups.threads(lambda: on_this_rank(attend, layout, dirty), 3)[0]
        assert_agrees(got, mask, *dirty)


def test_without_a_process_group_it_is_one_rank(half):
    q, k, v, dout, _ = whole(Mask.causal(9))
    got = half.strided_attention(q, k, v, head_stride=2, forward_first_stride=1)
    torch.testing.assert_close(got, oracle(q, k, v, dout).out, rtol=0, atol=1e-12)


def test_two_disjoint_groups_at_once(half):
    mask = Mask.causal(17)
    tensors = [whole(mask, h=2, g=2, seed=seed) for seed in (1, 2)]

    def program():
        groups = [dist.new_group([0, 3, 4]), dist.new_group([1, 2])]
        mine = int(dist.get_rank() in (1, 2))
        layout = Layout.zigzag(17, 3 - mine)
        attend = attend_with(half, mask, layout, group=groups[mine], head_stride=2, backward_first_stride=1)
        return on_this_rank(attend, layout, tensors[mine], groups[mine])

    for rank, got in enumerate(process_groups.threads(program, 5)):
        assert_agrees(got, mask, *tensors[int(rank in (1, 2))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_stay_in_float32(half, dtype):
    n = 70
    mask, layout = Mask.documents([0, 11, n]), Layout.zigzag(n, 3)
    tensors = whole(mask, h=4, g=2, d=16, dv=16, dtype=dtype)
    attend = attend_with(half, mask, layout, head_stride=2, backward_last_stride=1)
    runs = [process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 3) for _ in range(2)]
    assert_agrees(runs[0][2], mask, *tensors)
    for first, second in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # the same bits


@pytest.mark.parametrize("schedule", ["scatter", "ring"])
def test_gradients_are_sent_in_reduce_dtype(half, schedule):
    """Three of four ranks add 256, 1/3 and -256 to one key's dv: bfloat16 loses the third, float32 keeps it."""
    layout = Layout.contiguous(4, 4)
    parts = torch.tensor([0.0, 256.0, 1 / 3, -256.0])

    def program(reduce_dtype):
        rank = dist.get_rank()
        q, k = torch.zeros(2, 1, 1, 1, 16)
        v = torch.zeros(1, 1, 1, 16, requires_grad=True)
        mask = Mask.ranges([(0, 4)], [(0, 1)], ["full"], queries=4, keys=4)  # all queries see only the first key
        out = half.strided_attention(q, k, v, mask, layout, reduce_dtype=reduce_dtype, backward_schedule=schedule)
        out.backward(parts[rank].expand_as(out))
        return v.grad[0, 0, 0, 0].item()

    exact = process_groups.threads(lambda: program(None), 4)[0]
    assert abs(exact - 1 / 3) <= 2**-16  # one rounding at 256, where float32 steps by 2**-15
    assert abs(process_groups.threads(lambda: program(torch.bfloat16), 4)[0] - 1 / 3) > 0.1


def run_as_processes(name):
    """Run one pass over gloo, in processes. A function of the module, so that it can be pickled."""
    layout, mask = Layout.zigzag(23, 3), Mask.documents([0, 1, 12, 23])
    tensors = whole(mask, h=4, g=2)
    options = [dict(), dict(head_stride=2, backward_first_stride=1), dict(head_stride=2, backward_schedule="ring")]
    return [on_this_rank(attend_with(HALVES[name], mask, layout, **some), layout, tensors) for some in options]


@pytest.mark.parametrize("name", HALVES)
def test_runs_as_processes(name):
    mask = Mask.documents([0, 1, 12, 23])
    for results in process_groups.processes(functools.partial(run_as_processes, name), 3):
        for got in results:
            assert_agrees(got, mask, *whole(mask, h=4, g=2))


@contextlib.contextmanager
def no_waiting_for_the_device(device):
    """Raise if the host waits for a GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    yield
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def train_again_and_again(device, tokens, width, runs):
    """Return the results of one pass, whether 20 of ``runs`` further passes repeat their bits, and their peaks of memory."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mask, layout = Mask.documents([0, tokens // 3, tokens]), Layout.zigzag(tokens, ranks)
    tensors = [x.to(device) for x in whole(mask, d=width, dv=width, dtype=torch.bfloat16)]
    options = dict(head_stride=2, backward_first_stride=1, backward_last_stride=1)
    got = on_this_rank(attend_with(fast, mask, layout, **options), layout, tensors)
    mine, dout = [layout.shard(x, rank).requires_grad_() for x in tensors[:3]], layout.shard(tensors[3], rank)
    peaks, results = [], []
    for run in range(runs):
        with no_waiting_for_the_device(device):
            out = fast.strided_attention(*mine, mask, layout, **options)
            results = [*results, (out.detach(), *torch.autograd.grad(out, mine, dout))][:20]
        if device == "cuda" and run in (runs // 2, runs - 1):
            peaks.append(torch.cuda.max_memory_allocated())
    same = all(torch.equal(a, b) for again in results[1:] for a, b in zip(results[0], again, strict=True))
    return got, same, peaks


def assert_repeats(results, tokens, width):
    mask = Mask.documents([0, tokens // 3, tokens])
    for got, same, peaks in results:
        assert same
        assert len(set(peaks)) <= 1  # memory does not grow, however far the host runs ahead
        assert_agrees(got, mask, *whole(mask, d=width, dv=width, dtype=torch.bfloat16))


def test_repeats_its_bits():
    assert_repeats(process_groups.threads(functools.partial(train_again_and_again, "cpu", 40, 16, 3), 2), 40, 16)


@pytest.mark.gpus(2)
def test_on_gpus_it_repeats_its_bits_never_waits_and_keeps_its_memory():
    assert_repeats(process_groups.gpus(functools.partial(train_again_and_again, "cuda", 2048, 128, 50)), 2048, 128)
