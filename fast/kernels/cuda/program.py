"""Compile CUDA C++ at run time by NVRTC (through `cuda-core`), and keep the cubins on disk.

The cache is CANON_CACHE_DIR or a folder of Triton's cache. Two processes may write the same file.
"""

import hashlib
import io
import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from triton import knobs

FOLDER = Path(__file__).resolve().parent
STANDARD = "c++17"
Macros = tuple[tuple[str, int], ...]

_compiling, _importing = threading.Lock(), threading.Lock()


class Program(NamedTuple):
    """A file ``name``.cu with its macros, for one architecture: 80 is sm_80."""

    name: str
    macros: Macros
    architecture: int
    folder: Path = FOLDER

    def compiled(self) -> bytes:
        with _compiling:
            path = cache_folder() / f"{self.name}-{self.key()}.cubin"
            if path.exists():
                return path.read_bytes()
            code, _ = self.compile()
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_suffix(f".{os.getpid()}")
            written.write_bytes(code)
            written.replace(path)
            return code

    def compile(self) -> tuple[bytes, str]:
        """Compile without the cache. Return the cubin and the assembler's messages."""
        core, _ = compiler()
        options = core.ProgramOptions(
            name=f"{self.name}.cu",
            arch=f"sm_{self.architecture}",
            std=STANDARD,
            define_macro=[(name, str(value)) for name, value in self.macros],
            include_path=[str(self.folder)],
            ptxas_options=["-v"],
        )
        log = io.StringIO()
        source = (self.folder / f"{self.name}.cu").read_text()
        try:
            code = core.Program(source, "c++", options).compile("cubin", logs=log).code
        except Exception as error:  # `cuda-core` has no public class for it
            raise RuntimeError(
                f"{self.name}.cu does not compile for sm_{self.architecture}: {error}"
            ) from error
        return bytes(code), log.getvalue()

    def key(self) -> str:
        total = hashlib.sha256()
        for path in sorted(self.folder.glob("*.cu*")):
            content = path.read_bytes()
            total.update(f"{path.name} {len(content)}\n".encode() + content)
        _, version = compiler()
        total.update(
            repr((self.name, sorted(self.macros), self.architecture, STANDARD, version)).encode()
        )
        return total.hexdigest()[:32]


def compiler():
    """Return `cuda.core` and the version of NVRTC."""
    # `cuda.core` replaces modules during import: a second thread would find a part
    with _importing:
        return _imported()


@lru_cache(maxsize=1)
def _imported():
    try:
        import cuda.core as core  # pyright: ignore[reportMissingImports]  # it finds this folder instead
        from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: NVRTC's library is missing
        raise ModuleNotFoundError(
            "the CUDA kernels are compiled by NVRTC through cuda-core: pip install 'canon[cuda]' "
            f"({error})",
            name="cuda",
        ) from error
    if int(status):
        raise RuntimeError(f"NVRTC returns error {int(status)} for its version")
    return core, (major, minor)


def cache_folder() -> Path:
    """Return the folder of the cubins."""
    chosen = os.environ.get("CANON_CACHE_DIR")
    return Path(chosen) if chosen else Path(knobs.cache.dir) / "canon-cuda"
