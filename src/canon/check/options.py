"""Define the options of `canon check`."""

import argparse
from pathlib import Path

from canon.check.cases import DTYPES

BUDGET = {"cpu": 600, "cuda": 4096}  # tokens of the repository's documents
RECORD = Path("canon-check/record.json")
RANDOM_RECORD = Path("canon-check/random.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `canon check` to a parser."""
    _add_ranks(parser)
    _add_cases(parser)
    _add_random(parser)
    add = parser.add_argument
    add("--list", action="store_true", help="print the names of the cases and stop")
    add("--digest", action="store_true",
        help="print the digests of the calls with rank_invariant=True alone, one line for each input, and stop: equal "
             "code, documents, versions and GPU models give equal lines")  # fmt: skip
    add("--template", action="store_true", help="print a module to start from and stop")
    add("--resume", action="store_true",
        help="skip the cases that the record holds, if the code and the arguments are the same")  # fmt: skip
    add("--record", type=Path, metavar="PATH",
        help=f"write the results to PATH; --resume and --random continue PATH (default: {RECORD}, "
             f"with --random {RANDOM_RECORD})")  # fmt: skip


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("module", nargs="?", default="canon.fast", metavar="MODULE",
        help="name of the module to check, which may be in the current folder (default: canon.fast)")  # fmt: skip
    add("--ranks", type=int, metavar="N",
        help="number of ranks (default: 4, or the number of GPUs); with --random the largest number (default: 8)")  # fmt: skip
    add("--world", choices=["auto", "threads", "processes", "gpus"], default="auto",
        help="run each rank as a thread, as a process on the CPU (gloo), or as a process with a GPU (NCCL) "
             "(default: auto, see below)")  # fmt: skip
    add("--backend", choices=["triton", "gluon", "cuda"], metavar="BACKEND",
        help="force the kernels of canon.fast: triton, gluon or cuda; gluon needs a Hopper GPU or a simulator; cuda needs a "
             "GPU, and declines other dtypes than bfloat16 and float16 and the fused method")  # fmt: skip
    add("--runs", type=int, default=2, metavar="N",
        help="run each case N times; all runs must give the same bits (default: %(default)s)")  # fmt: skip


def _add_cases(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--documents", type=Path, nargs="+", default=[], metavar="PATH",
        help="text files, or folders of text files, that make the sequence (default: files of this repository)")  # fmt: skip
    add("--tokens", type=int, metavar="N",
        help="read whole documents up to N tokens in total; a token is a byte (default: no limit with --documents, "
             f"otherwise {BUDGET['cpu']} on the CPU and {BUDGET['cuda']} on GPUs)")  # fmt: skip
    add("--dtype", action="append", choices=list(DTYPES), metavar="DTYPE",
        help=f"one of {', '.join(DTYPES)}; repeat it for several dtypes, and the cases alternate between them "
             "(default: bfloat16, float32 and float64 on the CPU; bfloat16, float16 and float32 on GPUs)")  # fmt: skip
    add("--features", metavar="LIST", help="limits of MODULE, a list of words separated by commas: see below")
    add("--only", metavar="PATTERN",
        help="run only cases with PATTERN in their name; * and ? are wildcards; --list prints the names")  # fmt: skip


def _add_random(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--random", type=int, metavar="N",
        help="run N random cases instead, with random masks, layouts, shapes and options; the same command continues "
             "an interrupted check")  # fmt: skip
    add("--seed", type=int, metavar="S",
        help="seed of the random cases (default: 0); --ranks, the device and --backend change the cases, too")  # fmt: skip
    add("--first", type=int, metavar="I", help="number of the first random case (default: 0)")
