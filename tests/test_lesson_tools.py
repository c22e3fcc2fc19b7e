"""Claims about the instrumentation of the notebooks: excerpts, walks over tiles, claims of SMs, and events of a kernel."""

import kernel_events
import pytest
import torch
import torch.distributed as dist
from excerpts import excerpt
from ring_hops import recorded_hops
from simulated_passes import allocated_bytes, different_bits, simulated_passes
from tile_claims import claims_of
from tile_walks import recorded_walk

from canon import Layout, Mask, reference
from canon.reference import backward
from canon.testing import process_groups
from canon.testing.recording import recording


def test_an_excerpt_has_the_lines_from_the_first_to_the_last_without_indentation():
    """Of a function that decorators wrap, and of a kernel, too."""
    found = excerpt(backward._Backward.dq, "for queries, strip", "for keys")
    assert found.splitlines()[0].startswith("for queries, strip in")
    assert found.splitlines()[1].startswith("    for keys, visible in")
    assert excerpt(backward._Backward.dq, "return dq") == "return dq"


@pytest.mark.parametrize("texts", [("no such line",), ("return dq", "dq = self")])
def test_an_excerpt_without_such_lines_raises(texts):
    with pytest.raises(ValueError, match=r"no line .* contains"):
        excerpt(backward._Backward.dq, *texts)


@pytest.mark.parametrize(
    ("method", "counts"), [("fused", (5, 1, 3)), ("split", (7, 2, 1)), ("head_parallel", (7, 2, 1))]
)
def test_walks_count_products_exponentials_and_owners(method, counts):
    walk = recorded_walk(method, Mask.causal(384))
    assert (walk.products, walk.exponentials, walk.most_owners) == counts
    assert walk.tiles == 6
    assert walk.order(by_keys=True)[:4] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 1)]
    assert walk.owners(by_keys=True)["dk, dv"] == {0: [0], 1: [1], 2: [2]}
    dq = walk.owners(by_keys=method == "fused")["dq"]
    assert dq == ({0: [0], 1: [0, 1], 2: [0, 1, 2]} if method == "fused" else {0: [0], 1: [1], 2: [2]})


def test_an_unordered_sum_has_several_results_and_other_sums_have_one():
    torch.manual_seed(0)
    q, dout = (torch.randn(1, 384, 2, 64).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 384, 1, 64).bfloat16() for _ in range(2))
    any_order, ordered = (
        different_bits(q, k, v, dout, Mask.causal(384), method) for method in ("fused", "fused in order")
    )
    assert any_order.pop("dq") > 1
    assert set(any_order.values()) == set(ordered.values()) == {1}
    assert not torch.are_deterministic_algorithms_enabled()


def test_parts_by_query_head_take_the_bytes_of_the_formula():
    sizes = dict(b=2, d=48, dv=24)
    assert allocated_bytes("head_parallel", Mask.causal(130), h=4, g=2, **sizes) == 4 * 2 * 4 * 130 * (48 + 24)
    assert allocated_bytes("split", Mask.causal(130), h=4, g=2, **sizes) == 0


def test_owners_by_query_head_share_the_work_that_few_owners_cannot():
    split, by_head = (
        claims_of(Mask.causal(512), b=1, h=8, g=1, d=128, sms=8, by_query_head=flag) for flag in (False, True)
    )
    assert (split.owners, by_head.owners) == (4, 32)
    assert sum(split.visits) == sum(by_head.visits) == 8 * 20  # 8 heads; 8 + 6 + 4 + 2 tiles of 64 queries
    assert (split.busiest, by_head.busiest) == (64 / 20, 1)


@pytest.mark.parametrize(("method", "names"), [("split", "S dP dV dK"), ("fused", "S dP dV dQ dK")])
def test_steps_of_a_simulated_kernel_start_before_they_end_and_overlap_with_exponentials(method, names):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 128, 1, 128).bfloat16() for _ in range(4))
    simulated_passes(q, k, v, dout, Mask.full(128), method, log=(log := []))
    events = kernel_events.backward_events(log)
    assert kernel_events.mma_names(events) == names.split()
    assert kernel_events.total(events, "exp2") == 128 * 128
    steps, waits = kernel_events.steps_of(events, kernel_events.LANES[method])
    assert [step.number for step in steps] == list(range(len(steps)))
    started = {step.number for step in steps if step.kind == "start"}
    assert {step.begun for step in steps if step.kind == "end"} == started
    assert all(step.begun < step.number for step in steps if step.begun is not None)
    between = {(source[0], lane[0]) for source, lane in waits}
    assert (("warpgroup 0", "warpgroup 1") in between or ("warpgroup 1", "warpgroup 0") in between) == (
        method == "fused"
    )


def ring_of_three():
    q, k, v = (torch.ones(1, 2, 1, 4, dtype=torch.bfloat16) for _ in range(3))
    reference.ring_attention(q, k, v, Mask.full(6), Layout.contiguous(6, 3))
    return dist.get_rank()


def test_recorded_hops_have_their_step_sender_owner_and_bytes():
    before = reference.ring.Hop
    with recorded_hops(reference.ring) as hops:
        process_groups.threads(ring_of_three, 3)
    found = {(hop.step, hop.sender, hop.owner) for hop in hops}
    assert found == {(step, rank, (rank - step) % 3) for step in (0, 1) for rank in range(3)}
    assert len(hops) == 6
    assert {hop.nbytes for hop in hops} == {2 * 2 * 4 * 2}
    assert reference.ring.Hop is before


def test_a_recording_times_computations_and_messages_up_to_their_wait():
    with recording(reference.ring) as log:
        process_groups.threads(ring_of_three, 3)
    spans = [(str(event), start, stop) for event, start, stop in log.spans if event.rank == 1]
    assert [name for name, *_ in sorted(spans, key=lambda span: span[2])] == [
        *("computed forward 0", "posted hop 0", "computed forward 1", "posted hop 1", "computed forward 2")
    ]
    times = {name: (start, stop) for name, start, stop in spans}
    assert times["posted hop 0"][0] < times["computed forward 0"][0] < times["computed forward 0"][1]
    assert times["computed forward 0"][1] < times["posted hop 0"][1] < times["computed forward 1"][0]
