"""The defaults of ``head_stride``, ``casts`` and ``own_keys_first`` are within 3 % of the best
recorded option.

Times are those of both passes: GPU time, and wall time where a record has it. ``keep_kv`` and short
first and last head groups are other options: they take more memory, or more steps. Nothing is
asserted where a record lacks the chosen option, or others."""

import statistics
from functools import cache

import pytest
from schedule_records import DATA, recorded

from canon import fast
from canon.bench.shapes import shape_of
from canon.masks.head_groups import default_stride, gathered_bytes
from canon.masks.layout import Layout

NAMES = sorted(
    path.name for path in DATA.glob("*.json") if path.name.startswith(("schedules_", "packs_"))
)
CLOCKS = "both_ms", "both_wall_ms"


def excesses(rows, chosen, options):
    """Return the time of the chosen option over that of the best one, by clock. Empty if there is
    nothing to compare.
    """
    found = {option: rows[option] for option in options if option in rows}
    if chosen not in found or len(found) == 1:
        return []
    times = [
        {option: statistics.median(row[clock]) for option, row in found.items()}
        for clock in CLOCKS
        if all(clock in row for row in found.values())
    ]
    return [each[chosen] / min(each.values()) for each in times]


@cache
def chosen_stages(text, ranks):
    """Return the name of the default of magi attention, with the chunk of the record."""
    mask = shape_of(text).mask
    layout = fast.dispatch(mask, ranks, chunk=max(1, min(1024, mask.queries // (8 * ranks))))
    return f"magi, {int(fast.cast_plan(mask, layout).own_keys_first)} stages"


@pytest.mark.parametrize("name", NAMES)
def test_the_default_of_casts_and_own_keys_first(name):
    for (text, ranks), rows in recorded(name).items():
        chosen = chosen_stages(text, ranks)
        for excess in excesses(rows, chosen, [f"magi, {number} stages" for number in range(3)]):
            assert excess <= 1.03, (text, ranks, chosen, excess)


@pytest.mark.parametrize("name", NAMES)
def test_the_default_head_stride(name):
    for (text, ranks), rows in recorded(name).items():
        shape = shape_of(text)
        layout = Layout.zigzag(shape.n, ranks)
        stride = default_stride(shape.g, gathered_bytes(layout, shape.b * 2 * shape.d * 2))
        for kind in ("zigzag", "contiguous"):
            options = [f"strided {kind} {number}" for number in (1, 2, 4, 8)]
            for excess in excesses(rows, f"strided {kind} {stride}", options):
                assert excess <= 1.03, (text, ranks, kind, stride, excess)
