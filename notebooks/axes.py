"""Parts of the figures: frames, legends and small matrices."""

from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from canon.show.style import PALE, colour


def bare(ax):
    """Hide the frame and the ticks of axes."""
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def rank_legend(owner, ranks, **place):
    """Draw a legend of the ranks for a figure or for axes."""
    handles = [Patch(color=colour(rank), label=f"rank {rank}") for rank in range(ranks)]
    owner.legend(handles=handles, handlelength=1, **place)


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
