"""Show the results of `canon check --bits`, and write the record."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from canon.check.check_report import command_of
from canon.testing import record

RECORD = Path("canon-check/bits.json")
STYLES = {  # by verdict: a cell shows the first of these on any number of ranks
    "failed": "bold red",
    "differs": "bold red",
    "declined": "dim",
    "equal": "green",
    "no option": "dim",
}


def report(
    results: Sequence[dict[str, Any]],
    rows: Sequence[str],
    arguments: argparse.Namespace,
    console: Console,
    **sizes: int,
) -> int:
    """Return the number of wrong cells, 1 without any."""
    names = list(dict.fromkeys(rows))
    for dtype, backend in dict.fromkeys((x["dtype"], x["backend"]) for x in results):
        some = [x for x in results if (x["dtype"], x["backend"]) == (dtype, backend)]
        console.print(_table(some, names, dtype + (f", {backend}" if backend else "")))
    # of the fewest ranks
    reasons = {x["row"]: x["why"].splitlines()[0] for x in reversed(results) if "why" in x}
    for row, why in reversed(reasons.items()):
        console.print(f"{row}: {why}", markup=False, highlight=False)
    kept = {"module": arguments.module, **sizes}
    record.write(arguments.record, command_of(arguments), results, **kept)
    console.print(f"Record: {arguments.record}.", highlight=False)
    cells = [
        _cell(results, name, *column)
        for name in names
        for column in dict.fromkeys(map(_column, results))
    ]
    compared = (cell["verdict"] for cell in cells if "digest" not in cell)
    judged = [verdict for verdict in compared if verdict in ("equal", "differs", "failed")]
    wrong = len(judged) - judged.count("equal")
    line = f"{judged.count('equal')} of {len(judged)} cells have equal bits"
    style = "bold red" if wrong or not judged else "bold green"
    console.print(
        f"[{style}]{line}" + f", {wrong} do not." * bool(wrong) + "." * (not wrong), highlight=False
    )
    return wrong + (not judged)


def _column(result: dict[str, Any]) -> tuple[str, int, str | None]:
    return result["dtype"], result["width"], result["backend"]


def _cell(results: Sequence[dict[str, Any]], row: str, *column: Any) -> dict[str, Any]:
    cells = [x for x in results if x["row"] == row and _column(x) == column]
    return min(cells, key=lambda x: list(STYLES).index(x["verdict"]))


def _table(results: Sequence[dict[str, Any]], names: Sequence[str], title: str) -> Table:
    columns = list(dict.fromkeys(map(_column, results)))
    shown = Table(title=title, title_justify="left")
    shown.add_column("row", overflow="fold")
    for _, width, _ in columns:
        shown.add_column(f"D {width}", overflow="fold")
    for name in names:
        ranks = sorted({x["ranks"] for x in results if x["row"] == name})
        several = f", {ranks[0]} to {ranks[-1]} ranks" if len(ranks) > 1 else ""
        cells = [_cell(results, name, *column) for column in columns]
        shown.add_row(
            name + several, *(Text(_text(x, bool(several)), STYLES[x["verdict"]]) for x in cells)
        )
    return shown


def _text(cell: dict[str, Any], several: bool) -> str:
    """Distances are in units of the last place (ulp)."""
    if cell["verdict"] != "differs":
        return cell["digest"] if "digest" in cell else cell["verdict"]
    ranks = f"{cell['ranks']} rank{'s' * (cell['ranks'] > 1)}, " if several else ""
    parts = f" ({cell['other_calls']} of {cell['calls']} calls)" if cell["calls"] > 1 else ""
    distances = f"out {cell['out']:.3g}, lse {cell['lse']:.3g} ulp"
    return f"{ranks}token {cell['token']}, head {cell['head']}: {distances}{parts}"
