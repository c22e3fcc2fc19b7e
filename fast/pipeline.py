"""Run the steps of a schedule so that messages overlap with kernels. Every distributed function uses this order.

    time       before    step 0    step 1    step 2    step 3    end
    fetch      0         1         2         3
    compute              0         1         2         3
    reduce                         0         1         2         3

A column shows the steps that are fetched, computed and reduced at the same time. While the kernels of `compute` run in step
i, the inputs of step i + 1 and the results of step i - 1 are in flight. While the rest of the step runs (dq), its own
results are.
The first fetch overlaps with nothing, unless the caller starts it earlier by `prefetched`. The last reduction overlaps with
dq, if a separate kernel computes dq.

A schedule defines `fetch`, `compute` and `reduce` of a step. Its messages use torch.distributed (the ring) or `transport.py`.

Source: double buffering; the order is that of aqlaboratory/ring-flash-attention pull request 12 (2025).
"""

from collections.abc import Callable
from typing import Any


def prefetched(fetch: Callable[[int], Any]) -> Callable[[int], Any]:
    """Start the fetch of step 0 now, and return ``fetch`` with that result for step 0."""
    first = [fetch(0)]  # popped at its use, so that no reference keeps the memory
    return lambda step: fetch(step) if step else first.pop()


def run_pipeline(
    steps: int,
    fetch: Callable[[int], Any],
    compute: Callable[[int, Any], Any],
    reduce: Callable[[int, Any, Any], Any] | None = None,
) -> Any:
    """Run all steps. Return the result of the last reduction's ``wait()``, or None if nothing was reduced.

    Args:
        fetch: ``fetch(step)`` starts the messages that bring the inputs of a step. Its result's ``wait()`` returns them.
        compute: ``compute(step, inputs)`` launches kernels. With ``reduce`` it returns a pair: the results to send, and a
            function that launches the rest of the step after the sending has started.
        reduce: ``reduce(step, results, previous)`` starts to send, and returns an object with ``wait()``, or None.
            ``previous`` is the result of ``wait()`` of the step before, None in step 0. At most one reduction is in flight.
    """
    fetching, reducing = fetch(0), None
    for step in range(steps):
        inputs = fetching.wait()
        if step + 1 < steps:
            fetching = fetch(step + 1)
        computed = compute(step, inputs)
        inputs = None  # their memory may be used again
        if reduce:
            previous = reducing.wait() if reducing else None
            reducing = reduce(step, computed[0], previous)
            computed[1]()
        computed = None
    return reducing.wait() if reducing else None
