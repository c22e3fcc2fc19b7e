"""`canon diff A B`: name the first call and tensor in which two recorded runs part.

    with canon.testing.record_calls("a"):     in the program, on each rank
        train()

    canon diff a b

A record is a folder with a file for each rank: digests of q, k, v, out, lse and gradients of each call, in order. A or B may
also be the file of one rank. Exit status: 0 if all bits are equal, 1 if the runs part, 2 if a record cannot be read.
"""

import argparse
import sys
from pathlib import Path

from canon.testing.call_records import difference, read_calls

EQUAL, PARTED, MISUSED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``canon diff``."""
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a recorded run: a folder, or a file")


def run(arguments: argparse.Namespace) -> int:
    """Compare the records, print one sentence, and return the exit status."""
    try:
        sentence = difference(arguments.a, arguments.b)
    except ValueError as error:
        print(f"canon diff: {error}", file=sys.stderr)
        return MISUSED
    if sentence is not None:
        print(sentence)
        return PARTED
    calls = read_calls(arguments.a)
    ranks = f" on {len(calls)} ranks" * (len(calls) > 1)
    print(f"{sum(map(len, calls.values()))} calls{ranks} have equal bits.")
    return EQUAL
