"""Draw the figures of `README.md`, and compute its numbers from records.

The masks of the zigzag ring come from `canon.Layout` and `canon.Mask`. Its timeline is a sketch
without a scale."""

import kernel_tables
import schedule_tables
from plots import BLUE, GREY, ORANGE, SKY, Drawing, finish, new
from records import load, median, span, table

RANKS, TOKENS = 4, 32
# of the picture of one mask, in tokens
SIZE, PITCH = TOKENS // RANKS, (TOKENS // RANKS + 2, TOKENS // RANKS + 3.2)
STEP, GAP = 2.0, 0.08  # the time of a step, and the white space after a kernel


def readme_zigzag():
    """Draw the masks and the timeline next to each other."""
    figure, grid = new(2, width=10, height=3.7, gridspec_kw={"width_ratios": [1, 1.5]})
    _masks(grid[0][0])
    _timeline(grid[0][1])
    return figure


def owner(rank: int, step: int) -> int:
    """Return the rank whose keys ``rank`` holds at a step of the ring."""
    return (rank - step) % RANKS


def _masks(axes) -> None:
    """Draw the cells that the queries of each rank see at each step."""
    from matplotlib.colors import ListedColormap

    from canon import Layout, Mask

    layout, mask = Layout.zigzag(TOKENS, RANKS), Mask.causal(TOKENS)
    colours = ListedColormap(["#f2f2f2", BLUE])
    for rank in range(RANKS):
        for step in range(RANKS):
            cells = layout.local_mask(mask, rank, owner(rank, step)).dense()
            left, top = step * PITCH[0], rank * PITCH[1]
            right, bottom = left + SIZE, top + SIZE
            axes.imshow(
                cells, cmap=colours, extent=(left, right, bottom, top), interpolation="nearest"
            )
            axes.plot(
                [left, right, right, left, left],
                [top, top, bottom, bottom, top],
                color=GREY,
                lw=0.6,
            )
            axes.text(
                left + SIZE / 2,
                bottom + 1.4,
                f"K{owner(rank, step)}",
                ha="center",
                va="center",
                fontsize=7,
            )
    for i in range(RANKS):
        axes.text(i * PITCH[0] + SIZE / 2, -1.4, f"step {i}", ha="center", fontsize=8)
        axes.text(-1, i * PITCH[1] + SIZE / 2, f"rank {i}", ha="right", va="center", fontsize=8)
    axes.set_xlim(-8, RANKS * PITCH[0] - 1)
    axes.set_ylim(RANKS * PITCH[1] - 0.5, -4)
    axes.set_axis_off()
    axes.set_title("Visible cells: ranks have equal work", fontsize=9)


def _timeline(axes) -> None:
    """Draw the kernels and the messages of rank 0, forward and backward."""
    for step in range(RANKS):
        start = step * STEP
        _box(axes, start, 4.2, STEP - GAP, BLUE, f"K{owner(0, step)}", "white")
        _box(axes, start, 1.2, 0.55 * STEP - GAP, BLUE, "dk, dv", "white")
        _box(axes, start + 0.55 * STEP, 1.2, 0.45 * STEP - GAP, BLUE, "dq", "white")
        if step < RANKS - 1:
            _box(axes, start, 3.2, 0.8 * STEP, SKY, f"K{owner(0, step + 1)}, V{owner(0, step + 1)}")
            _box(axes, start, 0.2, 0.5 * STEP, SKY, f"K{owner(0, step + 1)}, V{owner(0, step + 1)}")
        if step:
            _box(axes, start + 0.55 * STEP, 0.2, 0.4 * STEP, ORANGE, "dk, dv")
    for height, text in ((4.2, "compute"), (3.2, "messages"), (1.2, "compute"), (0.2, "messages")):
        axes.text(-0.15, height + 0.4, text, ha="right", va="center", fontsize=8)
    axes.text(0, 5.25, "forward", fontsize=8, weight="bold")
    axes.text(0, 2.25, "backward", fontsize=8, weight="bold")
    axes.annotate(
        "", (RANKS * STEP, -0.25), (0, -0.25), arrowprops={"arrowstyle": "->", "color": GREY}
    )
    axes.text(RANKS * STEP, -0.65, "time", ha="right", fontsize=8)
    axes.set_xlim(-1.5, RANKS * STEP + 0.1)
    axes.set_ylim(-0.8, 5.7)
    axes.set_axis_off()
    axes.set_title("Rank 0: messages travel while kernels compute", fontsize=9)


