"""Figures of notebooks 05 to 07: walks over tiles, the work of each SM, and overlap inside a kernel.

The notebook computes the data with the package. These functions only draw it.
"""

import matplotlib.pyplot as plt
from drawing import INK, PALE, RANKS
from matplotlib.patches import ConnectionPatch, Rectangle

GREY = "#a9a9a2"


def _bare(ax):
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def _box(ax, x, y, width, height, colour, **style):
    style = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.6} | style
    ax.add_patch(Rectangle((x, y), width, height, **style))


def _text(ax, x, y, text, colour="white", size=9):
    ax.text(x, y, text, color=colour, fontsize=size, ha="center", va="center")


def walks(panels, size):
    """Draw tiles of scores, numbered in the order of computation and coloured by owner, and the owners of each gradient.

    panels[title] is (visits, adding): `order` and `owners` of a `canon.testing.tile_walks.TileWalk`.
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
                    place = (margin, tile + 0.06, width, 0.88) if name == "dq" else (tile + 0.06, margin, 0.88, width)
                    _box(ax, *place, RANKS[owner])
            _text(ax, *((size + 0.7, -0.25) if name == "dq" else (-0.45, size + 0.7)), name, INK)
        ax.set(xlim=(-1, size + 1.2), ylim=(size + 1.2, -0.5), xticks=[], yticks=[], aspect="equal", title=title)
        _bare(ax)
    axes[0, 0].set_ylabel("tiles of queries")
    axes[0, 0].set_xlabel("tiles of keys")
    figure.tight_layout()
    plt.show()


def owners_by_head(query_heads, key_heads, tiles):
    """Draw the owners of dk by query head (row) and tile of keys (column), for "split" and "head_parallel", and the sum."""
    group = query_heads // key_heads
    figure, axes = plt.subplots(1, 2, figsize=(8, 0.5 * query_heads + 1.6))
    names = {"split: an owner per key head": group, "head_parallel: an owner per query head, then a sum": 1}
    for ax, (title, rows) in zip(axes, names.items(), strict=True):
        for tile in range(tiles):
            for number, head in enumerate(range(0, query_heads, rows)):
                owner = tile * (query_heads // rows) + number
                _box(ax, tile + 0.04, head + 0.06, 0.92, rows - 0.12, RANKS[owner % len(RANKS)])
                _text(ax, tile + 0.5, head + rows / 2, f"owner {owner}")
            for head in range(0, query_heads, group):
                _box(ax, tile + 0.04, query_heads + 0.6 + head / group, 0.92, 0.8, "white", edgecolor=INK)
                _text(ax, tile + 0.5, query_heads + 1 + head / group, f"dk, tile {tile}", INK)
                arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
                ax.annotate("", (tile + 0.5, query_heads + 0.6), (tile + 0.5, query_heads), arrowprops=arrow)
        ax.set(xlim=(0, tiles), ylim=(query_heads + 0.5 + key_heads, 0), xticks=[], title=title)
        ax.set_yticks([head + 0.5 for head in range(query_heads)], [f"query head {head}" for head in range(query_heads)])
        _bare(ax)
    figure.tight_layout()
    plt.show()


def schedules(panels):
    """Draw the work of every SM. panels[row][column] is (title, work tiles by SM); a work tile lists (head, visits)."""
    shape = len(panels), len(panels[0])
    figure, axes = plt.subplots(*shape, figsize=(10, 1.9 * shape[0]), sharex="col", sharey=True, squeeze=False)
    for ax, (title, found) in zip(axes.flat, (panel for row in panels for panel in row), strict=True):
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
        _bare(ax)
    for ax in axes[-1]:
        ax.set_xlabel("tiles of queries visited (hatched: idle)")
    for ax in axes[:, 0]:
        ax.set_ylabel("SM")
    figure.tight_layout()
    plt.show()


def overlap(lanes, waits, title):
    """Draw the overlap inside a kernel. lanes[name] lists boxes (kind, begin, end, released, tile, text).

    A box is grey if its tile is None. A "load" is pale from its end until its release (None: until the last event). An
    "exp2" is hollow. waits lists ((lane, x), (lane, x)): an arrow from the awaited event to the end of the wait.
    """
    last = max(box[2] for boxes in lanes.values() for box in boxes)
    packed = {name: _rows(boxes, last) for name, boxes in lanes.items()}
    names, heights = list(lanes), [len(rows) for rows in packed.values()]
    size, apart = (11, 0.24 * sum(heights) + 0.9), {"hspace": 0.35}
    figure, axes = plt.subplots(len(lanes), 1, figsize=size, sharex=True, height_ratios=heights, gridspec_kw=apart)
    for ax, (name, rows) in zip(axes, packed.items(), strict=True):
        for y, (kind, begin, end, released, tile, text) in ((y, box) for y, row in enumerate(rows) for box in row):
            colour = GREY if tile is None else RANKS[tile % len(RANKS)]
            if kind == "load":
                _box(ax, end, y - 0.42, (released or last) - end, 0.84, colour, alpha=0.25)
            hollow = {"facecolor": "white", "edgecolor": colour} if kind == "exp2" else {}
            _box(ax, begin + 0.04, y - 0.42, end - begin - 0.08, 0.84, colour, **hollow)
            _text(ax, (begin + end) / 2, y, text, colour if hollow else "white", 7 if end - begin > 1 else 5.5)
        ax.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, last), yticks=[(len(rows) - 1) / 2], xticks=[])
        ax.set_yticklabels([name], color=INK)
        _bare(ax)
    for (lane, x), (other, y) in waits:
        upper, lower = (axes[i] for i in sorted(map(names.index, (lane, other))))
        edge = {upper: upper.get_ylim()[0], lower: lower.get_ylim()[1]}
        one, two = axes[names.index(lane)], axes[names.index(other)]
        arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0}
        figure.add_artist(ConnectionPatch((x, edge[one]), (y, edge[two]), "data", axesA=one, axesB=two, **arrow))
    axes[0].set_title(title, loc="left")
    axes[-1].set_xlabel("events of one simulated run, in their order")
    plt.show()


def _rows(boxes, last):
    """Distribute boxes over as few rows as possible, in their order, without overlap."""
    rows, until = [], lambda box: (box[3] or last) if box[0] == "load" else box[2]
    for box in boxes:
        row = next((row for row in rows if until(row[-1]) <= box[1]), None)
        if row is None:
            rows.append(row := [])
        row.append(box)
    return rows
