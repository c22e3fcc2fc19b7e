"""Compute tables, numbers and the figure of the experiment of detection: which planted faults a
judge, tolerances and a training loss find. `tests/detection.py` defines "found".

A fault counts as found if it is found with every seed. Its size is the largest relative error of a
result in float32.
"""

from collections import defaultdict
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from plots import BLUE, GREEN, ORANGE, PURPLE, SMALL, VERMILION, WIDE, Drawing, new, small
from records import load, median

RECORD = "detection_cpu"
SUITES = {  # name on the page: dtype, inputs
    "float32": ("float32", "normal"),
    "bfloat16": ("bfloat16", "normal"),
    "bfloat16, offset": ("bfloat16", "offset"),
}
TESTS = {  # name in the record: name in the paper
    "judge": "judge",
    "flash-attention": "FlashAttention's rule",
    "assert_close": "assert_close",
    "transformer engine": "Transformer Engine",
    "loss, same seed": "loss, same seed",
    "loss, other seeds": "loss, other seeds",
}
KINDS = {
    "mask": BLUE,
    "exchange": GREEN,
    "softmax": ORANGE,
    "gradient": PURPLE,
    "precision": VERMILION,
}
LEAST, MOST = 3e-6, 3.0  # sizes of the figure; larger and infinite errors stand at its edge


class Fault(NamedTuple):
    """A planted fault: its size, and the tests that find it in each suite."""

    kind: str
    size: float
    found: dict[str, set[str]]


@cache
def faults() -> dict[str, Fault]:
    """Return the faults that change a result, by name."""
    results = load(RECORD)["results"]
    planted = [row for row in results if row["what"] in ("tensors", "loss")]
    tensors = [row for row in planted if row["what"] == "tensors"]
    changed = {row["fault"] for row in tensors if row["changed"]}
    missed = {suite: defaultdict(set) for suite in SUITES}
    for suite, (dtype, inputs) in SUITES.items():
        for row in planted:
            if row["dtype"] == dtype and row.get("inputs", inputs) == inputs:
                missed[suite][row["fault"]] |= {t for t, found in row["found"].items() if not found}
    return {
        fault: Fault(
            next(row["kind"] for row in tensors if row["fault"] == fault),
            median(
                [
                    float(row.get("size", "inf"))
                    for row in tensors
                    if row["fault"] == fault and row["dtype"] == "float32"
                ]
            ),
            {suite: {*TESTS} - missed[suite][fault] for suite in SUITES},
        )
        for fault in sorted(changed)
    }


def tests_of(suite: str) -> list[str]:
    """Return the tests of a suite: a loss has no inputs, so it stands with the normal ones."""
    return [test for test in TESTS if SUITES[suite][1] == "normal" or not test.startswith("loss")]


def alarms(test: str, suite: str) -> tuple[int, int]:
    """Return the number of false alarms of a test, and of honest runs."""
    dtype, inputs = SUITES[suite]
    rows: list[dict[str, Any]] = [
        row
        for row in load(RECORD)["results"]
        if row["what"].startswith("honest")
        and row["dtype"] == dtype
        and row.get("inputs", inputs) == inputs
        and test in row["found"]
    ]
    return sum(row["found"][test] for row in rows), len(rows)


def count(test: str, suite: str, kind: str = "") -> int:
    """Return the number of faults of a kind, or of all, that a test finds."""
    return sum(test in f.found[suite] for f in faults().values() if kind in ("", f.kind))


def pairs(test: str = "") -> set[tuple[str, int]]:
    """Return the pairs (fault, seed) in bfloat16 on normal inputs that a test finds, or all."""
    return {
        (row["fault"], row["seed"])
        for row in load(RECORD)["results"]
        if row["what"] == "tensors" and (row["dtype"], row["inputs"]) == SUITES["bfloat16"]
        if row["fault"] in faults() and (not test or row["found"][test])
    }


def detection() -> dict[str, str]:
    """Return the numbers of faults that tests find."""
    kinds = [fault.kind for fault in faults().values()]
    numbers = {
        "judge_float32": ("judge", "float32"),
        "judge_bfloat16": ("judge", "bfloat16"),
        "judge_offset": ("judge", "bfloat16, offset"),
        "flash_bfloat16": ("flash-attention", "bfloat16"),
        "wide_float32": ("transformer engine", "float32"),
        "wide_bfloat16": ("transformer engine", "bfloat16"),
        "same_bfloat16": ("loss, same seed", "bfloat16"),
        "other_bfloat16": ("loss, other seeds", "bfloat16"),
    }
    found = {f"found_{name}": str(count(*of)) for name, of in numbers.items()}
    judge, flash = (pairs(test) for test in ("judge", "flash-attention"))
    alone = len(judge - flash)
    assert len(judge) == len(flash)
    assert alone == len(flash - judge)  # the paper's sentence names both with one number
    return found | {
        "pairs": str(len(pairs())),
        "pairs_judge": str(len(judge)),
        "pairs_judge_alone": str(alone),
        "detection_planted": str(len(kinds)),
        "detection_precision": str(kinds.count("precision")),
    }


def drawing():
    """Draw the tests that find each fault, by its size."""
    figure, grid = new(3, width=WIDE, height=2.7, sharey=True)
    kinds = list(KINDS)
    for axes, suite in zip(grid[0], SUITES, strict=True):
        for line, test in enumerate(tests_of(suite)):
            for kind, seen in product(kinds, (True, False)):
                sizes = {
                    min(max(float(f"{fault.size:.1e}"), LEAST), MOST)
                    for fault in faults().values()
                    if fault.kind == kind and (test in fault.found[suite]) is seen
                }
                axes.plot(
                    sorted(sizes),
                    [-line + 0.14 * (2 - kinds.index(kind))] * len(sizes),
                    "o",
                    color=KINDS[kind],
                    markerfacecolor=KINDS[kind] if seen else "white",
                    markeredgewidth=0.7,
                    markersize=3.2,
                )
            wrong, _ = alarms(test, suite)
            axes.text(
                0.02,
                -line + 0.38,
                "rejects honest code" if wrong else str(count(test, suite)),
                transform=axes.get_yaxis_transform(),
                fontsize=SMALL,
                ha="left",
                va="center",
                color=VERMILION if wrong else "black",
            )
        axes.set_xscale("log")
        axes.set_xticks([1e-5, 1e-3, 0.1])
        axes.minorticks_off()
        axes.set_xlim(LEAST / 2, MOST * 2)
        axes.set_ylim(-len(TESTS) + 0.5, 0.6)
        axes.set_yticks([-line for line in range(len(TESTS))], TESTS.values())
        small(axes, suite, "size: largest relative error")
    handles = [
        grid[0][0].plot([], [], "o", color=colour, markersize=3.2, label=kind)[0]
        for kind, colour in KINDS.items()
    ]
    handles += grid[0][0].plot(
        [], [], "o", color="black", markerfacecolor="white", markersize=3.2, label="not found"
    )
    figure.legend(
        handles=handles, fontsize=SMALL, loc="outside lower center", ncols=6, frameon=False
    )
    return figure


FIGURE = Drawing(drawing, (f"{RECORD}.json",))
PARTS = (detection,)
