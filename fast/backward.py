"""The backward pass of attention, from what the forward leaves (out and lse), in two kernels or one.

    method           kernels                                           products a tile    memory
    "split"          dq over tiles of queries; dk and dv over tiles    3 + 4              delta: 4 b h t bytes
                     of keys, the query heads of a group in turn
    "head_parallel"  dq as before; dk and dv of each *query* head,     3 + 4              also 4 b h s (d + dv) bytes
                     then summed over the group, in head order
    "fused"          one over tiles of keys, which adds to dq by       5                  delta, and 4 b h t d bytes
                     atomics in any order: not the same bits twice                        unless dq is float32 itself

"auto" is "head_parallel" where "split" would leave the device idle: heads share keys, and there are fewer tiles of
keys times key heads than twice the processors of the device; else "split". It is never "fused", so it is the same under
`torch.use_deterministic_algorithms(True)`.

delta = rowsum(dout * out) - dlse is made by a kernel of its own, or given: once per call, whatever the number of steps.

Sources: FlashAttention-2 (Tri Dao, 2023), algorithm 2; split: jax-ml/jax-triton pull request 177; head-parallel:
TensorAuto/OpenTau pull request 376.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from canon.fast.device import check_device
from canon.fast.kernels.triton import launch
from canon.reference.call import (
    accumulate_dtype,
    batched,
    check_gradients,
    check_mask,
    check_method,
    check_tensors,
    default_scale,
)
from canon.reference.mask import Mask

__all__ = ["attention_backward"]


def attention_backward(
    dout: Float[Tensor, "*b t h dv"],
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    out: Float[Tensor, "*b t h dv"],
    lse: Float[Tensor, "*b h t"],
    mask: Mask,
    *,
    scale: float | None = None,
    dlse: Float[Tensor, "*b h t"] | None = None,
    delta: Float[Tensor, "*b h t"] | None = None,
    method: str = "split",
    grad_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "*b t h d"], Float[Tensor, "*b s g d"], Float[Tensor, "*b s g dv"]]:
    """dq, dk and dv of these queries and keys, where ``out`` and ``lse`` are of *all* keys, held here or elsewhere.

    The parts of the gradient that the ranks of a ring compute add up: lse already normalises over all of them.
    Not differentiable by itself.

    Args:
        dout, dlse: gradients of out (b, t, h, dv) and of lse (b, h, t); None: zero.
        delta: rowsum(dout * out) - dlse, (b, h, t), if it is known already; then dlse must be None.
        method: "split", "fused", "head_parallel", or "auto": see the module's docstring.
        grad_dtype: of the results, that of the inputs by default; float32 comes straight from the accumulators.

    Raises:
        ValueError: shapes, dtypes or the mask do not fit together, dlse and delta both given, unknown method, or
            widths beyond what the device has shared memory for.
        RuntimeError: CPU tensors without Triton's interpreter.

    Source: Dao, FlashAttention-2 (2023), algorithm 2; the methods: see the module's docstring.
    """
    check_tensors(q, k, v)
    check_mask(q, k, mask)
    check_gradients(dout, q, v, out, lse, dlse, delta)
    check_method("method", method)
    check_device(q)
    packed, scale, grad_dtype = q.ndim == 3, default_scale(q, scale), grad_dtype or q.dtype
    q, k, v, dout, out = batched(q, k, v, dout.to(q.dtype), out)
    lse = lse.unsqueeze(0) if packed else lse
    dlse, delta = (x.unsqueeze(0) if packed and x is not None else x for x in (dlse, delta))
    if delta is None:
        delta = make_delta(dout, out, lse, dlse)
    arguments = (q, k, v, dout, lse, delta, mask, scale)
    method = automatic(q, k) if method == "auto" else method
    dq, dk, dv = {"split": _split, "head_parallel": _head_parallel, "fused": _fused}[method](*arguments, grad_dtype)
    return (dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)) if packed else (dq, dk, dv)


def make_delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, (b, h, t), and 0 in rows that see no key, whatever dout holds there."""
    delta = torch.empty(lse.shape, dtype=accumulate_dtype(lse.dtype), device=lse.device)
    launch.delta(dout, out, lse, dlse, delta)
    return delta


def automatic(q: Tensor, k: Tensor) -> str:
    """The method that "auto" stands for: see the module's docstring."""
    if q.shape[2] == k.shape[2] or q.device.type == "cpu":
        return "split"
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    tiles = -(-k.shape[1] // 128) * k.shape[0] * k.shape[2]
    return "head_parallel" if tiles < 2 * processors else "split"


def _split(q, k, v, dout, lse, delta, mask, scale, grad_dtype):
    dq, dk, dv = (_empty(x, grad_dtype) for x in (q, k, v))
    launch.dq(q, k, v, dout, lse, delta, mask, scale, dq)
    launch.dkdv(q, k, v, dout, lse, delta, mask, scale, dk, dv)
    return dq, dk, dv


def _head_parallel(q, k, v, dout, lse, delta, mask, scale, grad_dtype):
    heads = q.shape[2]
    if heads == k.shape[2]:
        return _split(q, k, v, dout, lse, delta, mask, scale, grad_dtype)
    dq, dk, dv = (_empty(x, grad_dtype) for x in (q, k, v))
    dk_heads, dv_heads = (_empty(x, accumulate_dtype(x.dtype), heads) for x in (k, v))
    launch.dq(q, k, v, dout, lse, delta, mask, scale, dq)
    launch.dkdv(q, k, v, dout, lse, delta, mask, scale, dk_heads, dv_heads)
    launch.sum_heads(dk_heads, dk)
    launch.sum_heads(dv_heads, dv)
    return dq, dk, dv


def _fused(q, k, v, dout, lse, delta, mask, scale, grad_dtype):
    dq, dk, dv = _empty(q, accumulate_dtype(q.dtype)).zero_(), _empty(k, grad_dtype), _empty(v, grad_dtype)
    launch.dkdv(q, k, v, dout, lse, delta, mask, scale, dk, dv, dq)
    return dq.to(grad_dtype), dk, dv


def _empty(like: Tensor, dtype: torch.dtype, heads: int | None = None) -> Tensor:
    b, tokens, own_heads, width = like.shape
    return torch.empty(b, tokens, heads or own_heads, width, dtype=dtype, device=like.device)
