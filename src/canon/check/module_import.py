"""Import the module of `canon check`, and keep it from ending the process."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from canon.check.cases import WHOLE, parameters_of

ENDS = ("_exit", "execv", "execve")  # of os: they raise no exception
# parameters of other libraries: the check does not pass them
UNUSED = {"causal", "is_causal", "dropout_p", "dropout", "attn_mask"}


@contextmanager
def without_ends() -> Iterator[None]:
    """Let functions of os that end this process raise SystemExit."""
    process = os.getpid()

    def raising(name: str, real: Any) -> Any:
        def ended(*given: Any) -> Any:
            if os.getpid() != process:
                return real(*given)
            raise SystemExit(f"os.{name}({', '.join(map(repr, given))})")

        return ended

    with ExitStack() as patches:
        for name in ENDS:
            patches.enter_context(mock.patch.object(os, name, raising(name, getattr(os, name))))
        yield


def load(name: str) -> Any:
    """Return a module, also of the current folder. Raises ValueError."""
    path = Path(name)
    if not name.strip(".") or os.sep in name or path.suffix in (".py", ".ipynb"):
        module = path.stem.strip(".") or "my_attention"
        remedy = f"in the folder of the file, write `canon check {module}`"
        remedy = "export the notebook as a .py file first" if path.suffix == ".ipynb" else remedy
        raise ValueError(
            f"cannot import {name!r}: expected the name of a module, not a path; {remedy}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        place = f"{Path(error.filename or name).name}, line {error.lineno}"
        raise ValueError(f"cannot import {name}: syntax error in {place}: {error.msg}") from error
    except ModuleNotFoundError as error:
        absent = error.name and f"{name}.".startswith(f"{error.name}.")
        told = ValueError(f"cannot import {name}: {error}") if absent else _failed(name, error)
        raise told from error
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def _failed(name: str, error: BaseException) -> ValueError:
    frames = "".join(traceback.format_exception(error, limit=-2)).rstrip()  # the innermost two
    return ValueError(f"cannot import {name}: it raises {type(error).__name__}: {error}\n{frames}")


def uses_kernels(module: ModuleType) -> bool:
    """Return whether the module is one of Triton or `canon.fast`, or has a value of these."""
    homes = {
        f"{getattr(x, name, '')}."
        for x in (module, *vars(module).values())
        for name in ("__name__", "__module__")
    }
    return any(home.startswith(("triton.", "canon.fast.")) for home in homes)


def remarks(module: ModuleType, functions: list[str]) -> list[str]:
    """Return remarks for the author of a module outside canon."""
    if module.__name__.startswith("canon."):
        return []
    lines, whole = [], WHOLE - {"prepare"}
    if parts := ", ".join(name for name in functions if name not in whole):
        lines.append(
            "By their names, these are compared with the same functions of canon.reference: "
            f"{parts}. A function with another purpose needs another name."
        )
    for name in (name for name in functions if name in whole):
        unused = {x.name: x for x in parameters_of(module, name).values() if x.name in UNUSED}
        own = ", ".join(f"{x}={y.default}" for x, y in unused.items() if y.default is not y.empty)
        if unused:
            lines.append(
                f"{name}: the check passes a mask as the argument after v, and never "
                f"{', '.join(unused)} (default: {own or 'none'}). Wrap such a function: `def "
                f"{name}(q, k, v): return yours(q, k, v, causal=True)` with --features no-mask, "
                "or make yours take a canon.Mask; dropout must be 0."
            )
    return lines
