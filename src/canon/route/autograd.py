"""The autograd Function of every attention call, and the differentiation that is refused.

Both passes run without autocast: inputs are cast before.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from canon.ranks.profiling import recorded
from canon.route.call import Call

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

_NOTHING = nullcontext()


def check_differentiation(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError under torch.func transforms and forward-mode differentiation."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise NotImplementedError(NO_TRANSFORMS)
    given = (x for x in tensors if x is not None)
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in given
    ):
        raise NotImplementedError(NO_FORWARD_MODE)


def forward_pass(call: Call, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return what `Call.forward` does, outside of a graph."""
    with surroundings(tensors[0], call, "forward"):
        return call.forward(tensors)


def once_differentiable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorate ``backward(ctx, saved, *douts)`` of a Function, whose gradients then raise if they
    are differentiated. Those of torch's decorator count as constants where dout is one.
    """

    @wraps(backward)
    def _backward(ctx, *douts):
        saved = ctx.saved_tensors  # a checkpoint unpacks them once
        if not torch.is_grad_enabled():
            return backward(ctx, saved, *douts)
        with torch.no_grad():
            grads = backward(ctx, saved, *douts)
        return undifferentiable(NO_SECOND_DERIVATIVE, grads, *saved, *douts)

    return _backward


class Attention(torch.autograd.Function):
    """Both passes: (call, *tensors with a batch axis) -> (out, lse, max_logits or None)."""

    @staticmethod
    def forward(ctx, call, *tensors):
        out, lse, max_logits, *others = forward_pass(call, tensors)
        # a mesh keeps those of a column, and lse for `once_differentiable`
        own = (lse,) if call.columns > 1 else (*tensors, out, lse)
        ctx.save_for_backward(*own, *others)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if max_logits is not None:
            ctx.mark_non_differentiable(max_logits)
        return out, lse, max_logits

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout, dlse, _):
        needs_grad = ctx.needs_input_grad[1:]
        if (dout is None and dlse is None) or True not in needs_grad:
            return (None,) * (1 + len(needs_grad))
        call = ctx.call
        saved = saved[1:] if call.columns > 1 else saved
        q = saved[0]
        if dout is None:
            dout = q.new_zeros(()).expand(*call.shapes[0][:-1], call.value_width)
        if call.ranks > 1:
            call.agree("backward", needs_grad)
        # this thread may have other settings
        restored = call.algorithm.side.restored(call.settings)
        with surroundings(q, call, "backward"), restored:
            return None, *call.passes[1](call, needs_grad, dout, dlse, *saved)


def surroundings(q: Tensor, call: Call, name: str) -> AbstractContextManager:
    """Turn autocast off, and name the pass in traces and in errors of messages."""
    if (
        call.ranks == 1
        and not torch._C._is_any_autocast_enabled()
        and not profiler._is_profiler_enabled
    ):
        return _NOTHING
    return _without_autocast(q, call, name)


@contextmanager
def _without_autocast(q: Tensor, call: Call, name: str) -> Iterator[None]:
    device = q.device.type
    plain = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING
    named = call.state.failures(f"{call.function} ({name})") if call.ranks > 1 else _NOTHING
    traced = recorded(f"{call.function} ({name})") if profiler._is_profiler_enabled else _NOTHING
    with plain, named, traced:
        yield


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
