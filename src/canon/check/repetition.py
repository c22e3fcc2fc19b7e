"""Run a case several times, and compare the bits of its runs.

    run 1              as a caller runs it
    run 2, 3, ...      under `torch.use_deterministic_algorithms(True, warn_only=True)`, with equal
                       bits

If runs 1 and 2 have equal bits, two runs are enough, or three on a GPU: steps are recorded in the
second call. Otherwise there is one more, and the results of both ways are judged.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from canon.testing.deterministic import deterministic

RUNS = {"cpu": 2, "cuda": 3}  # by default
SWITCH = "torch.use_deterministic_algorithms"


class Repeated(NamedTuple):
    """The results of run 1, those of run 2 if some rank has other bits, and texts of later runs
    with other bits than run 2.
    """

    first: Any
    second: Any
    unequal_runs: list[str]


def repeated(
    run: Callable[[], Any],
    different: Callable[[Any, Any], str],
    on_some_rank: Callable[[bool], bool],
    runs: int,
    switched: bool,
) -> Repeated:
    """Run a case ``runs`` times, or once more."""
    # else products of matrices warn on a GPU under the switch
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    first, unequal_runs = run(), []
    if runs == 1:
        return Repeated(first, None, [])
    with deterministic(warn_only=True) if switched else nullcontext():
        second = run()
        unlike = on_some_rank(bool(different(first, second)))
        for number in range(3, runs + 1 + unlike):
            if where := different(second, run()):
                how = " (deterministic algorithms)" * switched
                unequal_runs.append(f"run {number} gave other bits than run 2{how}, in {where}")
    return Repeated(first, second if unlike else None, unequal_runs)
