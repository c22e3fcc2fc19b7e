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
    """Return whether kernels of the module can be compiled ahead."""
    return (
        runner.device == "cuda"
        and find_spec("triton") is not None
        and uses_kernels(import_module(runner.module))
        and hasattr(os, "fork")
    )


def warm(groups: Sequence[tuple[int, CaseRunner]]) -> str:
    """Compile the kernels of pairs (ranks, runner). Return a line for the user."""
    from canon.fast.ahead.compilation import compile_ahead

    cases = [
        (ranks, replace(runner, cases=(case,))) for ranks, runner in groups for case in runner.cases
    ]
    began = perf_counter()
    outcome = compile_ahead([partial(collect, *case) for case in cases], [cases])
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


def collect(ranks: int, runner: CaseRunner) -> None:
    """Run a case without launches."""
    with suppress(RuntimeError):  # the check will report it
        process_groups.threads(runner.rehearse, ranks)
