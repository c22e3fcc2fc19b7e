"""Pictures of measured runs over time."""

from matplotlib.patches import Patch, Rectangle
from spans import KIND_NAMES

from canon.show.style import RANKS, plt, styled

KIND_COLOURS = dict(zip(KIND_NAMES, (RANKS[0], RANKS[3], "#8f8f8a", RANKS[1]), strict=True))


@styled
def measured_spans(panels):
    """Draw measured spans. panels[title][rank] lists objects with kind, start and stop: kernels
    above, messages below.
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.4 * len(panels) + 1, 3), squeeze=False, layout="constrained"
    )
    ends = [
        max(span.stop for spans in ranks.values() for span in spans) for ranks in panels.values()
    ]
    for ax, own_end, (title, ranks) in zip(axes.flat, ends, panels.items(), strict=True):
        for row, spans in enumerate(ranks.values()):
            for span in spans:
                place, height = (row + 0.2, 0.16) if span.kind == "message" else (row - 0.4, 0.54)
                box = {"facecolor": KIND_COLOURS[span.kind], "edgecolor": "white", "linewidth": 0.4}
                ax.add_patch(Rectangle((span.start, place), span.stop - span.start, height, **box))
        ax.set(ylim=(len(ranks) - 0.5, -0.6), xlabel="milliseconds", title=title)
        # one scale for panels of similar length
        end = max(ends) if max(ends) < 2 * min(ends) else own_end
        ax.set_xlim(0, 1.02 * end)
        ax.set_yticks(range(len(ranks)), ranks)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    handles = [Patch(color=colour, label=kind) for kind, colour in KIND_COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), handlelength=1)
    return figure
