"""Draw the figure of `README.md`: the masks and the timeline of a zigzag ring on four ranks.

The masks come from `canon.Layout` and `canon.Mask`. The timeline is a sketch without a scale.
"""

from plots import BLUE, GREY, ORANGE, SKY, Drawing, new

RANKS, TOKENS = 4, 32
SIZE, PITCH = TOKENS // RANKS, (TOKENS // RANKS + 2, TOKENS // RANKS + 3.2)  # of the picture of one mask, in tokens
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
            axes.imshow(cells, cmap=colours, extent=(left, right, bottom, top), interpolation="nearest")
            axes.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color=GREY, lw=0.6)
            axes.text(left + SIZE / 2, bottom + 1.4, f"K{owner(rank, step)}", ha="center", va="center", fontsize=7)
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
    axes.annotate("", (RANKS * STEP, -0.25), (0, -0.25), arrowprops={"arrowstyle": "->", "color": GREY})
    axes.text(RANKS * STEP, -0.65, "time", ha="right", fontsize=8)
    axes.set_xlim(-1.5, RANKS * STEP + 0.1)
    axes.set_ylim(-0.8, 5.7)
    axes.set_axis_off()
    axes.set_title("Rank 0: messages travel under kernels", fontsize=9)


def _box(axes, left: float, bottom: float, width: float, colour: str, text: str, ink: str = "black") -> None:
    axes.barh(bottom, width, 0.8, left, align="edge", color=colour)
    axes.text(left + width / 2, bottom + 0.4, text, ha="center", va="center", fontsize=7, color=ink)


FIGURES = {"readme_zigzag": Drawing(readme_zigzag, ())}
