"""Head groups: their pattern, the suggested first and last groups, and errors."""

import json
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask, fast, reference
from canon.reference.strides import STEP_SECONDS, STEP_SHARE, head_groups
from canon.testing import process_groups
from canon.testing.judge import oracle
from canon.testing.recording import Event, timeline

HALVES = {"reference": reference, "fast": fast}
FREE = {"step_seconds": 0.0, "step_share": 0.0}  # additional steps cost nothing
RECORDS = Path(__file__).parents[1] / "paper" / "data"


@pytest.fixture(params=HALVES)
def half(request):
    return HALVES[request.param]


def test_the_stride_pattern():
    def widths(*arguments):
        groups = head_groups(*arguments)
        assert [head for heads in groups for head in heads] == list(range(arguments[0]))
        return [len(heads) for heads in groups]

    assert widths(8, 4) == [4, 4]
    assert widths(8, 4, 1) == [1, 3, 4]
    assert widths(8, 4, None, 2) == [4, 2, 2]
    assert widths(8, 4, 1, 2) == [1, 3, 2, 2]
    assert widths(12, 4, 3, 1) == [3, 1, 4, 3, 1]
    assert widths(3, 1) == [1, 1, 1]
    assert widths(2, 2, None, 1) == [1, 1]


def pass_in_time(groups, moving, computing):
    """Return the time of a pass in which each gather overlaps with the step before it."""
    fetch = [(Event(0, "posted", "gather", i), Event(0, "waited", "gather", i)) for i in range(len(groups))]
    events = [*fetch[0]]
    for step in range(len(groups)):
        events += fetch[step + 1][:1] if step + 1 < len(groups) else ()
        events.append(Event(0, "computed", "forward", step))
        events += fetch[step + 1][1:] if step + 1 < len(groups) else ()
    seconds = {"gather": moving, "forward": computing}
    return timeline(events, lambda e: seconds[e.kind] * len(groups[e.number]))[-1].stop


