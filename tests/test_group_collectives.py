"""Magi attention sends the rows of its plan, each cast during the step before, and adds gradients in rank order."""

import functools
import weakref
from types import SimpleNamespace

import pytest
import sharded
import torch
import torch.distributed as dist
from sharded import assert_agrees, on_this_rank

from canon import Layout, Mask
from canon.fast import magi as fast
from canon.fast import schedule
from canon.reference import magi as reference
from canon.testing import process_groups

whole = functools.partial(sharded.whole, h=2, g=1)
HALVES = {"reference": reference, "fast": fast}


@pytest.fixture(params=HALVES)
def half(request):
    return HALVES[request.param]


def planned(half, mask, ranks, chunk):
    """Return a balanced plan. With so few tokens, the default rates would prefer little traffic to balance."""
    return half.dispatch(mask, ranks, chunk=chunk, cells_per_us=1, tokens_per_us=1000)


def attending(half, mask, layout, **options):
    return functools.partial(half.magi_attention, mask=mask, layout=layout, return_lse=True, **options)


@pytest.fixture
def exchanged(monkeypatch):
    """Record (rank, dtype, elements sent to each rank) of every exchange."""
    seen, exchange = [], dist.all_to_all_single

    def counting(output, input, output_sizes, input_sizes, **options):
        width = input[:1].numel() if len(input) else 0
        seen.append((dist.get_rank(), input.dtype, [size * width for size in input_sizes]))
        assert sum(output_sizes) == len(output)
        return exchange(output, input, output_sizes, input_sizes, **options)

    monkeypatch.setattr(dist, "all_to_all_single", counting)
    return seen


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("stages", [0, 2])
def test_sends_the_rows_of_the_plan(half, exchanged, stages, keep_kv):
    ranks, b, g, d, dv = 3, 2, 2, 8, 6
    mask = Mask.documents([0, 5, 24])
    layout = planned(half, mask, ranks, chunk=2)
    plan = half.cast_plan(mask, layout, stages=stages)
    attend = attending(half, mask, layout, stages=stages, keep_kv=keep_kv)
    results = process_groups.threads(
        lambda: _gradients(attend, layout, whole(mask, b=b, h=4, g=g, d=d, dtype=torch.bfloat16)), ranks
    )
    assert len(results) == ranks
    items = b * g * (d + dv)
    for rank in range(ranks):
        casts = [[size * items for size in plan.send_sizes(cast, rank)] for cast in range(plan.casts)]
        back = [[size * items for size in plan.receive_sizes(cast, rank)] for cast in range(plan.casts)]
        mine = [(dtype, sizes) for who, dtype, sizes in exchanged if who == rank]
        keys = [sizes for dtype, sizes in mine if dtype == torch.bfloat16]
        assert [sizes for dtype, sizes in mine if dtype == torch.float32] == back
        assert keys == casts * (1 if keep_kv else 2)


def _gradients(attend, layout, tensors):
    """Return this rank's gradients, like `on_this_rank`, without the messages that collect the results."""
    q, k, v = (layout.shard(x, dist.get_rank()).detach().requires_grad_() for x in tensors[:3])
    out, _ = attend(q, k, v)
    return torch.autograd.grad(out.float().sum(), (q, k, v))


def test_a_rank_with_nothing_to_send_or_receive_takes_part(half, exchanged):
    """Rank 2 holds a whole document, rank 3 holds no token."""
    mask = Mask.documents([0, 8, 12])
    layout = Layout([[range(0, 4)], [range(4, 8)], [range(8, 12)], []], 12)
    process_groups.threads(lambda: _gradients(attending(half, mask, layout), layout, whole(mask)), 4)
    calls = {rank: sum(who == rank for who, *_ in exchanged) for rank in range(4)}
    assert calls == dict.fromkeys(range(4), 3)
    assert all(not any(sizes) for who, _, sizes in exchanged if who > 1)


def test_zigzag_moves_three_quarters_of_an_all_gather(half, exchanged):
    n, ranks = 32, 4
    mask, layout = Mask.causal(n), Layout.zigzag(n, ranks)
    process_groups.threads(lambda: _gradients(attending(half, mask, layout), layout, whole(mask, d=8, dv=8)), ranks)
    all_gather = (ranks - 1) * n * 16
    assert sum(sum(sizes) for *_, sizes in exchanged) == 3 * 0.75 * all_gather  # keys twice, gradients once


