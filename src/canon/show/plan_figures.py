"""A picture of a plan: the rank of each token, the work and the traffic of each rank."""

from typing import TYPE_CHECKING

from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from canon.show.layout_figures import bars, owners_of, strides
from canon.show.mask_figures import sample_step
from canon.show.style import INK, PALE, RANKS, mean_line, plt, styled, traffic

if TYPE_CHECKING:
    from canon.masks.cast_plan import PlanReport
    from canon.masks.layout import Layout
    from canon.masks.mask import Mask

GAP = 0.1  # above and below a strip


@styled
def plot_plan(mask: "Mask", layout: "Layout", report: "PlanReport"):
    """Draw a plan with its report, the result of `plan_report`. Return the figure."""
    figure, axes = plt.subplot_mosaic(
        "aa;bc", figsize=(9, 4.4), height_ratios=[1, 2.2], layout="constrained"
    )
    strips(axes["a"], mask, layout)
    axes["a"].set_title("bands of queries (grey), and tokens in the colours of their ranks")
    mean = sum(report.areas) / len(report.areas) or 1.0
    bars(axes["b"], [area / mean for area in report.areas], "visible cells / mean of the ranks")
    mean_line(axes["b"])
    axes["b"].set_title(f"balance {report.balance:.2f}: largest work over its lower bound")
    traffic(axes["c"], report)
    axes["c"].set(
        xlabel="rank", ylabel="tokens", ylim=(0, 1.25 * max(*report.received, *report.sent, 1))
    )
    axes["c"].xaxis.get_major_locator().set_params(integer=True)
    axes["c"].legend(loc="upper left", ncols=2)
    axes["c"].set_title(f"volume {report.volume:.2f} of an all-gather")
    return figure


def strips(ax, mask: "Mask", layout: "Layout") -> None:
    """Draw the queries of each band in one strip, and the rank of each token in another."""
    for number, band in enumerate(mask.bands):
        width = band.q_stop - band.q_start
        ax.add_patch(
            Rectangle(
                (band.q_start, GAP), width, 1 - 2 * GAP, facecolor=("#c9c9c4", PALE)[number % 2]
            )
        )
    owner, step = owners_of(layout), sample_step((layout.tokens,), strides(layout))
    drawn = {
        "extent": (0, step * len(owner[::step]), 2.0 - GAP, 1 + GAP),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    ax.imshow(
        owner[None, ::step].numpy(),
        cmap=ListedColormap(RANKS),
        vmin=0,
        vmax=len(RANKS) - 1,
        **drawn,
    )
    ax.set(xlim=(0, layout.tokens), ylim=(2, 0), xlabel="position in the sequence")
    ax.set_yticks([0.5, 1.5], ["bands", "ranks"], color=INK)
    ax.ticklabel_format(axis="x", style="plain")
    ax.tick_params(axis="y", length=0)
