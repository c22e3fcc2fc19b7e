"""Run the fixed cases of `canon check`, and report."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from canon.check import check_report, contract
from canon.check.case_runner import CaseRunner
from canon.check.cases import (
    Case,
    Coverage,
    accepts,
    all_cases,
    covered,
    matches,
    nothing_to_check,
)
from canon.check.check_report import AGREES, DISAGREES, INTERRUPTED
from canon.check.documents import Documents
from canon.check.placement import Placement
from canon.check.run_cases import run_groups
from canon.testing import record

BUDGET = {"cpu": 600, "cuda": 4096}  # tokens of the repository's documents
RECORD = Path("canon-check/record.json")


def run(arguments: argparse.Namespace, console: Console, place: Placement, module: Any) -> int:
    """Return the exit status. Raises ValueError without a case."""
    name, backend = arguments.module, arguments.backend
    budget = arguments.tokens or (None if arguments.documents else BUDGET[place.device])
    documents = Documents.of(arguments.documents, budget)
    functions = covered(module)
    cases = _chosen_cases(arguments, place, module, functions, documents)
    if arguments.list:
        console.print("\n".join(case.name for case in cases), highlight=False)
        return AGREES
    lengths, where = sorted(documents.lengths), place.describe(backend)
    shown = ", ".join(map(str, lengths[:12])) + ", ..." * (len(lengths) > 12)
    console.print(
        f"{len(cases)} cases of [bold]{name}[/] on {where}; {len(lengths)} documents, "
        f"{documents.tokens} tokens: {shown}",
        highlight=False,
    )
    runner = CaseRunner(name, tuple(cases), place.device, backend=backend, runs=arguments.runs)
    results, interrupted = run_groups(place.kind, [(place.ranks, runner)], console)
    console.print(check_report.table(results, name))
    check_report.faults(results, console)
    for names, why in (
        (functions.absent, f"Skipped, because {name} does not have them"),
        (functions.imported, f"Skipped, because {name} imports them from canon"),
        (functions.untried, "Public functions without a case"),
    ):
        if names:
            console.print(f"{why}: {', '.join(names)}.")
    names = (Path(x).name if Path(x).is_absolute() else x for x in documents.names)
    record.write(
        arguments.record,
        check_report.command_of(arguments, ranks=place.ranks),
        results,
        module=name,
        world=where,
        ranks=place.ranks,
        documents=dict(zip(names, documents.lengths, strict=True)),
        absent=functions.absent,
        untried=functions.untried,
    )
    console.print(f"Record: {arguments.record}.", highlight=False)
    agree = check_report.summary([result["verdict"] for result in results], console)
    return INTERRUPTED if interrupted else AGREES if agree else DISAGREES


def _chosen_cases(
    arguments: argparse.Namespace,
    place: Placement,
    module: Any,
    functions: Coverage,
    documents: Documents,
) -> list[Case]:
    dtypes = arguments.dtype or _default_dtypes(place.device, arguments.backend)
    cases = [
        case
        for case in all_cases(dtypes, place.device == "cuda", documents)
        if case.function in functions.tested and accepts(module, case)
    ]
    if not cases:
        raise nothing_to_check(module, {*functions.absent, *functions.imported})
    if text := arguments.features:
        even = documents.tokens % place.ranks == 0
        cases = contract.limited(cases, contract.features(text), even)
        if not cases:
            left = ", ".join(functions.tested)
            raise ValueError(f"--features {text} leaves no case of {left}")
    chosen = [case for case in cases if matches(case.name, arguments.only)]
    if not chosen:
        only = arguments.only
        raise ValueError(f"no case matches {only!r}; --list prints the names of the cases")
    return chosen


def _default_dtypes(device: str, backend: str | None) -> list[str]:
    if backend in ("gluon", "cuda"):
        return ["bfloat16", "float16"]  # the only dtypes of these backends
    on_gpu = device == "cuda"
    return ["bfloat16", "float16", "float32"] if on_gpu else ["bfloat16", "float32", "float64"]
