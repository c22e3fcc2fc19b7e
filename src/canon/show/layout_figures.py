"""Pictures of layouts: the tokens and the work of each rank, and the masks between ranks."""

from typing import TYPE_CHECKING

import torch
from matplotlib.patches import Rectangle

from canon.masks.mask import Mask
from canon.show.mask_figures import cells, sample_step
from canon.show.style import INK, RANKS, bare, colour, matrix, mean_line, plt, rank_legend, styled

if TYPE_CHECKING:
    from canon.masks.layout import Layout


@styled
def pieces(mask, layout):
    """Draw the rows of a mask in the colours of their ranks, and the cells of each piece, stacked
    by rank.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), width_ratios=[1, 1.15])
    cells, bottoms = mask.dense(), [0] * layout.ranks
    values = torch.zeros_like(cells, dtype=torch.long)
    found = [(piece, rank) for rank, held in enumerate(layout.ranges_per_rank) for piece in held]
    for number, (piece, rank) in enumerate(sorted(found, key=lambda pair: pair[0].start)):
        rows, area = list(piece), int(cells[list(piece)].sum())
        values[rows] = cells[rows] * (1 + rank)
        right.bar(rank, area, 0.92, bottom=bottoms[rank], color=RANKS[rank], edgecolor="white")
        right.text(
            rank,
            bottoms[rank] + area / 2,
            f"piece {number}: {area}",
            ha="center",
            va="center",
            color="white",
        )
        bottoms[rank] += area
    matrix(left, values, RANKS[: layout.ranks], "rows in the colours of their ranks")
    left.set(xlabel="keys", ylabel="queries")
    right.set(title="cells of each rank", xticks=range(layout.ranks), ylim=(0, 1.1 * max(bottoms)))
    right.set_xticklabels([f"rank {rank}" for rank in range(layout.ranks)])
    for rank, total in enumerate(bottoms):
        right.text(rank, total + 0.02 * max(bottoms), total, ha="center")
    figure.tight_layout()
    return figure


@styled
def owners(layouts):
    """Draw one strip of tokens for each layout, coloured by rank."""
    figure, axes = plt.subplots(len(layouts), 1, figsize=(9, 0.75 * len(layouts)), squeeze=False)
    for ax, (name, layout) in zip(axes.flat, layouts.items(), strict=True):
        for rank in range(layout.ranks):
            for token in layout.positions(rank).tolist():
                ax.add_patch(Rectangle((token, 0), 0.94, 1, color=RANKS[rank]))
                ax.text(
                    token + 0.47, 0.5, token, ha="center", va="center", color="white", fontsize=7
                )
        ax.set(
            xlim=(0, layout.tokens),
            ylim=(0, 1),
            yticks=[0.5],
            xticks=range(0, layout.tokens + 1, 4),
        )
        ax.set_yticklabels([name], fontsize=9, color=INK)
        bare(ax)
    axes[-1, 0].set_xlabel("position in the sequence")
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderpad": 0}
    rank_legend(axes[0, 0], layout.ranks, ncols=layout.ranks, **place)
    figure.tight_layout(h_pad=0.4)
    return figure


@styled
def local_masks(layouts, mask):
    """Draw a grid of local masks: queries of each rank (row), keys of each rank (column and
    colour).
    """
    ranks = next(iter(layouts.values())).ranks
    figure = plt.figure(figsize=(0.85 * ranks * len(layouts), 0.74 * ranks + 0.5))
    parts = figure.subfigures(1, len(layouts), squeeze=False)[0]
    for part, (name, layout) in zip(parts, layouts.items(), strict=True):
        part.suptitle(name, y=1.0, fontsize=10, va="bottom")
        _pairs(
            part,
            layout,
            mask,
            hspace=0.06,
            wspace=0.06,
            left=0.08,
            right=0.98,
            bottom=0.01,
            top=0.88,
        )
    return figure


def _pairs(part, layout, mask, **inside):
    """Draw the local masks of all pairs of ranks: queries by row, keys by column."""
    axes = part.subplots(layout.ranks, layout.ranks, squeeze=False, gridspec_kw=inside)
    for rank in range(layout.ranks):
        for owner in range(layout.ranks):
            matrix(
                axes[rank, owner],
                layout.local_mask(mask, rank, owner).dense().long(),
                [RANKS[owner]],
            )
        axes[rank, 0].set_ylabel(f"rank {rank}")
        axes[0, rank].set_title(f"keys of {rank}", fontsize=8)


@styled
def zigzag_cases(layout, mask):
    """Draw the local masks of a zigzag layout, queries by row and keys by column, and their three
    cases.
    """
    figure = plt.figure(figsize=(9, 4.2))
    grid, cases = figure.subfigures(1, 2, squeeze=False, width_ratios=[1.5, 1])[0]
    grid.suptitle("all pairs of ranks", y=1.0, fontsize=10, va="bottom")
    _pairs(grid, layout, mask, hspace=0.08, wspace=0.08, left=0.1, right=0.96, bottom=0.02, top=0.9)
    cases.suptitle("queries of rank 1", y=1.0, fontsize=10, va="bottom")
    named = {
        "own keys: causal": 1,
        "keys of an earlier rank: the left half": 0,
        "keys of a later rank: the lower half": 2,
    }
    axes = cases.subplots(
        3, 1, gridspec_kw={"hspace": 0.75, "left": 0.2, "right": 0.8, "bottom": 0.1, "top": 0.9}
    )
    for ax, (name, owner) in zip(axes, named.items(), strict=True):
        matrix(ax, layout.local_mask(mask, 1, owner).dense().long(), [RANKS[owner]], name)
        for axis, tokens in (("x", layout.positions(owner)), ("y", layout.positions(1))):
            getattr(ax, f"set_{axis}ticks")(range(len(tokens)), tokens.tolist())
        ax.tick_params(labelbottom=True, labelleft=True, labelsize=6)
    return figure


@styled
def work(shares):
    """Draw the work of each rank over the mean. shares[mask][layout] is a list by rank."""
    figure, axes = plt.subplots(
        1, len(shares), figsize=(3 * len(shares), 2.5), sharey=True, squeeze=False
    )
    for ax, (name, by_layout) in zip(axes.flat, shares.items(), strict=True):
        for column, areas in enumerate(by_layout.values()):
            mean = sum(areas) / len(areas)
            for rank, area in enumerate(areas):
                place = column + (rank - (len(areas) - 1) / 2) * 0.8 / len(areas)
                ax.bar(place, area / mean, 0.72 / len(areas), color=RANKS[rank])
            ax.text(
                column,
                max(areas) / mean + 0.04,
                f"max {max(areas) / mean:.2f}",
                ha="center",
                fontsize=8,
            )
        mean_line(ax)
        ax.set_xticks(range(len(by_layout)), list(by_layout))
        ax.set_title(name)
        ax.tick_params(axis="x", length=0)
    axes[0, 0].set_ylim(0, 1.12 * axes[0, 0].get_ylim()[1])
    axes[0, 0].set_ylabel("visible cells / mean")
    figure.tight_layout()
    return figure


def areas(layout: "Layout", mask: Mask) -> list[int]:
    """Return the visible cells of each rank's queries."""
    ranks = range(layout.ranks)
    return [layout.local_mask(mask, rank, tuple(ranks)).area for rank in ranks]


