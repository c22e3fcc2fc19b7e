"""Run `canon check`: choose the ranks, run the cases, report.

After a failure, new ranks run the remaining cases.
"""

import argparse
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from canon.check import (
    bits,
    check_report,
    contract,
    module_import,
    random_check,
    rank_digests,
    sources,
    warming,
)
from canon.check.case_runner import CaseRunner
from canon.check.cases import DTYPES, Case, Coverage, accepts, all_cases, covered, declined_by
from canon.check.documents import Documents
from canon.check.inputs import FromDocuments
from canon.check.run_cases import Interrupted, run_cases
from canon.testing import process_groups, record

BUDGET = {"cpu": 600, "cuda": 4096}  # tokens of the repository's documents
RECORD = Path("canon-check/record.json")
AGREES, DISAGREES, MISUSED, INTERRUPTED = 0, 1, 2, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `canon check` to a parser."""
    _add_ranks(parser)
    _add_cases(parser)
    _add_random(parser)
    add = parser.add_argument
    add("--list", action="store_true", help="print the names of the cases and stop")
    add(
        "--digest",
        action="store_true",
        help="print the digests of the calls with rank_invariant=True alone, one line for each "
        "input, and stop: equal "
        "code, documents, versions and GPU models give equal lines",
    )
    add(
        "--bits",
        action="store_true",
        help="compare the bits of calls with rank_invariant=True instead: prefill in chunks, "
        "decoding, ranks, layouts, other "
        "documents, branches, sequences and heads, all with one whole call",
    )
    add("--template", action="store_true", help="print a module to start from and stop")
    add(
        "--resume",
        action="store_true",
        help="take the cases that the record holds from it, if the code of MODULE, of all that it "
        "imports, the machine and "
        "the arguments are the same",
    )
    add("--record", type=Path, metavar="PATH",
        help=f"write the results to PATH; --resume and --random continue PATH (default: {RECORD}, "
             f"with --random {random_check.record_of('MODULE')})")  # fmt: skip


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "module",
        nargs="?",
        default="canon.fast",
        metavar="MODULE",
        help="name of the module to check, which may be in the current folder (default: "
        "canon.fast)",
    )
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks (default: 4, or the number of GPUs); with --random the largest "
        "number (default: 8)",
    )
    add(
        "--world",
        choices=["auto", "threads", "processes", "gpus"],
        default="auto",
        help="run each rank as a thread, as a process on the CPU (gloo), or as a process with a "
        "GPU (NCCL) "
        "(default: auto, see below)",
    )
    add(
        "--backend",
        choices=["triton", "gluon", "cuda", "torch"],
        metavar="BACKEND",
        help="force the kernels of canon.fast: triton, gluon, cuda or torch; gluon needs a Hopper "
        "GPU or a simulator; cuda "
        "needs a GPU, and declines other dtypes than bfloat16 and float16 and the fused "
        "method",
    )
    add(
        "--runs",
        type=int,
        default=2,
        metavar="N",
        help="run each case N times; all runs must give the same bits (default: %(default)s)",
    )


def _add_cases(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--documents",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="text files, or folders of text files, that make the sequence (default: files of "
        "this repository)",
    )
    add(
        "--tokens",
        type=int,
        metavar="N",
        help="read whole documents up to N tokens in total; a token is a byte (default: no limit "
        "with --documents, "
        f"otherwise {BUDGET['cpu']} on the CPU and {BUDGET['cuda']} on GPUs)",
    )
    add(
        "--dtype",
        action="append",
        choices=list(DTYPES),
        metavar="DTYPE",
        help=f"one of {', '.join(DTYPES)}; repeat it for several dtypes, and the cases alternate "
        "between them "
        "(default: bfloat16, float32 and float64 on the CPU; bfloat16, float16 and float32 "
        "on GPUs)",
    )
    add(
        "--features",
        metavar="LIST",
        help="limits of MODULE, a list of words separated by commas: no-options for a module "
        "without options; all words "
        "stand below",
    )
    add(
        "--only",
        metavar="PATTERN",
        help="run only cases with PATTERN in their name, with --random in their function or mask; "
        "* and ? are wildcards; "
        "--list prints the names",
    )


def _add_random(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--random",
        type=int,
        metavar="N",
        help="run N random cases instead, with random masks, layouts, shapes and options; the "
        "same command continues "
        "an interrupted check, as --resume does",
    )
    add(
        "--fresh",
        action="store_true",
        help="with --random: run the cases that the record holds again",
    )
    add(
        "--seed",
        type=int,
        metavar="S",
        help="seed of the random cases (default: 0); --ranks, the device and --backend change the "
        "cases, too",
    )
    add("--first", type=int, metavar="I", help="number of the first random case (default: 0)")


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
    functions: Coverage
    documents: Documents
    where: str
    ranks: int
    key: str  # digest of the code and the arguments


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Run the check that `arguments` describe, and return the exit status."""
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    os.environ.setdefault("CANON_COMPILE_AHEAD", "0")  # `warming` compiles the cases' own kernels
    try:
        if arguments.template:
            console.print(contract.TEMPLATE, markup=False, highlight=False, soft_wrap=True, end="")
            return AGREES
        placement = _placement(arguments.world, arguments.ranks)
        interprets = placement.device == "cpu" and _interpret()
        with module_import.without_ends():
            return _checked(arguments, console, placement, interprets)
    except ValueError as error:
        print(f"canon check: {error}", file=sys.stderr)
        return MISUSED
    except SystemExit as ended:  # outside the cases, which fail by themselves
        print(f"canon check: {arguments.module} ends the process: {ended}", file=sys.stderr)
        return DISAGREES