@pytest.mark.parametrize("kernel_flops", [1e12, 4e12, 20e12, 50e12, 100e12, 500e12])
def test_suggested_strides_leave_the_least_exposed(half, kernel_flops):
    mask = Mask.causal(4096)
    for ranks, s, g in ((2, 4, 16), (4, 8, 16), (8, 8, 8), (8, 4, 8)):
        layout = Layout.zigzag(4096, ranks)
        q, k, v = (
            torch.empty(1, 4096 // ranks, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (2 * g, g, g)
        )
        options = dict(head_stride=s, kernel_flops=kernel_flops, **FREE)
        strides, assumed = half.suggest_strides(q, k, v, mask, layout, **options)
        assert assumed["kernel_flops"] == kernel_flops
        assert assumed["fetch"] == (ranks - 1) * 4096 / ranks * 128 * 2 / assumed["link_bytes"]
        assert assumed["reduce"] == 2 * assumed["fetch"]
        assert assumed["forward"] == pytest.approx(2 * mask.area / ranks * 128 * 2 / kernel_flops, rel=1e-12)
        assert assumed["backward"] == pytest.approx(3 * assumed["forward"], rel=1e-12)
        for name, moving, computing in (
            ("forward_first_stride", "fetch", "forward"),
            ("backward_first_stride", "fetch", "backward"),
            ("backward_last_stride", "reduce", "backward"),  # the end of a pass mirrors its start
        ):
            if g == s and name.startswith("backward"):
                continue  # only one of the two may split the only group
            lasts = {
                first: pass_in_time(head_groups(g, s, first), assumed[moving], assumed[computing])
                for first in (None, *range(1, s))
            }
            assert lasts[strides[name]] <= min(lasts.values()) * (1 + 1e-9)
        assert strides == reference.suggest_strides(q, k, v, mask, layout, **options)[0]


def test_no_stride_is_suggested_if_none_helps(half):
    q, k, v = torch.empty(3, 1, 64, 4, 16, device="meta").unbind()
    layout = Layout.contiguous(256, 4)

    def suggest(**options):
        return half.suggest_strides(q, k, v, None, layout, **FREE | options)[0]

    nothing = dict.fromkeys(["forward_first_stride", "backward_first_stride", "backward_last_stride"])
    assert suggest(head_stride=1) == nothing
    assert suggest(head_stride=4, link_bytes=1.0) == nothing  # transfers take nearly all the time
    assert half.suggest_strides(q, k, v, head_stride=4, **FREE)[0] == nothing  # one rank
    one_group = suggest(head_stride=4, kernel_flops=1e9)  # then the reduction, of float32, gains more
    assert one_group == {"forward_first_stride": 1, "backward_first_stride": None, "backward_last_stride": 1}
    with pytest.raises(ValueError, match="head_stride=3 does not divide the 4"):
        suggest(head_stride=3)


def test_a_split_must_gain_more_than_its_step_costs(half):
    q, k, v = torch.empty(3, 1, 64, 4, 16, device="meta").unbind()

    def suggest(**options):
        options = dict(head_stride=2, kernel_flops=1e9, link_bytes=1e8) | FREE | options
        return half.suggest_strides(q, k, v, None, Layout.contiguous(256, 4), **options)

    free, seconds = suggest()
    gain = seconds["fetch"]  # with f = 1 of 2 key heads, the first gather is one head shorter
    assert free["forward_first_stride"] == 1
    for name, cost in (("step_seconds", gain), ("step_share", gain / (4 * seconds["forward"]))):
        assert suggest(**{name: 0.99 * cost})[0]["forward_first_stride"] == 1
        assert suggest(**{name: 1.01 * cost})[0]["forward_first_stride"] is None


def measured_splits():
    """Yield (pass, GPUs, tokens, head_stride, ms, ms with splits, additional steps, heads that the splits hide)."""
    for name in ("two", "four", "eight", "long_eight"):
        rows = json.loads((RECORDS / f"schedules_{name}_h200.json").read_text())["results"]
        times = {(row["shape"], row["schedule"]): row for row in rows if "forward_ms" in row}
        for (shape, schedule), split in times.items():
            if schedule.startswith("strided zigzag") and schedule.endswith("small ends"):
                whole, stride = times[shape, schedule.split(",")[0]], int(schedule.split()[2].strip(","))
                place = split["ranks"], int(shape.split(" S")[1].split()[0]), stride
                forward, both = ([median(row[f"{x}_ms"]) for row in (whole, split)] for x in ("forward", "both"))
                backward = [b - a for a, b in zip(forward, both, strict=True)]
                two = stride < 8  # of the 8 key heads: both ends are split; dk and dv have twice the bytes of K and V
                yield "forward", *place, *forward, 1, stride - 1
                yield "backward", *place, *backward, 1 + two, (1 + 2 * two) * (stride - 1)


def test_the_default_cost_of_a_step_is_the_measured_one():
    short, long = [], []
    for name, ranks, tokens, _, whole, split, steps, hidden in measured_splits():
        head = 1e3 * (ranks - 1) * tokens / ranks * 256 * 2 / 300e9  # milliseconds to gather a key head
        cost = (split - whole + hidden * head) / steps
        if whole < 7:
            short.append(1e-3 * cost)
        elif name == "backward":
            long.append(cost / whole)
    assert min(len(short), len(long)) > 10
    assert median(short) == pytest.approx(STEP_SECONDS, rel=0.02)
    assert median(long) == pytest.approx(STEP_SHARE, rel=0.02)


def test_no_suggested_split_was_slower_on_h200s():
    """By more than 1 %, in a pass of the records."""
    passes = list(measured_splits())
    assert sum(split > 1.01 * whole for _, _, _, _, whole, split, *_ in passes) > len(passes) / 2
    for name, ranks, tokens, stride, whole, split, *_ in passes:
        q, k, v = (torch.empty(1, tokens // ranks, h, 128, dtype=torch.bfloat16, device="meta") for h in (32, 8, 8))
        mask, layout = Mask.causal(tokens), Layout.zigzag(tokens, ranks)
        strides, _ = reference.suggest_strides(q, k, v, mask, layout, head_stride=stride)
        if any(value for option, value in strides.items() if option.startswith(name)):
            assert split < 1.01 * whole


def test_the_method_sets_the_time_of_the_backward_pass(half):
    q, k, v = (torch.empty(1, 1024, heads, d, device="meta") for heads, d in ((8, 96), (8, 96), (8, 32)))
    layout = Layout.zigzag(4096, 4)
    cells = 2 * Mask.causal(4096).area / 4

    def suggest(**options):
        return half.suggest_strides(q, k, v, None, layout, head_stride=8, kernel_flops=1e9, **options)

    products = {"fused": 3 * 96 + 2 * 32, "split": 4 * 96 + 3 * 32, "head_parallel": 4 * 96 + 3 * 32}
    for method, elements in products.items():
        assert suggest(backward=method)[1]["backward"] == pytest.approx(cells * elements / 1e9, rel=1e-12)
    assert suggest()[1] == suggest(backward="auto")[1]
    assert products["fused"] < suggest()[1]["backward"] * 1e9 / cells < products["split"]
    with pytest.raises(ValueError, match="backward='fussed': expected one of 'auto', 'fused'"):
        suggest(backward="fussed")


def test_suggested_strides_are_taken(half):
    mask, layout = Mask.causal(16), Layout.zigzag(16, 2)
    q, k, v, dout = torch.randn(4, 1, 16, 4, 8, dtype=torch.float64).unbind()

    def program():
        mine = [layout.shard(x, dist.get_rank()) for x in (q, k, v)]
        strides, _ = half.suggest_strides(*mine, mask, layout, head_stride=2, kernel_flops=1e6, **FREE)
        assert strides["forward_first_stride"] == 1
        return layout.unshard(half.strided_attention(*mine, mask, layout, head_stride=2, **strides))

    torch.testing.assert_close(
        process_groups.threads(program, 2)[0], oracle(q, k, v, dout, mask).out, rtol=0, atol=1e-12
    )


WRONG = {
    "head_stride=3 does not divide the 4 key heads": dict(head_stride=3),
    "head_stride=0 does not divide": dict(head_stride=0),
    "forward_first_stride=2: expected 0 < first < head_stride, which is 2": dict(head_stride=2, forward_first_stride=2),
    "backward_first_stride=0: expected 0 < first": dict(head_stride=2, backward_first_stride=0),
    "backward_last_stride=5: expected 0 < last < head_stride, which is 4": dict(head_stride=4, backward_last_stride=5),
    "backward_first_stride=1 and backward_last_stride=1 split two head groups, but 4 key heads": dict(
        head_stride=4, backward_first_stride=1, backward_last_stride=1
    ),
    "backward_schedule='rign': expected one of 'scatter', 'ring'": dict(backward_schedule="rign"),
    'backward_first_stride=1 has no effect with backward_schedule="ring"': dict(
        head_stride=2, backward_first_stride=1, backward_schedule="ring"
    ),
    'backward_last_stride=1 has no effect with backward_schedule="ring"': dict(
        head_stride=2, backward_last_stride=1, backward_schedule="ring"
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_strides_raise_and_are_named(half, ranks):
    def program():
        for message, options in WRONG.items():
            with pytest.raises(ValueError) as raised:
                half.strided_attention(*(torch.ones(1, 4, heads, 8) for heads in (8, 4, 4)), **options)
            assert message in str(raised.value)
        with pytest.raises(ValueError, match="6 query heads are not a multiple of 4"):
            half.strided_attention(*(torch.ones(1, 4, heads, 8) for heads in (6, 4, 4)))
        with pytest.raises(TypeError, match="dropout"):
            half.strided_attention(*(torch.ones(1, 4, 4, 8) for _ in range(3)), dropout_p=0.1)

    process_groups.threads(program, ranks)


@pytest.mark.parametrize(
    "other", [dict(head_stride=1), dict(backward_last_stride=1), dict(pack_first=False), dict(backward_schedule="ring")]
)
def test_ranks_that_disagree_on_strides_raise(half, other):
    def program():
        options = dict(head_stride=2) | (other if dist.get_rank() == 1 else {})
        with pytest.raises(ValueError, match="(?s)the ranks disagree.*options.*rank 0, 2: .*; rank 1: ") as raised:
            half.strided_attention(*(torch.ones(1, 4, 2, 8) for _ in range(3)), **options)
        assert next(iter(other)) in str(raised.value)

    process_groups.threads(program, 3)
