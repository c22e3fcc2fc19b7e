"""`canon warm`: compile every kernel variant that a model can need, whatever its masks, into the
disk cache, once on each host.

    canon warm --dtype bfloat16 --widths 128 --heads 32/8
    canon warm --dtype float16 --widths 192/128 --heads 16/16 --functions magi_attention --ranks 8
"""

import argparse
import sys
import time

import torch

from canon.fast.ahead.kernel_variants import functions
from canon.fast.ahead.warm import DEFAULT, warm_up
from canon.fast.device import BACKENDS
from canon.route.checks import METHODS

FAILED, MISUSED = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float16", "float32", "float64"],
        help="dtype of q, k and v",
    )
    add(
        "--widths",
        type=_pair,
        default=(128, 128),
        metavar="D[/DV]",
        help="head widths of K and V (default: 128)",
    )
    add(
        "--heads",
        type=_pair,
        default=(32, 8),
        metavar="H[/G]",
        help="query heads and key heads (default: 32/8)",
    )
    add(
        "--functions",
        nargs="+",
        default=DEFAULT,
        choices=functions(),
        metavar="NAME",
        help=", ".join(functions()),
    )
    add("--backend", choices=BACKENDS, help="default: the automatic choice")
    add(
        "--backward",
        default="auto",
        choices=METHODS,
        help="the option of the functions (default: auto)",
    )
    add("--softcap", type=float, help="the option of the functions (default: none)")
    add("--ranks", type=int, help="ranks of strided_attention (default: 2, 4 and 8)")
    add("--rank-invariant", action="store_true", help="compile for calls with rank_invariant=True")
    add("--processes", type=int, help="compiling processes (default: one per core)")


def _pair(text: str) -> tuple[int, int]:
    """Return (a, b) of "a/b", and (a, a) of "a"."""
    first, _, second = text.partition("/")
    try:
        return int(first), int(second or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, or two as 32/8") from None


def run(arguments: argparse.Namespace) -> int:
    """Return the exit status: 1 if a kernel does not compile or there is no GPU, 2 for invalid
    arguments.
    """
    a, start = arguments, time.monotonic()
    options = {
        name: value for name, value in vars(a).items() if name not in ("command", "dtype", "widths")
    }
    try:
        compiled = warm_up(getattr(torch, a.dtype), *a.widths, **options)
    except (ValueError, RuntimeError) as error:
        print(f"canon warm: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, ValueError) else FAILED
    if not torch.cuda.is_available():  # `warm_up` has printed that
        return FAILED
    text = (
        f"{compiled} kernels compiled in {time.monotonic() - start:.0f} s"
        if compiled
        else "compiled already"
    )
    print(f"{a.dtype}, widths {a.widths[0]}/{a.widths[1]}, heads {a.heads[0]}/{a.heads[1]}: {text}")
    return 0
