"""Compile C extensions with Triton's builder, or without Triton with the compiler of Python."""

import importlib.util
import shlex
import subprocess
import sysconfig
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

CACHE = Path("~/.cache/canon")  # of modules; Triton has a cache of its own


def optional_c_module(folder: Path, *names: str) -> ModuleType | None:
    """Return the module of these files of a folder, or None where they cannot be compiled."""
    try:
        return c_module(*(folder / name for name in names))
    except Exception:
        return None


def c_module(*sources: Path, **options: Any) -> ModuleType:
    """Compile and load C files, one after another, as the module ``canon_NAME`` of the last one.
    The result is cached. Raises whatever the compiler raises.
    """
    code = "\n".join(source.read_text() for source in sources)
    name = f"canon_{sources[-1].stem}"
    try:
        import triton  # noqa: F401 (first: else threads meet in its circular imports)
        from triton.runtime.build import compile_module_from_src
    except ModuleNotFoundError:
        return _compiled(code, name)
    return compile_module_from_src(code, name, **options)


def _compiled(code: str, name: str) -> ModuleType:
    variables = sysconfig.get_config_vars()
    cache = CACHE.expanduser()  # raises without a home, which an import must not
    made = cache / f"{name}-{sha256(code.encode()).hexdigest()}{variables['EXT_SUFFIX']}"
    if not made.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as folder:  # other processes see whole files only
            source, result = Path(folder, f"{name}.c"), Path(folder, made.name)
            source.write_text(code)
            command = *shlex.split(variables["LDSHARED"]), "-O3", "-fPIC"
            include = f"-I{sysconfig.get_path('include')}"
            subprocess.run([*command, include, source, "-o", result], check=True)
            result.replace(made)
    spec = importlib.util.spec_from_file_location(name, made)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
