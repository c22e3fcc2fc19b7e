"""Draw the figure of `measured.md` from the records."""

import kernel_tables
from plots import BLUE, GREY, ONE, ORANGE, VERMILION, Drawing, finish, new
from records import load, median, tokens


def short(shape: str) -> str:
    """Return a short name of a shape for an axis."""
    b, n, h, g, d, mask = shape.split()
    mask = mask.replace("documents:", "documents ~")
    return f"{b[1:]} x {tokens(int(n[1:]))}, {h[2:]}/{g[2:]}, D {d[1:]}, {mask}"


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


FIGURES = {
    "wall": Drawing(wall, ("kernels_peers_h200.json", "host_h200.json")),
}
