"""Head groups: their pattern, the recorded cost of split ones, and errors."""

import json
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist

from canon import fast, reference
from canon.masks.head_groups import head_groups
from canon.testing import process_groups

HALVES = {"reference": reference, "fast": fast}
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


def measured_splits():
    """Yield (ms, ms with split first and last head groups) of both passes."""
    for name in ("two", "four", "eight", "long_eight"):
        rows = json.loads((RECORDS / f"schedules_{name}_h200.json").read_text())["results"]
        times = {(row["shape"], row["schedule"]): row for row in rows if "both_ms" in row}
        for (shape, schedule), split in times.items():
            if schedule.startswith("strided zigzag") and schedule.endswith("small ends"):
                yield median(times[shape, schedule.split(",")[0]]["both_ms"]), median(split["both_ms"])


def test_splits_rarely_pay_in_the_records():
    """The docstrings of `head_groups.py` and `strided_attention` quote these ratios."""
    ratios = [split / whole for whole, split in measured_splits()]
    assert len(ratios) == 26
    assert round(min(ratios), 2) == 0.99
    assert round(max(ratios), 2) == 1.14


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


@pytest.mark.parametrize("other", [dict(head_stride=1), dict(backward_last_stride=1), dict(backward_schedule="ring")])
def test_ranks_that_disagree_on_strides_raise(half, other):
    def program():
        options = dict(head_stride=2) | (other if dist.get_rank() == 1 else {})
        with pytest.raises(ValueError, match="(?s)the ranks disagree.*options.*rank 0, 2: .*; rank 1: ") as raised:
            half.strided_attention(*(torch.ones(1, 4, 2, 8) for _ in range(3)), **options)
        assert next(iter(other)) in str(raised.value)

    process_groups.threads(program, 3)
