"""Figures of 11: the lanes that hold the elements of a matrix, and the banks of shared memory that
a load reads.
"""

import matplotlib.pyplot as plt
from drawing import INK, RANKS, bare


def lanes(panels):
    """Draw matrices of lane numbers. ``panels``: title -> (lanes, registers), each (rows, columns);
    a colour per register.
    """
    widths = [held.shape[1] for held, _ in panels.values()]
    _, axes = plt.subplots(
        1, len(panels), figsize=(0.26 * sum(widths) + len(panels), 4.4), width_ratios=widths
    )
    for ax, (title, (held, registers)) in zip(axes, panels.items(), strict=True):
        for (row, column), lane in _cells(held):
            colour = RANKS[registers[row, column]]
            ax.add_patch(
                plt.Rectangle((column, row), 1, 1, facecolor=colour, alpha=0.35, edgecolor="white")
            )
            ax.text(
                column + 0.5, row + 0.5, str(lane), ha="center", va="center", fontsize=6, color=INK
            )
        _placed(ax, held.shape, title)
    plt.show()


def banks(panels):
    """Draw the places of chunks in shared memory. ``panels``: title -> chunk at each (row, place of
    16 bytes).
    """
    _, axes = plt.subplots(1, len(panels), figsize=(3.2 * len(panels), 2.8))
    for ax, (title, chunks) in zip(axes, panels.items(), strict=True):
        for (row, place), chunk in _cells(chunks):
            colour = RANKS[1] if chunk == 0 else RANKS[0]
            ax.add_patch(
                plt.Rectangle((place, row), 1, 1, facecolor=colour, alpha=0.35, edgecolor="white")
            )
            ax.text(
                place + 0.5, row + 0.5, str(chunk), ha="center", va="center", fontsize=7, color=INK
            )
        _placed(ax, chunks.shape, title)
    plt.show()


def _cells(matrix):
    return (
        ((row, column), matrix[row, column])
        for row in range(matrix.shape[0])
        for column in range(matrix.shape[1])
    )


def _placed(ax, shape, title):
    ax.set(
        xlim=(0, shape[1]), ylim=(shape[0], 0), xticks=[], yticks=[], title=title, aspect="equal"
    )
    bare(ax)
