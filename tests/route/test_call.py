"""Ranks that make different calls all raise before they compute,
and name the field and the ranks.
"""

import gc
import time
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask, fast
from canon.ranks import group as group_module
from canon.ranks.agreement import group_state
from canon.reference.magi import MAGI
from canon.reference.strided import STRIDED
from canon.route.call import checked_call
from canon.testing import process_groups


def inputs(tokens=4, h=2, g=2, d=8, dtype=torch.float32):
    return [torch.ones(1, tokens, heads, d, dtype=dtype) for heads in (h, g, g)]


def call(half, name="ring_attention", tensors=None, **options):
    return getattr(half, name)(*(tensors or inputs()), **options)


MASKS = [Mask.causal(12), Mask.window(12, 2, 0)]


def disagree_later(half):
    """After known calls of all ranks, rank 1 makes another known one. Then it calls forward while
    others call backward.
    """
    for mask in (*MASKS, *MASKS):
        call(half, mask=mask)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"mask: rank 0, 2: .*; rank 1: "):
        call(half, mask=MASKS[dist.get_rank() == 1])
    assert time.monotonic() - start < 5
    # nothing was sent before the error, so the group can still be used
    leaves = [x.requires_grad_() for x in inputs()]
    out = call(half, tensors=leaves)
    with pytest.raises(ValueError, match="pass"):
        call(half, tensors=leaves) if dist.get_rank() == 1 else out.sum().backward()


def test_ranks_that_disagree_in_a_later_call_raise_on_every_rank(half):
    process_groups.threads(partial(disagree_later, half), 3)


def test_calls_with_new_masks_leave_no_memory_behind(half):
    def program():
        for left in range(30):
            call(half, mask=Mask.window(8, left % 7, 0))
        state = group_state(None)
        return len(state.known), state.pending

    assert process_groups.threads(program, 2) == [(7, None)] * 2


def agreed(tensors=None, mask=None, layout=None, **options):
    found = checked_call(MAGI, *(tensors or inputs()), mask=mask, layout=layout, **options)
    found.agree("forward", (False, False, False))
    return found


def test_equal_calls_are_one_object_and_each_is_compared():
    def program():
        first, state = agreed(), group_state(None)
        assert state.calls == 1
        assert agreed() is first
        assert agreed(mask=Mask.causal(8), layout=Layout.contiguous(8, 2), scale=8**-0.5) is first
        assert state.calls == 3
        shifted = [torch.ones(1, 4, 2, 9)[..., 1:] for _ in range(3)]
        others = [
            dict(tensors=shifted),
            dict(scale=1.0),
            dict(casts=2),
            dict(keep_kv=True),
            dict(mask=Mask.full(8)),
        ]
        others += [dict(tensors=inputs(dtype=torch.float64))]
        calls = [first, *(agreed(**other) for other in others)]
        assert len(set(calls)) == len(calls)
        assert [agreed(**other) for other in others[1:-1]] == calls[2:-1]
        assert state.calls == 3 + len(others) + len(others) - 2
        assert agreed([x.requires_grad_() for x in inputs()]) is first, (
            "a checkpoint recomputes the same call"
        )

    process_groups.threads(program, 2)


@pytest.mark.parametrize(
    "one", [1, 1.0, np.int64(1), np.float32(1), np.float64(1), torch.tensor(1.0), torch.tensor(1)]
)
def test_equal_numbers_of_all_types_make_one_call(one):
    """The launches of a pass are recorded for each call object."""
    q, stride = inputs(), one if type(one) in (int, np.int64) else 1
    assert checked_call(STRIDED, *q, scale=one, head_stride=stride) is checked_call(
        STRIDED, *q, scale=1.0, head_stride=1
    )


def group_after_its_end():
    group = dist.new_group([0, 1])
    kept = weakref.ref(group)
    assert agreed(group=group).group is group
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return kept()


def test_a_known_call_does_not_keep_its_group():
    assert process_groups.processes(group_after_its_end, 2) == [None, None]


# --- on GPUs: a known call does not wait for the comparison; the next call reads the result


def on_gpu(half, mask, tokens=4):
    q, k, v = (x.cuda() for x in inputs(tokens=tokens))
    return call(half, tensors=(q, k, v), mask=mask)


def disagree_on_gpus(other):
    """Make two calls known on both ranks, then let rank 1 make the other one. Return the error and
    its seconds.
    """
    shapes = {
        "mask": (Mask.causal(8), Mask.window(8, 2, 0)),
        "tokens": (Mask.causal(8), Mask.causal(4096)),
    }
    masks = shapes[other]
    for _ in range(2):
        for mask in masks:
            on_gpu(fast, mask, mask.queries // 2)
    torch.cuda.synchronize()
    mask = masks[dist.get_rank()]
    on_gpu(fast, mask, mask.queries // 2)
    start = time.monotonic()
    if other == "tokens":
        torch.cuda.synchronize()  # the messages do not match: only their end lets it return
    with pytest.raises(ValueError) as raised:
        on_gpu(fast, masks[0], 4)
    return str(raised.value), time.monotonic() - start


@pytest.mark.gpus(2)
@pytest.mark.parametrize("other", ["mask", "tokens"])
def test_ranks_that_disagree_on_gpus_raise_at_the_next_call(other):
    for message, seconds in process_groups.gpus(partial(disagree_on_gpus, other), 2, timeout=90):
        assert "rank 0: " in message
        assert "rank 1: " in message
        assert "make a new process group" in message
        assert seconds < 20


def test_a_group_does_not_read_the_entries_of_another_in_the_store():
    store = dist.HashStore()
    first = [group_module.own_store(store, 3) for _ in range(3)]
    first[0].set("memory", "a file that is gone")
    second = [group_module.own_store(store, 3) for _ in range(3)]
    assert all(own.check(["memory"]) for own in first)
    assert not any(own.check(["memory"]) for own in second)
