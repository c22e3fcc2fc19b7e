"""Figures of notebook 04: chunks by rank, work and traffic of each rank, messages between ranks,
balance against traffic.

The notebook computes the data with the package. These functions only draw it.
"""

import matplotlib.pyplot as plt
import torch
from drawing import INK, PALE, RANKS, bare, colour, matrix, mean_line, rank_legend, traffic
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

GREYS = LinearSegmentedColormap.from_list("greys", ["white", "#4a4a4a"])


def plans_by_hand(mask, chunk, plans):
    """Draw a small mask once for each plan, its rows in the colours of their ranks. plans[title] is
    a layout.
    """
    figure, axes = plt.subplots(
        1, len(plans), figsize=(3.3 * len(plans) + 0.8, 3.5), squeeze=False, layout="constrained"
    )
    for ax, (title, layout) in zip(axes.flat, plans.items(), strict=True):
        values = torch.zeros(mask.queries, mask.keys, dtype=torch.long)
        for rank in range(layout.ranks):
            rows = layout.positions(rank)
            values[rows] = mask.dense()[rows].long() * (1 + rank)
        matrix(ax, values, RANKS[: layout.ranks], title)
        for edge in range(chunk, mask.queries, chunk):
            ax.axhline(edge - 0.5, color=INK, linewidth=0.8)
        middles = range(0, mask.queries, chunk)
        ax.set_yticks(
            [start + chunk / 2 - 0.5 for start in middles],
            [f"chunk {number}" for number in range(len(middles))],
        )
        ax.tick_params(labelleft=True)
        ax.set_xlabel("keys")
    rank_legend(figure, layout.ranks, loc="outside right center")
    plt.show()


def chunks(cu_seqlens, layouts, chunk):
    """Draw the documents of a pack and, for each layout,
    its chunks in the colours of their ranks.
    """
    figure, ax = plt.subplots(figsize=(9.5, 0.9 + 0.42 * (1 + len(layouts))), layout="constrained")
    for number, (start, stop) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        ax.add_patch(
            Rectangle((start, 0.1), stop - start, 0.8, facecolor=("#c9c9c4", PALE)[number % 2])
        )
    for row, layout in enumerate(layouts.values(), 1):
        for rank, ranges in enumerate(layout.ranges_per_rank):
            for tokens in ranges:
                for start in range(tokens.start, tokens.stop, chunk):
                    width = min(start + chunk, tokens.stop) - start
                    ax.add_patch(
                        Rectangle((start, row + 0.1), width, 0.8, color=colour(rank), linewidth=0)
                    )
    ax.set(xlim=(0, cu_seqlens[-1]), ylim=(1 + len(layouts), 0), xlabel="token")
    ax.set_yticks(
        [row + 0.5 for row in range(1 + len(layouts))], ["documents", *layouts], color=INK
    )
    bare(ax)
    rank_legend(
        figure, max(layout.ranks for layout in layouts.values()), loc="outside right center"
    )
    plt.show()


def work(reports):
    """Draw for each plan the work of each rank over the mean, and the tokens that each rank
    receives and sends.
    """
    figure, axes = plt.subplots(
        2, len(reports), figsize=(3 * len(reports), 3.6), sharey="row", squeeze=False
    )
    for (upper, lower), (name, report) in zip(axes.T, reports.items(), strict=True):
        ranks, mean = range(len(report.areas)), sum(report.areas) / len(report.areas)
        upper.bar(
            ranks, [area / mean for area in report.areas], color=[colour(rank) for rank in ranks]
        )
        mean_line(upper)
        upper.set_title(f"{name}\nbalance {report.balance:.2f}, volume {report.volume:.2f}")
        traffic(lower, report)
        lower.set_xticks(ranks, [f"{rank}" for rank in ranks])
        lower.set_xlabel("rank")
        upper.set_xticks(ranks)
    axes[0, 0].set_ylabel("area / mean")
    axes[1, 0].set_ylabel("tokens")
    axes[1, 0].set_ylim(
        0, 1.3 * max(max(*report.received, *report.sent) for report in reports.values())
    )
    axes[1, 0].legend(loc="upper left", ncols=2)
    figure.tight_layout()
    plt.show()


