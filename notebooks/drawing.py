"""Figures of the notebooks, in the style of `canon.show`.

The notebooks compute the data with the package. Each colour is one rank.
"""

from functools import wraps

import timeline_figures
import torch
from axes import bare, matrix, rank_legend
from matplotlib.patches import Rectangle

from canon.show.mask_figures import band_numbers
from canon.show.style import INK, PALE, RANKS, STYLE, colour, mean_line, plt, traffic

# For the notebooks and their modules.
__all__ = ["INK", "PALE", "RANKS", "bands", "bare", "colour", "matrix", "mean_line", "plt"]
__all__ += ["rank_legend", "traffic"]
plt.rcParams.update(STYLE)


def shown(draw):
    """Return the function ``draw`` with the figure shown in the notebook."""

    @wraps(draw)
    def show(*args, **options):
        draw(*args, **options)
        plt.show()

    return show


def bands(ax, mask, title="", colours=RANKS):
    """Draw a small mask with one colour for each band. Return its matrix of colour indices."""
    values = band_numbers(mask)
    values = torch.where(values > 0, (values - 1) % len(colours) + 1, 0)
    matrix(ax, values, colours, title)
    return values


@shown
def gallery(masks, columns=4):
    """Draw masks by name, with one colour for each band."""
    rows = -(-len(masks) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.5 * columns, 3.1 * rows), squeeze=False, layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1)
    for ax, (name, mask) in zip(axes.flat, masks.items(), strict=False):
        count = len(mask.bands)
        bands(ax, mask, f"{name}\n{count} band{'s' * (count != 1)}, {mask.area} cells")
    for ax in axes.flat[len(masks) :]:
        ax.axis("off")
    for ax in axes[:, 0]:
        ax.set_ylabel("queries")
    for ax in axes[-1]:
        ax.set_xlabel("keys")
    return figure


