"""The autograd Function of every attention call. Both passes run without autocast: inputs are cast
before.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from canon.ranks.profiling import recorded
from canon.route.call import Call
from canon.route.differentiation import once_differentiable

_NOTHING = nullcontext()


def forward_pass(call: Call, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return what `Call.forward` does, outside of a graph."""
    with surroundings(tensors[0], call, "forward"):
        return call.forward(tensors)


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
