"""Run the command line: ``canon check``, ``bench``, ``plan``, ``show`` and ``warm``,
or ``python -m canon``.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

import torch

import canon

DESCRIPTION = """\
Compare MODULE with canon.reference.

Each case runs one function of MODULE on real documents, on several ranks, forward and backward.
canon.reference runs the same case on the same ranks. Both results are compared with dense attention
in float64. The error may be at most twice the error of dense attention in the same dtype, plus one
rounding. Every case runs again under torch.use_deterministic_algorithms(True), where it must repeat
its bits. Functions with the option rank_invariant must give the same bits on any number of ranks,
too.

  canon check                                  check canon.fast on the files of this repository
  canon check --ranks 3 --documents a.txt b/   use your own documents and three ranks
  canon check --template > my_attention.py     write a module to start from
  canon check my_attention --only zigzag       check your own module, only cases with "zigzag" in
                                               their name
  canon check --only rank_invariant            print short digests, to compare the bits of two
                                               machines
  canon check --bits                           compare the bits of chunks, ranks, documents,
                                               branches and batches
  canon check --random 1000 --seed 7           check random masks, layouts, shapes and options
"""
EPILOG = """\
{conventions}
With --world auto, each rank is a process with a GPU of its own if there are two or more GPUs and
enough for all ranks. Otherwise, and with --random, the ranks are threads that share one GPU.
Without a GPU, the ranks are threads on the CPU, and Triton's interpreter runs the kernels.

Exit status: 0 if at least one case agrees and all others agree or are declined; 1 if a case does
not agree or none agrees; 2 if the arguments are invalid or MODULE cannot be imported; 130 after
Ctrl-C. After Ctrl-C the table and the record hold the finished cases.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("canon: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        if error.errno == errno.EPIPE:
            return 141  # as SIGPIPE does
        print(f"canon: {error.strerror}", file=sys.stderr)
        return 2


def _run(argv: Sequence[str] | None) -> int:
    # Triton reads the variable when canon.fast defines its kernels
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from canon import plan_command, show_command, warm_command
    from canon.bench import bench_command
    from canon.check import check_command
    from canon.check.contract import CONVENTIONS

    parser = argparse.ArgumentParser(
        prog="canon", description="Exact attention over a sequence that several GPUs hold together."
    )
    parser.add_argument("--version", action="version", version=f"canon {canon.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    found = {
        "check": (check_command, "compare the functions of a module with the reference"),
        "bench": (
            bench_command,
            "measure the speed of kernels and schedules, after checking their results",
        ),
        "plan": (plan_command, "predict the time and memory of all schedules on many GPUs"),
        "show": (show_command, "draw a mask, a layout or a plan into a file"),
        "warm": (warm_command, "compile every kernel variant that a model can need"),
    }
    texts = {
        "check": {"description": DESCRIPTION, "epilog": EPILOG.format(conventions=CONVENTIONS)}
    }
    for name, (module, purpose) in found.items():
        shown = {"help": purpose, "formatter_class": argparse.RawDescriptionHelpFormatter}
        module.add_arguments(
            commands.add_parser(name, **shown, **texts.get(name, {"description": module.__doc__}))
        )
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as ended:  # argparse has printed the help or the error
        return int(ended.code or 0)
    if arguments.command is None:
        parser.print_help()
        return 0
    return found[arguments.command][0].run(arguments)


if __name__ == "__main__":
    sys.exit(main())