def _box(
    axes, left: float, bottom: float, width: float, colour: str, text: str, ink: str = "black"
) -> None:
    axes.barh(bottom, width, 0.8, left, align="edge", color=colour)
    axes.text(left + width / 2, bottom + 0.4, text, ha="center", va="center", fontsize=7, color=ink)


# --- speed

EIGHT, PAIR, STEP_OF_TWO = "schedules_eight_h200", "schedules_two_h100", "swap_causal_two_h200"
ONE, LARGEST = kernel_tables.BESIDE, "B1 S16384 Hq32 Hk8 D128 causal"
DETERMINISTIC = "flash-attn-4 deterministic"
PEERS = "SDPA cudnn", "flash-attn-4"
LENGTHS = (131072, 32768)  # tokens on eight GPUs
ON_EIGHT = (  # name in the record, name in the figure
    ("strided zigzag 8", "Canon, strided_attention"),
    ("magi, 0 stages", "Canon, magi_attention"),
    ("ring zigzag", "Canon, zigzag_attention"),
    ("torch cudnn allgather", "torch context_parallel, cuDNN"),
    ("one GPU", "Canon on one GPU, all tokens"),
)
ON_ONE = (
    ("canon auto", "Canon, attention"),
    (DETERMINISTIC, "flash-attn-4, deterministic"),
    ("SDPA cudnn", "cuDNN"),
    ("flash-attn-4", "flash-attn-4, any order"),
)
# of the table of ratios
FASTER = ("both passes", "other system", "Canon's", "wall time", "GPU time", "record")


