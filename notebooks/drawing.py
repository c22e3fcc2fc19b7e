"""Figures of the notebooks: masks and their bands, the tokens of each rank, and rings over time.

The notebooks compute the data with the package. These functions only draw it. Each colour is one rank.
"""

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

RANKS = ["#3b6fb6", "#e08a2e", "#4a9d5b", "#a35bb0", "#c94f4f", "#3aa6a6", "#8c7a5b", "#6b6b6b"]
INK, PALE = "#2b2b2b", "#e9e9e6"

plt.rcParams.update(
    {
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
)


def matrix(ax, values, colours, title=""):
    """Draw a small matrix of colour indices as cells. Index 0 is blank."""
    rows, columns = values.shape
    ax.imshow(values, cmap=ListedColormap(["white", *colours]), vmin=0, vmax=len(colours), interpolation="nearest")
    ax.set_xticks([x - 0.5 for x in range(columns + 1)], minor=True)
    ax.set_yticks([y - 0.5 for y in range(rows + 1)], minor=True)
    ax.grid(which="minor", color=PALE, linewidth=0.5)
    ax.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    for side in ax.spines.values():
        side.set_visible(True)
    ax.set_title(title)


def bands(ax, mask, title="", colours=RANKS):
    """Draw a mask with one colour for each band. Return its matrix of colour indices."""
    values = mask.dense().long()
    for number, band in enumerate(mask.bands):
        values[_cells(band, mask)] = 1 + number % len(colours)
    matrix(ax, values, colours, title)
    return values


def _cells(band, mask):
    return type(mask)([band], mask.queries, mask.keys).dense()


def gallery(masks, columns=4):
    """Draw masks by name, with one colour for each band."""
    rows = -(-len(masks) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.3 * columns, 2.6 * rows), squeeze=False)
    for ax, (name, mask) in zip(axes.flat, masks.items(), strict=False):
        count = len(mask.bands)
        bands(ax, mask, f"{name}\n{count} band{'s' * (count != 1)}, {mask.area} cells")
    for ax in axes.flat[len(masks) :]:
        ax.axis("off")
    axes[-1, 0].set_ylabel("queries")
    axes[-1, 0].set_xlabel("keys")
    figure.tight_layout()
    plt.show()


