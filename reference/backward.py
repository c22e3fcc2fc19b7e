"""The gradients of attention on one rank, tile by tile, from the saved out and lse.

    s = scale * q k^T                    p = exp(s - lse)             the weights of the forward pass, computed again
    delta = rowsum(dout * out) - dlse    dp = dout v^T                ds = p * (dp - delta)
    dv = p^T dout                        dk = scale * ds^T q          dq = scale * ds k

lse normalises over all keys that a query sees, on this rank and on others. So p is the final weight of a key, even when
only a part of the keys is here. The parts of dq for different keys add up. So do the parts of dk and dv for different
queries. delta belongs to a query, not to a key. A call computes it once and passes it to every step.

In the matrix of scores, dq is a sum along rows (over keys); dk and dv are sums along columns (over queries). One loop
cannot finish both tile by tile, so there are three methods. They compute the same sums:

    method           loops over tiles                                   matrix products       dq on a GPU
                                                                        for each tile
    "fused"          key tiles outside, query tiles inside: dk and dv   5: s dp dv dk dq      atomic additions,
                     are finished, dq grows with every key tile                               in any order
    "split"          one loop by key tiles for dk and dv,               4: s dp dv dk         one owner for
                     one by query tiles for dq                          3: s dp dq            each element
    "head_parallel"  as "split"; each query head has its own dk         4 + 3                 one owner for
                     and dv, which are added in head order at the end                         each element

This module adds in one fixed order with every method. "auto" is "split".

Cost: fused takes 2 b h area (3 d + 2 dv) FLOPs and b h area exponentials. The others take 2 b h area (4 d + 3 dv) FLOPs
and 2 b h area exponentials. area counts the visible cells of the mask. Nothing is sent.
Memory beyond inputs and outputs: float32 dq, dk and dv; b h tiles of scores; the boolean tiles of one row or column.
dk and dv have b g s (d + dv) elements together, and b h s (d + dv) more with head_parallel.
Limits: those of `local.py`. Second derivatives are not supported.

This file exceeds 200 lines, so that the three methods and their derivation stay on one page.

Sources: Tri Dao, FlashAttention-2 (2023), algorithm 2; split: jax-ml/jax-triton pull request 177; head_parallel:
TensorAuto/OpenTau pull request 376.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from canon.masks.mask import Mask
from canon.reference.tiles import read, read_keys, visible_tiles
from canon.runtime.checks import (
    accumulate_dtype,
    check_gradients,
    check_mask,
    check_method,
    check_tensors,
    default_scale,
    under_autocast,
)
from canon.runtime.packing import differentiate_each

__all__ = ["attention_backward"]


@under_autocast("dout", "q", "k", "v", "out")
def attention_backward(
    dout: Float[Tensor, "*b t h dv"],
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    out: Float[Tensor, "*b t h dv"],
    lse: Float[Tensor, "*b h t"],
    mask: Mask | Sequence[Mask],
    *,
    scale: float | None = None,
    dlse: Float[Tensor, "*b h t"] | None = None,
    delta: Float[Tensor, "*b h t"] | None = None,
    method: str = "split",
    grad_dtype: torch.dtype | None = None,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Float[Tensor, "*b t h d"] | None, Float[Tensor, "*b s g d"] | None, Float[Tensor, "*b s g dv"] | None]:
    """Return dq, dk and dv of these queries over these keys.

    ``out`` and ``lse`` are those over *all* keys that the queries see, also keys on other ranks. The results for
    disjoint parts of the keys then add up to the whole gradient.

    Args:
        dout, dlse: gradients of out and lse; dlse=None is zero.
        mask: the visible cells of these queries x these keys, or b Masks, one for each sequence.
        scale: factor of the scores; None is 1 / sqrt(d).
        delta: rowsum(dout * out) - dlse, (b, h, t), if the caller has it; dlse must then be None.
        method: "fused", "split", "head_parallel", or "auto": see the module's docstring.
        grad_dtype: dtype of the results; None is the dtype of q.
        needs_grad: whether q, k and v need a gradient. A gradient that is not needed is None. The work for dq
            is skipped if q needs none, the work for dk and dv if neither k nor v needs one.

    Raises:
        ValueError: shapes, dtypes or the mask do not fit together, dlse and delta are both given, or an unknown method.

    The result is not differentiable. Source: Dao, FlashAttention-2 (2023), algorithm 2; methods: the module's docstring.
    """
    if isinstance(mask, (tuple, list)):
        return differentiate_each(
            attention_backward, dout, q, k, v, out, lse, mask,
            scale=scale, dlse=dlse, delta=delta, method=method, grad_dtype=grad_dtype, needs_grad=needs_grad,
        )  # fmt: skip
    check_tensors(q, k, v)
    check_mask(q, k, mask)
    check_gradients(dout, q, v, out, lse, dlse, delta)
    check_method("method", method)
    if delta is None:
        delta = make_delta(dout, out, dlse)
    packed = q.ndim == 3
    if packed:
        dout, q, k, v, lse, delta = (x.unsqueeze(0) for x in (dout, q, k, v, lse, delta))
    grads = tiled_backward(
        dout, q, k, v, lse, delta, mask,
        scale=default_scale(q, scale), method=method, grad_dtype=grad_dtype or q.dtype, needs_grad=needs_grad,
    )  # fmt: skip
    return tuple(x.squeeze(0) if packed and x is not None else x for x in grads)


def make_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Return rowsum(dout * out) - dlse, (*b, h, t), in the accumulation dtype. All steps of a call share it."""
    accumulate = accumulate_dtype(out.dtype)
    delta = (dout.to(accumulate) * out.to(accumulate)).sum(-1).transpose(-1, -2)
    return delta if dlse is None else delta - dlse


