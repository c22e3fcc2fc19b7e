"""Make kernels differentiable by `canon.reference.differentiable`, and use one backend for both passes of a call."""

from collections.abc import Callable
from functools import wraps

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

    def _with_choice(function: Callable) -> Callable:
        @wraps(function)
        def _computed(*args):
            with computing_with(choice):
                return function(*args)

        return _computed

    return plain.differentiable(
        q, k, v, _with_choice(forward), _with_choice(backward), call=call, return_lse=return_lse
    )
