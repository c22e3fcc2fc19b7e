"""The differentiation that Canon refuses: torch.func, forward mode and second derivatives."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.autograd import forward_ad

NO_TRANSFORMS = (
    "canon does not support torch.func transforms (grad, vmap, jvp): call it outside of them"
)
NO_FORWARD_MODE = (
    "canon does not support forward-mode differentiation: use backward(), or detach the tangents "
    "of q, k, v"
)
NO_SECOND_DERIVATIVE = (
    "canon does not support second derivatives of attention: its gradients cannot be differentiated"
)


def check_differentiation(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError under torch.func transforms and forward-mode differentiation."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise NotImplementedError(NO_TRANSFORMS)
    given = (x for x in tensors if x is not None)
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in given
    ):
        raise NotImplementedError(NO_FORWARD_MODE)


def once_differentiable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorate ``backward(ctx, saved, *douts)`` of a Function, whose gradients then raise if they
    are differentiated. Those of torch's decorator count as constants where dout is one.
    """

    @wraps(backward)
    def _backward(ctx, *douts):
        saved = ctx.saved_tensors  # a checkpoint unpacks them once
        douts = tuple([x.resolve_neg() if x is not None and x.is_neg() else x for x in douts])
        if not torch.is_grad_enabled():
            return backward(ctx, saved, *douts)
        with torch.no_grad():
            grads = backward(ctx, saved, *douts)
        return undifferentiable(NO_SECOND_DERIVATIVE, grads, *saved, *douts)

    return _backward


def undifferentiable(message: str, grads: tuple, *of: Tensor | None) -> tuple:
    """Return gradients that raise ``message`` if they are differentiated, by any of the tensors
    that they depend ``of``.
    """
    return _Undifferentiable.apply(message, grads, *of)


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, message, grads, *of):
        ctx.message = message
        return grads

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(ctx.message)
