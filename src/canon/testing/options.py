"""The options of `canon check`."""

import argparse
from pathlib import Path

from canon.testing.cases import DTYPES

BUDGET = {"cpu": 600, "cuda": 4096}  # tokens of the repository's documents
RECORD, PICTURE = Path("canon-check/record.json"), Path("canon-check/errors.png")
RANDOM_RECORD = Path("canon-check/random.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `canon check` to a parser."""
    _add_world(parser)
    _add_cases(parser)
    _add_random(parser)
    add = parser.add_argument
    add("--list", action="store_true", help="print the names of the cases and stop")
    add("--template", action="store_true", help="print a module to start from and stop")
    add("--resume", action="store_true", help="keep the verdicts that the record has of the same code and arguments")
    told = f"where the record goes, and what --resume and --random continue (default: {RECORD}, {RANDOM_RECORD})"
    add("--record", type=Path, metavar="PATH", help=told)
    add("--picture", type=Path, metavar="PATH", help=f"where the picture goes (default: {PICTURE})")


def _add_world(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("module", nargs="?", default="canon.fast", metavar="MODULE",
        help="module to check, any that has functions of the reference's names (default: canon.fast)")  # fmt: skip
    add("--ranks", type=int, metavar="N",
        help="ranks that hold the sequence together (default: 4, or all GPUs); the most, with --random (8)")  # fmt: skip
    add("--world", choices=["auto", "threads", "processes", "gpus"], default="auto",
        help="ranks as threads of one process, as processes on the CPU, or as one process per GPU (default: auto)")  # fmt: skip
    add("--backend", choices=["triton", "gluon"], metavar="BACKEND",
        help="kernels of canon.fast, triton or gluon; the latter run on Hopper, and CPUs simulate them (default: its own "
             "choice)")  # fmt: skip
    add("--runs", type=int, default=2, metavar="N",
        help="how often each case is run; all runs must give the same bits (default: %(default)s)")  # fmt: skip


def _add_cases(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--documents", type=Path, nargs="+", default=[], metavar="PATH",
        help="files, or folders of text files, to attend over (default: files of this repository)")  # fmt: skip
    add("--tokens", type=int, metavar="N",
        help="read documents only up to so many tokens, a token being a byte (default: no limit on --documents, "
             f"{BUDGET['cpu']} on the CPU and {BUDGET['cuda']} on GPUs for the repository's)")  # fmt: skip
    add("--dtype", action="append", choices=list(DTYPES), metavar="DTYPE",
        help=f"one of {', '.join(DTYPES)}; may be repeated, the cases then take turns "
             "(default: all but float16 on the CPU, all but float64 on GPUs)")  # fmt: skip
    add("--features", metavar="LIST", help="limits of MODULE, words with commas: see below")
    add("--only", metavar="PATTERN", help="run the cases whose name contains PATTERN (with * and ?)")


def _add_random(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--random",
        type=int,
        metavar="N",
        help="run N random cases instead: masks, layouts, shapes and options of all kinds",
    )
    add("--seed", type=int, metavar="S", help="of the random cases: case i depends on S and i alone (default: 0)")
    add("--first", type=int, metavar="I", help="the number of the first random case (default: 0)")
    add("--merge", type=Path, nargs="+", metavar="RECORD", help="merge records of --random into --record and stop")
