"""Draw the figures of the paper at their size in print: no text is smaller than 7 points."""

import detection_tables
import kernel_tables
import schedule_tables
from articles import order_of_dq
from measured_figures import short
from plots import (
    BLUE,
    GREEN,
    GREY,
    NARROW,
    ONE,
    ORANGE,
    SKY,
    SMALL,
    VERMILION,
    WIDE,
    Drawing,
    new,
    small,
)  # fmt: skip
from records import load, tokens

RANKS, TOKENS, RANK = 4, 32, 1  # of the figure of the schedules
ENDS = (0, 2, 12, 27, 32)  # of its documents


def _cells(axes, cells, left: float, top: float, colour: str = BLUE) -> None:
    """Draw a boolean matrix, one unit a cell, from its upper left corner."""
    from matplotlib.colors import ListedColormap

    rows, columns = cells.shape
    extent = (left, left + columns, top + rows, top)
    colours = ListedColormap(["#efefef", colour])
    axes.imshow(cells.numpy(), cmap=colours, extent=extent, interpolation="nearest", vmin=0, vmax=1)
    xs = [left, left + columns, left + columns, left, left]
    ys = [top, top, top + rows, top + rows, top]
    axes.plot(xs, ys, color=GREY, linewidth=0.6)


# ------------------------------------------------------------------ bands and schedules
def bands():
    """Draw a band, and the results of crop, shift and stride."""
    from canon import Band, Mask

    n, band = 16, Band(0, 16, 0, 16, -6, 0)
    rows, columns, every = range(6, 14), range(2, 12), range(1, 16, 3)
    crop = band.intersect(Band(rows.start, rows.stop, columns.start, columns.stop))
    local = crop.shift(-rows.start, -columns.start)
    picked = band.pick(every, every)
    panels = (
        ("a band", band, n, n),
        (
            f"crop: rows {rows.start}–{rows.stop - 1}, columns {columns.start}–{columns.stop - 1}",
            crop,
            n,
            n,
        ),
        ("shift: local coordinates", local, len(rows), len(columns)),
        ("stride: tokens 1, 4, 7, 10, 13", picked, len(every), len(every)),
    )
    figure, grid = new(4, width=WIDE, height=1.95, sharey=True)
    for axes, (title, one, queries, keys) in zip(grid[0], panels, strict=True):
        _cells(axes, Mask([one], queries, keys).dense(), 0, 0)
        rectangle = f"q [{one.q_start}, {one.q_stop})  k [{one.k_start}, {one.k_stop})"
        diagonals = f"{one.lo} ≤ j − i ≤ {one.hi}, {one.area} cells"
        axes.text(0, n + 0.8, f"{rectangle}\n{diagonals}", fontsize=SMALL, va="top")
        axes.set_title(title, fontsize=SMALL, loc="left")
        axes.set_xlim(-0.3, n + 0.3)
        axes.set_ylim(n + 4.2, -0.3)
        axes.set_axis_off()
    return figure


def steps_of_schedules():
    """Return (name, messages, masks) of each schedule: the masks of the steps of one rank, from the
    library.
    """
    from canon import Layout, Mask
    from canon.reference import cast_plan, dispatch

    causal, packed = Mask.causal(TOKENS), Mask.documents(ENDS)
    ring = lambda layout: [
        layout.local_mask(causal, RANK, (RANK - step) % RANKS).dense() for step in range(RANKS)
    ]
    zigzag, planned = Layout.zigzag(TOKENS, RANKS), dispatch(packed, RANKS, chunk=4)
    plan = cast_plan(packed, planned, own_keys_first=True)
    gathered = zigzag.local_mask(causal, RANK, range(RANKS)).dense()
    return (
        ("ring, contiguous", "one hop a step", ring(Layout.contiguous(TOKENS, RANKS))),
        ("ring, zigzag", "one hop a step", ring(zigzag)),
        ("ring, striped", "one hop a step", ring(Layout.striped(TOKENS, RANKS))),
        ("strided, zigzag", "one gather a step, of some heads", [gathered, gathered]),
        (
            "magi, planned",
            "one group cast a step",
            [plan.local_mask(s, RANK).dense() for s in range(plan.steps)],
        ),
    )


