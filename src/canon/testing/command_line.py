"""Console and numbers of commands."""

import argparse
import sys
from collections.abc import Callable

import rich.console


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of whole numbers from ``least``."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


class Console(rich.console.Console):
    """Print in ``width`` columns, or a terminal's."""

    def __init__(self, width: int):
        super().__init__(width=None if sys.stdout.isatty() else width)
        self.width = max(self.width, 80)  # else tables lose text

    def on_broken_pipe(self):
        raise  # rich exits with 1
