"""Magi attention sends the rows of its plan, each cast during the step before, and adds gradients
in rank order.
"""

import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import sharded
import torch
import torch.distributed as dist
from sharded import assert_agrees, gradients, on_this_rank, shards

from canon import Layout, Mask, fast
from canon.fast import schedule
from canon.reference import magi
from canon.testing import process_groups

whole = partial(sharded.whole, h=2, g=1)


def attending(half, mask, layout, **options):
    return partial(half.magi_attention, mask=mask, layout=layout, return_lse=True, **options)


kept_or_sent_again = pytest.mark.parametrize("keep_kv", [False, True])


def both_passes(attend, layout, tensors):
    """Run both passes like `on_this_rank`, without the messages that collect the results."""
    *leaves, dout = shards(layout, tensors[:4])
    gradients(lambda *qkv: attend(*qkv)[0], leaves, dout)


def test_gradients_are_added_in_rank_order(half):
    """Add 2^53, 1 and -2^53 of ranks 1, 2 and 3 to 1. The result depends on the order of the
    additions.
    """
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


@kept_or_sent_again
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
        monkeypatch.setattr(
            owner, name, lambda *args, **options: (note("compute"), compute(*args, **options))[1]
        )

    monkeypatch.setattr(dist, "all_to_all_single", noting)
    of_fast = (schedule.Step, "forward"), (schedule.StepBackward, "dkdv")
    for owner, name in (
        of_fast if half is fast else ((magi, "tiled_forward"), (magi, "tiled_backward"))
    ):
        computing(owner, name)
    mask, layout = Mask.causal(24), Layout.zigzag(24, 2)
    attend = attending(half, mask, layout, casts=2, keep_kv=keep_kv, reduce_dtype=torch.float64)
    process_groups.threads(lambda: both_passes(attend, layout, whole(mask, dtype=torch.float32)), 2)
    forward = ["send keys", "compute", "have keys", "send keys", "compute", "have keys", "compute"]
    backward = [
        *forward[:5],
        "send gradients",
        *forward[5:],
        "have gradients",
        "send gradients",
        "have gradients",
    ]
    if keep_kv:
        backward = [
            "compute",
            "send gradients",
            "compute",
            "have gradients",
            "send gradients",
            "have gradients",
        ]
        backward.insert(5 if half is fast else 0, "compute")  # in fast, the own keys come last
    assert log == forward + backward


@pytest.fixture
def late(monkeypatch):
    """Make exchanges read and write only in `wait`, without keeping their tensors alive."""
    exchange = dist.all_to_all_single

    def place(x):
        storage = weakref.ref(x.untyped_storage())
        dtype = x.dtype
        view = (x.storage_offset(), x.size(), x.stride())

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


@kept_or_sent_again
@pytest.mark.parametrize("options", [{"own_keys_first": False}, {"casts": 3}])
def test_memory_of_an_exchange_is_neither_read_early_nor_freed_early(half, late, options, keep_kv):
    mask = Mask.documents([0, 5, 24])
    # with the default rates, a plan of few tokens prefers little traffic to balance
    layout = half.dispatch(mask, 3, chunk=2, cells_per_us=1, tokens_per_us=1000)
    tensors = whole(mask)
    attend = attending(half, mask, layout, keep_kv=keep_kv, **options)
    for got in process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 3):
        assert_agrees(got, mask, *tensors)
