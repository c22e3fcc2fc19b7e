"""Claims about `canon.testing.warming`: kernels are collected without running, and compiled once, in parallel forks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from canon.testing import warming
from canon.testing.case_runner import CaseRunner
from canon.testing.cases import all_cases
from canon.testing.documents import Documents
from canon.testing.inputs import FromDocuments

DOCUMENTS = Documents(("a", "b"), (b"some text, and " * 3, b"some more"))
JOBS = """
import os
from canon.testing.warming import compile_all

def fail(): raise ValueError("no such kernel")
def die(): os._exit(7)
def fine(): pass

if __name__ == "__main__":
    print(sorted(compile_all([fine, fail, fine, fine], 2)))
    done = list(compile_all([die, *[fine] * 5], 1))
    print(len(done), done.count(False) >= 1)
"""
# Kernels get CPU tensors, and a driver with a target but no device.
COLLECT = """
import json
from pathlib import Path
from canon.fast import backward, local
from canon.testing import warming
from canon.testing.cases import all_cases
from canon.testing.compile import _target
from canon.testing.documents import Documents
from canon.testing.inputs import FromDocuments
from canon.testing.case_runner import CaseRunner

local.check_device = backward.check_device = lambda x: None
documents = Documents(("a", "b"), (b"some text, and " * 3, b"some more"))
cases = [case for case in all_cases(["bfloat16"], gpu=True) if case.function in ("merge", "attention_forward")]
runner = CaseRunner("canon.fast", tuple(cases), FromDocuments(documents), "cpu", Path())
progress = []
with _target(90):
    jobs = warming.collect([(1, runner)], progress.append)
    again = warming.collect([(1, runner), (1, runner)])
    names = sorted(job.args[0].fn.__name__ for job in jobs)
    merge = [job for job in jobs if job.args[0].fn.__name__ == "merge_kernel"]
    compiled = list(warming.compile_all(merge, 2))
print(json.dumps(dict(names=names, again=len(again), progress=progress, cases=len(cases), compiled=compiled)))
"""


def ran(program, tmp_path, **environment):
    """Run a program as a file, with compiled kernels, and return its output."""
    (tmp_path / "program.py").write_text(program)
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_failing_fork_is_not_fatal(tmp_path):
    assert ran(JOBS, tmp_path).splitlines() == ["[False, True, True, True]", "6 True"]


def test_compilations_are_collected_once_without_a_launch_and_compiled_into_the_cache(tmp_path):
    cache = tmp_path / "cache"
    found = json.loads(ran(COLLECT, tmp_path, TRITON_CACHE_DIR=str(cache)))
    assert found["progress"] == list(range(1, found["cases"] + 1)), "progress, case by case"
    assert set(found["names"]) == {"forward_kernel", "merge_kernel"}
    assert found["again"] == len(found["names"]), "each compilation is collected once, also if several cases need it"
    assert found["compiled"] == [True] * found["names"].count("merge_kernel")
    assert list(cache.rglob("merge_kernel.cubin"))
    assert not list(cache.rglob("forward_kernel.cubin")), "collecting compiles nothing"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    runner = CaseRunner(
        "canon.fast", tuple(all_cases(["float32"], gpu=True)[:3]), FromDocuments(DOCUMENTS), "cuda", Path()
    )
    return [(4, runner)]


@pytest.mark.parametrize(
    ("program", "message", "stamped"),
    [
        ('print(\'{"cases": 3}\\n{"of": 2}\\n{"compiled": 2, "failed": 0}\')', "2 kernels compiled.", True),
        ('print(\'{"of": 2}\\n{"compiled": 1, "failed": 1}\')', "1 kernels compiled; 1 others", False),
        ('print(\'{"of": 2}\\n{"compiled": 1, "failed": 0}\'); raise SystemExit(1)', "ended early: 1 kernels", False),
        ("print('something else')", "ended early: 0 kernels", False),
        ("raise SystemExit(3)", "ended early: 0 kernels", False),
    ],
)
def test_a_check_continues_after_any_end_of_the_compilation(groups, monkeypatch, program, message, stamped):
    monkeypatch.setattr(warming, "PROCESS", [sys.executable, "-c", program])
    assert message in warming.warm(groups)
    again = warming.warm(groups)
    assert (again == "The kernels are compiled already.") == stamped


def test_the_process_gets_the_groups(groups, monkeypatch):
    program = "import json, pickle, sys; (ranks, runner), = pickle.load(sys.stdin.buffer); "
    program += "print(json.dumps(dict(of=ranks, compiled=len(runner.cases))))"
    monkeypatch.setattr(warming, "PROCESS", [sys.executable, "-c", program])
    assert "3 kernels compiled; 1 others" in warming.warm(groups)


def test_a_cpu_compiles_nothing():
    assert not warming.worth_it("cpu")
