"""Head groups: their pattern, and the recorded cost of split ones."""

import json
from pathlib import Path
from statistics import median

from canon.masks.head_groups import head_groups

RECORDS = Path(__file__).parents[2] / "paper" / "data"


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
                yield (
                    median(times[shape, schedule.split(",")[0]]["both_ms"]),
                    median(split["both_ms"]),
                )


def test_splits_rarely_pay_in_the_records():
    """The docstrings of `head_groups.py` and `strided_attention` quote these ratios."""
    ratios = [split / whole for whole, split in measured_splits()]
    assert len(ratios) == 26
    assert round(min(ratios), 2) == 0.99
    assert round(max(ratios), 2) == 1.14