def crop(mask, rows, columns):
    """Draw a mask with a window, and the mask of this window in its own coordinates, in the same colours."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.2), width_ratios=[mask.keys, len(columns)])
    values = bands(left, mask, f"mask, {mask.queries} x {mask.keys}")
    frame = (columns.start - 0.5, rows.start - 0.5), len(columns), len(rows)
    left.add_patch(Rectangle(*frame, fill=False, edgecolor=INK, linewidth=2, zorder=5))
    window = mask.crop(rows, columns)
    colours = [RANKS[values[list(rows)][:, list(columns)][_cells(band, window)][0] - 1] for band in window.bands]
    bands(right, window, f"crop({rows}, {columns})", colours)
    figure.tight_layout()
    plt.show()


def owners(layouts):
    """Draw one strip of tokens for each layout, coloured by rank."""
    figure, axes = plt.subplots(len(layouts), 1, figsize=(9, 0.75 * len(layouts)), squeeze=False)
    for ax, (name, layout) in zip(axes.flat, layouts.items(), strict=True):
        for rank in range(layout.ranks):
            for token in layout.positions(rank).tolist():
                ax.add_patch(Rectangle((token, 0), 0.94, 1, color=RANKS[rank]))
                ax.text(token + 0.47, 0.5, token, ha="center", va="center", color="white", fontsize=7)
        ax.set(xlim=(0, layout.tokens), ylim=(0, 1), yticks=[0.5], xticks=[])
        ax.set_yticklabels([name], fontsize=9, color=INK)
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set_visible(False)
    axes[0, 0].legend(
        handles=[Patch(color=RANKS[r], label=f"rank {r}") for r in range(layout.ranks)],
        ncols=layout.ranks, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0, handlelength=1,
    )  # fmt: skip
    figure.tight_layout(h_pad=0.4)
    plt.show()


def local_masks(layouts, mask):
    """Draw a grid of local masks: queries of each rank (row), keys of each rank (column and colour)."""
    ranks = next(iter(layouts.values())).ranks
    figure = plt.figure(figsize=(0.85 * ranks * len(layouts), 0.74 * ranks + 0.5))
    parts = figure.subfigures(1, len(layouts), squeeze=False)[0]
    for part, (name, layout) in zip(parts, layouts.items(), strict=True):
        part.suptitle(name, y=1.0, fontsize=10, va="bottom")
        axes = part.subplots(
            ranks,
            ranks,
            squeeze=False,
            gridspec_kw={"hspace": 0.06, "wspace": 0.06, "left": 0.08, "right": 0.98, "bottom": 0.01, "top": 0.88},
        )
        for rank in range(ranks):
            for owner in range(ranks):
                local = layout.local_mask(mask, rank, owner)
                matrix(axes[rank, owner], local.dense().long(), [RANKS[owner]])
            axes[rank, 0].set_ylabel(f"rank {rank}")
            axes[0, rank].set_title(f"keys of {rank}", fontsize=8)
    plt.show()


def work(shares):
    """Draw the work of each rank over the mean. shares[mask][layout] is a list by rank."""
    figure, axes = plt.subplots(1, len(shares), figsize=(3 * len(shares), 2.5), sharey=True, squeeze=False)
    for ax, (name, by_layout) in zip(axes.flat, shares.items(), strict=True):
        for column, areas in enumerate(by_layout.values()):
            mean = sum(areas) / len(areas)
            for rank, area in enumerate(areas):
                place = column + (rank - (len(areas) - 1) / 2) * 0.8 / len(areas)
                ax.bar(place, area / mean, 0.72 / len(areas), color=RANKS[rank])
            ax.text(column, max(areas) / mean + 0.04, f"max {max(areas) / mean:.2f}", ha="center", fontsize=8)
        ax.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        ax.set_xticks(range(len(by_layout)), list(by_layout))
        ax.set_title(name)
        ax.tick_params(axis="x", length=0)
    axes[0, 0].set_ylabel("visible cells / mean")
    figure.tight_layout()
    plt.show()


def timelines(schedules):
    """Draw rings over time. schedules[name][step][rank] is (owner of the keys, cells). The largest sets the step's length."""
    figure, axes = plt.subplots(len(schedules), 1, figsize=(9, 1.7 * len(schedules)), sharex=True, squeeze=False)
    for ax, (name, steps) in zip(axes.flat, schedules.items(), strict=True):
        ranks, now = len(steps[0]), 0
        perfect = sum(cells for step in steps for _, cells in step) / ranks
        for number, step in enumerate(steps):
            length = max(cells for _, cells in step) / perfect
            for rank, (owner, cells) in enumerate(step):
                waiting = {"facecolor": "white", "edgecolor": "#c9c9c4", "hatch": "////", "linewidth": 0}
                ax.add_patch(Rectangle((now, rank - 0.36), length, 0.72, **waiting))
                share = cells / perfect
                ax.add_patch(Rectangle((now, rank - 0.36), share, 0.72, facecolor=RANKS[owner], edgecolor="white"))
                if share > 0.03:
                    ax.text(now + share / 2, rank, f"K{owner}", ha="center", va="center", color="white", fontsize=8)
            ax.axvline(now, color="#9a9a9a", linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
            ax.text(now + length / 2, -0.72, f"step {number}", ha="center", va="center", fontsize=8, color="#6a6a6a")
            now += length
        ax.set(ylim=(ranks - 0.4, -1.0), yticks=range(ranks), yticklabels=[f"rank {r}" for r in range(ranks)])
        ax.set_title(f"{name}: {100 / now:.0f} % busy", loc="left")
        ax.tick_params(length=0)
        ax.spines["left"].set_visible(False)
        ax.set_xlim(0, max(now, ax.get_xlim()[1] if ax is not axes[0, 0] else 0) * 1.005)
    axes[-1, 0].set_xlabel("time; 1 is perfect balance (hatched: waiting for the slowest rank)")
    figure.tight_layout()
    plt.show()


def hops(panels, ranks):
    """Draw the messages of rings. panels[title] lists (step, sender, owner of the data, thick).

    Rank 0 appears again below the last rank, so that every hop goes one row down and one step to the right.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(4.7 * len(panels), 3.1), sharey=True, squeeze=False)
    for ax, (title, messages) in zip(axes.flat, panels.items(), strict=True):
        for step, sender, owner, thick in messages:
            style = {"linewidth": 6, "alpha": 0.35} if thick else {"linewidth": 1.4}
            ax.plot([step, step + 1], [sender, sender + 1], color=RANKS[owner], solid_capstyle="round", **style)
        last = max(step for step, *_ in messages) + 1
        for step in range(ranks):
            for rank in range(ranks):
                owner = (rank - step) % ranks
                box = {"facecolor": RANKS[owner], "edgecolor": "white", "zorder": 3}
                ax.add_patch(Rectangle((step - 0.17, rank - 0.27), 0.34, 0.54, **box))
                ax.text(step, rank, f"K{owner}", ha="center", va="center", color="white", fontsize=8, zorder=4)
        if last == ranks:
            for rank in range(ranks):
                box = {"facecolor": "white", "edgecolor": RANKS[rank], "linewidth": 1.5, "zorder": 3}
                ax.add_patch(Rectangle((last - 0.22, rank - 0.27), 0.44, 0.54, **box))
                ax.text(last, rank, f"dK{rank}", ha="center", va="center", color=RANKS[rank], fontsize=8, zorder=4)
        ax.axhline(ranks - 0.5, color="#9a9a9a", linewidth=0.6, linestyle=(0, (2, 2)))
        ax.set(xlim=(-0.4, last + 0.4), ylim=(ranks + 0.3, -0.5), xticks=range(ranks), xlabel="step")
        ax.set_yticks(range(ranks + 1), [*(f"rank {rank}" for rank in range(ranks)), "rank 0"])
        ax.set_title(title, loc="left")
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set_visible(False)
    figure.tight_layout()
    plt.show()
