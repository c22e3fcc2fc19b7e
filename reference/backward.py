"""The gradients of attention on one rank, tile by tile, from the saved out and lse.

    scores = scale * q k^T              p = exp(scores - lse)   the weights of the forward pass,
                                                                computed again
    delta = rowsum(dout * out) - dlse   dp = dout v^T           ds = p * (dp - delta)
    dv = p^T dout                       dk = scale * ds^T q     dq = scale * ds k

With a soft-cap, the factor of ds is the slope of each score, scale * (1 - (score / softcap)^2).

lse normalises over all keys that a query sees, also those on other ranks, so p is the final weight
of a key. Hence parts of dq, dk and dv from disjoint keys or queries add up.

dq is a sum over keys, dk and dv are sums over queries. One loop cannot finish both tile by tile, so
three methods compute the same sums, with area visible cells:

    method            loops over tiles            products of a tile        FLOPs
    "fused"           of keys; dq grows with      5: s dp dv dk dq          2 b h area (3 d + 2 dv)
                      every tile of keys
    "split"           of keys for dk and dv,      4: s dp dv dk, 3: s dp    2 b h area (4 d + 3 dv)
                      then of queries for dq      dq
    "head_parallel"   as "split", with dk and dv of each query head, which are added over its share
                      in head order

A *share* is the query heads that share one key head. On a GPU, "fused" adds to dq by atomics, in
any order. This half adds in one fixed order with every method; "auto" is "split". Pictures:
notebooks/08_backward.md; shares: notebooks/09_grouped_heads.md.

Cost: float32 memory, beyond inputs and outputs: q, dout, k and v of every query head, dq, dk, dv
("head_parallel": of every query head), and b h tiles of scores, with the boolean tiles of one row
or column.

Limits: those of `local.py`. Second derivatives are not supported.

Sources: Tri Dao, FlashAttention-2 (2023), algorithm 2; split: jax-ml/jax-triton pull request 177;
head_parallel: TensorAuto/OpenTau pull request 376.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from canon.faces import public_parts
from canon.masks.layout import TILE
from canon.masks.mask import Mask
from canon.reference.tiles import (
    heads_first,
    in_whole_tiles,
    mask_in_whole_tiles,
    over_visible,
    read,
    scores_of,
    slope_of,
    visible_tiles,
)
from canon.route.algorithm import Gradients, NeedsGrad
from canon.route.checks import Scale, accumulate_dtype

__all__ = ["attention_backward"]


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor | None,
    mask: Mask,
    *,
    scale: Scale,
    method: str,
    grad_dtype: torch.dtype,
    needs_grad: NeedsGrad,
    whole_tiles: bool = False,
) -> Gradients:
    """Return dq, dk and dv as `attention_backward`, for a batch and without checks."""
    if delta is None:
        delta = make_delta(dout, out, dlse)
    return tiled_backward(
        dout,
        q,
        k,
        v,
        lse,
        delta,
        mask,
        scale=scale,
        method=method,
        grad_dtype=grad_dtype,
        needs_grad=needs_grad,
        whole_tiles=whole_tiles,
    )


attention_backward = public_parts.attention_backward(gradients)


def make_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Return rowsum(dout * out) - dlse, (*b, h, t), in the accumulation dtype."""
    accumulate = accumulate_dtype(out.dtype)
    product = (dout.to(accumulate) * out.to(accumulate)).contiguous()  # strides may change bits
    delta = product.sum(-1).transpose(-1, -2)
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
    scale: Scale,
    method: str,
    grad_dtype: torch.dtype,
    needs_grad: NeedsGrad = (True, True, True),
    whole_tiles: bool = False,
) -> tuple[
    Float[Tensor, "b t h d"] | None,
    Float[Tensor, "b s g d"] | None,
    Float[Tensor, "b s g dv"] | None,
]:
    """Return the same from delta: the step of every backward pass. ``whole_tiles``: as
    `tiled_forward`.
    """
    shapes = q.shape, k.shape, v.shape
    if whole_tiles:
        dout, q, k, v = map(in_whole_tiles, (dout, q, k, v))
        lse, delta = (
            pad(x, (0, -x.shape[2] % TILE), value=value)
            for x, value in ((lse, -torch.inf), (delta, 0))
        )
        mask = mask_in_whole_tiles(mask)
    tiles = _Backward(mask, scale, q, k, v, dout, lse, delta, whole_tiles)
    keys_need_grad = any(needs_grad[1:])
    if method == "fused" and needs_grad[0] and keys_need_grad:
        grads = tiles.fused()
    else:
        of_keys = tiles.head_parallel_keys if method == "head_parallel" else tiles.split_keys
        dq = tiles.dq() if needs_grad[0] else None
        grads = dq, *(of_keys() if keys_need_grad else (None, None))
    return tuple(
        x.transpose(1, 2)[:, : shape[1], :, : shape[3]].to(grad_dtype) if needed else None
        for x, shape, needed in zip(grads, shapes, needs_grad, strict=True)
    )


