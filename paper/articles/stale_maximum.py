"""Compute the tables and numbers of `stale_maximum.md` from the records, and draw its figure."""

import re

from plots import BLUE, ONE, VERMILION, Drawing, finish, new
from records import load, median, samples, span, table, tokens

DEVIATIONS = ("1", "1.5", "2", "3", "4", "6")
PEAKED = {64: "(8, 4096, 32, 64)", 128: "(8, 4096, 16, 128)", 256: "(8, 4096, 8, 256)"}


def peaked(d: int, variant: str) -> list[float]:
    """Return the speed over the kernel that takes every maximum, by the standard deviation of the
    scores: third run.
    """
    shapes = load("variants_peaked_h200")["runs"][2]["shapes"]
    found = [shapes[f"{PEAKED[d]}, {deviation} nats"] for deviation in DEVIATIONS]
    return [median(times["known"]) / median(times[variant]) for times in found]


def values() -> dict[str, str]:
    """Return the tables and numbers of the page, by name."""
    rows = [
        [f"D {d}, {label}", *(f"{speed:.2f}" for speed in peaked(d, variant))]
        for d in PEAKED
        for variant, label in (
            ("opt", "the tile is recomputed"),
            ("even", "the divisor is corrected"),
        )
    ]
    lengths, run = [], load("variants_optimistic_h200")["runs"][6]["shapes"]
    shapes = [f"({16384 // n}, {n}, 32, 8, 128, 'c')" for n in (512, 1024, 2048, 4096, 8192, 16384)]
    for variant, label in (("128opt-p", "partial tiles first"), ("128opt", "full tiles first")):
        lengths.append(
            [
                label,
                *(
                    f"{median(run[shape]['128']) / median(run[shape][variant]):.2f}"
                    for shape in shapes
                ),
            ]
        )
    found = samples("ncu_fifth_f64_canon_samples")
    count = lambda rows: sum(int(row["samples"]) for row in rows)
    maxima = {"128": [], "256": [], "64": []}
    for shape, times in (
        pair for run in load("variants_maxima_h200")["runs"] for pair in run.items()
    ):
        if "eight" in times:
            maxima[re.findall(r"\d+", shape)[4]].append(
                median(times["base"]) / median(times["eight"])
            )
    loops = load("variants_optimistic_compiled")["variants"]["base"]["compiled"]
    shipped = load("variants_peaked_h200")["compiled"]["as shipped: v6 with a ceiling of the limit"]
    after = [
        shipped[name]["instructions"] - shipped[name]["in branches"]
        for name in ("64 wide, three warpgroups", "128 wide")
    ]
    before = [entry["loops_of_whole_tiles"][0]["instructions"] for entry in loops]
    fast = [speed for d in PEAKED for speed in peaked(d, "even")]
    third, fifth = (load("variants_peaked_h200")["runs"][i]["shapes"] for i in (2, 4))
    over = lambda times, variant: median(times["known"]) / median(times[variant])
    apart = [
        abs(over(fifth[shape], "v6") / over(third[shape], "even") - 1)
        for shape in third.keys() & fifth.keys()
    ]
    maxima_found = [row for row in found if "FMNMX" in row["source"]]
    return {
        "shipped": f"{100 * max(apart):.1f}",
        "peaked": table(
            (
                "speed over the kernel that takes every maximum",
                *(f"{d} nat{'s' * (d != '1')}" for d in DEVIATIONS),
            ),
            rows,
        ),
        "lengths": table(
            (
                "tokens in a sequence, D 128, causal",
                *(tokens(n) for n in (512, 1024, 2048, 4096, 8192, 16384)),
            ),
            lengths,
        ),
        "maximum_share": f"{count(maxima_found) / count(found):.0%}",
        "eight_128": span(maxima["128"] + maxima["256"]),
        "before_64": str(before[0]),
        "after_64": str(after[0]),
        "before_128": str(before[1]),
        "after_128": str(after[1]),
        "one_nat": span([peaked(d, "even")[0] for d in PEAKED]),
        "least": f"{min(fast):.2f}",
        "recomputed_least": f"{min(min(peaked(d, 'opt')) for d in PEAKED):.2f}",
        "chance": f"{load('variants_optimistic_compiled')['chance']['mean_times']}",
    }


def figure():
    """Draw the speed of both variants by the standard deviation of the scores."""
    figure, grid = new(3, width=10, height=3.4, sharey=True)
    deviations = [float(d) for d in DEVIATIONS]
    for axes, d in zip(grid[0], PEAKED, strict=True):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.plot(deviations, peaked(d, "opt"), "s--", color=BLUE, label="tile recomputed")
        axes.plot(deviations, peaked(d, "even"), "o-", color=VERMILION, label="divisor corrected")
        axes.set_xticks(deviations, DEVIATIONS)
        axes.set_ylim(0, 1.2)
        finish(
            axes,
            f"D {d}",
            "standard deviation of the scores, nats",
            "" if d > 64 else "speed (GPU time) over the\nkernel that takes every maximum",
            grid="both",
        )
    grid[0][0].legend(fontsize=8, loc="lower left", frameon=True)
    figure.suptitle(
        f"Forward with a stale row maximum on {ONE}: 8 x 4,096 tokens, causal", fontsize=10
    )
    return figure


FIGURE = Drawing(figure, ("variants_peaked_h200.json",))