def schedules():
    """Draw the masks of the steps of one rank in five schedules."""
    gap, line = 2, TOKENS // RANKS + 5.5
    figure, grid = new(width=WIDE, height=2.45)
    axes = grid[0][0]
    for number, (name, messages, masks) in enumerate(steps_of_schedules()):
        left, top = (0, number * line) if number < 3 else (48, (number - 3) * line)
        axes.text(left, top - 0.6, f"{name}: {messages}", fontsize=SMALL, va="bottom")
        for cells in masks:
            _cells(axes, cells, left, top, VERMILION if number == 4 else BLUE)
            left += cells.shape[1] + gap
    axes.text(
        48,
        2 * line - 2,
        f"Causal mask of {TOKENS} tokens. magi: documents end at {ENDS[1:]}.",
        fontsize=SMALL,
        va="top",
    )
    axes.text(
        48,
        2 * line + 1,
        f"Rank {RANK} of {RANKS}: rows are its queries, columns",
        fontsize=SMALL,
        va="top",
    )
    axes.text(48, 2 * line + 4, "are the keys that it holds in a step.", fontsize=SMALL, va="top")
    axes.set_xlim(-0.5, 48 + 2 * TOKENS + gap + 0.5)
    axes.set_ylim(3 * line - 4, -3.5)
    axes.set_axis_off()
    return figure


