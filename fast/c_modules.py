"""Compile C extensions of this package with the compiler that Triton uses for its own."""

from pathlib import Path
from types import ModuleType
from typing import Any


def c_module(source: Path, **options: Any) -> ModuleType:
    """Compile and load a C file as the module ``canon_NAME``; Triton caches the result.

    Raises whatever the compiler raises, and ModuleNotFoundError without Triton.
    """
    from triton.runtime.build import compile_module_from_src

    return compile_module_from_src(source.read_text(), f"canon_{source.stem}", **options)
