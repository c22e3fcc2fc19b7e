"""The model beside the records: fitted on two H200s, compared with those of four and eight."""

import statistics
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from schedule_records import DATA, recorded

from canon.bench.measuring import Settings
from canon.bench.schedule_peers import schedules
from canon.bench.shapes import shape_of
from canon.costs.kernel_costs import RATES
from canon.costs.network import ASSUMED
from canon.costs.schedule_costs import plan_of

FITTED = "schedules_two", "schedules_later_two"
# All but those of copy engines, which Canon no longer uses, and of a changed commit.
CAUSAL = "schedules_four", "schedules_eight", "schedules_long_eight"
PACKED = "packs_four", "packs_begun_four", "packs_eight", "packs_later_eight", "packs_magi_eight"


@cache
def planned(text, ranks, name):
    """Return the plan of a schedule of the records."""
    shape = shape_of(text)
    (one,) = (x for x in schedules(shape, ranks, Settings()) if x.name == name)
    given = one.attend.func.__name__, (shape.h, shape.g), shape.d
    return plan_of(*given, **one.attend.keywords)


def compared(names, links=ASSUMED, rates=RATES):
    """Yield (record and shape, predicted, recorded): seconds of the forward pass and of both."""
    for name in names:
        for (text, ranks), rows in recorded(f"{name}_h200.json").items():
            for schedule, row in rows.items():
                if "invariant" not in schedule:
                    passes = zip(planned(text, ranks, schedule)[1:], rates, strict=True)
                    forward, backward = (x._replace(rates=y).seconds(links)[0] for x, y in passes)
                    times = [statistics.median(row[x]) / 1e3 for x in ("forward_ms", "both_ms")]
                    yield (name, text), (forward, forward + backward), times


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


@pytest.mark.parametrize(("kind", "names"), [
    ("causal", CAUSAL), ("packed", PACKED), ("all", (*CAUSAL, *PACKED)),
])  # fmt: skip
def test_the_page_quotes_how_well_the_model_predicts_four_and_eight_gpus(kind, names):
    rows = list(compared(names))
    ratios = [x / y for _, *both in rows for x, y in zip(*both, strict=True) if y >= 1e-3]
    right = [
        (x[1] < y[1]) == (one[1] < other[1])
        for (key, x, one), (same, y, other) in combinations(rows, 2)
        if key == same and abs(np.log(one[1] / other[1])) > np.log(1.03)
    ]
    shares = [abs(ratio - 1) <= 0.15 for ratio in ratios], right
    cells = [f"{sum(x):,} of {len(x):,} ({100 * sum(x) / len(x):.0f} %)" for x in shares]
    assert f"| {kind} | {' | '.join(cells)} |" in (DATA.parent / "in_your_program.md").read_text()


def test_the_predicted_peak_of_memory_is_within_a_fifth_of_the_records():
    for (text, ranks), rows in recorded("schedules_later_two_h200.json").items():
        for name, row in rows.items():
            if "1,8192" not in text and "ends" not in name and "invariant" not in name:
                plan = planned(text, ranks, name)
                q, k, v = (shape.numel() for shape in plan.call.shapes)
                added = sum(plan.tensors().values()) - 2 * (2 * q + k + v)  # to q, k, v and dout
                assert added == pytest.approx(1e6 * row["peak_mb"], rel=0.21)
