"""The options of `canon check`, and the choice of the check."""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from canon.check import bits, bits_report, contract, fixed_check, module_import, random_check
from canon.check.cases import DTYPES, covered
from canon.check.check_report import AGREES, DISAGREES, MISUSED
from canon.check.fixed_check import BUDGET, RECORD
from canon.check.placement import placement
from canon.testing import command_line, record
from canon.testing.command_line import at_least

REFUSED = {  # mode: the reason, and the options that it leaves out
    "--bits": (
        "has its own rows and runs them once",
        ("random", "seed", "first", "list", "features", "documents"),
    ),
    "--random": (
        "draws its own cases",
        ("documents", "tokens", "dtype", "list"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
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
        type=at_least(1),
        metavar="N",
        help="number of ranks (default: 4, or the number of GPUs); with --random the largest "
        "number (default: 8)",
    )
    add(
        "--world",
        choices=["auto", "threads", "processes", "gpus"],
        default="auto",
        help="run each rank as a thread, as a process on the CPU (gloo), or as a process with a "
        "GPU (NCCL) (default: auto, see below)",
    )
    add(
        "--backend",
        choices=["triton", "gluon", "cuda", "torch"],
        metavar="BACKEND",
        help="force the kernels of canon.fast: triton, gluon, cuda or torch; gluon needs a Hopper "
        "GPU or a simulator; cuda needs a GPU, and declines other dtypes than bfloat16 and "
        "float16 and the fused method",
    )
    add(
        "--runs",
        type=at_least(1),
        metavar="N",
        help="run each case N times; from run 2 on, bits must be equal (default: 3 on a GPU, where "
        "run 3 replays what run 2 has recorded; else 2)",
    )
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
        type=at_least(1),
        metavar="N",
        help="read whole documents up to N tokens in total; a token is a byte (default: no limit "
        f"with --documents, otherwise {BUDGET['cpu']} on the CPU and {BUDGET['cuda']} on GPUs)",
    )
    add(
        "--dtype",
        action="append",
        choices=list(DTYPES),
        metavar="DTYPE",
        help=f"one of {', '.join(DTYPES)}; repeat it for several dtypes, and the cases alternate "
        "between them (default: bfloat16, float32 and float64 on the CPU; bfloat16, float16 and "
        "float32 on GPUs)",
    )
    add(
        "--features",
        metavar="LIST",
        help="limits of MODULE, a list of words separated by commas: no-options for a module "
        "without options; all words stand below",
    )
    add(
        "--only",
        metavar="PATTERN",
        help="run only cases with PATTERN in their name, with --random in their function or mask; "
        "* and ? are wildcards; --list prints the names",
    )
    add(
        "--random",
        type=at_least(1),
        metavar="N",
        help="run N random cases instead, with random masks, layouts, shapes and options",
    )
    add(
        "--seed",
        type=int,
        metavar="S",
        help="seed of the random cases (default: 0); --ranks, the device and --backend change the "
        "cases, too",
    )
    text = "number of the first random case (default: 0)"
    add("--first", type=at_least(0), metavar="I", help=text)
    for name, does in (
        ("--list", "print the names of the cases and stop"),
        (
            "--bits",
            "compare the bits of calls with rank_invariant=True instead: prefill in chunks, "
            "decoding, ranks, layouts, other documents, branches, sequences and heads, all with "
            "one whole call",
        ),
        ("--template", "print a module to start from and stop"),
    ):
        add(name, action="store_true", help=does)
    add(
        "--record",
        type=Path,
        metavar="PATH",
        help=f"write the results to PATH (default: {RECORD}, with --random "
        f"{random_check.record_of('MODULE')})",
    )


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Run the check and return the exit status."""
    console = console or command_line.Console(120)
    os.environ.setdefault("CANON_COMPILE_AHEAD", "0")  # `warming` compiles the cases' own kernels
    try:
        if arguments.template:
            console.print(contract.TEMPLATE, markup=False, highlight=False, soft_wrap=True, end="")
            return AGREES
        with module_import.without_ends():
            return _checked(arguments, console)
    except ValueError as error:
        print(f"canon check: {error}", file=sys.stderr)
        return MISUSED
    except SystemExit as ended:  # outside the cases, which fail by themselves
        print(f"canon check: {arguments.module} ends the process: {ended}", file=sys.stderr)
        return DISAGREES


def _checked(arguments: argparse.Namespace, console: Console) -> int:
    place = placement(arguments.world, arguments.ranks)
    interprets, name = place.device == "cpu" and _interpret(), arguments.module
    module = module_import.load(name)
    if interprets and module_import.uses_kernels(module):
        plain = "plain PyTorch computes the tiles on the CPU."
        of_triton = "Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1)."
        console.print(f"No GPU in use: {plain if arguments.backend == 'torch' else of_triton}")
    if not (arguments.bits or arguments.list):
        for line in module_import.remarks(module, covered(module).tested):
            console.print(line, markup=False, highlight=False)
    _check_options(arguments, place.device)
    default = RECORD if arguments.random is None else random_check.record_of(name)
    arguments.record = arguments.record or (bits_report.RECORD if arguments.bits else default)
    if not arguments.list:
        record.check_path(arguments.record)
    if arguments.bits:
        return DISAGREES if bits.run(arguments, console, place.device, module) else AGREES
    if arguments.random is None:
        return fixed_check.run(arguments, console, place, module)
    kind = "threads" if arguments.world == "auto" else place.kind
    return random_check.run(arguments, console, kind, place.device, module)


def _check_options(arguments: argparse.Namespace, device: str) -> None:
    if arguments.backend and arguments.module != "canon.fast":
        raise ValueError(
            f"--backend chooses kernels of canon.fast; {arguments.module} has no backends"
        )
    if arguments.backend == "cuda" and device == "cpu":
        raise ValueError("--backend cuda needs a GPU: its kernels do not run on a CPU")
    is_random = arguments.random is not None
    if mode := "--bits" if arguments.bits else "--random" if is_random else "":
        reason, names = REFUSED[mode]
        given = (f"--{name}" for name in names if getattr(arguments, name) not in (None, False, []))
        if useless := ", ".join(given):
            raise ValueError(f"{mode} {reason}: leave {useless} out")
    elif arguments.seed is not None or arguments.first is not None:
        raise ValueError("--seed and --first need --random N")
    if is_random and not arguments.bits:
        arguments.seed, arguments.first = arguments.seed or 0, arguments.first or 0
        if (arguments.ranks or 1) > random_check.RANKS:
            raise ValueError(f"--random needs --ranks from 1 to {random_check.RANKS}")


def _interpret() -> bool:
    """Let kernels run on the CPU. Return whether Triton is there."""
    # Triton reads the variable when a module defines its kernels
    os.environ["TRITON_INTERPRET"] = "1"
    with suppress(ModuleNotFoundError):  # a module that needs it will fail
        from canon.fast.kernels.interpreter import repair
        from canon.testing.interpreted_types import share_types

        repair()
        share_types()
        return True
    return False
