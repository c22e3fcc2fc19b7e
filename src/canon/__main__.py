"""The command line: ``canon check`` and ``canon bench`` (or ``python -m canon ...``)."""

import argparse
import os
import sys
from collections.abc import Sequence

import torch

import canon

DESCRIPTION = """\
Run every function of MODULE over several ranks, on real documents, attention forward and backward, and compare:
with canon.reference, in the same world on the same arguments, and both with dense attention in float64. An error may
be twice that of honest dense attention in the same dtype, and one rounding; every case runs twice and must give the
same bits.

  canon check                                  canon.fast on the files of this repository
  canon check --ranks 3 --documents a.txt b/   on your own documents, over three ranks
  canon check my_attention --only zigzag       your own module, those cases alone
  canon check --random 1000 --seed 7           random masks, layouts, shapes and options; given again, it continues
  canon check --template > my_attention.py     a module to start from
"""
EPILOG = """\
{conventions}
Ranks are processes with a GPU each where there are several GPUs, threads that share it where there is one, and
threads on the CPU, under Triton's interpreter, elsewhere. Exit status: 0 if everything agrees, 1 if anything does
not, 2 if the command could not be carried out, 130 after Ctrl-C, when the table and the record hold what has finished.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    if not torch.cuda.is_available():  # read when kernels are defined, which is when canon.fast is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from canon.testing import bench, check
    from canon.testing.contract import CONVENTIONS

    parser = argparse.ArgumentParser(prog="canon", description="Exact context-parallel attention, written twice.")
    parser.add_argument("--version", action="version", version=f"canon {canon.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    told, raw = "prove that a module agrees with the reference", argparse.RawDescriptionHelpFormatter
    epilog = EPILOG.format(conventions=CONVENTIONS)
    command = commands.add_parser("check", help=told, description=DESCRIPTION, epilog=epilog, formatter_class=raw)
    check.add_arguments(command)
    told = "measure kernels on one GPU, beside their peers or in many tile sizes"
    bench.add_arguments(commands.add_parser("bench", help=told, description=bench.__doc__, formatter_class=raw))
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as ended:  # argparse has said why
        return int(ended.code or 0)
    try:
        return {"check": check.run, "bench": bench.run}[arguments.command](arguments)
    except KeyboardInterrupt:
        print("canon: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
