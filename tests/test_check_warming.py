"""Kernels are compiled ahead of a check: noted without running, each once, in forks whose failures are not fatal."""

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
# CPU tensors in the place of device tensors, and a driver that has a target and no device.
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
trial = CaseRunner("canon.fast", tuple(cases), FromDocuments(documents), "cpu", Path())
seen = []
with _target(90):
    jobs = warming.collect([(1, trial)], seen.append)
    again = warming.collect([(1, trial), (1, trial)])
    names = sorted(job.args[0].fn.__name__ for job in jobs)
    merge = [job for job in jobs if job.args[0].fn.__name__ == "merge_kernel"]
    compiled = list(warming.compile_all(merge, 2))
print(json.dumps(dict(names=names, again=len(again), seen=seen, cases=len(cases), compiled=compiled)))
"""


def ran(program, tmp_path, **environment):
    """What a program prints, run as a file of its own, kernels not interpreted."""
    (tmp_path / "program.py").write_text(program)
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_failing_fork_is_not_fatal(tmp_path):
    assert ran(JOBS, tmp_path).splitlines() == ["[False, True, True, True]", "6 True"]


def test_compilations_are_noted_once_without_a_launch_and_compiled_into_the_cache(tmp_path):
    cache = tmp_path / "cache"
    said = json.loads(ran(COLLECT, tmp_path, TRITON_CACHE_DIR=str(cache)))
    assert said["seen"] == list(range(1, said["cases"] + 1)), "progress, case by case"
    assert set(said["names"]) == {"forward_kernel", "merge_kernel"}
    assert said["again"] == len(said["names"]), "each compilation is noted once, however many cases need it"
    assert said["compiled"] == [True] * said["names"].count("merge_kernel")
    assert list(cache.rglob("merge_kernel.cubin"))
    assert not list(cache.rglob("forward_kernel.cubin")), "collecting compiles nothing"


@pytest.fixture
def worlds(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    trial = CaseRunner(
        "canon.fast", tuple(all_cases(["float32"], gpu=True)[:3]), FromDocuments(DOCUMENTS), "cuda", Path()
    )
    return [(4, trial)]


@pytest.mark.parametrize(
    ("program", "told", "stamped"),
    [
        ('print(\'{"cases": 3}\\n{"of": 2}\\n{"compiled": 2, "failed": 0}\')', "2 kernels compiled ahead.", True),
        ('print(\'{"of": 2}\\n{"compiled": 1, "failed": 1}\')', "1 kernels compiled ahead, 1 left", False),
        ('print(\'{"of": 2}\\n{"compiled": 1, "failed": 0}\'); raise SystemExit(1)', "ended early, 1 kernels", False),
        ("print('something else')", "ended early, 0 kernels", False),
        ("raise SystemExit(3)", "ended early, 0 kernels", False),
    ],
)
def test_a_check_goes_on_however_compiling_ahead_ends(worlds, monkeypatch, program, told, stamped):
    monkeypatch.setattr(warming, "PROCESS", [sys.executable, "-c", program])
    assert told in warming.warm(worlds)
    again = warming.warm(worlds)
    assert (again == "Kernels were compiled before.") == stamped


def test_the_process_gets_the_worlds(worlds, monkeypatch):
    program = "import json, pickle, sys; (ranks, trial), = pickle.load(sys.stdin.buffer); "
    program += "print(json.dumps(dict(of=ranks, compiled=len(trial.cases))))"
    monkeypatch.setattr(warming, "PROCESS", [sys.executable, "-c", program])
    assert "3 kernels compiled ahead, 1 left" in warming.warm(worlds)


def test_nothing_is_compiled_ahead_on_a_cpu():
    assert not warming.worth_it("cpu")