def _checked(
    arguments: argparse.Namespace, console: Console, placement: _Placement, interprets: bool
) -> int:
    module = module_import.load(arguments.module)
    if interprets and not arguments.digest and module_import.uses_kernels(module):
        console.print(
            "No GPU in use: Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1)."
        )
    if not (arguments.digest or arguments.bits or arguments.list):
        for line in module_import.remarks(module, covered(module).tested):
            console.print(line, markup=False, highlight=False)
    if arguments.backend and arguments.module != "canon.fast":
        raise _Misuse(
            f"--backend chooses kernels of canon.fast; {arguments.module} has no backends"
        )
    if arguments.backend == "cuda" and placement.device == "cpu":
        raise _Misuse("--backend cuda needs a GPU: its kernels do not run on a CPU")
    if arguments.bits:
        return _bits(arguments, console, placement, module)
    if arguments.runs < 1:
        raise _Misuse(f"--runs must be at least 1, got {arguments.runs}")
    return (_fixed if arguments.random is None else _random)(arguments, console, placement, module)


def _fixed(
    arguments: argparse.Namespace, console: Console, placement: _Placement, module: Any
) -> int:
    if arguments.seed is not None or arguments.first is not None:
        raise _Misuse("--seed and --first need --random N")
    if arguments.fresh:
        raise _Misuse(
            "--fresh needs --random N: other checks start afresh unless --resume is given"
        )
    if arguments.tokens is not None and arguments.tokens < 1:
        raise _Misuse(f"--tokens must be at least 1, got {arguments.tokens}")
    device, ranks = placement.device, placement.ranks
    budget = arguments.tokens or (None if arguments.documents else BUDGET[device])
    documents, functions = Documents.of(arguments.documents, budget), covered(module)
    digests = _digest_runner(arguments, module, functions, documents, placement)
    if arguments.digest:
        if not digests.calls:
            raise _Misuse(
                f"--digest: {arguments.module} has no function with the option rank_invariant, or "
                "--only leaves none"
            )
        results = rank_digests.compare(placement.kind, digests)
        rank_digests.show(results, console, alone=True)
        return DISAGREES if any(result["faults"] for result in results) else AGREES
    cases = _choose_cases(module, arguments, functions, device, documents.tokens % ranks == 0)
    if not cases and not digests.calls:
        raise _Misuse(f"no case matches {arguments.only!r}; --list prints the names of the cases")
    if arguments.list:
        names = [case.name for case in cases] + list(
            dict.fromkeys(call.inputs for call in digests.calls)
        )
        console.print("\n".join(names), highlight=False)
        return AGREES
    where = placement.describe(arguments.backend)
    code = sources.digest(arguments.module)
    key = record.digest(
        code, record.machine(), where, arguments.runs, arguments.features, documents
    )
    check = _Check(cases, functions, documents, where, ranks, key)
    lengths = ", ".join(map(str, sorted(documents.lengths)[:12])) + ", ..." * (
        len(documents.lengths) > 12
    )
    console.print(
        f"{len(cases)} cases of [bold]{arguments.module}[/] on {where}; "
        f"{len(documents.lengths)} documents, "
        f"{documents.tokens} tokens: {lengths}",
        highlight=False,
    )
    known = _known_results(arguments, console, check)
    results, interrupted = _run_cases(arguments, console, placement, check, known)
    if interrupted:
        console.print(
            f"[bold red]Interrupted: {len(results)} of {len(cases)} cases have run; --resume runs "
            "the others."
        )
    invariance = [] if interrupted else rank_digests.compare(placement.kind, digests)
    status = _report(arguments, console, check, results, invariance, len(known))
    return INTERRUPTED if interrupted else status