class _Backward:
    """The loops over the visible tiles, of tensors (b, heads, tokens, width)."""

    def __init__(self, mask, scale, q, k, v, dout, lse, delta, whole_tiles):
        self.tiles = partial(visible_tiles, mask, q.device, whole_tiles=whole_tiles)
        self.scale, self.share = scale, q.shape[2] // k.shape[2]
        self.q, self.dout, self.lse, self.delta = heads_first(q), heads_first(dout), lse, delta
        self.k, self.v = (heads_first(x, self.share) for x in (k, v))
        self.all_finite = all(bool(x.isfinite().all()) for x in (q, k, dout))

    def fused(self):
        dq, dk, dv = torch.zeros_like(self.q), *self._zeros_of_keys()
        for keys, strip in self.tiles(by_keys=True):
            for queries, visible in strip:
                p, ds, visible, q, k, dout = self._scores(queries, keys, visible)
                dv[:, :, keys] += self._over_share(self._product(p.mT, dout, visible.mT))
                dk[:, :, keys] += self._over_share(self._product(ds.mT, q, visible.mT))
                dq[:, :, queries] += self._product(ds, k, visible)
        return dq, dk, dv

    def split_keys(self):
        """Add the query heads of a key head in each tile."""
        dk, dv = self._zeros_of_keys()
        for keys, strip in self.tiles(by_keys=True):
            for queries, visible in strip:
                p, ds, visible, q, _, dout = self._scores(queries, keys, visible)
                dv[:, :, keys] += self._over_share(self._product(p.mT, dout, visible.mT))
                dk[:, :, keys] += self._over_share(self._product(ds.mT, q, visible.mT))
        return dk, dv

    def head_parallel_keys(self):
        """Add over queries for each query head, then the query heads of each key head, in order."""
        dk_heads, dv_heads = torch.zeros_like(self.k), torch.zeros_like(self.v)
        for keys, strip in self.tiles(by_keys=True):
            for queries, visible in strip:
                p, ds, visible, q, _, dout = self._scores(queries, keys, visible)
                dv_heads[:, :, keys] += self._product(p.mT, dout, visible.mT)
                dk_heads[:, :, keys] += self._product(ds.mT, q, visible.mT)
        return self._over_share(dk_heads), self._over_share(dv_heads)

    def dq(self):
        dq = torch.zeros_like(self.q)
        for queries, strip in self.tiles():
            for keys, visible in strip:
                _, ds, visible, _, k, _ = self._scores(queries, keys, visible)
                dq[:, :, queries] += self._product(ds, k, visible)
        return dq

    def _scores(self, queries, keys, visible):
        """Return p, slope * ds and the visible cells of one tile, and its q, k and dout."""
        q, dout = read(self.q, queries), read(self.dout, queries)
        k, v = read(self.k, keys), read(self.v, keys)
        lse, delta = (x[:, :, queries, None] for x in (self.lse, self.delta))
        visible = visible & (lse != -torch.inf)
        scores = scores_of(q, k, self.scale)
        p = torch.exp(scores - lse).masked_fill(~visible, 0)
        ds = slope_of(scores, self.scale) * (p * (dout @ v.mT - delta))
        ds = ds.masked_fill(~visible, 0)
        return p, ds, visible, q, k, dout

    def _product(self, weights, x, visible):
        return over_visible(weights, x, visible, self.all_finite)

    def _over_share(self, x):
        first, *others = x.unflatten(1, (-1, self.share)).unbind(2)
        for other in others:
            first = first + other
        return first

    def _zeros_of_keys(self):
        return (torch.zeros_like(x[:, :: self.share]) for x in (self.k, self.v))
