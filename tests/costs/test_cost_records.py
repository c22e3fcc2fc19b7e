"""The model beside the records: fitted on two H200s, compared with those of four and eight.

Copy engines, which Canon no longer uses, profiles, rank_invariant and deterministic calls are left
out.
"""

import re
import statistics
from itertools import combinations

import numpy as np
import pytest
from folders import DATA, GUIDE
from recorded_plans import planned, predicted
from schedule_records import recorded

from canon.costs.kernel_costs import RATES
from canon.costs.network import ASSUMED

FITTED = "schedules_two_h200.json", "schedules_later_two_h200.json"
TESTED = [
    path.name
    for path in sorted(DATA.glob("*_*_h200.json"))
    if re.match("(schedules|packs).*(four|eight)_", path.name)
    and not re.search("copy_engines|timeline", path.name)
]


def compared(names, *constants):
    """Yield (record and shape, predicted, recorded): seconds of the forward pass and of both."""
    for name in names:
        for (text, ranks), rows in recorded(name).items():
            for schedule, row in rows.items():
                if "invariant" not in schedule and "repeatable" not in schedule:
                    times = [statistics.median(row[x]) / 1e3 for x in ("forward_ms", "both_ms")]
                    yield (name, text), predicted(name, text, ranks, schedule, *constants), times


def loss(place=0, factor=1.0):
    """Return the loss of the fit, with one constant changed."""
    constants = np.array([*RATES, ASSUMED[0]])
    constants.flat[place] *= factor
    *rates, inside = constants
    found = compared(FITTED, np.array([inside, ASSUMED[1]]), rates)
    return sum((abs(np.log(np.divide(*x))) ** 1.5).sum() for _, *x in found)


@pytest.mark.parametrize("place", [0, 1, 2, 3, 5])  # a bandwidth is assumed
def test_no_other_constant_fits_the_records_of_two_gpus_better(place):
    assert loss() < min(loss(place, 0.95), loss(place, 1.05))


@pytest.mark.parametrize(("kind", "first"), [("causal", "s"), ("packed", "p"), ("all", "")])
def test_the_model_predicts_times_and_orders_of_four_and_eight_gpus(kind, first):
    rows = list(compared([name for name in TESTED if name.startswith(first)]))
    ratios = [x / y for _, *both in rows for x, y in zip(*both, strict=True) if y >= 1e-3]
    right = [
        (x[1] < y[1]) == (one[1] < other[1])
        for (key, x, one), (same, y, other) in combinations(rows, 2)
        if key == same and abs(np.log(one[1] / other[1])) > np.log(1.03)
    ]
    shares = [abs(ratio - 1) <= 0.15 for ratio in ratios], right
    assert np.all(np.array([*map(np.mean, shares)]) >= (0.95, 0.85))
    cells = [f"{sum(x):,} of {len(x):,} ({100 * sum(x) / len(x):.0f} %)" for x in shares]
    assert f"| {kind} | {' | '.join(cells)} |" in GUIDE.read_text()


def test_the_predicted_peak_of_memory_is_within_a_fifth_of_the_records():
    for (text, ranks), rows in recorded("schedules_later_two_h200.json").items():
        for name, row in rows.items():
            if "1,8192" not in text and "ends" not in name and "invariant" not in name:
                plan = planned(text, ranks, name)
                q, k, v = (shape.numel() for shape in plan.call.shapes)
                added = sum(plan.tensors().values()) - 2 * (2 * q + k + v)  # to q, k, v and dout
                assert added == pytest.approx(1e6 * row["peak_mb"], rel=0.21)
