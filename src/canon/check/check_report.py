"""Show the results of `canon check`: a table, and the faults as text."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

MARKS = {
    "agrees": "[green]agrees",
    "disagrees": "[bold red]disagrees",
    "failed": "[bold red]failed",
    "declined": "[dim]declined",
}


NUMBERS = {"error", "bound", "ratio", "time"}


def table(results: Sequence[dict[str, Any]], module: str) -> Table:
    """Return a row for each case, with the measure that has the largest error / bound."""
    shown = Table(title=f"{module} against canon.reference and float64", title_justify="left")
    for name in ("case", "worst", "error", "bound", "ratio", "time", "verdict"):
        shown.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=name != "case", overflow="fold")
    for result in results:
        worst = max(result["measures"], key=lambda m: m["ratio"], default=None)
        numbers = ("", "", "", "")
        if worst:
            place = f"{worst['tensor']} {worst['norm']}"
            numbers = (place, f"{worst['error']:.1e}", f"{worst['bound']:.1e}", f"{worst['ratio']:.2f}")
        seconds = f"{1e3 * min(result['seconds']):.1f} ms" if result["seconds"] else ""
        shown.add_row(result["case"], *numbers, seconds, MARKS[result["verdict"]])
    return shown


def faults(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the faults of each case."""
    for result in results:
        for fault in result["faults"]:
            colour = "dim" if result["verdict"] == "declined" else "red"
            console.print(f"[{colour}]{result['case']}[/]: ", end="")
            console.print(fault, markup=False, highlight=False)
