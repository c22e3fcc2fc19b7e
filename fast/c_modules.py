"""Compile C extensions of this package with the compiler that Triton uses for its own."""

from pathlib import Path
from types import ModuleType
from typing import Any


def optional_c_module(folder: Path, *names: str) -> ModuleType | None:
    """Return the module of these files of a folder, or None where they cannot be compiled."""
    try:
        return c_module(*(folder / name for name in names))
    except Exception:
        return None


def c_module(*sources: Path, **options: Any) -> ModuleType:
    """Compile and load C files, one after another, as the module ``canon_NAME`` of the last one.
    Triton caches the result.

    Raises whatever the compiler raises, and ModuleNotFoundError without Triton.
    """
    from triton.runtime.build import compile_module_from_src

    return compile_module_from_src(
        "\n".join(source.read_text() for source in sources), f"canon_{sources[-1].stem}", **options
    )
