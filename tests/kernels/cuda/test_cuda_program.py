"""CUDA programs: each variant is compiled once, its cubin is kept on disk whole, and errors name
their remedy.
"""

import subprocess
from pathlib import Path

import pytest
from cuda_resources import resources
from folders import ROOT
from programs import printed

from canon.fast.kernels.cuda import kernel, program
from canon.fast.kernels.cuda.program import Program
from canon.fast.replay import native as native_replay

SOURCE = """#include "value.cuh"
struct Params { float *out; long long stride; int count; };
extern "C" __global__ void canon_fill(const __grid_constant__ Params p) {
  if (threadIdx.x < p.count) p.out[threadIdx.x * p.stride] = VALUE * FACTOR;
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a program, and an empty cache."""
    pytest.importorskip("cuda.core", reason="needs the extra cuda")
    monkeypatch.setenv("CANON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "fill.cu").write_text(SOURCE)
    (tmp_path / "value.cuh").write_text("#define VALUE 2.0f\n")
    return tmp_path


@pytest.fixture
def compilations(monkeypatch):
    """The programs that are compiled."""
    found, compile = [], Program.compile
    monkeypatch.setattr(Program, "compile", lambda self: found.append(self) or compile(self))
    return found


def fill(folder, factor=1, architecture=80):
    return Program("fill", (("FACTOR", factor),), architecture, folder)


def test_a_compiled_program_comes_from_the_cache(folder, compilations):
    code = fill(folder).compiled()
    assert code[:4] == b"\x7fELF"
    assert fill(folder).compiled() == code
    assert len(compilations) == 1
    assert [path.name for path in program.cache_folder().iterdir()] == [
        f"fill-{fill(folder).key()}.cubin"
    ]


def test_a_file_of_the_cache_appears_whole_or_not_at_all(folder, monkeypatch):
    def broken(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", broken)
        with pytest.raises(OSError, match="no space"):
            fill(folder).compiled()
    assert not list(program.cache_folder().glob("*.cubin"))
    assert fill(folder).compiled()


IN_ANOTHER_PROCESS = """
import sys, threading
from pathlib import Path
from canon.fast.ahead.compilation import compile_all
from canon.fast.kernels.cuda.program import Program

jobs = [Program("fill", (("FACTOR", factor),), 80, Path(sys.argv[1])) for factor in range(1, 5)]
if sys.argv[2] == "forks":
    assert list(compile_all([job.compiled for job in jobs], 2)) == [None] * 4
else:
    start, failed = threading.Barrier(4), []
    threading.excepthook = lambda arguments: failed.append(arguments.exc_value)
    threads = [
        threading.Thread(target=lambda job=job: (start.wait(), job.compile())) for job in jobs
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed, failed
"""


@pytest.mark.parametrize(("how", "cached"), [("forks", 4), ("threads", 0)])
def test_the_compiler_is_imported_by_forks_and_by_threads_that_start_together(folder, how, cached):
    printed(IN_ANOTHER_PROCESS, folder, how)
    assert len(list((folder / "cache").glob("*.cubin"))) == cached


def test_an_error_in_the_source_has_the_messages_of_the_compiler(folder):
    (folder / "value.cuh").write_text("#define VALUE unknown\n")
    with pytest.raises(
        RuntimeError,
        match=r'(?s)fill.cu does not compile for sm_80.*"unknown" is '
        r"undefined",
    ):
        fill(folder).compiled()


def test_the_messages_of_the_assembler_give_registers_and_spills(folder):
    registers, spilled, shared = resources(fill(folder).compile()[1])
    assert 4 <= registers <= 255
    assert (spilled, shared) == (0, 0)
    messages = "Used 168 registers, 40 bytes smem\n 8 bytes spill stores, 16 bytes spill loads"
    assert resources(messages) == (168, 24, 40)


def test_importing_canon_compiles_nothing_and_a_missing_compiler_names_the_extra():
    code = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("cuda.core"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import canon.fast
from canon.fast.kernels.cuda.program import Program
assert not [name for name in sys.modules if name.startswith("cuda.core")]
try:
    Program("forward", (), 80).compiled()
except ModuleNotFoundError as error:
    assert "pip install 'canon[cuda]'" in str(error), error
else:
    raise AssertionError("the compiler is blocked")
"""
    printed(code)


# ------------------------------------------------------------------ parameters
FILL = kernel.Kernel("fill", 2, 1, "fi")
DRIVER = """
#include <string.h>
typedef struct {
  unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count;
} Config;
static unsigned char seen[64]; static unsigned grid, block, shared_bytes;
int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
  memcpy(seen, parameters[0], sizeof seen);
  grid = config->grid[0], block = config->block[0], shared_bytes = config->shared;
  return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b,
                   unsigned c, unsigned shared, void *stream, void **parameters, void **extra) {
  memcpy(seen, parameters[0], sizeof seen);
  grid = x, block = a, shared_bytes = shared;
  return 0;
}
int cuMemsetD8Async() { return 0; }
int cuTensorMapEncodeTiled() { return 0; }
unsigned char *last(unsigned *sizes) {
  sizes[0] = grid, sizes[1] = block, sizes[2] = shared_bytes; return seen;
}
"""
LAUNCHES = """
import ctypes, struct, sys
import torch
driver = ctypes.CDLL({driver!r}, ctypes.RTLD_GLOBAL)  # replaces libcuda.so.1 in this process
driver.last.restype = ctypes.POINTER(ctypes.c_ubyte)
from canon.fast.replay import native as native_replay
from canon.fast.kernels.cuda import kernel

def last():
    sizes = (ctypes.c_uint * 3)()
    seen = bytes(driver.last(sizes)[:32])
    return struct.unpack("<QQqfi", seen), list(sizes)

fill = kernel.Kernel("fill", 2, 1, "fi")
loaded = object.__new__(kernel.LoadedKernel)
loaded.kernel, loaded.variant = fill, kernel.Variant((), 4, 512)
loaded.device, loaded.function = 0, 4096
x, y = torch.zeros(3), torch.zeros(2)
torch._C._cuda_getCurrentRawStream = lambda device: 0
arguments = x, y, 7, 0.5, 3
loaded[5, 1, 1](*arguments)
assert last() == ((x.data_ptr(), y.data_ptr(), 7, 0.5, 3), [5, 128, 512]), last()
native = native_replay.native_module()
capsule = native.make((loaded.packed(6, arguments, [(1, 16), (-1, 12345)]),))
native.run(capsule, 0, 1 << 40, 1 << 41)
assert last() == (((1 << 41) + 16, 12345, 7, 0.5, 3), [6, 128, 512]), last()
"""


def test_a_launch_and_its_replay_pass_the_structure_with_addresses(tmp_path):
    """A library with the name of the driver takes the launches."""
    source, built = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", built, source], check=True
    )
    printed(LAUNCHES.format(driver=str(built)))


def test_a_structure_is_padded_to_eight_bytes_and_checked():
    assert len(FILL.image((None, None, 1, 0.5, 2))) == 32
    assert len(kernel.Kernel("odd", 1, 0, "i").image((None, 1))) == 16
    native = native_replay.native_module()
    with pytest.raises(ValueError, match="outside of its structure"):
        native.make(((4096, 1, 128, 0, (("s", bytes(16)), ("i", 16, 0, 0))),))
    with pytest.raises(ValueError, match="no such buffer"):
        native.make(((4096, 1, 128, 0, (("s", bytes(16)), ("i", 8, 99, 0))),))


def test_macros_the_architecture_the_headers_and_the_compiler_decide_the_key(folder, monkeypatch):
    keys = [fill(folder).key(), fill(folder, factor=2).key(), fill(folder, architecture=86).key()]
    (folder / "value.cuh").write_text("#define VALUE 3.0f\n")
    keys.append(fill(folder).key())
    core, _ = program.compiler()
    monkeypatch.setattr(program, "compiler", lambda: (core, (99, 0)))
    keys.append(fill(folder).key())
    assert len(set(keys)) == len(keys)


def test_the_sources_are_package_data():
    """A wheel takes the patterns of pyproject.toml."""
    import tomllib

    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {"*.cu", "*.cuh"} <= set(patterns["package-data"]["*"])
    assert {path.suffix for path in program.FOLDER.iterdir()} <= {".py", ".cu", ".cuh", ""}
