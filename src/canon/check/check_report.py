"""Show the results of `canon check`: a table, and the faults as text."""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from canon.testing import record
from canon.testing.judge import short

AGREES, DISAGREES, MISUSED, INTERRUPTED = 0, 1, 2, 130  # exit statuses
MARKS = {  # verdicts
    "agrees": "green",
    "disagrees": "bold red",
    "failed": "bold red",
    "declined": "dim",
}
NUMBERS = {"error", "bound", "ratio"}
# parts of faults, the most specific first; then exceptions
TELLING = (
    "no rank can continue",
    "the ranks disagree",
    "sees no key",
    "see no key",
    "as if ",
    "times the expected",
    "not finite",
    "-inf at",
    "is worst",
    "is off by",
)
LINE = 300  # characters of a fault that is not printed in full


def command_of(arguments: argparse.Namespace, **changed: Any) -> str:
    """Return the command, with ``changed`` options."""
    hidden = {"command", "module", "record", "list", "template"}
    given = {name: value for name, value in vars(arguments).items() if name not in hidden}
    given |= {"documents": tuple(path.name for path in arguments.documents)} | changed
    given["world"] = None if arguments.world == "auto" else arguments.world
    return record.command("canon", "check", arguments.module, **given)


def table(results: Sequence[dict[str, Any]], module: str) -> Table:
    """Return the table of the results."""
    shown = Table(title=f"{module} against canon.reference and float64", title_justify="left")
    for name in ("case", "worst", "error", "bound", "ratio", "verdict"):
        shown.add_column(
            name,
            justify="right" if name in NUMBERS else "left",
            no_wrap=name != "case",
            overflow="fold",
        )
    for result, same in _grouped(results):
        if len(same) > 1:
            declined = Text("declined", MARKS["declined"])
            shown.add_row(f"{_function(result)}: {len(same)} cases", *[""] * 4, declined)
            continue
        numbers = ("", "", "", "")
        if worst := max(result["measures"], key=lambda m: float(m["ratio"]), default=None):
            place, ratio = f"{worst['tensor']} {worst['norm']}", short(float(worst["ratio"]))
            numbers = (place, f"{worst['error']:.1e}", f"{worst['bound']:.1e}", ratio)
        verdict = result["verdict"]
        if "digest" in result:
            verdict += f", bits {result['digest']}"
        shown.add_row(result["case"], *numbers, Text(verdict, MARKS[result["verdict"]]))
    return shown


def faults(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print all faults of the most specific case, and one of each other case."""
    wrong = [result for result in results if result["faults"] and result["verdict"] != "declined"]
    in_full = min(wrong, key=lambda result: min(map(_place, result["faults"])), default=None)
    for result, same in _grouped(results):
        if len(same) > 1:
            reason = f"{_function(result)}: {len(same)} cases declined: {_reason(result)}"
            console.print(Text(reason, MARKS["declined"]), soft_wrap=True)
        elif result["faults"]:
            fault(result, console, in_full=result is in_full)


def _function(result: dict[str, Any]) -> str:
    return result["case"].split("/")[0]


def _reason(result: dict[str, Any]) -> str:
    first = "".join(result["faults"][:1])
    return re.sub(r"^rank \d+: ", "", first).partition("\n")[0]


def _grouped(
    results: Sequence[dict[str, Any]],
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for number, result in enumerate(results):
        declined = result["verdict"] == "declined"
        key = (_function(result), _reason(result)) if declined else number
        groups.setdefault(key, []).append(result)
    return [(group[0], group) for group in groups.values()]


def fault(result: dict[str, Any], console: Console, in_full: bool) -> None:
    """Print the faults of a case, or the beginning of the most specific one."""
    texts, style = [*result["faults"]], MARKS[result["verdict"]]
    if not in_full:
        more = f" (and {len(texts) - 1} more in the record)" * (len(texts) > 1)
        texts = [shorten(min(texts, key=_place), LINE, placeholder=" ...") + more]
    texts[0] = _wrong_and_right(result) + texts[0]
    for text in texts:
        console.print(Text.assemble((result["case"], style), ": ", text), soft_wrap=not in_full)


def _wrong_and_right(result: dict[str, Any]) -> str:
    """Return such as "wrong: out, dq; right: lse; ", or ""."""
    agrees: dict[str, bool] = {}
    for m in result.get("measures", ()):
        agrees[m["tensor"]] = agrees.get(m["tensor"], True) and float(m["ratio"]) <= 1
    wrong, right = (
        ", ".join(x for x in agrees if agrees[x] is is_right) for is_right in (False, True)
    )
    return (f"wrong: {wrong}; " + f"right: {right}; " * bool(right)) if wrong else ""


def _place(fault: str) -> int:
    return next((place for place, part in enumerate(TELLING) if part in fault), len(TELLING))


def summary(verdicts: Sequence[str], console: Console) -> bool:
    """Print how many cases agree. Return whether some agree, and the others are declined."""
    counts = Counter(verdicts)
    wrong = len(verdicts) - counts["agrees"] - counts["declined"]
    good = bool(counts["agrees"]) and not wrong
    line = f"{counts['agrees']} of {len(verdicts)} cases agree"
    line += f", {counts['declined']} declined" * bool(counts["declined"])
    line += f", {wrong} do not" * bool(wrong)
    console.print(f"[bold {'green' if good else 'red'}]{line}.")
    return good
