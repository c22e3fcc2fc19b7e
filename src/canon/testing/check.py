"""`canon check`: does a module compute what the reference defines, on real documents, over several ranks?

choose the world    all GPUs, one process each; or one GPU, ranks as threads; or the CPU, ranks as threads
run the cases       `trial` on every rank; after a failure a fresh world goes on with the cases that are left
show and keep       table, faults, picture, record; 0 only if everything agrees
"""

import argparse
import importlib
import json
import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from canon import reference
from canon.testing import check_report, contract, process_groups, random_check, random_record, record, warming
from canon.testing.case_runner import CaseRunner
from canon.testing.cases import Case, all_cases, covered
from canon.testing.documents import Documents
from canon.testing.inputs import FromDocuments
from canon.testing.options import BUDGET, PICTURE, RECORD, add_arguments
from canon.testing.run_cases import Interrupted, run_cases

AGREES, DISAGREES, MISUSED, INTERRUPTED = 0, 1, 2, 130
__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Check, show and keep what `add_arguments` asked for. Returns the exit status."""
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    try:
        if arguments.template:
            console.print(contract.TEMPLATE, markup=False, highlight=False, soft_wrap=True, end="")
            return AGREES
        if arguments.merge:
            return _merged(arguments, console)
        kind, device, ranks = _world(arguments.world, arguments.ranks)
        _interpret_if(device == "cpu", console)
        module = _module(arguments.module)
        if arguments.backend and arguments.module != "canon.fast":
            raise _Misuse(f"--backend chooses kernels of canon.fast, not of {arguments.module}")
        if arguments.runs < 1:
            raise _Misuse(f"--runs must be at least 1, got {arguments.runs}")
        if arguments.random is not None:
            return _random(arguments, console, kind, device, module)
        return _fixed(arguments, console, kind, device, ranks, module)
    except ValueError as error:
        print(f"canon check: {error}", file=sys.stderr)
        return MISUSED


def _fixed(arguments: argparse.Namespace, console: Console, kind: str, device: str, ranks: int, module: Any) -> int:
    """The cases of `canon.testing.cases`, on documents."""
    if arguments.seed is not None or arguments.first is not None:
        raise _Misuse("--seed and --first choose random cases: give --random N, too")
    budget = arguments.tokens or (None if arguments.documents else BUDGET[device])
    documents = Documents.of(arguments.documents, budget)
    cases, absent, untried = _chosen(module, arguments, device, documents.tokens % ranks == 0)
    if arguments.list:
        console.print("\n".join(case.name for case in cases), highlight=False)
        return AGREES
    where = _describe(kind, device, ranks, arguments.backend)
    key = record.digest(record.source(arguments.module), where, arguments.runs, arguments.features, documents)
    known = _known(arguments, key)
    left = tuple(case for case in cases if case.name not in known)
    console.print(f"{len(cases)} cases of [bold]{arguments.module}[/] on {where}; {len(documents.lengths)} documents, "
                  f"{documents.tokens} tokens: {_lengths(documents)}", highlight=False)  # fmt: skip
    source = FromDocuments(documents)
    trial = CaseRunner(arguments.module, left, source, device, Path(), arguments.backend, arguments.runs)
    interrupted = False
    try:
        if left and warming.worth_it(device):
            console.print(warming.warm([(ranks, trial)]), highlight=False)
        results = run_cases(kind, ranks, trial, len(cases) - len(left), len(cases))
    except Interrupted as error:
        results, interrupted = error.results, True
    found = known | {result["case"]: result for result in results}
    results = [found[case.name] for case in cases if case.name in found]
    if interrupted:
        console.print(
            f"[bold red]Interrupted: {len(results)} of {len(cases)} cases have run; --resume runs the others."
        )
    status = _show(arguments, console, results, documents, absent, untried, where, ranks, key)
    return INTERRUPTED if interrupted else status


def _known(arguments: argparse.Namespace, key: str) -> dict[str, dict[str, Any]]:
    """Results that the record has, of the same code and arguments; an exception is no result."""
    path = arguments.record or RECORD
    if not arguments.resume or not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text())
        results = kept["results"] if kept["key"] == key else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Misuse(f"--resume: {path} is not a record of canon check that can be resumed: {error!r}") from error
    return {result["case"]: result for result in results if result["verdict"] != "failed"}


def _random(arguments: argparse.Namespace, console: Console, kind: str, device: str, module: Any) -> int:
    given = {"--documents": arguments.documents, "--tokens": arguments.tokens, "--dtype": arguments.dtype,
             "--only": arguments.only, "--list": arguments.list, "--features": arguments.features,
             "--picture": arguments.picture, "--resume": arguments.resume}  # fmt: skip
    if useless := [name for name, value in given.items() if value]:
        raise _Misuse(f"--random draws its own cases and always resumes: leave {', '.join(useless)} out")
    arguments.seed, arguments.first = arguments.seed or 0, arguments.first or 0
    if arguments.random < 1 or arguments.first < 0 or not 1 <= (arguments.ranks or 1) <= random_check.RANKS:
        raise _Misuse(f"--random takes N >= 1, --first I >= 0 and --ranks 1 to {random_check.RANKS}, the largest world")
    kind = "threads" if arguments.world == "auto" else kind
    try:
        wrong = random_check.run(arguments, console, kind, device, covered(module, reference)[0])
    except Interrupted:
        console.print("[bold red]Interrupted; the record holds what had finished.")
        return INTERRUPTED
    return DISAGREES if wrong else AGREES


def _merged(arguments: argparse.Namespace, console: Console) -> int:
    if not arguments.record:
        raise _Misuse("--merge needs --record PATH, where the merged record goes")
    kept = random_record.merge(arguments.merge)
    random_record.write(arguments.record, kept)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in random_record.counts(kept).items())
    console.print(f"Record: {arguments.record}, of {len(kept['runs'])} runs: {counts}.", highlight=False)
    return AGREES


class _Misuse(ValueError):
    """The command cannot be carried out as it was given."""


def _world(asked: str, ranks: int | None) -> tuple[str, str, int]:
    """(kind, device, ranks)."""
    gpus = process_groups.kernel_gpus()
    if ranks is not None and ranks < 1:
        raise _Misuse(f"--ranks must be at least 1, got {ranks}")
    kind = asked if asked != "auto" else "gpus" if gpus > 1 and (ranks or gpus) <= gpus else "threads"
    if kind == "gpus":
        if (ranks or 1) > gpus:
            raise _Misuse(f"--world gpus: {ranks or 1} ranks need as many GPUs, there are {gpus} "
                          "(none under TRITON_INTERPRET=1)")  # fmt: skip
        return kind, "cuda", ranks or gpus
    return kind, "cuda" if gpus and kind == "threads" else "cpu", ranks or 4


def _interpret_if(on_cpu: bool, console: Console) -> None:
    if not on_cpu:
        return
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, which is when the module is imported
    try:
        from canon.fast.kernels.interpreter import repair

        repair()
    except ModuleNotFoundError:
        return  # no Triton here: a module that needs it will say so
    console.print("No GPU in use: Triton's kernels run in its interpreter on the CPU (TRITON_INTERPRET=1).")


def _module(name: str) -> Any:
    sys.path.insert(0, "") if "" not in sys.path else None  # one's own module in the folder where one stands
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _Misuse(f"cannot import {name}: {error}") from error


def _default_dtypes(device: str, backend: str | None) -> list[str]:
    if backend == "gluon":
        return ["bfloat16", "float16"]  # it has no others
    return ["bfloat16", "float32", "float64"] if device == "cpu" else ["bfloat16", "float16", "float32"]


def _chosen(module: Any, arguments, device: str, even: bool) -> tuple[list[Case], list[str], list[str]]:
    dtypes = arguments.dtype or _default_dtypes(device, arguments.backend)
    functions, absent, untried = covered(module, reference)
    cases = [case for case in all_cases(dtypes, device == "cuda") if case.function in functions]
    if not cases:
        raise _Misuse(f"{module.__name__} has none of the functions {', '.join(absent)}")
    if arguments.features:
        cases = contract.limited(cases, contract.features(arguments.features), even)
        if not cases:
            raise _Misuse(f"--features {arguments.features} leaves no case of {', '.join(functions)}")
    if arguments.only:
        cases = [case for case in cases if fnmatch(case.name, f"*{arguments.only}*")]
        if not cases:
            raise _Misuse(f"no case matches {arguments.only!r}; --list shows their names")
    return cases, absent, untried


def _describe(kind: str, device: str, ranks: int, backend: str | None) -> str:
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    many = f"{ranks} rank{'s' * (ranks > 1)}"
    kernels = f", {backend} kernels" + ", simulated" * (backend == "gluon" and device == "cpu") if backend else ""
    places = {
        "gpus": f"{many}, a process and a {gpu} each (NCCL)",
        "processes": f"{many}, a process on the CPU each (gloo)",
        "threads": f"{many}, threads sharing " + (f"one {gpu}" if gpu else "the CPU"),
    }
    return places[kind] + kernels


def _lengths(documents: Documents) -> str:
    shown = ", ".join(map(str, sorted(documents.lengths)[:12]))
    return shown + (", ..." if len(documents.lengths) > 12 else "")


# ---------------------------------------------------------------------- showing
def _show(arguments, console, results, documents, absent, untried, where: str, ranks: int, key: str) -> int:
    console.print(check_report.table(results, arguments.module))
    check_report.faults(results, console)
    if absent:
        console.print(f"Skipped, because {arguments.module} does not have them: {', '.join(absent)}.")
    if untried:
        console.print(f"Public, but no case tries them: {', '.join(untried)}.")
    wrong = [result for result in results if result["verdict"] in {"disagrees", "failed"}]
    kept = record.write(
        arguments.record or RECORD,
        _command(arguments, ranks),
        results,
        key=key,
        module=arguments.module,
        world=where,
        ranks=ranks,
        documents=dict(zip(map(_base, documents.names), documents.lengths, strict=True)),
        absent=absent,
        untried=untried,
    )
    picture = arguments.picture or PICTURE
    if check_report.picture(results, picture, f"{arguments.module} on {where}"):
        console.print(f"Record: {kept}. Picture: {picture}.", highlight=False)
    else:
        console.print(f"Record: {kept}. No picture: it takes matplotlib (pip install matplotlib).", highlight=False)
    declined = sum(result["verdict"] == "declined" for result in results)
    agreeing = len(results) - len(wrong) - declined
    told = f"{agreeing} of {len(results)} cases agree" + (f", {declined} declined" if declined else "")
    console.print(f"[bold red]{told}, {len(wrong)} do not." if wrong else f"[bold green]{told}.")
    return DISAGREES if wrong or not agreeing else AGREES


def _command(arguments, ranks: int) -> str:
    """The command without the paths of whoever gave it."""
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
