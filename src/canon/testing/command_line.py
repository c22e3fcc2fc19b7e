"""The console and the numbers of commands."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

import rich.console


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


class Console(rich.console.Console):
    """Print text, in ``width`` columns unless to a terminal."""

    def __init__(self, width: int):
        super().__init__(width=None if sys.stdout.isatty() else width)
        self.width = max(self.width, 80)  # narrower tables lose their text

    def on_broken_pipe(self) -> NoReturn:
        raise  # rich would exit with 1
