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
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from canon import reference
from canon.testing import record, report, world
from canon.testing.cases import DTYPES, Case, all_cases, covered
from canon.testing.documents import Documents
from canon.testing.trial import CaseFailed, Trial

AGREES, DISAGREES, MISUSED = 0, 1, 2
_RESTARTS = 5  # of worlds made of processes, after failures
_BUDGET = {"cpu": 600, "cuda": 4096}  # tokens of the repository's documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `canon check`."""
    add = parser.add_argument
    add("module", nargs="?", default="canon.fast", metavar="MODULE",
        help="module to check, any that has functions of the reference's names (default: canon.fast)")  # fmt: skip
    add("--ranks", type=int, metavar="N", help="ranks that hold the sequence together (default: 4, or all GPUs)")
    add("--documents", type=Path, nargs="+", default=[], metavar="PATH",
        help="files, or folders of text files, to attend over (default: files of this repository)")  # fmt: skip
    add("--tokens", type=int, metavar="N",
        help="read documents only up to so many tokens, a token being a byte (default: no limit on --documents, "
             f"{_BUDGET['cpu']} on the CPU and {_BUDGET['cuda']} on GPUs for the repository's)")  # fmt: skip
    add("--dtype", action="append", choices=list(DTYPES), metavar="DTYPE",
        help=f"one of {', '.join(DTYPES)}; may be repeated, the cases then take turns "
             "(default: all but float16 on the CPU, all but float64 on GPUs)")  # fmt: skip
    add("--backend", choices=["triton", "gluon"], metavar="FAMILY",
        help="kernels of canon.fast, triton or gluon; the latter run on Hopper, and CPUs simulate them (default: its own "
             "choice)")  # fmt: skip
    add("--runs", type=int, default=2, metavar="N",
        help="how often each case is run; all runs must give the same bits (default: %(default)s)")  # fmt: skip
    add("--only", metavar="PATTERN", help="run the cases whose name contains PATTERN (with * and ?)")
    add("--list", action="store_true", help="print the names of the cases and stop")
    add("--world", choices=["auto", "threads", "processes", "gpus"], default="auto",
        help="ranks as threads of one process, as processes on the CPU, or as one process per GPU (default: auto)")  # fmt: skip
    add("--record", type=Path, default=Path("canon-check/record.json"), metavar="PATH",
        help="where the record goes (default: %(default)s)")  # fmt: skip
    add("--picture", type=Path, default=Path("canon-check/errors.png"), metavar="PATH",
        help="where the picture goes (default: %(default)s)")  # fmt: skip


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Check, show and keep what `add_arguments` asked for. Returns the exit status."""
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    try:
        kind, device, ranks = _world(arguments.world, arguments.ranks)
        _interpret_if(device == "cpu", console)
        module = _module(arguments.module)
        if arguments.backend and arguments.module != "canon.fast":
            raise _Misuse(f"--backend chooses kernels of canon.fast, not of {arguments.module}")
        if arguments.runs < 1:
            raise _Misuse(f"--runs must be at least 1, got {arguments.runs}")
        dtypes = arguments.dtype or _default_dtypes(device, arguments.backend)
        cases, absent, untried = _chosen(module, dtypes, device, arguments.only)
        if arguments.list:
            console.print("\n".join(case.name for case in cases), highlight=False)
            return AGREES
        budget = arguments.tokens or (None if arguments.documents else _BUDGET[device])
        documents = Documents.of(arguments.documents, budget)
    except ValueError as error:
        print(f"canon check: {error}", file=sys.stderr)
        return MISUSED
    where = _describe(kind, device, ranks)
    if arguments.backend:
        where += f", {arguments.backend} kernels" + ", simulated" * (arguments.backend == "gluon" and device == "cpu")
    console.print(f"{len(cases)} cases of [bold]{arguments.module}[/] on {where}; {len(documents.lengths)} documents, "
                  f"{documents.tokens} tokens: {_lengths(documents)}", highlight=False)  # fmt: skip
    trial = Trial(arguments.module, tuple(cases), documents, device, Path(), arguments.backend, arguments.runs)
    results = _results(kind, ranks, trial)
    return _show(arguments, console, results, documents, absent, untried, where, ranks)


class _Misuse(ValueError):
    """The command cannot be carried out as it was given."""


def _world(asked: str, ranks: int | None) -> tuple[str, str, int]:
    """(kind, device, ranks)."""
    gpus = world.kernel_gpus()
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


def _chosen(module: Any, dtypes: list[str], device: str, only: str | None) -> tuple[list[Case], list[str], list[str]]:
    functions, absent, untried = covered(module, reference)
    cases = [case for case in all_cases(dtypes, device == "cuda") if case.function in functions]
    if not cases:
        raise _Misuse(f"{module.__name__} has none of the functions {', '.join(absent)}")
    if only:
        cases = [case for case in cases if fnmatch(case.name, f"*{only}*")]
        if not cases:
            raise _Misuse(f"no case matches {only!r}; --list shows their names")
    return cases, absent, untried


def _describe(kind: str, device: str, ranks: int) -> str:
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    many = f"{ranks} rank{'s' * (ranks > 1)}"
    return {
        "gpus": f"{many}, a process and a {gpu} each (NCCL)",
        "processes": f"{many}, a process on the CPU each (gloo)",
        "threads": f"{many}, threads sharing " + (f"one {gpu}" if gpu else "the CPU"),
    }[kind]


def _lengths(documents: Documents) -> str:
    shown = ", ".join(map(str, sorted(documents.lengths)[:12]))
    return shown + (", ..." if len(documents.lengths) > 12 else "")


# ---------------------------------------------------------------------- running
def _results(kind: str, ranks: int, trial: Trial) -> list[dict[str, Any]]:
    """A result for every case, in order; a case that ends a world has failed, and a fresh world runs the others."""
    results: dict[str, dict[str, Any]] = {}
    restarts = 0
    while left := [case for case in trial.cases if case.name not in results]:
        with tempfile.TemporaryDirectory(prefix="canon-check-") as folder:
            some = replace(trial, cases=tuple(left), sink=Path(folder) / "results")
            some.sink.touch()
            error = _go(partial(_start(kind, len(left)), some, ranks), some.sink, len(results), len(trial.cases))
            results |= {result["case"]: result for result in map(json.loads, _lines(some.sink))}
        if error is None:
            break
        cause = error.__cause__
        named = cause.args[0] if isinstance(cause, CaseFailed) else None
        name = named or next((case.name for case in left if case.name not in results), None)
        if name is None:
            raise error
        results[name] = _failed(name, error)
        restarts += kind != "threads"
        if restarts > _RESTARTS:
            results |= {c.name: _failed(c.name, "not run: too many failures") for c in left if c.name not in results}
    return [results[case.name] for case in trial.cases]


def _start(kind: str, cases: int) -> Callable:
    return partial(getattr(world, kind), timeout=120 + 20 * cases) if kind != "threads" else world.threads


def _failed(name: str, error: Exception | str) -> dict[str, Any]:
    """float64 is an offer: hardware kernels may decline it. All else must run."""
    cause = getattr(error, "__cause__", None)
    told = f"{str(error).split(':')[0]}: {cause}" if isinstance(cause, CaseFailed) else str(error)
    declined = "/float64" in name and str(cause).startswith(("ValueError", "NotImplementedError", "TypeError"))
    return {
        "case": name,
        "verdict": "declined" if declined else "failed",
        "faults": [told],
        "measures": [],
        "same_bits": None,
        "seconds": [],
        "reference_seconds": [],
    }


def _lines(sink: Path) -> list[str]:
    """The lines that are there in full."""
    return sink.read_text().split("\n")[:-1]


def _go(start: Callable[[], Any], sink: Path, done: int, total: int) -> Exception | None:
    """Run a world, showing how far it is, as a bar or, where nobody watches, in lines; returns its error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, ended = Console(stderr=True), threading.Event()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking", total=total, completed=done)

        def follow() -> None:
            told, last = 0, False
            while not last:
                last = ended.wait(0.3)
                finished = _lines(sink)
                progress.update(task, completed=done + len(finished))
                if not console.is_terminal:
                    for number, line in enumerate(finished[told:], done + told + 1):
                        result = json.loads(line)
                        print(f"{number}/{total} {result['case']} {result['verdict']}", file=sys.stderr, flush=True)
                told = len(finished)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            start()
        except (RuntimeError, TimeoutError) as error:
            return error
        finally:
            ended.set()
            follower.join()
    return None


# ---------------------------------------------------------------------- showing
def _show(arguments, console: Console, results, documents, absent, untried, where: str, ranks: int) -> int:
    console.print(report.table(results, arguments.module))
    report.faults(results, console)
    if absent:
        console.print(f"Skipped, because {arguments.module} does not have them: {', '.join(absent)}.")
    if untried:
        console.print(f"Public, but no case tries them: {', '.join(untried)}.")
    wrong = [result for result in results if result["verdict"] in {"disagrees", "failed"}]
    kept = record.write(
        arguments.record,
        _command(arguments, ranks),
        results,
        module=arguments.module,
        world=where,
        ranks=ranks,
        documents=dict(zip(map(_base, documents.names), documents.lengths, strict=True)),
        absent=absent,
        untried=untried,
    )
    if report.picture(results, arguments.picture, f"{arguments.module} on {where}"):
        console.print(f"Record: {kept}. Picture: {arguments.picture}.", highlight=False)
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
    words += [f"--only '{arguments.only}'"] if arguments.only else []
    return " ".join(words)


def _base(name: str) -> str:
    return Path(name).name if Path(name).is_absolute() else name
