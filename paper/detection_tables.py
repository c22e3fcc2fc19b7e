"""Compute tables, numbers and the figure of the experiment of detection: which planted faults a
judge, tolerances and a training loss find. `tests/detection.py` defines "found".

A fault counts as found if it is found with every seed. Its size is the largest relative error of a
result in float32.
"""

from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

from plots import BLUE, GREEN, ORANGE, PURPLE, SMALL, VERMILION, WIDE, Drawing, new, small
from records import load, median, table

RECORD = "detection_cpu"
SUITES = {  # name on the page: dtype, inputs
    "float32": ("float32", "normal"),
    "bfloat16": ("bfloat16", "normal"),
    "bfloat16, offset": ("bfloat16", "offset"),
}
TESTS = {  # name in the record: name on the page
    "judge": "judge",
    "flash-attention": "twice the error of PyTorch (FlashAttention)",
    "assert_close": "`torch.testing.assert_close`",
    "transformer engine": "tolerances of Transformer Engine",
    "loss, same seed": "loss, beside a run with the same seed",
    "loss, other seeds": "loss, beside runs with other seeds",
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


def by_kind(suite: str) -> list[list[str]]:
    """Return a row for each test: faults found by kind, in all, and false alarms."""
    return [
        [
            TESTS[test],
            *(str(count(test, suite, kind)) for kind in (*KINDS, "")),
            "{} of {}".format(*alarms(test, suite)),
        ]
        for test in tests_of(suite)
    ]


def detection() -> dict[str, str]:
    """Return the tables and numbers of the pages."""
    kinds = [fault.kind for fault in faults().values()]
    planted = ["planted", *(str(kinds.count(kind)) for kind in KINDS), str(len(kinds)), ""]
    found = {"detection_planted": str(len(kinds)), "detection_precision": planted[-3]}
    for suite in SUITES:
        name = suite.replace(", ", "_")
        header = (f"{suite}: found", *KINDS, "all", "false alarms")
        found[f"detection_{name}"] = table(header, [planted, *by_kind(suite)])
    numbers = {
        "judge_float32": ("judge", "float32"),
        "judge_bfloat16": ("judge", "bfloat16"),
        "flash_bfloat16": ("flash-attention", "bfloat16"),
        "wide_float32": ("transformer engine", "float32"),
        "wide_bfloat16": ("transformer engine", "bfloat16"),
        "same_bfloat16": ("loss, same seed", "bfloat16"),
        "other_bfloat16": ("loss, other seeds", "bfloat16"),
    }
    return found | {f"found_{name}": str(count(*of)) for name, of in numbers.items()}


def drawing():
    """Draw the tests that find each fault, by its size."""
    figure, grid = new(3, width=WIDE, height=2.7, sharey=True)
    kinds = list(KINDS)
    for axes, suite in zip(grid[0], SUITES, strict=True):
        for line, test in enumerate(tests_of(suite)):
            for fault in faults().values():
                colour, seen = KINDS[fault.kind], test in fault.found[suite]
                axes.plot(
                    [min(max(fault.size, LEAST), MOST)],
                    [-line + 0.14 * (2 - kinds.index(fault.kind))],
                    "o",
                    color=colour,
                    markerfacecolor=colour if seen else "white",
                    markeredgewidth=0.7,
                    markersize=3.2,
                )
            wrong, honest = alarms(test, suite)
            axes.text(
                0.02,
                -line + 0.38,
                f"{count(test, suite)} found" + (f", {wrong} of {honest} false" if wrong else ""),
                transform=axes.get_yaxis_transform(),
                fontsize=SMALL,
                ha="left",
                va="center",
                color=VERMILION if wrong else "black",
            )
        axes.set_xscale("log")
        axes.set_xlim(LEAST / 2, MOST * 2)
        axes.set_ylim(-len(TESTS) + 0.5, 0.6)
        axes.set_yticks([-line for line in range(len(TESTS))], map(_short, TESTS))
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


def _short(test: str) -> str:
    names = {"flash-attention": "FlashAttention's rule", "transformer engine": "Transformer Engine"}
    return names.get(test, test)


FIGURE = Drawing(drawing, (f"{RECORD}.json",))
PARTS = (detection,)
