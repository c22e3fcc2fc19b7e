"""Draw the figures of `measured.md` from the records."""

import kernel_tables
import schedule_tables
from plots import BLUE, GREEN, GREY, ONE, ORANGE, SKY, VERMILION, Drawing, finish, new
from records import load, median, tokens


def short(shape: str) -> str:
    """Return a short name of a shape for an axis."""
    b, n, h, g, d, mask = shape.split()
    mask = mask.replace("documents:", "documents ~")
    return f"{b[1:]} x {tokens(int(n[1:]))}, {h[2:]}/{g[2:]}, D {d[1:]}, {mask}"


def kernels():
    """Draw the speeds of kernels on nine shapes."""
    figure, grid = new(2, width=10, height=5.2, sharey=True)
    record, shapes = kernel_tables.BESIDE, kernel_tables.SHAPES
    peers = (("SDPA cudnn", "cuDNN", ORANGE, "^"), ("flash-attn-4", "flash-attn-4", BLUE, "s"))
    for axes, name in zip(grid[0], ("forward", "backward"), strict=True):
        series = [
            (
                label,
                colour,
                mark,
                "none" if name == "backward" else colour,
                [kernel_tables.speed(record, s, peer, name) for s in shapes],
            )
            for peer, label, colour, mark in peers
        ]
        if name == "forward":
            series.append(
                (
                    "Canon",
                    VERMILION,
                    "o",
                    VERMILION,
                    [kernel_tables.speed(record, s, "canon auto", name) for s in shapes],
                )
            )
        else:
            strict = [
                kernel_tables.speed(record, s, "flash-attn-4 deterministic", name) for s in shapes
            ]
            series.append(("flash-attn-4, deterministic", BLUE, "s", BLUE, strict))
            any_order = [kernel_tables.speed(record, s, "canon auto", name) for s in shapes]
            series.append(("Canon", VERMILION, "o", "none", any_order))
            series.append(
                (
                    "Canon, deterministic",
                    VERMILION,
                    "o",
                    VERMILION,
                    [
                        kernel_tables.speed(record, s, kernel_tables.REPEATABLE, name)
                        for s in shapes
                    ],
                )
            )
        for label, colour, mark, face, values in series:
            points = [(value, -i) for i, value in enumerate(values) if value]
            axes.plot(
                *zip(*points, strict=True),
                mark,
                color=colour,
                markerfacecolor=face,
                markersize=7,
                label=label,
            )
        axes.set_yticks([-i for i in range(len(shapes))], [short(s) for s in shapes])
        axes.set_xlim(left=0)
        finish(axes, name, "TFLOP/s of visible cells, GPU time", grid="both")
        axes.legend(
            fontsize=8,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.14),
            ncols=3 if name == "forward" else 2,
            frameon=False,
        )
    figure.suptitle(f"Kernels on {ONE}: batch x tokens, query/key heads, width, mask", fontsize=10)
    return figure


def wall():
    """Draw wall time and GPU time of Canon and its peers, as parts of cuDNN's or flash-attn-4's
    wall time.
    """
    figure, grid = new(2, width=10, height=5.6, sharey=True)
    record, host = kernel_tables.BESIDE, load("host_h200")["results"]
    short_shapes = list(dict.fromkeys(row["shape"] for row in host))
    shapes = [*short_shapes, *kernel_tables.SHAPES]
    series = (
        ("canon auto", "Canon", VERMILION, "o"), ("SDPA cudnn", "cuDNN", ORANGE, "^"),
        ("flash-attn-4", "flash-attn-4", BLUE, "s"),
    )  # fmt: skip
    for axes, name in zip(grid[0], ("forward", "both"), strict=True):
        for i, shape in enumerate(shapes):
            known = lambda who, shape=shape, name=name: kernel_tables.clocks(
                record, shape, who, name
            )
            if shape in short_shapes:
                times = {
                    r["contender"]: (median(r[f"{name}_wall_ms"]), 0.0)
                    for r in host
                    if r["shape"] == shape
                }
            else:
                times = {who: known(who) for who, *_ in series}
            unit = times.get("SDPA cudnn", (0.0, 0.0))[0] or times["flash-attn-4"][0]
            for who, _, colour, mark in series:
                wall, gpu = times.get(who, (0.0, 0.0))
                if wall:
                    axes.plot(wall / unit, -i, mark, color=colour, markersize=7)
                if gpu:
                    axes.plot(
                        gpu / unit, -i, mark, color=colour, markerfacecolor="none", markersize=7
                    )
        axes.axvline(1.0, color=GREY, linewidth=0.8)
        axes.set_yticks([-i for i in range(len(shapes))], [short(shape) for shape in shapes])
        axes.set_xlim(0, 1.9)
        finish(
            axes,
            "forward" if name == "forward" else "forward and backward",
            "wall time of cuDNN, else of flash-attn-4, = 1",
            grid="both",
        )
    handles = [
        grid[0][0].plot([], [], mark, color=colour, label=label)[0]
        for _, label, colour, mark in series
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        f"Eager calls back to back on {ONE}. Filled: wall time. Hollow: GPU time. Less is better",
        fontsize=10,
    )
    return figure