# ------------------------------------------------------------------ measurements
def kernels():
    """Draw the speeds of kernels on nine shapes."""
    figure, grid = new(2, width=WIDE, height=3.0, sharey=True)
    record, shapes = kernel_tables.BESIDE, kernel_tables.SHAPES
    speeds = lambda who, name: [kernel_tables.speed(record, shape, who, name) for shape in shapes]
    forward = (
        ("cuDNN", ORANGE, "^", ORANGE, speeds("SDPA cudnn", "forward")),
        ("flash-attn-4", BLUE, "s", BLUE, speeds("flash-attn-4", "forward")),
        (
            "Canon",
            VERMILION,
            "o",
            VERMILION,
            speeds("canon auto", "forward"),
        ),
    )
    backward = (
        ("cuDNN", ORANGE, "^", ORANGE, speeds("SDPA cudnn", "backward")),
        ("flash-attn-4", BLUE, "s", BLUE, speeds("flash-attn-4", "backward")),
        (
            "flash-attn-4, deterministic",
            BLUE,
            "s",
            "none",
            speeds("flash-attn-4 deterministic", "backward"),
        ),
        ("Canon", VERMILION, "o", VERMILION, speeds("canon auto", "backward")),
        (
            "Canon, deterministic",
            VERMILION,
            "o",
            "none",
            speeds(kernel_tables.REPEATABLE, "backward"),
        ),
    )
    for axes, name, series in zip(
        grid[0], ("forward", "backward"), (forward, backward), strict=True
    ):
        for label, colour, mark, face, found in series:
            points = [(value, -i) for i, value in enumerate(found) if value]
            axes.plot(
                *zip(*points, strict=True),
                mark,
                color=colour,
                markerfacecolor=face,
                markersize=4.5,
                label=label,
            )
        axes.set_yticks([-i for i in range(len(shapes))], [short(shape) for shape in shapes])
        small(axes, f"{name}, {ONE}", "TFLOP/s of visible cells, GPU time", grid="both")
    figure.legend(
        *grid[0][1].get_legend_handles_labels(),
        fontsize=SMALL,
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    return figure


def several_gpus():
    """Draw the speeds of schedules on one long sequence and on packed documents, on eight GPUs."""
    figure, grid = new(2, width=WIDE, height=2.55)
    one, two = grid[0]
    n = 131072
    for i, name in enumerate(CAUSAL):
        speed = schedule_tables.schedule("schedules_eight_h200", name, n)["both_tflops"]
        one.barh(-i, speed, color=_colour(name), height=0.7)
        one.text(speed + 8, -i, f"{speed:.0f}", va="center", fontsize=SMALL)
    one.set_yticks([-i for i in range(len(CAUSAL))], list(CAUSAL.values()))
    one.set_xlim(0, 720)
    small(
        one, f"one causal sequence of {tokens(n)} tokens", "TFLOP/s per GPU, both passes, GPU time"
    )
    found = schedule_tables.pack_speeds()
    for i, (name, _) in enumerate(PACKED):
        for offset, colour, j in ((0.2, BLUE, 0), (-0.2, ORANGE, 1)):
            values = [row[j] for row in found[name, 0]]
            two.barh(-i + offset, sum(values) / len(values), color=colour, height=0.36, alpha=0.8)
            two.plot(
                values,
                [-i + offset] * len(values),
                "|",
                color="black",
                markersize=4,
                markeredgewidth=0.6,
            )
    two.set_yticks([-i for i in range(len(PACKED))], [label for _, label in PACKED])
    two.barh([0], [0], color=BLUE, label="forward")
    two.barh([0], [0], color=ORANGE, label="backward")
    two.legend(fontsize=SMALL, loc="lower right", bbox_to_anchor=(1.0, 0.2), frameon=True)
    count = len(found["magi, 0 stages", 0])
    small(two, f"{count} packs of 65,536 tokens, a tick for each", "TFLOP/s per GPU, GPU time")
    return figure


CAUSAL = {
    "ring contiguous": "ring, contiguous",
    "ring zigzag": "ring, zigzag",
    "ring striped": "ring, striped",
    "strided zigzag 4": "strided, 4 key heads",
    "strided zigzag 8": "strided, 8 key heads",
    "magi, 0 stages": "magi, one group cast",
    "torch cudnn allgather": "torch, cuDNN",
    "one GPU": "one GPU alone",
}
PACKED = (
    ("magi, 0 stages", "magi, one group cast"),
    ("magi, 0 stages, keys kept", "the same, keys kept"),
    ("magi, 1 stages", "magi, own keys first"),
    ("ring zigzag", "ring, zigzag"),
    ("strided zigzag 8", "strided, 8 key heads"),
    ("one GPU", "one GPU alone"),
)


def _colour(name: str) -> str:
    colours = {"ring": SKY, "strided": VERMILION, "magi": GREEN, "torch": ORANGE}
    return next((colour for key, colour in colours.items() if name.startswith(key)), GREY)


def dq_order():
    """Draw the cost of a fixed order of the additions to dq."""
    figure, grid = new(width=NARROW, height=2.75)
    axes = grid[0][0]
    cases = order_of_dq.ORDERED
    for i, text in enumerate(cases):
        times = order_of_dq.ordered_times(text)
        for offset, colour, name in ((0.2, SKY, "longest first"), (-0.2, VERMILION, "by turns")):
            cost = 100 * (times[name] / times["any order"] - 1)
            axes.barh(-i + offset, cost, color=colour, height=0.36)
        split = 100 * (times["split"] / times["any order"] - 1)
        axes.plot([split, split], [-i - 0.42, -i + 0.42], color="black", linewidth=1.3)
    axes.barh([0], [0], color=SKY, label="ordered, longest first")
    axes.barh([0], [0], color=VERMILION, label="ordered, alternating")
    axes.plot([], [], color="black", linewidth=1.3, label="split")
    labels = [
        f"{b} × {tokens(int(s))}, {h}/{g}" for b, s, h, g, *_ in (text.split(",") for text in cases)
    ]
    axes.set_yticks([-i for i in range(len(cases))], labels)
    axes.legend(fontsize=SMALL, loc="lower right", frameon=True)
    small(axes, "", "% more GPU time than additions in any order")
    return figure


def lengths():
    """Draw Canon's speed over cuDNN's by the length of a causal sequence."""
    figure, grid = new(width=NARROW, height=2.5)
    axes, record = grid[0][0], load("kernels_sweep_widths_h200")["results"]
    for d, colour, mark in ((64, SKY, "o"), (128, VERMILION, "s"), (256, GREEN, "^")):
        for name, style, face in (("forward", "-", colour), ("backward", "--", "white")):
            found = {
                (row["n"], row["contender"]): row.get(f"{name}_tflops")
                for row in record
                if row["d"] == d
            }
            pairs = (
                (n, found[n, "canon auto"], found.get((n, "SDPA cudnn")))
                for n, who in found
                if who == "canon auto"
            )
            points = sorted((n, ours / theirs) for n, ours, theirs in pairs if ours and theirs)
            axes.plot(
                *zip(*points, strict=True),
                style,
                marker=mark,
                color=colour,
                markerfacecolor=face,
                markersize=3.5,
                linewidth=1,
                label=f"{name}, width {d}",
            )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([512, 2048, 8192, 32768, 131072], ["512", "2K", "8K", "32K", "128K"])
    small(axes, "", "tokens in a sequence", "Canon over cuDNN, GPU time", grid="both")
    figure.legend(fontsize=SMALL, loc="outside lower center", ncols=2, frameon=False)
    return figure


def judge():
    """Draw the errors of all recorded cases as parts of their bounds, by tensor and dtype."""
    figure, grid = new(width=NARROW, height=2.2)
    axes = grid[0][0]
    names = ("out", "lse", "dq", "dk", "dv")
    dtypes = (("bfloat16", BLUE), ("float16", GREEN), ("float32", ORANGE))
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in (row for record, *_ in kernel_tables.CHECKS for row in load(record)["results"]):
        dtype = next((dtype for dtype, _ in dtypes if dtype in row["case"].split("/")), "")
        for measure in row["measures"]:
            ratios.setdefault((measure["tensor"], dtype), []).append(measure["ratio"])
    for i, name in enumerate(names):
        for offset, (dtype, colour) in zip((0.25, 0, -0.25), dtypes, strict=True):
            found = sorted(ratios[name, dtype])
            low, middle, high = (
                found[int(share * (len(found) - 1))] for share in (0.05, 0.5, 0.95)
            )
            axes.plot(
                [low, high],
                [-i + offset] * 2,
                color=colour,
                linewidth=3,
                alpha=0.6,
                solid_capstyle="butt",
            )
            axes.plot([middle], [-i + offset], "|", color="black", markersize=6)
            axes.plot(
                [found[-1]],
                [-i + offset],
                "o",
                color=colour,
                markersize=3.5,
                label=dtype if i == 0 else None,
            )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.text(0.985, 0.45, "bound", fontsize=SMALL, ha="right", va="center")
    axes.set_yticks([-i for i in range(len(names))], names)
    axes.set_xlim(0, 1.05)
    small(axes, "", "error over its bound")
    figure.legend(fontsize=SMALL, loc="outside lower center", ncols=3, frameon=False)
    return figure


FIGURES = {
    "paper_bands": Drawing(bands, ()),
    "paper_schedules": Drawing(schedules, ()),
    "paper_kernels": Drawing(kernels, ("kernels_peers_h200.json",)),
    "paper_several_gpus": Drawing(
        several_gpus,
        (
            "schedules_eight_h200.json",
            "packs_eight_h200.json",
            "packs_later_eight_h200.json",
            "packs_magi_eight_h200.json",
        ),
    ),
    "paper_lengths": Drawing(lengths, ("kernels_sweep_widths_h200.json",)),
    "paper_judge": Drawing(judge, tuple(f"{record}.json" for record, *_ in kernel_tables.CHECKS)),
    "paper_detection": detection_tables.FIGURE,
    "paper_dq_order": Drawing(dq_order, ("pairs_h200.json",)),
}