def test_cast_and_reduce_are_transposes(half):
    """<cast x, y> = <x, reduce y>, summed over ranks; and every row arrives where the plan puts it."""
    mask, layout = Mask.documents([0, 2, 2, 23], causal=False), Layout.zigzag(23, 3)
    plan = half.cast_plan(mask, layout, stages=2)
    full = torch.randn(23, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def program():
        rank, products = dist.get_rank(), []
        x = layout.shard(full, rank, 0)
        for stage in range(plan.casts):
            received = half.group_cast(x, plan, stage)
            tokens = [token for piece in plan.received[stage][rank] for token in piece.tokens]
            assert torch.equal(received, full[tokens])
            y = torch.cos(received + rank)
            back = half.group_reduce(y, plan, stage, torch.zeros_like(x))
            products.append(torch.stack([(received * y).sum(), (x * back).sum()]))
        return torch.stack(products).sum(0)

    left, right = torch.stack(process_groups.threads(program, 3)).sum(0)
    torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_gradients_are_added_in_rank_order(half):
    """Add 2^53, 1 and -2^53 of ranks 1, 2 and 3 to 1. The result depends on the order of the additions."""
    mask = Mask.ranges([(0, 4)], [(0, 1)], ["full"], queries=4, keys=4)  # all see the first key
    plan = half.cast_plan(mask, Layout.contiguous(4, 4))
    parts = [0.0, 2.0**53, 1.0, -(2.0**53)]

    def program():
        rank = dist.get_rank()
        y = torch.full((int(rank > 0), 1), parts[rank], dtype=torch.float64)
        return half.group_reduce(y, plan, 0, torch.ones(1, 1, dtype=torch.float64)).item()

    expected = 1.0
    for part in parts[1:]:
        expected += part
    assert process_groups.threads(program, 4)[0] == expected


# --- overlap


@pytest.mark.parametrize("keep_kv", [False, True])
def test_casts_and_reductions_are_in_flight_during_a_step(half, monkeypatch, keep_kv):
    """Compare the order of sends, computations and waits on rank 0."""
    log, exchange = [], dist.all_to_all_single

    def note(event):
        if dist.get_rank() == 0:
            log.append(event)

    def noting(output, input, *sizes, **options):
        kind = "keys" if input.dtype == torch.float32 else "gradients"
        note(f"send {kind}")
        work = exchange(output, input, *sizes, **options)
        return SimpleNamespace(wait=lambda: (note(f"have {kind}"), work.wait()))

    def computing(owner, name):
        compute = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: (note("compute"), compute(*args, **options))[1])

    monkeypatch.setattr(dist, "all_to_all_single", noting)
    of_fast = (schedule.Step, "forward"), (schedule.StepBackward, "dkdv")
    for owner, name in of_fast if half is fast else ((half, "tiled_forward"), (half, "tiled_backward")):
        computing(owner, name)
    mask, layout = Mask.causal(24), Layout.zigzag(24, 2)
    attend = attending(half, mask, layout, stages=2, keep_kv=keep_kv, reduce_dtype=torch.float64)
    process_groups.threads(lambda: _gradients(attend, layout, whole(mask, dtype=torch.float32)), 2)
    forward = ["send keys", "compute", "have keys", "send keys", "compute", "have keys", "compute"]
    backward = [*forward[:5], "send gradients", *forward[5:], "have gradients", "send gradients", "have gradients"]
    if keep_kv:
        backward = [
            "compute",
            "compute",
            "send gradients",
            "compute",
            "have gradients",
            "send gradients",
            "have gradients",
        ]
        if half is fast:  # the own keys come last
            backward = [
                "compute",
                "send gradients",
                "compute",
                "have gradients",
                "send gradients",
                "compute",
                "have gradients",
            ]
    assert log == forward + backward


@pytest.fixture
def late(monkeypatch):
    """Make exchanges read and write only in `wait`, without keeping their tensors alive."""
    exchange = dist.all_to_all_single

    def place(x):
        storage, dtype, view = weakref.ref(x.untyped_storage()), x.dtype, (x.storage_offset(), x.size(), x.stride())

        def found():
            assert storage() is not None, "its memory was freed before the end of the exchange"
            return torch.empty(0, dtype=dtype).set_(storage(), *view)

        return found

    def posted(received, sent, *sizes, group=None, async_op=False):
        received.fill_(torch.nan)
        places = place(received), place(sent)
        wait = lambda: exchange(*(found() for found in places), *sizes, group=group)
        return SimpleNamespace(wait=wait) if async_op else wait()

    monkeypatch.setattr(dist, "all_to_all_single", posted)


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("stages", [0, 3])
def test_memory_of_an_exchange_is_neither_read_early_nor_freed_early(half, late, stages, keep_kv):
    mask = Mask.documents([0, 5, 24])
    layout, tensors = planned(half, mask, 3, chunk=2), whole(mask)
    attend = attending(half, mask, layout, stages=stages, keep_kv=keep_kv)
    for got in process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 3):
        assert_agrees(got, mask, *tensors)