def lengths():
    """Draw the speeds of Canon and cuDNN by the length of a sequence."""
    figure, grid = new(3, 2, width=10, height=5.6, sharex=True, sharey=True)
    rows = load("kernels_sweep_widths_h200")["results"]
    for column, d in enumerate((64, 128, 256)):
        for line, name in enumerate(("forward", "backward")):
            axes = grid[line][column]
            for peer, label, colour, mark in (
                ("canon auto", 'Canon, "auto"', VERMILION, "o"),
                ("SDPA cudnn", "cuDNN", ORANGE, "^"),
            ):
                points = sorted(
                    (row["n"], row[f"{name}_tflops"])
                    for row in rows
                    if row["d"] == d and row["contender"] == peer
                )
                axes.plot(
                    *zip(*points, strict=True), marker=mark, color=colour, markersize=4, label=label
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks([512, 2048, 8192, 32768, 131072], ["512", "2K", "8K", "32K", "128K"])
            axes.set_ylim(0, 850)
            finish(
                axes,
                f"{name}, D {d}",
                "tokens in a sequence" if line else "",
                "" if column else "TFLOP/s, GPU time",
                grid="both",
            )
    grid[0][0].legend(fontsize=8, loc="lower right", frameon=True)
    figure.suptitle(f"Causal sequences of different lengths on {ONE}", fontsize=10)
    return figure


def schedules():
    """Draw the speeds of schedules on two, four and eight GPUs."""
    records = (
        ("schedules_two_h200", 32768, 2),
        ("schedules_four_h200", 65536, 4),
        ("schedules_eight_h200", 131072, 8),
    )
    chosen = (
        ("one GPU", "one GPU, the whole sequence", GREY),
        ("ring contiguous", "ring, contiguous", SKY),
        ("ring zigzag", "ring, zigzag", SKY),
        ("ring striped", "ring, striped", SKY),
        ("strided zigzag 2", "strided, 2 key heads at a time", VERMILION),
        ("strided zigzag 4", "strided, 4 key heads", VERMILION),
        ("strided zigzag 8", "strided, 8 key heads", VERMILION),
        ("magi, 0 stages", "magi, one group cast", GREEN),
        ("magi, 0 stages, keys kept", "magi, one group cast, keep_kv", GREEN),
        ("torch cudnn allgather", "torch context_parallel, cuDNN", ORANGE),
    )
    figure, grid = new(3, width=10, height=4.2, sharex=True, sharey=True)
    for axes, (record, n, gpus) in zip(grid[0], records, strict=True):
        found = {
            row["schedule"]: row["both_tflops"]
            for row in load(record)["results"]
            if f" S{n} " in row["shape"]
        }
        for i, (name, _, colour) in enumerate(chosen):
            if name in found:
                axes.barh(-i, found[name], color=colour, height=0.7)
                axes.text(8, -i, f"{found[name]:.0f}", va="center", fontsize=8)
            else:
                axes.text(8, -i, "not measured", va="center", fontsize=7, color="black")
        axes.axvline(found["one GPU"], color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks([-i for i in range(len(chosen))], [label for _, label, _ in chosen])
        finish(axes, f"{gpus} GPUs, {tokens(n)} tokens", "TFLOP/s per GPU, GPU time")
    figure.suptitle(
        "Both passes of one causal sequence on NVIDIA H200s with NVLink, 16,384 tokens a GPU, "
        "32/8 heads, D 128. Dotted: one GPU alone",
        fontsize=10,
    )
    return figure


def packs():
    """Draw the speeds on packed documents."""
    chosen = [(name, label) for name, label in schedule_tables.PACKED if "2 stages" not in name]
    figure, grid = new(2, width=10, height=3.8, sharey=True, sharex=True)
    columns = (("8 GPUs, 65,536 tokens, 9 packs", 0), ("4 GPUs, 32,768 tokens, 10 packs", 1))
    found = schedule_tables.pack_speeds()
    for axes, (title, i) in zip(grid[0], columns, strict=True):
        for line, (name, _) in enumerate(chosen):
            for offset, colour, j in ((0.2, BLUE, 0), (-0.2, ORANGE, 1)):
                values = [row[j] for row in found[name, i]]
                mean = sum(values) / len(values)
                axes.barh(-line + offset, mean, color=colour, height=0.36, alpha=0.75)
                axes.plot(values, [-line + offset] * len(values), "|", color="black", markersize=6)
                axes.text(
                    8,
                    -line + offset,
                    f"{mean:.0f}",
                    va="center",
                    fontsize=7,
                    color="white" if j == 0 else "black",
                )
        labels = [
            label.replace("`", "").replace("the same, ", "      the same, ") for _, label in chosen
        ]
        axes.set_yticks([-line for line in range(len(chosen))], labels)
        finish(axes, f"{title}, a tick for each", "TFLOP/s per GPU, GPU time")
    grid[0][1].barh([-1], [0], color=BLUE, label="forward")
    grid[0][1].barh([-1], [0], color=ORANGE, label="backward alone")
    grid[0][1].legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.16), frameon=True)
    figure.suptitle("Packed documents on NVIDIA H200s, 64/8 heads, D 128, bfloat16", fontsize=10)
    return figure


FIGURES = {
    "kernels": Drawing(kernels, ("kernels_peers_h200.json",)),
    "wall": Drawing(wall, ("kernels_peers_h200.json", "host_h200.json")),
    "lengths": Drawing(lengths, ("kernels_sweep_widths_h200.json",)),
    "schedules": Drawing(
        schedules,
        ("schedules_two_h200.json", "schedules_four_h200.json", "schedules_eight_h200.json"),
    ),
    "packs": Drawing(
        packs,
        tuple(f"packs_{name}_h200.json" for name in ("eight", "later_eight", "magi_eight", "four")),
    ),
}
