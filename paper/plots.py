"""Set up, finish and save figures. Needs matplotlib, which it imports late.

Each SVG holds a digest of the records that it was drawn from, so that a test can find one that is
out of date."""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from records import DATA

ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7",
)  # fmt: skip
GREY = "#888888"
ONE = "one NVIDIA H200, bfloat16"
WIDE, NARROW = 6.85, 3.3  # inches: both columns of a page of the paper, and one
SMALL = 7  # points


class Drawing(NamedTuple):
    """A figure that can be drawn: its function,
    and the files under `data` that it is drawn from.
    """

    make: Callable[[], Any]
    records: Sequence[str]


def new(columns: int = 1, rows: int = 1, width: float = 9.0, height: float = 4.0, **more):
    """Return (figure, grid of axes)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def finish(axes, title: str = "", xlabel: str = "", ylabel: str = "", grid: str = "x") -> None:
    """Set the texts and the grid of axes."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def small(axes, title: str = "", xlabel: str = "", ylabel: str = "", grid: str = "x") -> None:
    """Set the texts of axes in the sizes of the paper."""
    finish(axes, title, xlabel, ylabel, grid)
    axes.title.set_fontsize(8)
    axes.xaxis.label.set_fontsize(SMALL)
    axes.yaxis.label.set_fontsize(SMALL)
    axes.tick_params(labelsize=SMALL, pad=2)


def digest(records: Sequence[str]) -> str:
    """Return a digest of files under `data`."""
    found = hashlib.sha256()
    for record in records:
        found.update((DATA / record).read_bytes())
    return found.hexdigest()[:16]


def drawn_from(path: Path) -> str:
    """Return the digest that an SVG holds."""
    return re.findall(r"records ([0-9a-f]{16})", path.read_text())[0]


def save(drawings: dict[str, Drawing], folder: Path) -> None:
    """Write all figures to ``folder`` as SVG. The same records give the same files."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "canon"
    folder.mkdir(parents=True, exist_ok=True)
    for name, (make, records) in drawings.items():
        make().savefig(
            folder / f"{name}.svg",
            metadata={"Date": None, "Description": f"records {digest(records)}"},
        )
