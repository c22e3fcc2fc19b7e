"""Make kernels differentiable by `canon.reference.differentiable`, and use one backend for both passes of a call."""

from collections.abc import Callable

from torch import Tensor

from canon.fast.device import chosen_backend, computing_with
from canon.fast.recomputation import choice_of_call
from canon.reference import differentiable as plain
from canon.reference.call import Call


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
    """Return out and lse as `canon.reference.differentiable`. Backward passes and recomputations use the call's backend."""
    choice = choice_of_call(chosen_backend())
    forward, backward = _WithChoice(forward, choice), _WithChoice(backward, choice)
    return plain.differentiable(q, k, v, forward, backward, call=call, return_lse=return_lse)


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
