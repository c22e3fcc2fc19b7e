"""Show the results of `canon check`: a table, the faults as text, and a picture of the errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLOURS = {"out": "#0072b2", "lse": "#56b4e9", "dq": "#e69f00", "dk": "#d55e00", "dv": "#009e73", "sum": "#cc79a7"}
WRONG = "#cc0000"  # names of cases that do not agree
EQUAL = "#999999"  # tables that must equal the expected values, without an error bound
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


def picture(results: Sequence[dict[str, Any]], path: Path, title: str) -> bool:
    """Draw `figure` into ``path``. Return False if matplotlib is missing."""
    try:
        drawn = figure(results, title)
    except ModuleNotFoundError:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=150)
    return True


def figure(results: Sequence[dict[str, Any]], title: str):
    """Return a figure of error / bound. A cross marks a wrong case without an error above its bound. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = results or [{"case": "no case ran", "measures": [], "verdict": "declined"}]
    drawing = Figure(figsize=(8, 1.5 + 0.2 * len(results)), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.add_subplot()
    for tensor, colour in [*COLOURS.items(), ("equal", EQUAL)]:
        for row, result in enumerate(results):
            ratios = [m["ratio"] for m in result["measures"] if _shown_as(m["tensor"]) == tensor]
            drawn = [min(max(ratio, 1e-4), 1e4) for ratio in ratios]
            axes.plot(drawn, [row] * len(drawn), "o", color=colour, markersize=4, alpha=0.8)
        axes.plot([], [], "o", color=colour, label=tensor)
    for row, result in enumerate(results):
        wrong = result["verdict"] in {"disagrees", "failed"}
        if wrong and not any(m["ratio"] > 1 for m in result["measures"]):
            axes.plot([1e4], [row], "x", color=WRONG, markersize=6)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("error / bound (agrees up to 1)")
    labels = [result["case"] + (f" ({result['verdict']})" if not result["measures"] else "") for result in results]
    axes.set_yticks(range(len(results)), labels, fontsize=7)
    for label, result in zip(axes.get_yticklabels(), results, strict=True):
        label.set_color(WRONG if result["verdict"] in {"disagrees", "failed"} else "black")
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    drawing.legend(ncols=7, loc="outside lower right", frameon=False)
    drawing.suptitle(title, x=0.01, ha="left", fontsize=10)
    return drawing


def _shown_as(tensor: str) -> str:
    return "sum" if tensor == "into" else tensor if tensor in COLOURS else "equal"
