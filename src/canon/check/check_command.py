"""Run `canon check`: choose the ranks, run the cases, report.

After a failure, new ranks run the remaining cases. The exit status is 0 only if all cases agree.
"""

import argparse
import importlib
import json
import os
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from canon import reference
from canon.check import check_report, contract, random_check, rank_digests, warming
from canon.check.case_runner import CaseRunner
from canon.check.cases import Case, accepts, all_cases, covered, declined_by
from canon.check.documents import Documents
from canon.check.inputs import FromDocuments
from canon.check.options import BUDGET, RECORD, add_arguments
from canon.check.run_cases import Interrupted, run_cases
from canon.testing import process_groups, record

AGREES, DISAGREES, MISUSED, INTERRUPTED = 0, 1, 2, 130
__all__ = ["add_arguments", "run"]


class _Misuse(ValueError):
    """The arguments are invalid."""


@dataclass(frozen=True)
class _Placement:
    kind: str  # "threads", "processes" or "gpus": a function of `process_groups`
    device: str  # "cpu" or "cuda"
    ranks: int

    def describe(self, backend: str | None) -> str:
        gpu = torch.cuda.get_device_name() if self.device == "cuda" else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        simulated = ", simulated" * (backend == "gluon" and self.device == "cpu")
        places = {
            "gpus": f"{ranks}, each a process with its own {gpu} (NCCL)",
            "processes": f"{ranks}, each a process on the CPU (gloo)",
            "threads": f"{ranks}, threads that share " + (f"one {gpu}" if gpu else "the CPU"),
        }
        return places[self.kind] + (f", {backend} kernels{simulated}" if backend else "")