def _digest_runner(
    arguments: argparse.Namespace,
    module: Any,
    functions: Coverage,
    documents: Documents,
    placement: _Placement,
) -> rank_digests.DigestRunner:
    dtypes = arguments.dtype or _default_dtypes(placement.device, arguments.backend)
    options = placement.ranks, dtypes, placement.device == "cuda", arguments.only
    calls = [] if arguments.features else rank_digests.calls_of(module, *options)
    own = any(call.case.function in functions.tested for call in calls)
    calls = [call for call in calls if own and not declined_by(arguments.backend, call.case)]
    given = (
        arguments.module,
        (),
        FromDocuments(documents),
        placement.device,
        Path(),
        arguments.backend,
    )
    return rank_digests.DigestRunner(*given, calls=tuple(calls))


def _run_cases(
    arguments: argparse.Namespace,
    console: Console,
    placement: _Placement,
    check: _Check,
    known: dict[str, Any],
) -> tuple[list[dict[str, Any]], bool]:
    left = tuple(case for case in check.cases if case.name not in known)
    source, interrupted = FromDocuments(check.documents), False
    runner = CaseRunner(
        arguments.module, left, source, placement.device, Path(), arguments.backend, arguments.runs
    )
    try:
        if left and warming.worth_it(placement.device):
            console.print(warming.warm([(placement.ranks, runner)]), highlight=False)
        total = len(check.cases)
        results = run_cases(placement.kind, placement.ranks, runner, total - len(left), total)
    except Interrupted as error:
        results, interrupted = error.results, True
    found = known | {result["case"]: result for result in results}
    return [found[case.name] for case in check.cases if case.name in found], interrupted


