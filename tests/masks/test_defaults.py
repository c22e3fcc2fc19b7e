"""The defaults of ``head_stride``, ``casts`` and ``own_keys_first`` are within 2 % of the best
recorded option, and better than the choices of the cost model.

Times are those of both passes: GPU time, and wall time where a record has it. ``keep_kv`` and short
first and last head groups are other options: they take more memory, or more steps. Nothing is
asserted where a record lacks the chosen option, or others."""

import statistics
from itertools import product

import numpy as np
import pytest
from folders import DATA
from recorded_plans import layout_of, predicted
from schedule_records import recorded

from canon import fast
from canon.bench.shapes import shape_of
from canon.masks.cast_plan import own_keys_come_first
from canon.masks.head_groups import default_stride, gathered_bytes
from canon.masks.layout import Layout


def default_of(rule, text, ranks):
    """Return the number that a rule chooses, and the names of its options."""
    shape = shape_of(text)
    if rule is default_stride:
        layout = Layout.zigzag(shape.n, ranks)
        stride = default_stride(shape.g, gathered_bytes(layout, shape.b * 2 * shape.d * 2))
        return stride, ["strided zigzag {}", "strided contiguous {}"]
    plan = fast.cast_plan(shape.mask, layout_of(text, ranks))
    return int(plan.own_keys_first), ["magi, {} stages"]


@pytest.mark.parametrize("rule", [default_stride, own_keys_come_first])
def test_rules_choose_better_than_the_cost_model_as_their_docstrings_quote(rule):
    found = []
    for name in sorted(
        path.name for kind in ("schedules", "packs") for path in DATA.glob(f"{kind}_*")
    ):
        for (text, ranks), rows in recorded(name).items():
            number, kinds = default_of(rule, text, ranks)
            for kind, clock in product(kinds, ("both_ms", "both_wall_ms")):
                some = [x for n in (0, 1, 2, 4, 8) if clock in rows.get(x := kind.format(n), ())]
                if (chosen := kind.format(number)) in some and len(some) > 1:
                    times = [statistics.median(rows[x][clock]) for x in some]
                    model = np.argmin([predicted(name, text, ranks, x)[1] for x in some])
                    found.append([times[some.index(chosen)], times[model]] / np.min(times))
    (mean, model_mean), (most, model_most) = np.mean(found, 0), np.max(found, 0)
    assert most < 1.02 < model_most
    expected = f"""both passes take at most {most:.2f} times as long as with the best choice, and on
    average {mean:.3f} times; with the choice of `canon.costs` {model_most:.2f} and {model_mean:.3f}
    times."""
    assert " ".join(expected.split()) in " ".join(rule.__doc__.split())