def exchanges(tables):
    """Draw the tokens that each rank (row) receives from each rank (column), one table for each
    plan.
    """
    most = max(max(map(max, table)) for table in tables.values())
    figure, axes = plt.subplots(
        1, len(tables), figsize=(2.9 * len(tables) + 0.6, 3), squeeze=False, layout="constrained"
    )
    for ax, (name, table) in zip(axes.flat, tables.items(), strict=True):
        image = ax.imshow(table, cmap=GREYS, vmin=0, vmax=most)
        for rank in range(len(table)):
            ax.add_patch(Rectangle((rank - 0.5, rank - 0.5), 1, 1, color=colour(rank)))
        ax.set(title=name, xticks=range(len(table)), yticks=range(len(table)), xlabel="from rank")
        ax.tick_params(length=0)
    axes[0, 0].set_ylabel("to rank")
    figure.colorbar(image, ax=axes, label="tokens", shrink=0.8)
    plt.show()


def volumes(lines):
    """Draw the volume, as a part of an all-gather, by number of ranks. lines[name] is {ranks:
    volume}.
    """
    _, ax = plt.subplots(figsize=(5, 3))
    for number, (name, points) in enumerate(lines.items()):
        ax.plot(
            list(points), list(points.values()), "o-", color=RANKS[number], label=name, markersize=4
        )
    ax.set_xscale("log", base=2)
    ticks = list(next(iter(lines.values())))
    ax.set_xticks(ticks, [f"{tick}" for tick in ticks])
    ax.set(xlabel="ranks", ylabel="keys moved / all-gather", ylim=(0, None))
    ax.legend()
    plt.show()


def trade(curves):
    """Draw the volume by the balance. curves[name] lists (balance, volume)."""
    _, ax = plt.subplots(figsize=(5, 3))
    for number, (name, points) in enumerate(curves.items()):
        ax.plot(*zip(*points, strict=True), "o-", color=RANKS[number], label=name, markersize=4)
    ax.set(
        xlabel="balance: largest area / lower bound",
        ylabel="keys moved / all-gather",
        ylim=(0, None),
    )
    ax.legend()
    plt.show()


def buffer(mask, local, own, keys, owner):
    """Draw the global mask with the cells of one rank in colour, and its local mask over its buffer
    of keys.
    """
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.4, 3.6), width_ratios=[mask.keys, local.keys], layout="constrained"
    )
    shown = mask.dense().float() * 0.25
    for row in own:
        for place, key in enumerate(keys):
            if mask.dense()[row, key]:
                left.add_patch(
                    Rectangle((key - 0.5, row - 0.5), 1, 1, color=RANKS[owner[place]], linewidth=0)
                )
    left.imshow(shown, cmap=GREYS, vmin=0, vmax=1)
    left.set(
        title="the mask; the rank computes the coloured cells",
        xlabel="keys",
        ylabel="queries",
        xticks=[],
        yticks=[],
    )
    cells = local.dense()
    for row in range(local.queries):
        for place in range(local.keys):
            if cells[row, place]:
                right.add_patch(
                    Rectangle(
                        (place - 0.5, row - 0.5), 1, 1, color=RANKS[owner[place]], linewidth=0
                    )
                )
    right.set(
        xlim=(-0.5, local.keys - 0.5),
        ylim=(local.queries - 0.5, -0.5),
        title="its local mask",
        xlabel="buffer of keys",
    )
    right.set_xticks(range(local.keys), keys, fontsize=7)
    right.set_yticks(range(local.queries), own, fontsize=7)
    right.set_aspect("equal")
    rank_legend(figure, 1 + max(owner), loc="outside right center", title="keys of")
    plt.show()
