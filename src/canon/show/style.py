"""Colours and settings of all pictures."""

try:
    import matplotlib.pyplot as plt
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
    """Return the colour of a rank."""
    return RANKS[rank % len(RANKS)]


def mean_line(ax):
    """Draw the mean of the ranks, 1."""
    ax.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))


def traffic(ax, report):
    """Draw the tokens of each rank."""
    ranks = range(len(report.received))
    ax.bar([rank - 0.2 for rank in ranks], report.received, 0.36, color=INK, label="receives")
    ax.bar([rank + 0.2 for rank in ranks], report.sent, 0.36, color="#b5b5ae", label="sends")
