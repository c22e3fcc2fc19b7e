"""Excerpts of source code, for notebooks that explain a function block by block."""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any


def excerpt(function: Callable | Path | Any, first: str, last: str | None = None) -> str:
    """Return lines of a function's source without their common indentation: a block to print and explain.

    The block begins with the first line that contains ``first``, and ends with the next line that contains ``last``. Without
    ``last`` it ends with the function. ``function`` may be a kernel of Triton or Gluon, or the path of a file.
    Raises ValueError if the source contains no such lines.
    """
    source = (
        function.read_text() if isinstance(function, Path) else inspect.getsource(getattr(function, "fn", function))
    )
    lines = source.rstrip().splitlines()
    begin = _line(lines, first, 0)
    end = len(lines) if last is None else _line(lines, last, begin) + 1
    return textwrap.dedent("\n".join(lines[begin:end]))


def _line(lines: list[str], text: str, start: int) -> int:
    for number in range(start, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"no line from line {start + 1} of the source on contains {text!r}: read the function again")