def numbers() -> dict[str, str]:
    """Return the numbers of `README.md` by name, computed from single times. Lengths are in tokens
    on eight GPUs.
    """
    two = {
        row["function"]: median(row["seconds"][row["steps"] // 2 :])
        for row in load(STEP_OF_TWO)["results"]
    }
    both = lambda name, n: median(schedule_tables.schedule(EIGHT, name, n)["both_ms"])
    share = lambda name, n: f"{100 * both('one GPU', n) / 8 / both(name, n):.0f} %"
    found = {
        f"two {name}": f"{two['torch'] / two[name]:.2f}" for name in ("zigzag", "strided", "magi")
    }
    for n in LENGTHS:
        found[f"share {n}"], found[f"zigzag share {n}"] = (
            share("strided zigzag 8", n),
            share("ring zigzag", n),
        )
    found["strided over zigzag"] = span(
        schedule_tables.schedule(record, "strided zigzag 8", n)["both_tflops"]
        / schedule_tables.schedule(record, "ring zigzag", n)["both_tflops"]
        for record, sizes in ((EIGHT, LENGTHS), ("schedules_four_h200", (16384, 65536, 262144)))
        for n in sizes
    )
    return found | {"table": table(FASTER, [*_on_several(), *_on_one()], 3)}


def _on_several() -> list[list[str]]:
    """Return rows of `FASTER` for several GPUs. The record of eight GPUs has no wall time."""
    rows = []
    for n in (8192, 32768):
        for peer, label in (
            ("ring-flash-attn zigzag", "ring-flash-attn"),
            ("torch cudnn allgather", "torch"),
        ):
            row, ours = (schedule_tables.schedule(PAIR, name, n) for name in (peer, "ring zigzag"))
            ratios = (
                f"{median(row[clock]) / median(ours[clock]):.2f}"
                for clock in ("both_wall_ms", "both_ms")
            )
            rows.append([f"two H100s, {n:,} tokens", label, "zigzag", *ratios, _link(PAIR)])
    for n in sorted(LENGTHS):
        peers = [row for row in load(EIGHT)["results"] if row["peer"] and f" S{n} " in row["shape"]]
        ours = median(schedule_tables.schedule(EIGHT, "strided zigzag 8", n)["both_ms"])
        ratio = min(median(row["both_ms"]) for row in peers) / ours
        rows.append(
            [f"eight H200s, {n:,} tokens", "torch", "strided", "-", f"{ratio:.2f}", _link(EIGHT)]
        )
    return rows


def _on_one() -> list[list[str]]:
    """Return rows of `FASTER` for one GPU: the range over the shapes."""
    rows, shapes = [], list(dict.fromkeys(row["shape"] for row in load(ONE)["results"]))
    for passes, peers, label in (
        ("forward", PEERS, "faster of cuDNN, flash-attn-4"),
        ("both", PEERS, "faster of cuDNN, flash-attn-4"),
        ("both", (DETERMINISTIC,), "flash-attn-4, deterministic"),
    ):
        ratios = [_fastest_over_canon(shape, passes, peers) for shape in shapes]
        title = (f"one H200, {len(shapes)} shapes") + (
            ", forward alone" if passes == "forward" else ""
        )
        rows.append([title, label, "attention", *map(span, zip(*ratios, strict=True)), _link(ONE)])
    largest = (f"{ratio:.2f}" for ratio in _fastest_over_canon(LARGEST, "both", PEERS))
    return [
        *rows,
        ["the same, 16,384 causal tokens", "flash-attn-4", "attention", *largest, _link(ONE)],
    ]


def _link(record: str) -> str:
    return f"[{load(record)['commit'][:7]}](paper/data/{record}.json)"


def _fastest_over_canon(shape: str, passes: str, peers: tuple[str, ...]) -> tuple[float, float]:
    """Return wall time and GPU time of the fastest peer over those of Canon, on one GPU."""
    times = [time for peer in peers if (time := kernel_tables.clocks(ONE, shape, peer, passes))[0]]
    ours = kernel_tables.clocks(ONE, shape, "canon auto", passes)
    return min(wall for wall, _ in times) / ours[0], min(gpu for _, gpu in times) / ours[1]


def readme_speed():
    """Draw the speed of both passes on one and on eight GPUs, next to other libraries."""
    gpu_ms = {name: kernel_tables.clocks(ONE, LARGEST, name, "both")[1] for name, _ in ON_ONE}
    # of both passes: 14 d for each visible cell of a head
    flops = 14 * 32 * 128 * 16384 * 16385 / 2
    groups = [
        ("1 GPU, 16,384 tokens", [(label, flops / gpu_ms[name] / 1e9) for name, label in ON_ONE])
    ]
    for n in LENGTHS:
        speed = lambda name, n=n: schedule_tables.schedule(EIGHT, name, n)["both_tflops"]
        groups.append(
            (
                f"8 GPUs, {n:,} tokens, an older commit",
                [(label, speed(name)) for name, label in ON_EIGHT],
            )
        )
    figure, grid = new(width=9, height=5.2)
    axes, line, labels = grid[0][0], 0.0, []
    for title, bars in groups:
        axes.text(0, line, title, va="center", fontsize=9, weight="bold")
        for label, value in bars:
            line -= 1
            colour = (
                ORANGE
                if not label.startswith("Canon")
                else SKY
                if label.startswith("Canon on one")
                else BLUE
            )
            axes.barh(line, value, 0.8, color=colour)
            axes.text(value + 6, line, f"{value:.0f}", va="center", fontsize=8)
            labels.append((line, label))
        line -= 1.4
    axes.set_yticks(*zip(*labels, strict=True))
    axes.set_ylim(line + 0.6, 0.9)
    finish(axes, xlabel="TFLOP/s of each GPU, in GPU time")
    figure.suptitle(
        "Speed of forward and backward (longer is faster) on NVIDIA H200s\n"
        "One causal sequence, 32 query heads, 8 key heads, D 128, bfloat16",
        fontsize=10,
    )
    return figure


FIGURES = {
    "readme_zigzag": Drawing(readme_zigzag, ()),
    "readme_speed": Drawing(readme_speed, (f"{ONE}.json", f"{EIGHT}.json")),
}
