"""Colours and settings of all pictures. Raises ModuleNotFoundError with the remedy if matplotlib is
missing.
"""

try:
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "Pictures need matplotlib: run `pip install matplotlib`.", name="matplotlib"
    ) from missing

RANKS = [
    "#3b6fb6",
    "#e08a2e",
    "#4a9d5b",
    "#a35bb0",
    "#c94f4f",
    "#3aa6a6",
    "#8c7a5b",
    "#d9b52f",
]  # no grey: it is no rank
INK, PALE = "#2b2b2b", "#e9e9e6"
STYLE = {
    "figure.dpi": 100,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": "#9a9a9a",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#6a6a6a",
    "ytick.color": "#6a6a6a",
    "text.color": INK,
    "legend.frameon": False,
}
styled = plt.rc_context(STYLE)  # a decorator: the caller's settings stay as they are


def colour(rank: int) -> str:
    """Return the colour of a rank. From the ninth rank on colours repeat."""
    return RANKS[rank % len(RANKS)]


def bare(ax):
    """Hide the frame and the ticks of axes."""
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def rank_legend(owner, ranks, **place):
    """Draw a legend of the ranks for a figure or for axes."""
    handles = [Patch(color=colour(rank), label=f"rank {rank}") for rank in range(ranks)]
    owner.legend(handles=handles, handlelength=1, **place)


def mean_line(ax):
    """Draw the line at 1, the mean of the ranks."""
    ax.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))


def traffic(ax, report):
    """Draw the tokens that each rank receives and sends. ``report``: of `plan_report`."""
    ranks = range(len(report.received))
    ax.bar([rank - 0.2 for rank in ranks], report.received, 0.36, color=INK, label="receives")
    ax.bar([rank + 0.2 for rank in ranks], report.sent, 0.36, color="#b5b5ae", label="sends")


def matrix(ax, values, colours, title=""):
    """Draw a small matrix of colour indices as cells. Index 0 is blank."""
    rows, columns = values.shape
    ax.imshow(
        values.numpy(),
        cmap=ListedColormap(["white", *colours]),
        vmin=0,
        vmax=len(colours),
        interpolation="nearest",
    )
    ax.set_xticks([x - 0.5 for x in range(columns + 1)], minor=True)
    ax.set_yticks([y - 0.5 for y in range(rows + 1)], minor=True)
    ax.grid(which="minor", color=PALE, linewidth=0.5)
    ax.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    for side in ax.spines.values():
        side.set_visible(True)
    ax.set_title(title)
