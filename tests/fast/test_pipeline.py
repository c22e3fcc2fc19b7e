"""Fetches, kernels and reductions overlap as the docstrings state, with the stated traffic and
buffers.
"""

import itertools
from functools import partial

import pytest
import torch
from event_log import recording
from sharded import gradients, shards, whole

from canon import Layout, Mask, fast
from canon.fast.transport.messages import Transport
from canon.testing import process_groups

B, G, D, DV = 2, 4, 8, 6
PATTERNS = [
    (dict(head_stride=1), [1, 1, 1, 1], [1, 1, 1, 1]),
    (dict(), [4], [4]),
    (dict(head_stride=4), [4], [4]),
    (dict(head_stride=2, forward_first_stride=1), [1, 1, 2], [2, 2]),
    (dict(head_stride=2, backward_first_stride=1, backward_last_stride=1), [2, 2], [1, 1, 1, 1]),
    (dict(head_stride=4, backward_last_stride=1), [4], [3, 1]),
]


def inputs(tokens, dtype=torch.float32):
    return whole(Mask.causal(tokens), B, G, G, D, DV, dtype)


def train(half, layout, tensors, name="strided", **options):
    """Return out and the gradients of one forward and backward pass of this rank."""
    options |= {"mask": Mask.causal(layout.tokens), "layout": layout}
    *leaves, dout = shards(layout, tensors[:4])
    return gradients(partial(getattr(half, f"{name}_attention"), **options), leaves, dout)


def recorded(half, layout, tensors, name="strided", **options):
    with recording(getattr(half, name)) as log:
        process_groups.threads(lambda: train(half, layout, tensors, name, **options), layout.ranks)
    return log


def order(events):
    return {str(event): place for place, event in enumerate(events)}


# --- strided attention, recorded ---


@pytest.mark.parametrize(
    ("name", "options", "steps"), [("strided", {"head_stride": 1}, G), ("magi", {"casts": 2}, 3)]
)
def test_no_kernel_is_launched_before_its_overlapping_messages_have_started(
    name, options, steps, monkeypatch
):
    monkeypatch.setattr(Transport, "wait_until_started", lambda _: log.add("started", "message"))
    with recording(getattr(fast, name)) as log:
        layout = Layout.zigzag(12, 3)
        process_groups.threads(lambda: train(fast, layout, inputs(12), name, **options), 3)
    for rank in range(3):
        events = [e for e in log.of(rank) if e.what in ("posted", "started", "computed")]
        names = [e.what for e in events]
        assert names.count("started") == 2 * (steps - 1), "in both passes"
        for here, after in itertools.pairwise(events):
            assert after.what != "started" or here.what == "posted"
            if here.what == "posted" and here.kind != "reduce":
                assert after.what != "computed"


@pytest.mark.parametrize(("options", "forward", "backward"), PATTERNS)
def test_steps_overlap_with_the_traffic_of_the_docstring(half, options, forward, backward):
    ranks, n = 3, 12
    layout, tensors = Layout.zigzag(n, ranks), inputs(n, torch.bfloat16)
    log = recorded(half, layout, tensors, **options)
    assert any(event.what == "finished" for event in log.events) == (half is fast)
    elements = (ranks - 1) * B * (n // ranks) * G * (D + DV)
    for rank in range(ranks):
        events = log.of(rank)
        gathers, sums = (
            [e for e in events if e.what == "posted" and e.kind == kind]
            for kind in ("gather", "reduce")
        )
        assert len(gathers) == len(forward) + len(backward)
        assert len(sums) == len(backward)
        assert sum(e.items for e in gathers) == 2 * elements
        assert sum(e.nbytes for e in gathers) == 2 * 2 * elements  # bfloat16, forward and backward
        assert sum(e.nbytes for e in sums) == 4 * elements  # float32
        assert [e.items for e in sums] == [elements * heads // G for heads in backward]
        computed = [e for e in events if e.what == "computed"]
        area = layout.local_mask(Mask.causal(n), rank, range(ranks)).area
        assert [(e.kind, e.items) for e in computed] == [
            (kind, heads * area)
            for kind, steps in (("forward", forward), ("backward", backward))
            for heads in steps
        ]
        assert_overlap(events, len(forward), len(backward))


def assert_overlap(events, forward, backward):
    at, first = order(events), 0
    for kind, steps in (("forward", forward), ("backward", backward)):
        for step in range(steps):
            computed, gather = at[f"computed {kind} {step}"], first + step
            assert at[f"waited gather {gather}"] < computed
            if step + 1 < steps:  # the next keys are in flight
                assert (
                    at[f"posted gather {gather + 1}"] < computed < at[f"waited gather {gather + 1}"]
                )
        first += steps
    # dk and dv leave before dq is computed
    for step in range(backward if "finished backward 0" in at else 0):
        assert (
            at[f"computed backward {step}"]
            < at[f"posted reduce {step}"]
            < at[f"finished backward {step}"]
        )
    for step in range(backward - 1):  # the gradients travel while the next step is computed
        assert (
            at[f"posted reduce {step}"]
            < at[f"computed backward {step + 1}"]
            < at[f"waited reduce {step}"]
        )
    pending = 0
    for event in events:
        pending += {"posted": 1, "waited": -1}.get(event.what, 0) * (event.kind == "reduce")
        assert pending in (0, 1)
    assert pending == 0


def test_the_ring_schedule_gathers_forward_and_hops_backward(half):
    layout = Layout.zigzag(12, 3)
    log = recorded(half, layout, inputs(12), head_stride=2, backward_schedule="ring")
    posted = [e for e in log.of(1) if e.what == "posted"]
    assert [e.kind for e in posted[:2]] == ["gather"] * 2
    assert {e.kind for e in posted[3:]} == {"hop"}
    elements = 2 * B * 4 * G * (D + DV)
    assert sum(e.items for e in posted if e.kind == "gather") == elements
    # K, V and their gradients
    assert sum(e.items for e in posted if e.kind == "hop") == 2 * elements


def test_rings_send_before_they_compute_with_the_traffic_of_the_docstring(half):
    log = recorded(half, Layout.zigzag(12, 3), inputs(12, torch.bfloat16), "ring")
    at = order(log.of(2))
    for step in range(2):
        assert at[f"posted hop {step}"] < at[f"computed forward {step}"] < at[f"waited hop {step}"]
    block = B * 4 * G * (D + DV)
    for rank in range(3):
        posted = [e for e in log.of(rank) if e.what == "posted"]
        # two hops: K and V in both passes, then their gradients in float32
        assert sum(e.nbytes for e in posted) == 2 * block * (2 + 2 + 4)
