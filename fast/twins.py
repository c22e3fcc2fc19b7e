"""Take docstrings of `canon.fast` from `canon.reference`, so that shapes, units and errors are written once."""

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def twin_of(original: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function of this half with the docstring of ``original``, its twin in `canon.reference`.

    The function's own docstring, if it has one, states what is true of this half only. It is appended. The function itself is
    returned, so a call costs nothing more. Its signature must be that of its twin, defaults included: a test compares them.
    """

    def _documented(function: Callable[P, R]) -> Callable[P, R]:
        shared, own = (inspect.cleandoc(x.__doc__ or "") for x in (original, function))
        function.__doc__ = f"{shared}\n\nIn `canon.fast`:\n\n{own}" if own else shared
        return function

    return _documented
