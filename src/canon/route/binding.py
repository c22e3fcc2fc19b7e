"""Bind a public function of `canon.faces` to a half."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def bound(function: F, implementation: Callable[..., Any], notes: str = "") -> F:
    """Return ``function`` as a member of the module of its ``implementation``, to be pickled.
    ``notes`` follow its docstring.
    """
    function.__module__, function.__qualname__ = implementation.__module__, function.__name__
    inner: Any = function
    while inner := getattr(inner, "__wrapped__", None):  # errors of a missing argument name it
        inner.__qualname__ = function.__qualname__
    if notes:
        shared, own = inspect.cleandoc(function.__doc__ or ""), inspect.cleandoc(notes)
        function.__doc__ = f"{shared}\n\nIn `canon.fast`:\n\n{own}"
    return function


def half_of(implementation: Callable[..., Any]) -> str:
    """Return the half of an implementation, "reference" or "fast", or its own module."""
    return implementation.__module__.removeprefix("canon.").split(".")[0]
