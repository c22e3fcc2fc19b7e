"""Many cases of a check run in several processes, with the results of one."""

from dataclasses import replace

from rich.console import Console

from canon.check import run_cases
from canon.check.case_runner import CaseRunner
from canon.check.cases import all_cases
from canon.check.documents import Documents

DOCUMENTS = Documents(tuple("ab"), (bytes(range(9)), bytes(range(11))))
CASES = tuple(
    x
    for x in all_cases(["float32"], False, DOCUMENTS)
    if x.function in ("merge", "attention_forward")
)
RUNNER = CaseRunner("canon.reference", CASES, "cpu")


def results_of(runner, monkeypatch, number=2):
    monkeypatch.setattr(run_cases, "PART", 2)
    monkeypatch.setattr(run_cases, "_processes", lambda runner: number)
    return run_cases.run_groups("threads", [(2, runner)], Console())[0]


def test_processes_give_the_results_of_one_in_the_order_of_the_cases(monkeypatch):
    assert len(CASES) > 4
    one = results_of(RUNNER, monkeypatch, 1)
    assert [x["case"] for x in one] == [case.name for case in CASES]
    for start in ("fork", "spawn"):
        monkeypatch.setitem(run_cases.START, "cpu", start)
        assert results_of(RUNNER, monkeypatch) == one


def test_a_failing_case_is_named_and_the_others_run(monkeypatch, write_module):
    write_module(
        "failing",
        "from canon.reference import attention_forward\ndef merge(*_): raise KeyError('lost')\n",
    )
    merges = [x for x in CASES if x.function == "merge"][:2]
    cases = (CASES[0], *merges, CASES[1])  # each fork has a failing case, one the first
    found = results_of(replace(RUNNER, module="failing", cases=cases), monkeypatch)
    assert [(x["case"], x["verdict"]) for x in found] == [
        (x.name, "failed" if x.function == "merge" else "agrees") for x in cases
    ]


def test_a_case_that_ends_its_fork_fails(monkeypatch, write_module):
    write_module(
        "killing", "import os, signal\ndef merge(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    cases = tuple(x for x in CASES if x.function == "merge") + CASES[:2]
    found = results_of(replace(RUNNER, module="killing", cases=cases), monkeypatch)
    assert all(x["verdict"] == "failed" for x in found if x["case"].startswith("merge"))
    assert "terminated abruptly" in found[0]["faults"][0]
