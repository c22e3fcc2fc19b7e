"""Claims about the instrumentation of the notebooks: claims of SMs, events of a kernel, parts of a
ring, and kernels without a line.
"""

import re
from pathlib import Path

import drawing
import forward_runs
import pytest
import torch
import torch.distributed as dist
from event_log import recording
from ring_hops import Part, require_parts
from tile_claims import claims_of

from canon import Layout, Mask, reference
from canon.fast.kernels.gluon import forward_plain
from canon.testing import process_groups

pytestmark = pytest.mark.interpreted


def test_owners_by_query_head_share_the_work_that_few_owners_cannot():
    split, by_head = (
        claims_of(Mask.causal(512), b=1, h=8, g=1, d=128, sms=8, by_query_head=flag)
        for flag in (False, True)
    )
    assert (split.owners, by_head.owners) == (4, 32)
    # 8 heads; 8 + 6 + 4 + 2 tiles of 64 queries
    assert sum(split.visits) == sum(by_head.visits) == 8 * 20
    assert (split.busiest, by_head.busiest) == (64 / 20, 1)


def ring_of_three():
    q, k, v = (torch.ones(1, 2, 1, 4, dtype=torch.bfloat16) for _ in range(3))
    reference.ring_attention(q, k, v, Mask.full(6), Layout.contiguous(6, 3))
    return dist.get_rank()


def test_a_recording_times_computations_and_messages_up_to_their_wait():
    with recording(reference.ring) as log:
        process_groups.threads(ring_of_three, 3)
    spans = [(str(event), start, stop) for event, start, stop in log.spans if event.rank == 1]
    assert [name for name, *_ in sorted(spans, key=lambda span: span[2])] == [
        "computed forward 0",
        "posted hop 0",
        "computed forward 1",
        "posted hop 1",
        "computed forward 2",
    ]
    times = {name: span for name, *span in spans}
    hop, (start, stop) = times["posted hop 0"], times["computed forward 0"]
    assert hop[0] < start < stop < hop[1] < times["computed forward 1"][0]


def forward_inputs(keys):
    return (torch.randn(1, tokens, 1, 64).bfloat16() for tokens in (128, keys, keys))


def test_the_simulator_explains_the_absence_of_each_wait_and_arrival_of_the_plain_forward():
    source = Path(forward_plain.__file__).read_text()
    lines = re.findall(
        r"^ +((?:mbarrier\.|ping_pong_|.*warpgroup_mma_wait).*?)(?:  "
        r"#.*)?$",
        source,
        re.MULTILINE,
    )
    tensors = list(forward_inputs(320))
    for line in dict.fromkeys(lines):
        message = forward_runs.fault_without(line, *tensors)
        assert message.startswith(("Fault: ", "Deadlock: ")), line
        assert ".py:" not in message
    assert len(set(lines)) == 13
    page = Path(forward_runs.__file__).with_name("10_overlap_on_hopper.md").read_text()
    line, message = re.search(
        r"\*\*1\.\*\* .*?: "
        r"`(.*?)`\..*?```\n(.*?)\n```",
        page,
        re.DOTALL,
    ).groups()
    assert forward_runs.fault_without(line, *tensors) == message
    # new barriers are visible at once here
    assert not forward_runs.fault_without("fence_async_shared()", *tensors)
    with (
        pytest.raises(ValueError, match=r"forward_plain.py has no line 'q_full.index'"),
        forward_runs.without("q_full.index"),
    ):
        pass


def test_a_part_of_keys_whose_hop_was_not_awaited_is_named():
    shards = [torch.full((1, 2, 1, 4), float(rank)) for rank in range(2)]

    def parts(awaited):
        return [
            Part(rank, shards[(rank - step) % 2], (rank - step) % 2, 1, awaited * step)
            for rank in range(2)
            for step in range(2)
        ]

    require_parts(parts(awaited=1), shards)
    with pytest.raises(
        AssertionError,
        match="^rank 0, step 1: it computes without waiting for the hop of its keys$",
    ):
        require_parts(parts(awaited=0), shards)


def test_a_timeline_hatches_each_rank_to_the_end_of_the_step():
    steps = [[(0, 2), (2, 1), (1, 1)], [(2, 0), (1, 3), (0, 1)]]
    perfect = 8 / 3  # cells of a rank, the unit of time
    ax = drawing.timelines.__wrapped__({"ring": steps}, hop=1).axes[0]
    hatched = [(perfect * x.get_x(), perfect * x.get_width()) for x in ax.patches if x.get_hatch()]
    assert hatched == [pytest.approx(span) for span in 3 * [(0, 2)] + 3 * [(2, 3)]]
    assert ax.get_title(loc="left") == "ring: 53 % busy"  # of 5 cells of time