def strides(layout: "Layout") -> set[int]:
    """Return the strides of the ranges of a layout."""
    return {piece.step for held in layout.ranges_per_rank for piece in held}


def owners_of(layout: "Layout") -> torch.Tensor:
    """Return the index of the colour of each token's rank: int64 [tokens]."""
    owner = torch.empty(layout.tokens, dtype=torch.long, device="cpu")
    for rank in range(layout.ranks):
        owner[layout.positions(rank)] = rank % len(RANKS)
    return owner


def bars(ax, values: list[float], ylabel: str) -> None:
    """Draw one bar for each rank, in its colour."""
    ax.bar(range(len(values)), values, color=[colour(rank) for rank in range(len(values))])
    ax.set(xlabel="rank", ylabel=ylabel)
    ax.xaxis.get_major_locator().set_params(integer=True)


@styled
def plot_layout(layout: "Layout", mask: Mask | None = None):
    """Draw the rows of a mask in the colours of their ranks, and the work of each rank. See
    `Layout.plot`.
    """
    mask = Mask.causal(layout.tokens) if mask is None else mask
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.6, 4), width_ratios=[1.2, 1], layout="constrained"
    )
    work = areas(layout, mask)  # raises if mask and layout do not fit
    step = sample_step((layout.tokens,), strides(layout))
    every = range(0, layout.tokens, step)
    cells(
        left,
        mask.crop(every, every).dense() * (1 + owners_of(layout)[::step, None]),
        RANKS,
        mask,
        step,
    )
    left.set_title(
        ("rows in the colours of their ranks") + f"\none cell for every {step} tokens" * (step > 1)
    )
    mean = sum(work) / len(work)
    bars(
        right, [area / mean if mean else 0.0 for area in work], "visible cells / mean of the ranks"
    )
    mean_line(right)
    right.set_title(f"largest {max(work) / mean:.2f} of the mean" if mean else "no visible cell")
    return figure
