"""The one order in which every schedule fetches, computes and reduces.

    step          0          1          2          3
    fetch     0 | 1          2          3
    compute       0          1          2          3
    reduce                   0          1          2     | 3

While step i is computed, what step i + 1 needs is on its way, and so is what step i - 1 gave. The first fetch has beside it
what is computed before (`started`), the last reduction what its step still has to compute: dq, in two of the methods. A
schedule (head group, ring hop, stage) says what to fetch and where results go; how it travels is the transport's business.

Source: double buffering; the order is that of aqlaboratory/ring-flash-attention pull request 12 (2025).
"""

from collections.abc import Callable
from typing import Any


def started(fetch: Callable[[int], Any]) -> Callable[[int], Any]:
    """``fetch`` with step 0 under way: what is computed between this and the `pipeline` has a message to hide."""
    first = [fetch(0)]  # given away, not kept
    return lambda step: fetch(step) if step else first.pop()


def run_pipeline(
    steps: int,
    fetch: Callable[[int], Any],
    compute: Callable[[int, Any], Any],
    reduce: Callable[[int, Any, Any], Any] | None = None,
) -> Any:
    """Run ``compute(step, fetched)`` for each step, with the next fetch and the last reduction under way beside it.

    With ``reduce`` it returns what is to be sent away, and what to call once that has left: the rest of the step.

    ``fetch(step)`` starts to bring what the step needs, and returns what waits for it: ``.wait()``.
    ``reduce(step, computed, before)`` starts to send what is to be sent away, once the reduction of the step before is
    finished: ``before`` is what its ``.wait()`` gave (None at first). At most one is under way. Returns what the last gave.
    """
    arriving, leaving = fetch(0), None
    for step in range(steps):
        fetched = arriving.wait()
        if step + 1 < steps:
            arriving = fetch(step + 1)
        computed = compute(step, fetched)
        fetched = None  # what follows may have its memory
        if reduce:
            before = leaving.wait() if leaving else None
            leaving = reduce(step, computed[0], before)
            computed[1]()
        computed = None
    return leaving.wait() if leaving else None
