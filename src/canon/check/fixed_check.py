"""Run the fixed cases of `canon check`, and report."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from canon.check import check_report, contract, warming
from canon.check.case_runner import CaseRunner
from canon.check.cases import Case, accepts, all_cases, covered, matches, nothing_to_check
from canon.check.check_report import AGREES, DISAGREES, INTERRUPTED
from canon.check.documents import Documents
from canon.check.inputs import FromDocuments
from canon.check.placement import Placement
from canon.check.run_cases import Interrupted, run_cases
from canon.testing import record

BUDGET = {"cpu": 600, "cuda": 4096}  # tokens of the repository's documents
RECORD = Path("canon-check/record.json")


class FixedCheck:
    """A check of the cases of the table."""

    def __init__(
        self, arguments: argparse.Namespace, console: Console, placement: Placement, module: Any
    ):
        self.arguments, self.print, self.console = arguments, console.print, console
        self.placement, self.module, self.functions = placement, module, covered(module)
        self.gpu = placement.device == "cuda"
        budget = arguments.tokens or (None if arguments.documents else BUDGET[placement.device])
        self.documents = Documents.of(arguments.documents, budget)
        self.dtypes = arguments.dtype or _default_dtypes(self.gpu, arguments.backend)
        self.where = placement.describe(arguments.backend)
        self.path = arguments.record or RECORD
        self.given = arguments.module, FromDocuments(self.documents), placement.device

    def run(self) -> int:
        cases, name = self.chosen_cases(), self.arguments.module
        if not cases:
            only = self.arguments.only
            raise ValueError(f"no case matches {only!r}; --list prints the names of the cases")
        if self.arguments.list:
            self.print("\n".join(case.name for case in cases), highlight=False)
            return AGREES
        lengths = sorted(self.documents.lengths)
        shown = ", ".join(map(str, lengths[:12])) + ", ..." * (len(lengths) > 12)
        self.print(
            f"{len(cases)} cases of [bold]{name}[/] on {self.where}; {len(lengths)} documents, "
            f"{self.documents.tokens} tokens: {shown}",
            highlight=False,
        )
        results, interrupted = self.run_cases(cases)
        if interrupted:
            self.print(f"[bold red]Interrupted: {len(results)} of {len(cases)} cases have run.")
        status = self.report(results)
        return INTERRUPTED if interrupted else status

    def chosen_cases(self) -> list[Case]:
        cases = [
            case
            for case in all_cases(self.dtypes, self.gpu)
            if case.function in self.functions.tested and accepts(self.module, case)
        ]
        if not cases:
            names = {*self.functions.absent, *self.functions.imported}
            raise nothing_to_check(self.module, names)
        if text := self.arguments.features:
            even = self.documents.tokens % self.placement.ranks == 0
            cases = contract.limited(cases, contract.features(text), even, self.module)
            if not cases:
                left = ", ".join(self.functions.tested)
                raise ValueError(f"--features {text} leaves no case of {left}")
        return [case for case in cases if matches(case.name, self.arguments.only)]

    def run_cases(self, cases: list[Case]) -> tuple[list[dict[str, Any]], bool]:
        """Return the results, and whether Ctrl-C came."""
        kind, ranks = self.placement.kind, self.placement.ranks
        name, *given = self.given
        settings = {"backend": self.arguments.backend, "runs": self.arguments.runs}
        runner = CaseRunner(name, tuple(cases), *given, **settings)
        try:
            if warming.worth_it(self.placement.device, self.module):
                self.print(warming.warm([(ranks, runner)]), highlight=False)
            return run_cases(kind, ranks, runner), False
        except Interrupted as error:
            return error.results, True

    def report(self, results: list[dict[str, Any]]) -> int:
        name, functions = self.arguments.module, self.functions
        self.print(check_report.table(results, name))
        check_report.faults(results, self.console)
        for names, why in (
            (functions.absent, f"Skipped, because {name} does not have them"),
            (functions.imported, f"Skipped, because {name} imports them from canon"),
            (functions.untried, "Public functions without a case"),
        ):
            if names:
                self.print(f"{why}: {', '.join(names)}.")
        self.print(f"Record: {self.write_record(results)}.", highlight=False)
        verdicts = [result["verdict"] for result in results]
        wrong = check_report.summary(verdicts, self.console)
        return DISAGREES if wrong or "agrees" not in verdicts else AGREES

    def write_record(self, results: list[dict[str, Any]]) -> Path:
        ranks = self.placement.ranks
        names = (Path(x).name if Path(x).is_absolute() else x for x in self.documents.names)
        return record.write(
            self.path,
            check_report.command_of(self.arguments, ranks=ranks),
            results,
            module=self.arguments.module,
            world=self.where,
            ranks=ranks,
            documents=dict(zip(names, self.documents.lengths, strict=True)),
            absent=self.functions.absent,
            untried=self.functions.untried,
        )


def _default_dtypes(gpu: bool, backend: str | None) -> list[str]:
    if backend in ("gluon", "cuda"):
        return ["bfloat16", "float16"]  # the only dtypes of these backends
    return ["bfloat16", "float16", "float32"] if gpu else ["bfloat16", "float32", "float64"]
