"""The console of the commands."""

import sys
from typing import NoReturn

import rich.console


class Console(rich.console.Console):
    """Print text, in ``width`` columns unless to a terminal."""

    def __init__(self, width: int):
        super().__init__(width=None if sys.stdout.isatty() else width)

    def on_broken_pipe(self) -> NoReturn:
        raise  # rich would exit with 1
