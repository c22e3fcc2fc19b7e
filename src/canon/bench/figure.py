"""`canon bench figure`: TFLOP/s against the length of the sequence, drawn from records of `canon bench kernels`.

    canon bench kernels --sweep 64 --record sweep64.json
    canon bench kernels --sweep 128 --record sweep128.json
    canon bench figure sweep64.json sweep128.json --out sweep.png

A column for each head width and mask, forward above backward; the product of large matrices that was measured in the
same run is a dotted line. Needs matplotlib, and no GPU.
"""

import argparse
import json
from itertools import product
from pathlib import Path

from canon.bench.roofline import PASSES

COLOURS = ("#d55e00", "#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#000000")
STYLES = ("-", "--", "-.", ":")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``canon bench figure``."""
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD", help="figure: records of kernels")
    parser.add_argument("--out", type=Path, metavar="FILE", help="figure: where it goes (the record's name, as .png)")


def run(options: argparse.Namespace) -> Path:
    """Draw the figure of ``canon bench figure``. Raises ValueError where a record has nothing to draw."""
    if not options.records:
        raise ValueError("figure needs records: canon bench figure RECORD... --out FILE")
    try:
        records = [json.loads(path.read_text()) for path in options.records]
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error
    out = options.out or options.records[0].with_suffix(".png")
    try:
        drawn = drawing(records)
    except ModuleNotFoundError as error:
        raise ValueError(f"a figure needs {error.name}: pip install matplotlib") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(out, dpi=150)
    return out


def drawing(records: list[dict]):
    """The matplotlib figure. Raises ValueError if no record has speeds, ModuleNotFoundError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = sorted({(row["d"], row["mask"]) for record in records for row in speeds(record)})
    if not columns:
        raise ValueError("no speeds in these records: figure draws records of canon bench kernels")
    figure = Figure(figsize=(1.5 + 4.2 * len(columns), 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(columns), sharex=True, sharey=True, squeeze=False)
    looks = _looks(records)
    for (column, (d, mask)), (line, name) in product(enumerate(columns), enumerate(PASSES)):
        axes = grid[line][column]
        for record in records:
            rows = [row for row in speeds(record) if (row["d"], row["mask"]) == (d, mask)]
            if rows:
                _panel(axes, rows, name, record["ceilings"]["matmul_tflops"], looks)
        axes.set_title(f"{name}, {mask}, width {d}", fontsize=9)
        axes.set_xscale("log", base=2)
        ticks = sorted({row["n"] for record in records for row in speeds(record)})[::2]
        axes.set_xticks(ticks, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in ticks])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_xlabel("tokens of a sequence" if line == len(PASSES) - 1 else "")
        axes.set_ylabel("" if column else "TFLOP/s")
    for contender, look in looks.items():
        grid[0][0].plot([], [], label=contender, **look)
    grid[0][0].plot([], [], color="grey", linestyle=":", label="8192 x 8192 product")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    gpus = sorted({name for record in records for name in record["machine"]["gpus"][:1]})
    figure.suptitle(", ".join(gpus), x=0.01, ha="left", fontsize=10)
    return figure


def speeds(record: dict) -> list[dict]:
    """The rows of a record that have been timed, shortest sequence first."""
    rows = [row for row in record["results"] if any(f"{name}_tflops" in row for name in PASSES)]
    return sorted(rows, key=lambda row: row["n"])


def _looks(records: list[dict]) -> dict[str, dict]:
    """A colour for each forward pass, and a style of line for each contender that shares it."""
    looks: dict[str, dict] = {}
    sharing: dict[str, int] = {}
    for row in (row for record in records for row in speeds(record)):
        if row["contender"] not in looks:
            colour = COLOURS[list(dict.fromkeys([*sharing, row["forward_of"]])).index(row["forward_of"]) % len(COLOURS)]
            style = STYLES[sharing.get(row["forward_of"], 0) % len(STYLES)]
            sharing[row["forward_of"]] = sharing.get(row["forward_of"], 0) + 1
            width = 1.8 if row["canon"] else 1.0
            looks[row["contender"]] = {"color": colour, "linestyle": style, "linewidth": width, "marker": "."}
    return looks


def _panel(axes, rows: list[dict], name: str, ceiling: float, looks: dict[str, dict]) -> None:
    for contender, look in looks.items():
        points = [
            (row["n"], row[f"{name}_tflops"])
            for row in rows
            if row["contender"] == contender and f"{name}_tflops" in row
        ]
        if points:
            axes.plot(*zip(*points, strict=True), **look)
    axes.axhline(ceiling, color="grey", linestyle=":", linewidth=1.2)
