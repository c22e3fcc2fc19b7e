"""The autograd Function of every algorithm of both halves.

An algorithm is two functions of tensors with a batch axis:

    forward(q, k, v)                                                 returns out, lse, *others
    backward(needs_grad, dout, dlse, q, k, v, out, lse, *others)     returns dq, dk, dv; those not in needs_grad may be None

``others`` are tensors saved for the backward pass. dlse is None if nothing depends on lse; dout is never None. Both passes
run without autocast: inputs are cast before, and partial results stay float32. Unsupported differentiation raises here.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from canon.runtime.call import Call
from canon.runtime.checks import batched

NO_TRANSFORMS = "canon does not support torch.func transforms (grad, vmap, jvp): call it outside of them"
NO_FORWARD_MODE = (
    "canon does not support forward-mode differentiation: use backward(), or detach the tangents of q, k, v"
)
NO_SECOND_DERIVATIVE = "canon does not support second derivatives of attention: its gradients cannot be differentiated"


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
    """Return out, or with ``return_lse`` (out, lse), as a differentiable function of q, k and v.

    Args: q, k, v with a batch axis, or packed without it; ``forward`` and ``backward`` of the module's docstring;
        ``call``, for a function of several ranks.
    Raises NotImplementedError under torch.func transforms and forward-mode differentiation. A second derivative raises
    RuntimeError when it is computed.
    """
    check_differentiation(q, k, v)
    if q.ndim == 3:
        out, lse = (x.squeeze(0) for x in _Attention.apply(*batched(q, k, v), forward, backward, call))
    else:
        out, lse = _Attention.apply(q, k, v, forward, backward, call)
    return (out, lse) if return_lse else out


def check_differentiation(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise NotImplementedError under torch.func transforms and forward-mode differentiation."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise NotImplementedError(NO_TRANSFORMS)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
        raise NotImplementedError(NO_FORWARD_MODE)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, forward, backward, call):
        with surroundings(q, call, "forward"):
            out, lse, *others = forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, *others)
        ctx.backward, ctx.call = backward, call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        needs_grad = ctx.needs_input_grad[:3]
        if (dout is None and dlse is None) or True not in needs_grad:
            return (None,) * 6
        saved, call = ctx.saved_tensors, ctx.call
        q, out = saved[0], saved[3]
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        create_graph = torch.is_grad_enabled()
        with torch.no_grad() if create_graph else _NOTHING, surroundings(q, call, "backward"):
            if call is not None and call.ranks > 1:
                call.agree("backward", q.device)
            grads = ctx.backward(needs_grad, dout, dlse, *saved)
        return *(_undifferentiable(*grads) if create_graph else grads), None, None, None


_NOTHING = nullcontext()


def surroundings(q: Tensor, call: Call | None, name: str) -> AbstractContextManager:
    """Turn autocast off. If messages of the pass ``name`` fail, raise an error that names the missing ranks."""
    if (call is None or call.ranks == 1) and not torch._C._is_any_autocast_enabled():
        return _NOTHING
    return _without_autocast(q, call, name)


@contextmanager
def _without_autocast(q: Tensor, call: Call | None, name: str) -> Iterator[None]:
    device = q.device.type
    plain = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    named = call.state.failures(f"{call.function} ({name})") if call is not None and call.ranks > 1 else nullcontext()
    with plain, named:
        yield


def _undifferentiable(*grads: Tensor | None) -> tuple[Any, ...]:
    """Return gradients that raise when they are differentiated. Otherwise a second derivative would silently be 0."""
    raising = torch._C._functions.DelayedError(NO_SECOND_DERIVATIVE.encode(), len(grads))  # pyright: ignore[reportAttributeAccessIssue]
    return raising(*(None if x is None else x.detach().requires_grad_() for x in grads))
