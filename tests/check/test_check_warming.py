"""Claims about `canon.fast.ahead.compilation` and `canon check`: kernels are collected, and
compiled once, in forks.
"""

import json
import os
import subprocess
import sys

import pytest
from programs import printed

from canon.check import warming
from canon.check.case_runner import CaseRunner
from canon.check.cases import all_cases
from canon.check.documents import Documents
from canon.fast.ahead import compilation
from canon.fast.ahead.compilation import Outcome

pytestmark = pytest.mark.interpreted

DOCUMENTS = Documents(("a", "b"), (b"some text, and " * 3, b"some more"))
JOBS = """
import os
from canon.fast.ahead.compilation import compile_all

def fail(): raise ValueError("no such kernel")
def fine(): pass

if __name__ == "__main__":
    print(sorted(map(repr, compile_all([fine, fail, fine, fine], 2))))
"""
# Kernels get CPU tensors, and a driver with a target but no device.
COLLECT = """
import json
from canon.fast.ahead.compilation import compile_all, recorded_jobs
from canon.fast.kernels.triton.backend import TRITON
from canon.check import warming
from canon.check.cases import all_cases
from canon.testing.compile import _target
from canon.check.documents import Documents
from canon.check.case_runner import CaseRunner

for name, answer in dict(check_device=None, check=None, serves=True).items():
    object.__setattr__(TRITON, name, lambda *given, answer=answer: answer)
documents = Documents(("a", "b"), (b"some text, and " * 3, b"some more"))
cases = [
    case
    for case in all_cases(["bfloat16"], True, documents)
    if case.function in ("merge", "attention_forward")
]
runner = CaseRunner("canon.fast", tuple(cases), "cpu")
with _target(90):
    with recorded_jobs() as jobs:
        warming.collect(1, runner)
    with recorded_jobs() as again:
        for _ in range(2):
            warming.collect(1, runner)
    names = sorted(name for _, name, _ in jobs)
    merge = [job for key, job in jobs.items() if key[1] == "merge_kernel"]
    compiled = [error is None for error in compile_all(merge, 2)]
print(json.dumps(dict(names=names, again=len(again), compiled=compiled)))
"""

# A module whose `collect` launches one kernel, in each of two shares.
MERGING = """
import os
import tempfile
import time
from pathlib import Path

import torch
from canon.fast.ahead import compilation
from canon.fast.kernels.triton import launch
from canon.testing.compile import _target

target = _target(90)

def collect():
    target.__enter__()  # until the process ends
    out, lse = torch.zeros(1, 16, 2, 32), torch.zeros(1, 2, 16)
    launch.merge(out, lse, out, lse, out, lse)

def end():
    while not list(Path(tempfile.gettempdir()).glob("tmp*/*")):  # until the other share has a fork
        time.sleep(0.01)
    os._exit(3)

def compiled(other):
    shares, options = [collect, other], dict(processes=4, progress=False)
    return compilation.compile_ahead(shares, [other.__name__], **options)
"""


def test_kernels_compile_before_the_check_of_a_module_that_has_some():
    """In a fresh process, where nothing has loaded Triton."""
    program = """
from canon.check import warming
from canon.check.case_runner import CaseRunner
given = ("canon.fast", "cuda"), ("canon.reference", "cuda"), ("canon.fast", "cpu")
print([warming.worth_it(CaseRunner(name, (), device)) for name, device in given])
"""
    assert printed(program) == "[True, False, False]\n"


def test_a_failing_fork_is_not_fatal():
    assert printed(JOBS) == str(["None"] * 3 + ["ValueError('no such kernel')"]) + "\n"


def test_compilations_are_collected_once_without_a_launch_and_compiled_into_the_cache(tmp_path):
    cache = tmp_path / "cache"
    found = json.loads(printed(COLLECT, TRITON_CACHE_DIR=str(cache)))
    assert set(found["names"]) == {
        "forward_kernel",
        "merge_kernel",
        "parts_kernel",
        "merge_parts_kernel",
    }
    assert found["again"] == len(found["names"]), (
        "each compilation is collected once, also if several cases need it"
    )
    assert found["compiled"] == [True] * found["names"].count("merge_kernel")
    assert list(cache.rglob("merge_kernel.cubin"))
    assert not list(cache.rglob("forward_kernel.cubin")), "collecting compiles nothing"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    runner = CaseRunner("canon.fast", tuple(all_cases(["float32"], True, DOCUMENTS)[:3]), "cuda")
    return [(4, runner)]


@pytest.mark.parametrize(
    ("program", "message", "stamped"),
    [
        (
            'print(\'{"of": 2}\\n{"compiled": 2, "failed": 0}\')',
            "2 kernels compiled in ",
            True,
        ),
        (
            'print(\'{"of": 2}\\n{"compiled": 1, "failed": 1}\'); print("bad", file=sys.stderr)',
            "1 kernels compiled; others compile when they run, because of: bad",
            False,
        ),
        (
            'print(\'{"of": 2}\\n{"compiled": 1, "failed": 0}\'); raise SystemExit(1)',
            "exit status 1",
            False,
        ),
    ],
)
def test_a_check_continues_after_any_end_of_the_compilation(
    groups, monkeypatch, program, message, stamped
):
    # The process reads its work first. Otherwise it may end before the work is written.
    monkeypatch.setattr(
        compilation,
        "PROCESS",
        [sys.executable, "-c", f"import sys; sys.stdin.buffer.read(); {program}"],
    )
    assert message in warming.warm(groups)
    again = warming.warm(groups)
    assert (again == "The kernels are compiled already.") == stamped


def test_a_script_and_a_program_from_the_standard_input_take_turns_and_compile_once(tmp_path):
    script = tmp_path / "script.py"
    (tmp_path / "merging.py").write_text(MERGING)
    script.write_text(
        "import os, sys; os.environ.pop('TRITON_INTERPRET', None); "
        f"sys.path.append({str(tmp_path)!r}); import merging; "
        "print(merging.compiled(merging.collect))"
    )
    kept = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
    both = [subprocess.Popen([sys.executable, place], env=kept, **pipes) for place in (script, "-")]
    texts = None, script.read_text()
    (one, errors), (other, more) = (
        p.communicate(text, timeout=300) for p, text in zip(both, texts, strict=True)
    )
    found = sorted(map(str.strip, (one, other)))
    assert found == [str(Outcome(*counts)) for counts in ((), (3, 0, 3))], errors + more
    assert len(list((tmp_path / "cache").rglob("merge_kernel.cubin"))) == 1, "of both shares"
    assert len(list((tmp_path / "cache").rglob("canon_replay*.so"))) == 1, (
        "the native replay is compiled, too"
    )


def test_a_share_that_ends_ends_the_compilation(tmp_path):
    (tmp_path / "merging.py").write_text(MERGING)
    program = f"import sys; sys.path.append({str(tmp_path)!r}); import merging; "
    program += "print(merging.compiled(merging.end))"
    said = printed(program, TRITON_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path))
    assert "terminated abruptly" in said, "and no fork of the other remains"
