"""Draw the figures of `README.md`, and compute its numbers from records.

The masks of the zigzag ring come from `canon.Layout` and `canon.Mask`. Its timeline is a sketch
without a scale.
"""

import kernel_tables
import other_libraries
import schedule_tables
from plots import BLUE, GREY, ORANGE, SKY, Drawing, new
from records import load, median, only, span, table

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
                f"keys of rank {owner(rank, step)}",
                ha="center",
                va="center",
                fontsize=6.5,
            )
    for i in range(RANKS):
        axes.text(i * PITCH[0] + SIZE / 2, -2.6, f"step {i}", ha="center", fontsize=8)
        axes.text(-1, i * PITCH[1] + SIZE / 2, f"rank {i}", ha="right", va="center", fontsize=8)
    axes.set_xlim(-8, RANKS * PITCH[0] - 1)
    axes.set_ylim(RANKS * PITCH[1] - 0.5, -4.6)
    axes.set_axis_off()
    arrow = {"arrowstyle": "->", "color": GREY}
    axes.annotate("", (SIZE, -0.7), (0, -0.7), arrowprops=arrow)
    axes.annotate("", (-0.7, SIZE), (-0.7, 0), arrowprops=arrow)
    axes.text(SIZE + 0.3, -0.8, "keys", fontsize=6, va="center")
    axes.text(-1.1, SIZE + 0.6, "queries", fontsize=6.5, ha="right", va="center")
    axes.set_title("Visible cells: ranks have equal work", fontsize=9)


def _timeline(axes) -> None:
    """Draw the kernels and the messages of rank 0, forward and backward."""
    for step in range(RANKS):
        start = step * STEP
        _box(axes, start, 4.2, STEP - GAP, BLUE, f"keys of rank {owner(0, step)}", "white")
        _box(axes, start, 1.2, 0.55 * STEP - GAP, BLUE, "dk, dv", "white")
        _box(axes, start + 0.55 * STEP, 1.2, 0.45 * STEP - GAP, BLUE, "dq", "white")
        if step < RANKS - 1:
            _box(axes, start, 3.2, 0.8 * STEP, SKY, f"of rank {owner(0, step + 1)}")
            _box(axes, start, 0.2, 0.5 * STEP, SKY, f"rank {owner(0, step + 1)}")
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
    for left, colour, text in (
        (0, BLUE, "kernel"),
        (2, SKY, "keys, values"),
        (4.6, ORANGE, "dk, dv"),
    ):
        axes.barh(-1.6, 0.3, 0.5, left, align="edge", color=colour)
        axes.text(left + 0.45, -1.35, text, va="center", fontsize=7)
    axes.set_xlim(-1.5, RANKS * STEP + 0.1)
    axes.set_ylim(-1.7, 5.7)
    axes.set_axis_off()
    axes.set_title("Rank 0: messages travel while kernels compute", fontsize=9)


def _box(
    axes, left: float, bottom: float, width: float, colour: str, text: str, ink: str = "black"
) -> None:
    axes.barh(bottom, width, 0.8, left, align="edge", color=colour)
    axes.text(left + width / 2, bottom + 0.4, text, ha="center", va="center", fontsize=7, color=ink)


# --- speed

EIGHT = "schedules_eight_h200"
ONE = kernel_tables.BESIDE
DETERMINISTIC = kernel_tables.DETERMINISTIC
PEERS = kernel_tables.PEERS
LENGTHS = (131072, 32768)  # tokens on eight GPUs
OF_PAIR, of_two = schedule_tables.LENGTHS, schedule_tables.of_two
PACK_CLOCKS = "both_wall", "both_gpu"
# of the table of ratios
FASTER = ("both passes", "against", "Canon's function", "wall time", "GPU time")


