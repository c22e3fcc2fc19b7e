"""Figures of the notebooks: `canon.show` draws them, and this file shows them. Two figures of
notebook 00 are here.

The notebooks compute the data with the package. Each colour is one rank.
"""

from functools import wraps

from matplotlib.patches import Rectangle

from canon.show import layout_figures, mask_figures, timeline_figures
from canon.show.mask_figures import bands
from canon.show.style import (
    INK,
    PALE,
    RANKS,
    STYLE,
    bare,
    colour,
    matrix,
    mean_line,
    plt,
    rank_legend,
    traffic,
)

# For the notebooks and their modules.
__all__ = [
    "INK",
    "PALE",
    "RANKS",
    "bands",
    "bare",
    "colour",
    "matrix",
    "mean_line",
    "plt",
    "rank_legend",
    "traffic",
]
plt.rcParams.update(STYLE)


def shown(draw):
    """Return the function ``draw`` with the figure shown in the notebook."""

    @wraps(draw)
    def show(*args, **options):
        draw(*args, **options)
        plt.show()

    return show


gallery, crop = shown(mask_figures.gallery), shown(mask_figures.crop)
pieces, owners, work = (
    shown(draw) for draw in (layout_figures.pieces, layout_figures.owners, layout_figures.work)
)
local_masks, zigzag_cases = shown(layout_figures.local_masks), shown(layout_figures.zigzag_cases)
measured, measured_spans = shown(timeline_figures.measured), shown(timeline_figures.measured_spans)
timelines, hops = shown(timeline_figures.timelines), shown(timeline_figures.hops)


def weighted_means(weights, values, pieces):
    """Draw keys as boxes of width weight and height value, one colour for each piece, and the mean
    height of each piece.
    """
    _, ax = plt.subplots(figsize=(6.4, 2.6))
    left = [sum(weights[:key]) for key in range(len(weights) + 1)]
    for number, piece in enumerate(pieces):
        for key in piece:
            box = {"facecolor": RANKS[number], "edgecolor": "white", "alpha": 0.75}
            ax.add_patch(Rectangle((left[key], 0), weights[key], values[key], **box))
            ax.text(
                left[key] + weights[key] / 2,
                0.15,
                f"key {key}",
                ha="center",
                va="bottom",
                color="white",
            )
        start, stop = left[piece.start], left[piece.stop]
        mean = sum(weights[key] * values[key] for key in piece) / (stop - start)
        ax.plot([start, stop], [mean, mean], color=INK, linewidth=1.4, linestyle=(0, (4, 2)))
        right_of = left[piece.stop - 1] + 0.08
        ax.text(
            right_of,
            mean + 0.15,
            f"piece {number}: out {mean:g}, total {stop - start:g}",
            va="bottom",
        )
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / left[-1]
    ax.axhline(mean, color=RANKS[4], linewidth=1.4)
    ax.text(
        left[-1] + 0.1,
        mean,
        f"all keys:\nout {mean:g},\ntotal {left[-1]:g}",
        va="center",
        color=RANKS[4],
    )
    ax.set(xlim=(0, left[-1]), ylim=(0, 1.05 * max(values)), xlabel="weight", ylabel="value")
    plt.show()


def weighted_pieces(weights, pieces, parts):
    """Draw the softmax of one query over each piece of its keys, and below it the same times the
    weight of the piece.
    """
    figure, axes = plt.subplots(2, 1, figsize=(8, 3.8), sharex=True, sharey=True)
    highest = max(
        weights[piece.start : piece.stop].max() / part
        for piece, part in zip(pieces, parts, strict=True)
    )
    for piece, part, fill in zip(pieces, parts, RANKS, strict=False):
        scaled, middle = weights[piece.start : piece.stop], (piece.start + piece.stop - 1) / 2
        axes[0].bar(piece, scaled / part, color=fill)
        axes[1].bar(
            piece, scaled / part, color="none", edgecolor=fill, linewidth=0.6, linestyle=":"
        )
        axes[1].bar(piece, scaled, color=fill)
        for ax, text in zip(axes, ("sums to 1", f"times {part:.2f}"), strict=True):
            ax.text(middle, 1.06 * highest, text, ha="center", va="bottom", color=fill)
        axes[0].axvline(piece.start - 0.5, color=PALE, zorder=0)
        axes[1].axvline(piece.start - 0.5, color=PALE, zorder=0)
    axes[0].set_title("the softmax of each piece, for one query", loc="left")
    axes[1].set_title("the same times their weights: the softmax over all keys", loc="left")
    axes[1].set(xlabel="key", xlim=(-0.6, len(weights) - 0.4), ylim=(0, 1.3 * highest))
    figure.tight_layout()
    plt.show()
