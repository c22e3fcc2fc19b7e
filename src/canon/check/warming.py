"""Compile the kernels of a check before it runs, in parallel processes."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter

from canon.check.case_runner import CaseRunner
from canon.check.module_import import uses_kernels
from canon.testing import process_groups


def worth_it(runner: CaseRunner) -> bool:
    """Return whether several cores can compile kernels of the module ahead."""
    return (
        runner.device == "cuda"
        and (os.cpu_count() or 1) > 1
        and find_spec("triton") is not None
        and uses_kernels(import_module(runner.module))
        and hasattr(os, "fork")
    )


def warm(groups: Sequence[tuple[int, CaseRunner]]) -> str:
    """Compile the kernels of pairs (ranks, runner), which processes share. Return a line for the
    user.
    """
    from canon.fast.ahead.compilation import compile_ahead

    first = groups[0][1]
    names = [(ranks, case.name) for ranks, runner in groups for case in runner.cases]
    documents = [case.documents for case in first.cases[:1]]
    identities = [(first.module, first.backend, documents, names)]
    began = perf_counter()
    outcome = compile_ahead([partial(collect, [group]) for group in groups], identities)
    if outcome.complete:
        return (
            f"{outcome.compiled} kernels compiled in {perf_counter() - began:.0f} s."
            if outcome.compiled
            else "The kernels are compiled already."
        )
    return (
        f"{outcome.compiled} kernels compiled; others compile when they run, because of: "
        f"{outcome.error}"
    )


def collect(groups: Sequence[tuple[int, CaseRunner]]) -> None:
    """Run all cases without launches."""
    for ranks, runner in groups:
        for case in runner.cases:
            with suppress(RuntimeError):  # the check will report it
                process_groups.threads(replace(runner, cases=(case,)).rehearse, ranks)