def _known_results(
    arguments: argparse.Namespace, console: Console, check: _Check
) -> dict[str, dict[str, Any]]:
    """Return the record's results of these cases for the same code and arguments. Failed cases run
    again.
    """
    path = arguments.record or RECORD
    if not arguments.resume or not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text())
        same = kept["key"] == check.key
        names = {case.name for case in check.cases if same}
        known = {
            x["case"]: x for x in kept["results"] if x["case"] in names and x["verdict"] != "failed"
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Misuse(
            f"--resume: cannot read {path} as a record of canon check: {error!r}"
        ) from error
    why = "" if same else ", because it was made with other code, arguments or versions"
    taken = f"{len(known)} of {len(check.cases)} cases are taken from {path}{why}; the others run."
    console.print(taken, highlight=False)
    return known


def _random(
    arguments: argparse.Namespace, console: Console, placement: _Placement, module: Any
) -> int:
    given = {
        "--documents": arguments.documents,
        "--tokens": arguments.tokens,
        "--dtype": arguments.dtype,
        "--list": arguments.list,
        "--digest": arguments.digest,
        "--resume": arguments.resume,
    }
    if useless := [name for name, value in given.items() if value]:
        raise _Misuse(
            f"--random draws its own cases and always resumes: leave {', '.join(useless)} out"
        )
    arguments.seed, arguments.first = arguments.seed or 0, arguments.first or 0
    if (
        arguments.random < 1
        or arguments.first < 0
        or not 1 <= (arguments.ranks or 1) <= random_check.RANKS
    ):
        raise _Misuse(
            f"--random needs N >= 1, --first I >= 0 and --ranks from 1 to {random_check.RANKS}"
        )
    kind = "threads" if arguments.world == "auto" else placement.kind
    try:
        agree = random_check.run(arguments, console, kind, placement.device, module)
    except Interrupted:
        console.print("[bold red]Interrupted; the record holds the finished cases.")
        return INTERRUPTED
    return AGREES if agree else DISAGREES


def _bits(
    arguments: argparse.Namespace, console: Console, placement: _Placement, module: Any
) -> int:
    names = ("random", "seed", "first", "list", "digest", "features", "resume", "fresh")
    if useless := [f"--{name}" for name in names if getattr(arguments, name) not in (None, False)]:
        raise _Misuse(f"--bits has its own rows and runs them once: leave {', '.join(useless)} out")
    return DISAGREES if bits.run(arguments, console, placement.device, module) else AGREES


def _placement(world: str, ranks: int | None) -> _Placement:
    gpus = process_groups.kernel_gpus()
    if ranks is not None and ranks < 1:
        raise _Misuse(f"--ranks must be at least 1, got {ranks}")
    kind = (
        world if world != "auto" else "gpus" if gpus > 1 and (ranks or gpus) <= gpus else "threads"
    )
    if kind == "gpus":
        if (ranks or 1) > gpus:
            raise _Misuse(
                f"--world gpus needs a GPU for each rank: {ranks or 1} ranks, {gpus} "
                "GPUs "
                "(none under TRITON_INTERPRET=1)"
            )
        return _Placement(kind, "cuda", ranks or gpus)
    return _Placement(kind, "cuda" if gpus and kind == "threads" else "cpu", ranks or 4)


def _interpret() -> bool:
    """Let kernels run on the CPU. Return whether Triton is there."""
    # Triton reads the variable when a module defines its kernels
    os.environ["TRITON_INTERPRET"] = "1"
    with suppress(ModuleNotFoundError):  # no Triton: the import of a module that needs it will fail
        from canon.fast.kernels.interpreter import repair
        from canon.testing.interpreted_types import share_types

        repair()
        share_types()
        return True
    return False


def _choose_cases(
    module: Any, arguments: argparse.Namespace, functions: Coverage, device: str, even: bool
) -> list[Case]:
    dtypes = arguments.dtype or _default_dtypes(device, arguments.backend)
    cases = [
        case for case in all_cases(dtypes, device == "cuda") if case.function in functions.tested
    ]
    cases = [case for case in cases if accepts(module, case)]
    if not cases:
        names = ", ".join(sorted({*functions.absent, *functions.imported}))
        raise _Misuse(
            f"{module.__name__} has none of the functions {names}; those that it imports from "
            "canon do not count"
        )
    if arguments.features:
        cases = contract.limited(cases, contract.features(arguments.features), even, module)
        if not cases:
            raise _Misuse(
                f"--features {arguments.features} leaves no case of {', '.join(functions.tested)}"
            )
    return [case for case in cases if fnmatch(case.name, f"*{arguments.only or ''}*")]


def _default_dtypes(device: str, backend: str | None) -> list[str]:
    if backend in ("gluon", "cuda"):
        return ["bfloat16", "float16"]  # the only dtypes of these backends
    return (
        ["bfloat16", "float32", "float64"]
        if device == "cpu"
        else ["bfloat16", "float16", "float32"]
    )


def _report(
    arguments,
    console: Console,
    check: _Check,
    results: list[dict[str, Any]],
    invariance: list[dict[str, Any]],
    taken: int,
) -> int:
    console.print(check_report.table(results, arguments.module))
    check_report.faults(results, console)
    rank_digests.show(invariance, console)
    for names, why in (
        (check.functions.absent, f"Skipped, because {arguments.module} does not have them"),
        (check.functions.imported, f"Skipped, because {arguments.module} imports them from canon"),
        (check.functions.untried, "Public functions without a case"),
    ):
        if names:
            console.print(f"{why}: {', '.join(names)}.")
    kept = _write_record(arguments, check, results, invariance)
    console.print(f"Record: {kept}.", highlight=False)
    verdicts = [result["verdict"] for result in results]
    wrong = check_report.summary(verdicts, console, taken)
    if unequal := sum(bool(result["faults"]) for result in invariance):
        console.print(
            f"[bold red]The bits depend on the ranks or the layout for {unequal} of "
            f"{len(invariance)} inputs."
        )
    none_agrees = "agrees" not in verdicts and (results or not invariance)
    return DISAGREES if wrong or unequal or none_agrees else AGREES


def _write_record(
    arguments, check: _Check, results: list[dict[str, Any]], invariance: list[dict[str, Any]]
) -> Path:
    names = (
        Path(name).name if Path(name).is_absolute() else name for name in check.documents.names
    )
    given = {
        name: getattr(arguments, name)
        for name in ("world", "dtype", "backend", "tokens", "features", "only")
    }
    given |= {"documents": tuple(path.name for path in arguments.documents)}
    given |= {"runs": arguments.runs} if arguments.runs != 2 else {}
    return record.write(
        arguments.record or RECORD,
        record.command("canon", "check", arguments.module, ranks=check.ranks, **given),
        results,
        key=check.key,
        module=arguments.module,
        world=check.where,
        ranks=check.ranks,
        documents=dict(zip(names, check.documents.lengths, strict=True)),
        absent=check.functions.absent,
        untried=check.functions.untried,
        rank_invariance=invariance,
    )