@shown
def crop(mask, rows, columns):
    """Draw a mask with a window, and the mask of this window in its own coordinates, in the same
    colours.
    """
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(7, 3.6), width_ratios=[mask.keys, len(columns)]
    )
    values = bands(left, mask, f"mask, {mask.queries} x {mask.keys}")
    frame = (columns.start - 0.5, rows.start - 0.5), len(columns), len(rows)
    left.add_patch(Rectangle(*frame, fill=False, edgecolor=INK, linewidth=2, zorder=5))
    window = mask.crop(rows, columns)
    inside, numbers = values[list(rows)][:, list(columns)], band_numbers(window)
    colours = [
        colour(int(inside[numbers == 1 + place][0]) - 1) for place in range(len(window.bands))
    ]
    bands(right, window, f"crop({rows}, {columns})", colours)
    for ax, height, width in ((left, mask.queries, mask.keys), (right, len(rows), len(columns))):
        ax.set_xticks(range(0, width, -(-width // 10)))
        ax.set_yticks(range(0, height, -(-height // 10)))
        ax.tick_params(labelbottom=True, labelleft=True, labelsize=7)
        ax.set(xlabel="keys", ylabel="queries")
    figure.tight_layout()
    return figure


@shown
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


@shown
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


@shown
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


@shown
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


@shown
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


@shown
def other_bits(rows):
    """Draw a strip of tokens for each row, with a mark at those of other bits. rows[label] are
    booleans (tokens,).
    """
    _, ax = plt.subplots(figsize=(8, 0.5 + 0.36 * len(rows)), layout="constrained")
    tokens = max(len(other) for other in rows.values())
    for place, other in enumerate(rows.values()):
        ax.barh(place, len(other), height=0.7, color=PALE)
        for token in other.nonzero().flatten().tolist():
            ax.add_patch(Rectangle((token, place - 0.35), 1, 0.7, color=RANKS[4], linewidth=0))
        ax.text(1.01 * tokens, place, f"{int(other.sum())} of {len(other)}", va="center")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(xlim=(0, tokens), ylim=(len(rows) - 0.5, -0.5), xlabel="token; red: other bits")
    bare(ax)


measured_spans = shown(timeline_figures.measured_spans)


def measured(results):
    """Draw the results of `real_ranks`, one panel for each call."""
    panels = {}
    for name, ranks in results.items():
        drawn = [one for one in ranks if one.spans]
        shared = len(drawn) < len(ranks)  # one GPU runs the kernels of all ranks
        panels[name] = {"all ranks" if shared else f"rank {one.rank}": one.spans for one in drawn}
    return measured_spans(panels)


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


@shown
def errors_of_pieces(counts, errors):
    """Draw relative errors by the number of pieces, one curve for each dtype of the pieces."""
    _, ax = plt.subplots(figsize=(6, 2.6))
    for (dtype, curve), fill in zip(errors.items(), [RANKS[2], RANKS[4]], strict=True):
        percent = [100 * error for error in curve]
        ax.plot(counts, percent, marker="o", markersize=4, color=fill)
        name = f"pieces in\n{str(dtype)[6:]}"
        ax.text(counts[-1] * 1.12, percent[-1], name, va="center", color=fill)
    ax.set_xscale("log", base=2)
    ax.set(xticks=counts, xticklabels=counts, ylim=(0, None))
    ax.set(xlabel="pieces", ylabel="relative error, %")


@shown
def timelines(schedules, hop):
    """Draw rings over time. schedules[name][step][rank] is (owner of the keys, cells). The largest
    sets the step's length.

    The thin bar below a rank's computation is the hop that it sends in this step. ``hop`` is its
    length in cells."""
    figure, axes = plt.subplots(
        len(schedules), 1, figsize=(9, 2.1 * len(schedules)), sharex=True, squeeze=False
    )
    for ax, (name, steps) in zip(axes.flat, schedules.items(), strict=True):
        ranks, now = len(steps[0]), 0
        perfect = sum(cells for step in steps for _, cells in step) / ranks
        for number, step in enumerate(steps):
            length = max(cells for _, cells in step) / perfect
            for rank, (owner, cells) in enumerate(step):
                waiting = {
                    "facecolor": "white",
                    "edgecolor": "#c9c9c4",
                    "hatch": "////",
                    "linewidth": 0,
                }
                ax.add_patch(Rectangle((now, rank - 0.4), length, 0.54, **waiting))
                own = cells / perfect
                sent = {"facecolor": RANKS[owner], "alpha": 0.6, "linewidth": 0}
                ax.add_patch(
                    Rectangle(
                        (now, rank - 0.4), own, 0.54, facecolor=RANKS[owner], edgecolor="white"
                    )
                )
                if own > 0.03:
                    ax.text(
                        now + own / 2,
                        rank - 0.13,
                        f"K{owner}",
                        ha="center",
                        va="center",
                        color="white",
                        fontsize=8,
                    )
                if number + 1 < len(steps):
                    ax.add_patch(Rectangle((now, rank + 0.2), hop / perfect, 0.16, **sent))
            ax.axvline(now, color="#9a9a9a", linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
            ax.text(
                now + length / 2,
                -0.72,
                f"step {number}",
                ha="center",
                va="center",
                fontsize=8,
                color="#6a6a6a",
            )
            now += length
        ax.set(
            ylim=(ranks - 0.4, -1.0),
            yticks=range(ranks),
            yticklabels=[f"rank {r}" for r in range(ranks)],
        )
        ax.set_title(f"{name}: {100 / now:.0f} % busy", loc="left")
        ax.tick_params(length=0)
        ax.spines["left"].set_visible(False)
        ax.set_xlim(0, max(now, ax.get_xlim()[1] if ax is not axes[0, 0] else 0) * 1.005)
    axes[-1, 0].set_xlabel(
        "time; 1 is perfect balance (hatched: waiting for the slowest rank; thin: the hop that "
        "the rank sends)"
    )
    figure.tight_layout()
    return figure


@shown
def hops(panels, ranks):
    """Draw the messages of rings. panels[title] lists (step, sender, owner of the data, thick).

    Rank 0 appears again below the last rank, so that every hop goes one row down and one step to
    the right.
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.7 * len(panels), 3.1), sharey=True, squeeze=False
    )
    longest = 1 + max(step for messages in panels.values() for step, *_ in messages)
    for ax, (title, messages) in zip(axes.flat, panels.items(), strict=True):
        for step, sender, owner, thick in messages:
            style = {"linewidth": 6, "alpha": 0.35} if thick else {"linewidth": 1.4}
            ax.plot(
                [step, step + 1],
                [sender, sender + 1],
                color=RANKS[owner],
                solid_capstyle="round",
                **style,
            )
        last = max(step for step, *_ in messages) + 1
        for step in range(ranks):
            for rank in range(ranks):
                owner = (rank - step) % ranks
                box = {"facecolor": RANKS[owner], "edgecolor": "white", "zorder": 3}
                ax.add_patch(Rectangle((step - 0.17, rank - 0.27), 0.34, 0.54, **box))
                ax.text(
                    step,
                    rank,
                    f"K{owner}",
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                    zorder=4,
                )
        if last == ranks:
            for rank in range(ranks):
                box = {
                    "facecolor": "white",
                    "edgecolor": RANKS[rank],
                    "linewidth": 1.5,
                    "zorder": 3,
                }
                ax.add_patch(Rectangle((last - 0.22, rank - 0.27), 0.44, 0.54, **box))
                ax.text(
                    last,
                    rank,
                    f"dK{rank}",
                    ha="center",
                    va="center",
                    color=RANKS[rank],
                    fontsize=8,
                    zorder=4,
                )
        ax.axhline(ranks - 0.5, color="#9a9a9a", linewidth=0.6, linestyle=(0, (2, 2)))
        ax.set(xlim=(-0.4, longest + 0.4), ylim=(ranks + 0.3, -0.5), xlabel="step")
        # the gradients end at their owners
        steps = [*range(ranks), *(["end"] if last == ranks else [])]
        ax.set_xticks(range(len(steps)), steps)
        ax.set_yticks(range(ranks + 1), [*(f"rank {rank}" for rank in range(ranks)), "rank 0"])
        ax.set_title(title, loc="left")
        bare(ax)
    figure.tight_layout()
    return figure
