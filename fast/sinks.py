"""Attention sinks in two kernels, one for each pass, which run after those over the keys.
Derivation and sources: `canon.reference.local`. PyTorch reduces dlse (b, h, t) to dsink, in a fixed
order.
"""

from typing import Any

import torch
from torch import Tensor

from canon.fast.device import rows_for
from canon.fast.replay.recordings import replayed
from canon.route.differentiation import once_differentiable


def under_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return out (*b, t, h, dv) under ``sink`` (h,)."""
    if out.ndim == 3:
        return _Sink.apply(out.unsqueeze(0), lse.unsqueeze(0), sink).squeeze(0)
    return _Sink.apply(out, lse, sink)


class _Sink(torch.autograd.Function):
    """out (b, t, h, dv) times sigmoid(lse - sink), as a function of out, lse (b, h, t) and sink
    (h,).
    """

    @staticmethod
    def forward(ctx, out, lse, sink):
        ctx.save_for_backward(out, lse, sink)
        result = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        replayed(_apply, (out, lse, sink, result))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: tuple[Tensor, ...], dout: Tensor):
        out, lse, sink = saved
        dlse = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        dout_keys = (
            torch.empty(out.shape, dtype=out.dtype, device=out.device)
            if ctx.needs_input_grad[0]
            else None
        )
        replayed(_differentiate, (dout, out, lse, sink, dout_keys, dlse))
        dsink = -dlse.sum((0, 2)).to(sink.dtype) if ctx.needs_input_grad[2] else None
        return dout_keys, dlse if ctx.needs_input_grad[1] else None, dsink


def _apply(out: Tensor, *tensors: Tensor) -> None:
    rows_for(out).apply_sink(out, *tensors)


def _differentiate(dout: Tensor, *tensors: Tensor | None) -> None:
    rows_for(dout).differentiate_sink(dout, *tensors)