def numbers() -> dict[str, str]:
    """Return the numbers of `README.md` by name, computed from single times. Lengths are in tokens
    on eight GPUs.
    """
    both = lambda name, n: median(schedule_tables.schedule(EIGHT, name, n)["both_ms"])
    share = lambda name, n: f"{100 * both('one GPU', n) / 8 / both(name, n):.0f} %"
    found = {}
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
    found["packs over strided"] = schedule_tables.packs()["packs_over_strided"]
    found |= {f"others {name}": ratio for name, ratio in other_libraries.others().items()}
    for name, side in (("our memory", 0), ("magi memory", 1)):
        extra = (pair[side]["extra_gib"] * 1.073741824 for pair in packs("MagiAttention default"))
        found[name] = span(extra, 1)
    return found | {"table": table(FASTER, [*_on_several(), *_on_one()], 3)}


def _on_several() -> list[list[str]]:
    """Return rows of `FASTER` for several GPUs. The record of eight GPUs has no wall time."""
    rows, pair, ours = [], schedule_tables.TWO, "strided zigzag, no options"
    for peer, label in (
        ("ring-flash-attn zigzag", "ring-flash-attn"),
        ("torch cudnn allgather", "torch `context_parallel`"),
    ):
        ratios = (
            span(of_two(peer, n, clock) / of_two(ours, n, clock) for n in OF_PAIR)
            for clock in ("both_wall", "both")
        )
        setting = _link(pair, "2 H200s, 8,192 to 131,072 tokens")
        rows.append([setting, label, "strided", *ratios])
    for n in LENGTHS[:1]:
        peers = [row for row in load(EIGHT)["results"] if row["peer"] and f" S{n} " in row["shape"]]
        ours = median(schedule_tables.schedule(EIGHT, "strided zigzag 8", n)["both_ms"])
        ratio = min(median(row["both_ms"]) for row in peers) / ours
        setting = _link(EIGHT, f"8 H200s, {n:,} tokens")
        rows.append([setting, "torch `context_parallel`", "strided", "not recorded", _two(ratio)])
    ratios = [
        [other[key] / ours[key] for ours, other in packs("MagiAttention")] for key in PACK_CLOCKS
    ]
    setting = _link(
        other_libraries.RECORD, "2 H200s, 65,536 tokens, documents of mean 256 to 4,096"
    )
    return [*rows, [setting, "MagiAttention, fastest of 6 settings", "magi", *map(span, ratios)]]


def packs(name: str) -> list[tuple[dict, dict]]:
    """Return the rows of Canon and of MagiAttention by the mean of documents. Of the settings whose
    names begin with ``name``, that with the least wall time counts.
    """
    times = [row for row in load(other_libraries.RECORD)["results"] if row["what"] == "time"]
    shapes = sorted({row["shape"] for row in times if row["shape"].startswith("doc")})
    fastest = lambda shape: min(
        (row for row in times if row["shape"] == shape and row["name"].startswith(name)),
        key=lambda row: row["both_wall"],
    )
    return [(only(times, shape=x, name="Canon magi"), fastest(x)) for x in shapes]


def _on_one() -> list[list[str]]:
    """Return rows of `FASTER` for one GPU: the range over the shapes."""
    rows, shapes = [], kernel_tables.shapes_of(ONE)
    for peers, label, ours in (
        (PEERS, "faster of cuDNN, flash-attn-4", "canon auto"),
        ((DETERMINISTIC,), "flash-attn-4, deterministic", kernel_tables.REPEATABLE),
    ):
        ratios = [other_libraries.fastest_over_canon(shape, peers, ours) for shape in shapes]
        setting = _link(ONE, f"1 H200, {len(shapes)} shapes")
        rows.append([setting, label, "attention", *map(span, zip(*ratios, strict=True))])
    return rows


def _two(ratio: float) -> str:
    return f"{ratio:.2f}"


def _link(record: str, text: str) -> str:
    return f"[{text}](paper/data/{record}.json)"


FIGURES = {
    "readme_zigzag": Drawing(readme_zigzag, ()),
}
