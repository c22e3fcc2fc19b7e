"""Compute the tables and numbers of `hidden_wait.md` from the records, and draw its figure."""

from collections import Counter

from plots import BLUE, GREY, ONE, ORANGE, SKY, VERMILION, Drawing, finish, new
from records import case, load, median, only, span, table

WAITED = tuple(
    (shape, how)
    for shape in ("1,16384,32,32,64,causal", "1,16384,32,8,128,causal", "1,16384,32,8,128,full")
    for how in ("order", "fused", "split")
)


def waited(shape: str, how: str, variant: str) -> list[float]:
    """Return the single times of dk, dv (and dq), in ms."""
    return only(load("variants_dkdv_h200")["results"], shape=shape, how=how, variant=variant)["ms"]


def values() -> dict[str, str]:
    """Return the tables and numbers of the page, by name."""
    names = {
        "order": "dk, dv, ordered dq",
        "fused": "dk, dv, dq in any order",
        "split": "dk, dv alone",
    }
    rows, gains = [], {}
    for shape, how in WAITED:
        before, after = (median(waited(shape, how, variant)) for variant in ("base", "n5"))
        gains[shape, how] = before / after
        rows.append(
            [case(shape), names[how], f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}"]
        )
    record = load("variants_dkdv_h200")["compiled"]
    order = load("variants_optimistic_h200")["runs"][8]["shapes"]["(1, 16384, 32, 8, 128, 'c')"]
    config = ":128,128,3,turns,optimistic"
    shifted = [
        median(order[f"tree{config}"]) / median(order[f"tree_{p}{config}"])
        for p in ("p0", "p1", "p3", "p5")
    ]
    waits = Counter(
        (row["case"]["backend"], row["case"]["kernel"], row["waits_added"])
        for row in load("compile_triton_3.6.0")["results"]
        if row["case"]["backend"] == "gluon"
    )
    late = lambda variant: only(
        load("variants_h200")["results"],
        kernel="forward",
        shape="1,16384,32,8,128,causal",
        variant=variant,
    )["tflops"]
    return {
        "waits": table(
            (
                "batch x tokens, query/key heads, width, mask",
                "kernel",
                "with the wait, ms",
                "without, ms",
                "speed-up",
            ),
            rows,
            left=2,
        ),
        "gain_narrow": f"{gains['1,16384,32,32,64,causal', 'order'] - 1:.0%}",
        "faster": str(sum(gain > 1 for gain in gains.values())),
        "cases": str(len(gains)),
        "before_128": str(record["128 wide"]["base"]),
        "after_128": str(record["128 wide"]["n5"]),
        "before_64": str(record["64 wide"]["base"]),
        "after_64": str(record["64 wide"]["n5"]),
        "reordered": f"{median(order[f'tree{config}']) / median(order[f'sA{config}']) - 1:.1%}",
        "shifted": span(shifted),
        "late": f"{late('turns, P rounded late'):.0f}",
        "early": f"{late('turns'):.0f}",
        "backward_waits": str(
            sum(n for (_, kernel, added), n in waits.items() if added and kernel != "forward")
        ),
        "backward_kernels": str(
            sum(n for (_, kernel, _), n in waits.items() if kernel != "forward")
        ),
        "forward_waits": str(
            sum(n for (_, kernel, added), n in waits.items() if added and kernel == "forward")
        ),
    }


def figure():
    """Draw one tile with and without the wait, and the times of both kernels."""
    from matplotlib.patches import Rectangle

    figure, grid = new(2, width=10.5, height=4.2, width_ratios=[1.15, 1])
    left, right = grid[0]
    wait = ("", 2.0, 0.12, VERMILION)
    late = (
        ("tensor cores", 1, [("S", 0, 2, BLUE), ("dP", 2.9, 2, ORANGE)]),
        (
            "warpgroup",
            0.5,
            [wait, ("-delta", 2.12, 0.78, SKY), ("P", 2.9, 1.2, GREY), ("dS", 4.9, 1, GREY)],
        ),
    )
    early = (
        ("tensor cores", 1, [("S", 0, 2, BLUE), ("dP", 2, 2, ORANGE)]),
        (
            "warpgroup",
            0.5,
            [("-delta", -0.78, 0.78, SKY), ("P", 2.0, 1.2, GREY), ("dS", 4.0, 1, GREY)],
        ),
    )
    for shift, title, lanes in (
        (1.5, "as assembled: dP is issued after S is complete", late),
        (0.0, "as written: dP is issued right behind S", early),
    ):
        left.text(0, shift + 1.37, title, fontsize=9)
        for lane, y, parts in lanes:
            left.text(-0.9, shift + y, lane, fontsize=8, ha="right", va="center")
            for name, begin, length, colour in parts:
                left.add_patch(
                    Rectangle(
                        (begin, shift + y - 0.18),
                        length,
                        0.36,
                        facecolor=colour,
                        edgecolor="black",
                        linewidth=0.5,
                    )
                )
                left.text(
                    begin + length / 2,
                    shift + y,
                    name,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if colour == BLUE else "black",
                )
    left.annotate(
        "WARPGROUP.DEPBAR gsb0, 0x0",
        (2.05, 1.82),
        (2.4, 1.6),
        fontsize=8,
        color="black",
        va="center",
        arrowprops={"arrowstyle": "->", "color": VERMILION},
    )
    left.set_xlim(-2.3, 6.0)
    left.set_ylim(0.1, 3.1)
    left.axis("off")
    left.set_title("One tile of one warpgroup (schematic)", fontsize=10)
    names = {"order": "ordered dq", "fused": "dq in any order", "split": "no dq"}
    labels = []
    for i, (shape, how) in enumerate(WAITED):
        before = median(waited(shape, how, "base"))
        for variant, colour, offset in (("base", BLUE, 0.16), ("n5", VERMILION, -0.16)):
            times = waited(shape, how, variant)
            right.plot(
                [time / before for time in times],
                [-i + offset] * len(times),
                "|",
                color=colour,
                markersize=7,
                alpha=0.7,
            )
            right.plot(median(times) / before, -i + offset, "o", color=colour, markersize=5)
        d, mask = shape.split(",")[4:]
        labels.append(f"D {d}, {mask}, {names[how]}")
    right.plot([], [], "o", color=BLUE, label="with the wait")
    right.plot([], [], "o", color=VERMILION, label="without")
    right.set_yticks([-i for i in range(len(labels))], labels)
    right.axvline(1, color="black", linewidth=0.8, linestyle=":")
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.13), ncols=2, frameon=False)
    finish(right, f"{ONE}", "GPU time over the median with the wait; a tick is one run")
    return figure


FIGURE = Drawing(figure, ("variants_dkdv_h200.json",))