@dataclass(frozen=True)
class _Check:
    cases: list[Case]
    absent: list[str]  # functions that the module lacks
    untried: list[str]  # public functions without a case
    documents: Documents
    where: str
    ranks: int
    key: str  # digest of the code and the arguments


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Run the check that `arguments` describe, and return the exit status."""
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    try:
        if arguments.template:
            console.print(contract.TEMPLATE, markup=False, highlight=False, soft_wrap=True, end="")
            return AGREES
        placement = _placement(arguments.world, arguments.ranks)
        _interpret_if(placement.device == "cpu", None if arguments.digest else console)
        module = _module(arguments.module)
        if arguments.backend and arguments.module != "canon.fast":
            raise _Misuse(f"--backend chooses kernels of canon.fast; {arguments.module} has no backends")
        if arguments.backend == "cuda" and placement.device == "cpu":
            raise _Misuse("--backend cuda needs a GPU: its kernels do not run on a CPU")
        if arguments.runs < 1:
            raise _Misuse(f"--runs must be at least 1, got {arguments.runs}")
        if arguments.random is not None:
            return _random(arguments, console, placement, module)
        return _fixed(arguments, console, placement, module)
    except ValueError as error:
        print(f"canon check: {error}", file=sys.stderr)
        return MISUSED


def _fixed(arguments: argparse.Namespace, console: Console, placement: _Placement, module: Any) -> int:
    if arguments.seed is not None or arguments.first is not None:
        raise _Misuse("--seed and --first need --random N")
    device, ranks = placement.device, placement.ranks
    budget = arguments.tokens or (None if arguments.documents else BUDGET[device])
    documents = Documents.of(arguments.documents, budget)
    digests = _digest_runner(arguments, module, documents, placement)
    if arguments.digest:
        return _digests_alone(digests, placement, console)
    cases, absent, untried = _choose_cases(module, arguments, device, documents.tokens % ranks == 0, digests)
    if arguments.list:
        names = [case.name for case in cases] + list(dict.fromkeys(call.inputs for call in digests.calls))
        console.print("\n".join(names), highlight=False)
        return AGREES
    where = placement.describe(arguments.backend)
    key = record.digest(record.source(arguments.module), where, arguments.runs, arguments.features, documents)
    check = _Check(cases, absent, untried, documents, where, ranks, key)
    console.print(f"{len(cases)} cases of [bold]{arguments.module}[/] on {where}; {len(documents.lengths)} documents, "
                  f"{documents.tokens} tokens: {_lengths(documents)}", highlight=False)  # fmt: skip
    results, interrupted = _run_cases(arguments, console, placement, check)
    if interrupted:
        console.print(
            f"[bold red]Interrupted: {len(results)} of {len(cases)} cases have run; --resume runs the others."
        )
    invariance = [] if interrupted else rank_digests.compare(placement.kind, digests)
    status = _report(arguments, console, check, results, invariance)
    return INTERRUPTED if interrupted else status


def _digest_runner(
    arguments: argparse.Namespace, module: Any, documents: Documents, placement: _Placement
) -> rank_digests.DigestRunner:
    dtypes = arguments.dtype or _default_dtypes(placement.device, arguments.backend)
    options = placement.ranks, dtypes, placement.device == "cuda", arguments.only
    calls = [] if arguments.features else rank_digests.calls_of(module, *options)
    calls = [call for call in calls if not declined_by(arguments.backend, call.case)]
    given = arguments.module, (), FromDocuments(documents), placement.device, Path(), arguments.backend
    return rank_digests.DigestRunner(*given, calls=tuple(calls))


def _digests_alone(runner: rank_digests.DigestRunner, placement: _Placement, console: Console) -> int:
    if not runner.calls:
        raise _Misuse(
            f"--digest: {runner.module} has no function with the option rank_invariant, or --only leaves none"
        )
    results = rank_digests.compare(placement.kind, runner)
    rank_digests.show(results, console, alone=True)
    return DISAGREES if any(result["faults"] for result in results) else AGREES


def _run_cases(
    arguments: argparse.Namespace, console: Console, placement: _Placement, check: _Check
) -> tuple[list[dict[str, Any]], bool]:
    known = _known_results(arguments, check.key)
    left = tuple(case for case in check.cases if case.name not in known)
    source, interrupted = FromDocuments(check.documents), False
    runner = CaseRunner(arguments.module, left, source, placement.device, Path(), arguments.backend, arguments.runs)
    try:
        if left and warming.worth_it(placement.device):
            console.print(warming.warm([(placement.ranks, runner)]), highlight=False)
        total = len(check.cases)
        results = run_cases(placement.kind, placement.ranks, runner, total - len(left), total)
    except Interrupted as error:
        results, interrupted = error.results, True
    found = known | {result["case"]: result for result in results}
    return [found[case.name] for case in check.cases if case.name in found], interrupted


def _known_results(arguments: argparse.Namespace, key: str) -> dict[str, dict[str, Any]]:
    """Return the results that the record holds for the same code and arguments. Failed cases run again."""
    path = arguments.record or RECORD
    if not arguments.resume or not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text())
        results = kept["results"] if kept["key"] == key else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Misuse(f"--resume: cannot read {path} as a record of canon check: {error!r}") from error
    return {result["case"]: result for result in results if result["verdict"] != "failed"}


def _random(arguments: argparse.Namespace, console: Console, placement: _Placement, module: Any) -> int:
    given = {"--documents": arguments.documents, "--tokens": arguments.tokens, "--dtype": arguments.dtype,
             "--only": arguments.only, "--list": arguments.list, "--digest": arguments.digest, "--features": arguments.features,
             "--resume": arguments.resume}  # fmt: skip
    if useless := [name for name, value in given.items() if value]:
        raise _Misuse(f"--random draws its own cases and always resumes: leave {', '.join(useless)} out")
    arguments.seed, arguments.first = arguments.seed or 0, arguments.first or 0
    if arguments.random < 1 or arguments.first < 0 or not 1 <= (arguments.ranks or 1) <= random_check.RANKS:
        raise _Misuse(f"--random needs N >= 1, --first I >= 0 and --ranks from 1 to {random_check.RANKS}")
    kind = "threads" if arguments.world == "auto" else placement.kind
    try:
        wrong = random_check.run(arguments, console, kind, placement.device, module)
    except Interrupted:
        console.print("[bold red]Interrupted; the record holds the finished cases.")
        return INTERRUPTED
    return DISAGREES if wrong else AGREES


def _placement(world: str, ranks: int | None) -> _Placement:
    gpus = process_groups.kernel_gpus()
    if ranks is not None and ranks < 1:
        raise _Misuse(f"--ranks must be at least 1, got {ranks}")
    kind = world if world != "auto" else "gpus" if gpus > 1 and (ranks or gpus) <= gpus else "threads"
    if kind == "gpus":
        if (ranks or 1) > gpus:
            raise _Misuse(f"--world gpus needs a GPU for each rank: {ranks or 1} ranks, {gpus} GPUs "
                          "(none under TRITON_INTERPRET=1)")  # fmt: skip
        return _Placement(kind, "cuda", ranks or gpus)
    return _Placement(kind, "cuda" if gpus and kind == "threads" else "cpu", ranks or 4)


def _interpret_if(on_cpu: bool, console: Console | None) -> None:
    if not on_cpu:
        return
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads the variable when a module defines its kernels
    try:
        from canon.fast.kernels.interpreter import repair

        repair()
    except ModuleNotFoundError:
        return  # no Triton: the import of a module that needs it will fail
    if console:
        console.print("No GPU in use: Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1).")


def _module(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _Misuse(f"cannot import {name}: {error}") from error


def _choose_cases(
    module: Any, arguments, device: str, even: bool, digests: rank_digests.DigestRunner
) -> tuple[list[Case], list[str], list[str]]:
    dtypes = arguments.dtype or _default_dtypes(device, arguments.backend)
    functions, absent, untried = covered(module, reference)
    cases = [case for case in all_cases(dtypes, device == "cuda") if case.function in functions]
    cases = [case for case in cases if accepts(module, case)]
    if not cases:
        raise _Misuse(f"{module.__name__} has none of the functions {', '.join(absent)}")
    if arguments.features:
        cases = contract.limited(cases, contract.features(arguments.features), even)
        if not cases:
            raise _Misuse(f"--features {arguments.features} leaves no case of {', '.join(functions)}")
    if arguments.only:
        cases = [case for case in cases if fnmatch(case.name, f"*{arguments.only}*")]
        if not cases and not digests.calls:
            raise _Misuse(f"no case matches {arguments.only!r}; --list prints the names of the cases")
    return cases, absent, untried


def _default_dtypes(device: str, backend: str | None) -> list[str]:
    if backend in ("gluon", "cuda"):
        return ["bfloat16", "float16"]  # the only dtypes of these backends
    return ["bfloat16", "float32", "float64"] if device == "cpu" else ["bfloat16", "float16", "float32"]


def _report(
    arguments, console: Console, check: _Check, results: list[dict[str, Any]], invariance: list[dict[str, Any]]
) -> int:
    console.print(check_report.table(results, arguments.module))
    check_report.faults(results, console)
    rank_digests.show(invariance, console)
    if check.absent:
        console.print(f"Skipped, because {arguments.module} does not have them: {', '.join(check.absent)}.")
    if check.untried:
        console.print(f"Public functions without a case: {', '.join(check.untried)}.")
    kept = _write_record(arguments, check, results, invariance)
    console.print(f"Record: {kept}.", highlight=False)
    verdicts = [result["verdict"] for result in results]
    agree, declined = verdicts.count("agrees"), verdicts.count("declined")
    wrong = len(results) - agree - declined
    summary = f"{agree} of {len(results)} cases agree" + (f", {declined} declined" if declined else "")
    console.print(f"[bold red]{summary}, {wrong} do not." if wrong else f"[bold green]{summary}.")
    if unequal := sum(bool(result["faults"]) for result in invariance):
        console.print(
            f"[bold red]The bits depend on the ranks or the layout for {unequal} of {len(invariance)} inputs."
        )
    none_agrees = not agree and (results or not invariance)
    return DISAGREES if wrong or unequal or none_agrees else AGREES


def _write_record(arguments, check: _Check, results: list[dict[str, Any]], invariance: list[dict[str, Any]]) -> Path:
    documents = check.documents
    return record.write(
        arguments.record or RECORD,
        _command(arguments, check.ranks),
        results,
        key=check.key,
        module=arguments.module,
        world=check.where,
        ranks=check.ranks,
        documents=dict(zip(map(_base, documents.names), documents.lengths, strict=True)),
        absent=check.absent,
        untried=check.untried,
        rank_invariance=invariance,
    )


def _command(arguments, ranks: int) -> str:
    words = ["canon check", arguments.module, f"--ranks {ranks}", f"--world {arguments.world}"]
    words += [f"--dtype {name}" for name in arguments.dtype or ()]
    words += [f"--documents {' '.join(path.name for path in arguments.documents)}"] if arguments.documents else []
    words += [f"--backend {arguments.backend}"] if arguments.backend else []
    words += [f"--tokens {arguments.tokens}"] if arguments.tokens else []
    words += [f"--runs {arguments.runs}"] if arguments.runs != 2 else []
    words += [f"--features {arguments.features}"] if arguments.features else []
    words += [f"--only '{arguments.only}'"] if arguments.only else []
    return " ".join(words)


def _base(name: str) -> str:
    return Path(name).name if Path(name).is_absolute() else name


def _lengths(documents: Documents) -> str:
    shown = ", ".join(map(str, sorted(documents.lengths)[:12]))
    return shown + (", ..." if len(documents.lengths) > 12 else "")
