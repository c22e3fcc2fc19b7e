"""Figures of notebook 03: head groups, and errors by the number of ranks.

The notebook computes the data with the package. These functions only draw it. Each colour is one
step.
"""

import matplotlib.pyplot as plt
from drawing import INK, PALE, RANKS, bare, colour
from matplotlib.patches import Rectangle


def head_groups(patterns):
    """Draw one strip of key heads for each pattern, cut into its steps. patterns[name] is a tuple
    of ranges.
    """
    figure, axes = plt.subplots(len(patterns), 1, figsize=(7, 0.55 * len(patterns)), squeeze=False)
    for ax, (name, groups) in zip(axes.flat, patterns.items(), strict=True):
        for step, heads in enumerate(groups):
            ax.add_patch(
                Rectangle((heads.start + 0.03, 0.06), len(heads) - 0.06, 0.88, color=colour(step))
            )
            for head in heads:
                ax.text(head + 0.5, 0.5, head, ha="center", va="center", color="white", fontsize=8)
        ax.set(xlim=(0, groups[-1].stop), ylim=(0, 1), yticks=[0.5], xticks=[])
        ax.set_yticklabels([name], fontsize=9, color=INK)
        bare(ax)
    axes[-1, 0].set_xlabel("key heads, in the order of the steps")
    figure.tight_layout(h_pad=0.3)
    plt.show()


def errors(curves, rounding):
    """Draw the gradient error by the number of ranks. curves[name] is ({ranks: error}, colour
    number, line style).
    """
    figure, ax = plt.subplots(figsize=(6, 3.2))
    for name, (points, number, style) in curves.items():
        ax.plot(
            list(points),
            list(points.values()),
            style,
            color=RANKS[number],
            marker="o",
            markersize=4,
            label=name,
        )
    ax.axhline(rounding, color="#9a9a9a", linewidth=0.8, linestyle=(0, (2, 2)))
    ax.text(1, 0.95 * rounding, "one rounding to bfloat16", fontsize=8, va="top", color="#6a6a6a")
    ax.set_xscale("log", base=2)
    ticks = list(next(iter(curves.values()))[0])
    ax.set_xticks(ticks, [str(ranks) for ranks in ticks])
    ax.set(ylim=(0, None), xlabel="ranks", ylabel="relative error")
    ax.grid(color=PALE, linewidth=0.5)
    ax.legend()
    figure.tight_layout()
    plt.show()
