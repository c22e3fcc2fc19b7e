"""Names in the traces of torch.profiler: `canon.ring_attention (forward)`, and inside `canon step
0`, `canon step 1`, ...
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch.autograd import profiler

T = TypeVar("T")
_NOTHING = nullcontext()


def recorded(function: str) -> AbstractContextManager:
    """Return a context that names a function in a trace."""
    profiled = profiler._is_profiler_enabled and not torch.compiler.is_compiling()
    return profiler.record_function(f"canon.{function}") if profiled else _NOTHING


def named_steps(steps: Iterable[T]) -> Iterable[T]:
    """Return the steps of a loop. A profiler shows their numbers."""
    return _named(iter(steps)) if profiler._is_profiler_enabled else steps


def _named(steps: Iterator[T]) -> Iterator[T]:
    for number in itertools.count():
        try:
            step = [next(steps)]
        except StopIteration:
            return
        with profiler.record_function(f"canon step {number}"):
            yield step.pop()  # the loop alone holds the tensors of a step
