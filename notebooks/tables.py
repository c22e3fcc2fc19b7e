"""Print the tables of the notebooks: aligned columns of text."""

from collections.abc import Iterable, Sequence


def show(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. The first column begins at the left, the others end at the right."""
    lines = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        print(f"{first:{widths[0]}}", *cells, sep="   ")
