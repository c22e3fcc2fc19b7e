"""Make kernels differentiable by `canon.runtime.autograd`, and use one backend for both passes of a call."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from canon.fast.device import chosen_backend, computing_with
from canon.fast.recomputation import choice_of_call
from canon.runtime import autograd as plain
from canon.runtime import operators, passes
from canon.runtime.call import Call


def differentiable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Callable,
    backward: Callable,
    *,
    call: Call | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return out and lse as `canon.runtime.autograd`. Backward passes and recomputations use the call's backend."""
    chosen = chosen_backend()
    choice = choice_of_call(chosen)
    if choice != chosen:
        forward = _WithChoice(forward, choice)
    backward = _WithChoice(backward, choice)  # its thread may have another choice
    return plain.differentiable(q, k, v, forward, backward, call=call, return_lse=return_lse)


def call_operator(function: str, *args: Any, **options: Any) -> Any:
    """Return the result of `canon.runtime.operators.call_operator`. The operator uses this call's backend."""
    choice = _choice_at_compilation() if torch.compiler.is_compiling() else choice_of_call(chosen_backend())
    return operators.call_operator("fast", function, *args, **options, kernels=choice)


@torch.compiler.assume_constant_result
def _choice_at_compilation() -> str | None:
    return chosen_backend()


def makes_passes(*functions: str) -> Callable[[Callable], Callable]:
    """Decorate as `canon.runtime.passes.makes_passes`. The passes of an operator use the backend of its call."""

    def _decorate(make: Callable) -> Callable:
        @wraps(make)
        def with_choice(*args: Any, kernels: str | None = None, **options: Any) -> passes.Passes:
            _check_choice(kernels)
            made = make(*args, **options)
            forward, backward = _WithChoice(made.forward, kernels), _WithChoice(made.backward, kernels)
            return made._replace(forward=forward, backward=backward)

        passes.makes_passes("fast", *functions)(with_choice)
        return make

    return _decorate


def _check_choice(kernels: str | None) -> None:
    """Raise RuntimeError if another backend was chosen around a compiled function than at its compilation."""
    in_backward = torch._C._current_graph_task_id() != -1
    if not in_backward and (chosen := chosen_backend()) not in (None, kernels):
        compiled = "outside of backend(...)" if kernels is None else f"inside backend({kernels!r})"
        raise RuntimeError(
            f"backend({chosen!r}) surrounds a function that was compiled {compiled}: compile another copy"
        )


class _WithChoice:
    """A function that computes with the backend of its call."""

    __slots__ = ("choice", "function")

    def __init__(self, function: Callable, choice: str | None):
        self.function, self.choice = function, choice

    def __call__(self, *args):
        if chosen_backend() == self.choice:
            return self.function(*args)
        with computing_with(self.choice):
            return self.function(*args)
