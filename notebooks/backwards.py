"""Figures of notebooks 08 to 10: walks over tiles, the work of each SM, and overlap inside a
kernel.

The notebook computes the data with the package. These functions only draw it.
"""

import matplotlib.pyplot as plt
from drawing import INK, PALE, RANKS, bare, colour
from matplotlib.patches import Rectangle

OTHER = "#6a6a6a"  # colour of steps without a tile


def _box(ax, x, y, width, height, fill, **style):
    style = {"facecolor": fill, "edgecolor": "white", "linewidth": 0.6} | style
    ax.add_patch(Rectangle((x, y), width, height, **style))


def _text(ax, x, y, text, colour="white", size=9):
    ax.text(x, y, text, color=colour, fontsize=size, ha="center", va="center")


def walks(panels, size):
    """Draw tiles of scores, numbered in the order of computation and coloured by owner, and the
    owners of each gradient.

    panels[title] is (visits, adding): `order` and `owners` of a `tile_walks.TileWalk`.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 3.4), squeeze=False)
    for ax, (title, (visits, adding)) in zip(axes.flat, panels.items(), strict=True):
        for cell in range(size * size):
            _box(ax, cell % size, cell // size, 1, 1, "white", edgecolor=PALE)
        for number, (row, column, owner) in enumerate(visits, 1):
            _box(ax, column, row, 1, 1, RANKS[owner])
            _text(ax, column + 0.5, row + 0.5, number)
        for name, tiles in adding.items():
            for tile, owners in tiles.items():
                for part, owner in enumerate(owners):
                    margin, width = size + 0.3 + 0.8 * part / len(owners), 0.8 / len(owners)
                    place = (
                        (margin, tile + 0.06, width, 0.88)
                        if name == "dq"
                        else (tile + 0.06, margin, 0.88, width)
                    )
                    _box(ax, *place, RANKS[owner])
            _text(ax, *((size + 0.7, -0.25) if name == "dq" else (-0.45, size + 0.7)), name, INK)
        ax.set(
            xlim=(-1, size + 1.2),
            ylim=(size + 1.2, -0.5),
            xticks=[],
            yticks=[],
            aspect="equal",
            title=title,
        )
        bare(ax)
    axes[0, 0].set_ylabel("tiles of queries")
    axes[0, 0].set_xlabel("tiles of keys")
    figure.tight_layout()
    plt.show()


def owners_by_head(query_heads, key_heads, tiles):
    """Draw the owners of dk by query head (row) and tile of keys (column), for "split" and
    "head_parallel", and the sum.
    """
    group = query_heads // key_heads
    figure, axes = plt.subplots(1, 2, figsize=(8, 0.5 * query_heads + 1.6))
    names = {
        "split: an owner per key head": group,
        "head_parallel: an owner per query head, then a sum": 1,
    }
    for ax, (title, rows) in zip(axes, names.items(), strict=True):
        for tile in range(tiles):
            for number, head in enumerate(range(0, query_heads, rows)):
                owner = tile * (query_heads // rows) + number
                _box(ax, tile + 0.04, head + 0.06, 0.92, rows - 0.12, colour(owner))
                _text(ax, tile + 0.5, head + rows / 2, f"owner {owner}")
            for head in range(0, query_heads, group):
                _box(
                    ax,
                    tile + 0.04,
                    query_heads + 0.6 + head / group,
                    0.92,
                    0.8,
                    "white",
                    edgecolor=INK,
                )
                _text(ax, tile + 0.5, query_heads + 1 + head / group, f"dk, tile {tile}", INK)
                arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
                ax.annotate(
                    "", (tile + 0.5, query_heads + 0.6), (tile + 0.5, query_heads), arrowprops=arrow
                )
        ax.set(xlim=(0, tiles), ylim=(query_heads + 0.5 + key_heads, 0), xticks=[], title=title)
        ax.set_yticks(
            [head + 0.5 for head in range(query_heads)],
            [f"query head {head}" for head in range(query_heads)],
        )
        bare(ax)
    figure.tight_layout()
    plt.show()


def schedules(panels):
    """Draw the work of every SM. panels[row][column] is (title, work tiles by SM); a work tile
    lists (head, visits).
    """
    shape = len(panels), len(panels[0])
    figure, axes = plt.subplots(
        *shape, figsize=(10, 1.9 * shape[0]), sharex="col", sharey=True, squeeze=False
    )
    for ax, (title, found) in zip(
        axes.flat, (panel for row in panels for panel in row), strict=True
    ):
        end = max(sum(visits for tile in tiles for _, visits in tile) for tiles in found)
        for sm, tiles in enumerate(found):
            now, y = 0, sm - 0.4
            _box(ax, 0, y, end, 0.8, "white", edgecolor="#c9c9c4", hatch="////", linewidth=0)
            for tile in tiles:
                begin = now
                for head, visits in tile:
                    _box(ax, now, y, visits, 0.8, RANKS[head], linewidth=0)
                    now += visits
                _box(ax, begin, y, now - begin, 0.8, "none", edgecolor=INK)
        ax.set(ylim=(len(found) - 0.5, -0.5), yticks=range(0, len(found), len(found) - 1))
        ax.set_xlim(0, max(1.005 * end, ax.get_xlim()[1]))
        ax.set_title(title, loc="left")
        bare(ax)
    for ax in axes[-1]:
        ax.set_xlabel("tiles of queries visited (hatched: idle)")
    for ax in axes[:, 0]:
        ax.set_ylabel("SM")
    figure.tight_layout()
    plt.show()


def clocks(panels):
    """Draw the units of an SM over time, coloured by warpgroup. panels[title] lists (unit, start,
    stop, warpgroup, text).
    """
    longest = max(stop for bars in panels.values() for _, _, stop, *_ in bars)
    figure, axes = plt.subplots(len(panels), 1, figsize=(10, 1.15 * len(panels)), sharex=True)
    for ax, (title, bars) in zip(axes, panels.items(), strict=True):
        units = sorted({unit for unit, *_ in bars}, reverse=True)
        end = max(stop for _, _, stop, *_ in bars)
        for y in range(len(units)):
            _box(ax, 0, y - 0.4, end, 0.8, "white", edgecolor="#c9c9c4", hatch="////", linewidth=0)
        for unit, start, stop, warpgroup, text in bars:
            _box(ax, start, units.index(unit) - 0.4, stop - start, 0.8, RANKS[warpgroup])
            _text(
                ax,
                (start + stop) / 2,
                units.index(unit),
                text,
                size=8 if stop - start > longest / 50 else 6,
            )
        ax.set(ylim=(len(units) - 0.5, -0.5), xlim=(0, longest), yticks=range(len(units)))
        ax.set_yticklabels(units, color=INK)
        ax.set_title(title, loc="left")
        bare(ax)
    axes[-1].set_xlabel("time, in clocks of one SM (hatched: idle)")
    figure.tight_layout()
    plt.show()


def events(steps, waits, title):
    """Draw the steps of a simulated run, each in one column: a filled box starts, an open box ends,
    a line is in flight.

    Rows of a lane are operations. waits lists ((lane, number), (lane, number)): the awaited lane,
    and the waiting one."""
    lanes = sorted({step.lane for step in steps}, key=lambda lane: (lane == "loader", lane))
    rows = {
        lane: list(dict.fromkeys(step.text for step in steps if step.lane == lane))
        for lane in lanes
    }
    heights, tops = {}, {}
    for lane in lanes:
        tops[lane] = sum(heights.values()) + 0.7 * len(heights)
        heights[lane] = len(rows[lane])
    bottom = tops[lanes[-1]] + heights[lanes[-1]]
    _, ax = plt.subplots(figsize=(0.215 * len(steps) + 1, 0.21 * bottom + 0.8))
    place = {step.number: tops[step.lane] + rows[step.lane].index(step.text) for step in steps}
    for step in steps:
        y, colour = place[step.number], OTHER if step.tile is None else RANKS[step.tile]
        if step.begun is not None:
            ax.plot(
                [step.begun + 1, step.number],
                [y + 0.5, y + 0.5],
                color=colour,
                linewidth=1.6,
                zorder=0,
            )
        ended = (
            {"facecolor": "white", "edgecolor": colour, "linewidth": 1}
            if step.kind == "end"
            else {}
        )
        _box(ax, step.number + 0.04, y + 0.08, 0.92, 0.84, colour, **ended)
        _text(ax, step.number + 0.5, y + 0.5, step.text, colour if ended else "white", 6)
    for (source, begin), (lane, end) in waits:
        upward = tops[source] > tops[lane]
        y = tops[source] - 0.08 if upward else tops[source] + heights[source] + 0.08
        to = tops[lane] + heights[lane] + 0.05 if upward else tops[lane] - 0.05
        arrow = {
            "arrowstyle": "-|>",
            "color": INK,
            "linewidth": 0.8,
            "mutation_scale": 7,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        ax.annotate("", (end, to), (begin, y), arrowprops=arrow)
    for lane in lanes:
        ax.axhspan(
            tops[lane], tops[lane] + heights[lane], color=PALE, alpha=0.45, zorder=-1, linewidth=0
        )
    ax.set(
        xlim=(0, len(steps)),
        ylim=(bottom + 0.1, -0.1),
        xticks=[x + 0.5 for x in range(0, len(steps), 5)],
    )
    ax.set_xticklabels(range(0, len(steps), 5))
    ax.set_yticks([tops[lane] + heights[lane] / 2 for lane in lanes], lanes, color=INK)
    ax.set_title(title, loc="left")
    ax.set_xlabel("number of the event in one simulated run: order, not time")
    bare(ax)
    plt.show()
