"""Compute what `backward_on_hopper.md` says about the order of additions to dq, and draw its second
figure.
"""

from kernel_tables import BESIDE, semaphore, speed
from plots import ONE, SKY, VERMILION, Drawing, finish, new
from records import case, load, median, named, only, span, table

ORDERS = ("any order", "longest first", "by turns")
ORDERED = (  # cases of the fourth run of `pairs_h200`
    "1,16384,8,2,128,causal",
    "1,65536,8,2,128,causal",
    "1,8192,32,8,128,causal",
    "1,16384,32,8,128,causal",
    "1,32768,16,4,128,causal",
    "2,8192,32,8,128,causal",
    "4,4096,32,8,128,causal",
    "4,8192,16,16,128,causal",
)


def ordered_times(text: str) -> dict[str, float]:
    """Return the median ms of the backward pass in one case, by the order of the sums."""
    row = only(load("pairs_h200")["runs"][3]["results"], case=text)
    return {name: median(times) for name, times in row["ms"].items()}


def values() -> dict[str, str]:
    """Return the tables and numbers of the page, by name."""
    return ordered() | peers()


def ordered() -> dict[str, str]:
    """Return the cost of each order of the sums, in percent of the backward pass."""
    costs = {name: [] for name in ORDERS}
    for text in ORDERED:
        times = ordered_times(text)
        for name in ORDERS:
            costs[name].append(100 * (times[name] / times["any order"] - 1))
    return {
        "longest_cost": span(costs["longest first"], 0),
        "alternating_cost": span(costs["by turns"], 0),
    }


def peers() -> dict[str, str]:
    """Return the speeds of both fused backward passes of Canon and of flash-attn-4."""
    rows, ours, theirs, costs, splits = [], [], [], [], []
    for shape in dict.fromkeys(
        row["shape"] for row in load(BESIDE)["results"] if row["d"] <= 128 and row["n"] >= 8192
    ):
        get = lambda contender, shape=shape: speed(BESIDE, shape, contender, "backward")
        any_order, in_order = get("canon gluon fused"), get("canon gluon fused in order")
        fa, fa_in_order = get("flash-attn-4"), get("flash-attn-4 deterministic")
        ours.append(in_order / any_order)
        theirs.append(fa_in_order / fa)
        if shape.endswith("D128 causal"):
            costs.append(100 * (any_order / in_order - 1))
            splits.append(get("canon gluon split") / in_order)
        speeds = [f"{value:.0f}" for value in (any_order, in_order, fa, fa_in_order)]
        rows.append([named(shape), *speeds, f"{in_order / fa_in_order:.2f}"])
    header = (
        "TFLOP/s",
        "Canon, any order",
        "Canon, ordered",
        "flash-attn-4, any order",
        "flash-attn-4, deterministic",
    )
    header += ("Canon over flash-attn-4, both deterministic",)
    return {"peers": table(header, rows), "ours_kept": span(ours), "theirs_kept": span(theirs)} | {
        "today_cost": span(costs, 0),
        "split_over": span(splits),
        "ours_faster": str(sum(float(row[-1]) > 1 for row in rows)),
        "peer_rows": str(len(rows)),
        "semaphore": span(semaphore()),
    }


def figure():
    """Draw the cost of each order of the sums."""
    figure, grid = new(width=8.5, height=4.2)
    axes = grid[0][0]
    for i, text in enumerate(ORDERED):
        times = ordered_times(text)
        split = 100 * (times["split"] / times["any order"] - 1)
        for offset, colour, name in ((0.2, SKY, "longest first"), (-0.2, VERMILION, "by turns")):
            cost = 100 * (times[name] / times["any order"] - 1)
            axes.barh(-i + offset, cost, color=colour, height=0.36)
            # the label does not cross the mark of "split"
            right = split if cost < split < cost + 3 else cost
            axes.text(right + 0.4, -i + offset, f"{cost:.0f} %", va="center", fontsize=8)
        axes.plot([split, split], [-i - 0.42, -i + 0.42], color="black", linewidth=1.6)
    axes.barh([0], [0], color=SKY, label="ordered, longest tiles first")
    axes.barh([0], [0], color=VERMILION, label="ordered, short and long tiles alternate")
    axes.plot([], [], color="black", linewidth=1.6, label="split: seven MMAs, no sum to order")
    axes.set_yticks([-i for i in range(len(ORDERED))], [case(text) for text in ORDERED])
    axes.legend(fontsize=8, loc="lower right", frameon=True)
    finish(
        axes,
        f"What a fixed order of the sums of dq costs on {ONE}",
        "% more GPU time than the fused backward that adds in any order",
    )
    return figure


FIGURE = Drawing(figure, ("pairs_h200.json",))
