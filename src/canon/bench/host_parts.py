"""Split the host time of a call of `canon.fast` into parts.

    arguments    checks, or the look-up of arguments that were checked before
    digests      the comparison of the call between ranks
    results      allocation of results and gradients
    look-up      from the tensors of a pass to its recorded launches
    launches     workspace, tensor maps, kernels and memsets
    messages     posts of messages, and waits for them
    other        autograd, and Python code between the parts

A part that calls another part does not count its time. A clock costs about 0.3 us.
"""

import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from canon.route import attend

FUNCTIONS = {  # in every module that uses them: the part
    "empty_result": "results",
    "_empty_gradients": "results",
    "replayed": "look-up",
}
METHODS = {  # module, class, method: the part
    ("canon.ranks.agreement", "GroupState", "agree"): "digests",
    ("canon.fast.replay.recordings", "PreparedPass", "replay"): "launches",
    ("canon.fast.messages", "Transport", "all_gather"): "messages",
    ("canon.fast.messages", "Transport", "all_to_all"): "messages",
    ("canon.fast.messages", "BlockRing", "hop"): "messages",
    ("canon.fast.messages", "Pending", "wait"): "messages",
}
MODULES = ("local", "backward", "schedule", "messages", "ring", "strided", "magi")  # of canon.fast
PARTS = ("arguments", "digests", "results", "look-up", "launches", "messages", "other")


def host_parts(run: Callable[[], object], calls: int) -> dict[str, float]:
    """Return the milliseconds of each part, averaged over ``calls``. They add up to the call."""
    with _clocks() as seconds:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        seconds["other"] = time.perf_counter() - start - sum(seconds.values())
    return {part: 1e3 * seconds[part] / calls for part in PARTS}


@contextmanager
def _clocks() -> Iterator[Counter]:
    seconds, running = Counter(), threading.local()

    def timed(part: str, function: Callable) -> Callable:
        @wraps(function)
        def clocked(*arguments: Any, **options: Any) -> Any:
            stack = running.__dict__.setdefault("inside", [])  # the backward pass has a thread of its own
            stack.append(0.0)
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent = time.perf_counter() - start
                seconds[part] += spent - stack.pop()
                if stack:
                    stack[-1] += spent

        return clocked

    with ExitStack() as patches:
        for module in (importlib.import_module(f"canon.fast.{name}") for name in MODULES):
            for name in FUNCTIONS.keys() & vars(module).keys():
                patches.enter_context(mock.patch.object(module, name, timed(FUNCTIONS[name], getattr(module, name))))
        patches.enter_context(mock.patch.object(attend, "call_of", timed("arguments", attend.call_of)))
        for (module, owner, name), part in METHODS.items():
            found = getattr(importlib.import_module(module), owner)
            patches.enter_context(mock.patch.object(found, name, timed(part, getattr(found, name))))
        yield seconds