def tiled_backward(
    dout: Float[Tensor, "b t h dv"],
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g dv"],
    lse: Float[Tensor, "b h t"],
    delta: Float[Tensor, "b h t"],
    mask: Mask,
    *,
    scale: float,
    method: str,
    grad_dtype: torch.dtype,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Float[Tensor, "b t h d"] | None, Float[Tensor, "b s g d"] | None, Float[Tensor, "b s g dv"] | None]:
    """Return dq, dk and dv as `attention_backward`, without checks: the step of every backward pass."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v, dout))
    tiles = _Backward(mask, scale, *heads_first, lse, delta)
    walk = {"fused": tiles.fused, "head_parallel": tiles.head_parallel}.get(method, tiles.split)
    if not any(needs_grad[1:]):
        grads = tiles.dq(), None, None
    elif not needs_grad[0]:
        grads = None, *(tiles.head_parallel_keys() if method == "head_parallel" else tiles.split_keys())
    else:
        grads = walk()
    return tuple(
        x.transpose(1, 2).to(grad_dtype) if needed else None for x, needed in zip(grads, needs_grad, strict=True)
    )


class _Backward:
    """The loops of one backward pass over the visible tiles. Tensors have their heads first: (b, heads, tokens, width)."""

    def __init__(self, mask, scale, q, k, v, dout, lse, delta):
        self.mask, self.scale = mask, scale
        self.q, self.k, self.v, self.dout, self.lse, self.delta = q, k, v, dout, lse, delta
        self.group, self.accumulate = q.shape[1] // k.shape[1], accumulate_dtype(q.dtype)

    def fused(self):
        """Return dq, dk, dv by one loop over key tiles. Scores are computed once; dq grows with every key tile."""
        dq, dk, dv = self._zeros(self.q), self._zeros(self.k), self._zeros(self.v)
        for keys, strip in visible_tiles(self.mask, self.q.device, by_keys=True):
            for queries, visible in strip:
                p, ds, q, k, dout = self._scores(queries, keys, visible)
                dv[:, :, keys] += self._over_group(p.mT @ dout)
                dk[:, :, keys] += self._over_group(ds.mT @ q)
                dq[:, :, queries] += ds @ k
        return dq, dk, dv

    def split(self):
        """Return dq by a loop over query tiles, then dk and dv by a loop over key tiles."""
        return self.dq(), *self.split_keys()

    def split_keys(self):
        """Return dk, dv by a loop over key tiles. The query heads of a key head are added in each tile."""
        dk, dv = self._zeros(self.k), self._zeros(self.v)
        for keys, strip in visible_tiles(self.mask, self.q.device, by_keys=True):
            for queries, visible in strip:
                p, ds, q, _, dout = self._scores(queries, keys, visible)
                dv[:, :, keys] += self._over_group(p.mT @ dout)
                dk[:, :, keys] += self._over_group(ds.mT @ q)
        return dk, dv

    def head_parallel(self):
        """Return dq as split, and dk, dv from one partial sum for each query head."""
        return self.dq(), *self.head_parallel_keys()

    def head_parallel_keys(self):
        """Return dk, dv: a sum for each query head, then the sum of the query heads of each key head, in head order."""
        heads = self.q.shape[1]
        dk_heads, dv_heads = self._zeros(self.k, heads), self._zeros(self.v, heads)
        for keys, strip in visible_tiles(self.mask, self.q.device, by_keys=True):
            for queries, visible in strip:
                p, ds, q, _, dout = self._scores(queries, keys, visible)
                dv_heads[:, :, keys] += p.mT @ dout
                dk_heads[:, :, keys] += ds.mT @ q
        return self._over_group(dk_heads), self._over_group(dv_heads)

    def dq(self):
        """Return dq by a loop over query tiles."""
        dq = self._zeros(self.q)
        for queries, strip in visible_tiles(self.mask, self.q.device):
            for keys, visible in strip:
                _, ds, _, k, _ = self._scores(queries, keys, visible)
                dq[:, :, queries] += ds @ k
        return dq

    def _scores(self, queries, keys, visible):
        """Return p and scale * ds of one tile, and its q, k and dout in the accumulation dtype."""
        q, dout = (read(x, queries, visible.any(1)) for x in (self.q, self.dout))
        k, v = read_keys(self.k, self.v, keys, visible, self.group)
        p = torch.exp(self.scale * q @ k.mT - self.lse[:, :, queries, None]).masked_fill(~visible, 0)
        ds = (p * (dout @ v.mT - self.delta[:, :, queries, None])).masked_fill(~visible, 0)
        return p, self.scale * ds, q, k, dout

    def _over_group(self, x):
        """Return the sum over the query heads of each key head, in head order."""
        first, *others = x.unflatten(1, (-1, self.group)).unbind(2)
        for other in others:
            first = first + other
        return first

    def _zeros(self, like, heads=None):
        b, own_heads, tokens, width = like.shape
        return like.new_zeros(b, heads or own_heads, tokens, width, dtype=self.accumulate)
