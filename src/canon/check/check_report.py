"""Show the results of `canon check`: a table, and the faults as text."""

from collections.abc import Sequence
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from canon.testing.judge import short

MARKS = {"agrees": "green", "disagrees": "bold red", "failed": "bold red", "declined": "dim"}  # verdicts
NUMBERS = {"error", "bound", "ratio", "time"}
TELLING = (  # parts of faults, the most specific first; after them come exceptions, such as those of shapes
    "no rank can continue", "the ranks disagree", "sees no key", "as if ", "times the expected", "not finite", "-inf at",
    "is worst", "is off by",
)  # fmt: skip
LINE = 300  # characters of a fault that is not printed in full


def table(results: Sequence[dict[str, Any]], module: str) -> Table:
    """Return a row for each case, with the measure that has the largest error / bound."""
    shown = Table(title=f"{module} against canon.reference and float64", title_justify="left")
    for name in ("case", "worst", "error", "bound", "ratio", "time", "verdict"):
        shown.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=name != "case", overflow="fold")
    for result in results:
        numbers = ("", "", "", "")
        if worst := max(result["measures"], key=lambda m: float(m["ratio"]), default=None):
            place, ratio = f"{worst['tensor']} {worst['norm']}", short(float(worst["ratio"]))
            numbers = (place, f"{worst['error']:.1e}", f"{worst['bound']:.1e}", ratio)
        seconds = f"{1e3 * min(result['seconds']):.1f} ms" if result["seconds"] else ""
        shown.add_row(result["case"], *numbers, seconds, Text(result["verdict"], MARKS[result["verdict"]]))
    return shown


def faults(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print all faults of the case with the most specific one, and the most specific one of each other case."""
    wrong = [result for result in results if result["faults"] and result["verdict"] != "declined"]
    in_full = min(wrong, key=lambda result: min(map(_place, result["faults"])), default=None)
    for result in results:
        if result["faults"]:
            fault(result, console, in_full=result is in_full)


def fault(result: dict[str, Any], console: Console, in_full: bool) -> None:
    """Print the faults of a case, or a line with the beginning of the most specific one."""
    texts, style = result["faults"], MARKS[result["verdict"]]
    if not in_full:
        more = f" (and {len(texts) - 1} more)" * (len(texts) > 1)
        texts = [shorten(min(texts, key=_place), LINE, placeholder=" ...") + more]
    for text in texts:
        console.print(Text.assemble((result["case"], style), ": ", text), soft_wrap=not in_full)


def _place(fault: str) -> int:
    """Return the place of a fault in `TELLING`."""
    return next((place for place, part in enumerate(TELLING) if part in fault), len(TELLING))


def summary(verdicts: Sequence[str], console: Console, taken: int = 0) -> int:
    """Print how many cases agree, and return how many are wrong. ``taken``: results that the record held before."""
    agree, declined = verdicts.count("agrees"), verdicts.count("declined")
    wrong = len(verdicts) - agree - declined
    line = f"{agree} of {len(verdicts)} cases agree" + f", {declined} declined" * bool(declined)
    line += f", {taken} taken from the record" * bool(taken)
    console.print(f"[bold red]{line}, {wrong} do not." if wrong else f"[bold green]{line}.")
    return wrong
