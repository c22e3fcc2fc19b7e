"""The backward pass of attention, from what the forward leaves (out and lse), in three walks over the tiles.

    p = exp(scale * q k^T - lse)        delta = rowsum(dout * out) - dlse        ds = p * (dout v^T - delta)
    dv = p^T dout        dk = scale * ds^T q        dq = scale * ds k

Which of the three sums is finished first depends on the walk; the sums are the same:

    method           walk                                              products a tile    writes
    "fused"          key tiles; dq of every query tile grows as        5                  dq many times: on a GPU
                     the key tiles pass by                                                by atomics, in any order
    "split"          query tiles for dq; key tiles for dk and dv,      3 + 4              each element once
                     a key head's query heads one after another
    "head_parallel"  query tiles for dq; key tiles for dk and dv       3 + 4              each element once, then
                     of each *query* head, summed in head order                           one sum over the group

Cost: 2 b h area times (3 d + 2 dv) operations for fused, (4 d + 3 dv) for the others, which make s and dp twice.
Memory beyond inputs and outputs: the running tile; head_parallel also h s (d + dv) accumulators for each of b.
lse is of all keys a query sees, here or on other ranks: then the parts that ranks compute add up.

Sources: Tri Dao, FlashAttention-2 (2023), algorithm 2; split: jax-ml/jax-triton pull request 177; head-parallel:
TensorAuto/OpenTau pull request 376.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from canon.reference.checks import (
    accumulate_dtype,
    batched,
    check_gradients,
    check_mask,
    check_method,
    check_tensors,
    default_scale,
    under_autocast,
)
from canon.reference.mask import Mask
from canon.reference.tiles import read, read_keys, visible_tiles

__all__ = ["attention_backward"]


@under_autocast("dout", "q", "k", "v", "out")
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
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Float[Tensor, "*b t h d"] | None, Float[Tensor, "*b s g d"] | None, Float[Tensor, "*b s g dv"] | None]:
    """Return dq, dk and dv of these queries and keys, where ``out`` and ``lse`` are of *all* keys, held here or elsewhere.

    The parts of the gradient that the ranks of a ring compute add up: lse already normalises over all of them.

    Args:
        dout, dlse: gradients of out and lse (None: zero).
        delta: rowsum(dout * out) - dlse, (b, h, t), if it is known already; then dlse must be None.
        method: "fused", "split", "head_parallel", or "auto" (here: "split").
        grad_dtype: of the results, that of the inputs by default.
        needs_grad: which of q, k and v need a gradient. The others' are None and cost nothing; dk and dv share their cost.

    Raises:
        ValueError: shapes, dtypes or the mask do not fit together, dlse and delta both given, or unknown method.

    Source: Dao, FlashAttention-2 (2023), algorithm 2; the methods: see the module.
    """
    check_tensors(q, k, v)
    check_mask(q, k, mask)
    check_gradients(dout, q, v, out, lse, dlse, delta)
    check_method("method", method)
    packed, scale, grad_dtype = q.ndim == 3, default_scale(q, scale), grad_dtype or q.dtype
    if delta is None:
        delta = make_delta(dout, out, dlse)
    tiles = _Backward(mask, scale, *(x.transpose(1, 2) for x in batched(q, k, v, dout)), *_batched_rows(lse, delta))
    walk = {"fused": tiles.fused, "head_parallel": tiles.head_parallel}.get(method, tiles.split)
    if not any(needs_grad[1:]):
        grads = tiles.dq(), None, None
    elif not needs_grad[0]:
        grads = None, *(tiles.head_parallel_keys() if method == "head_parallel" else tiles.split_keys())
    else:
        grads = walk()
    grads = (x.transpose(1, 2).to(grad_dtype) if needed else None for x, needed in zip(grads, needs_grad, strict=True))
    return tuple(x.squeeze(0) if packed and x is not None else x for x in grads)


class _Backward:
    """The tiles of one backward pass, heads first, and the three walks over them."""

    def __init__(self, mask, scale, q, k, v, dout, lse, delta):
        self.mask, self.scale, self.q, self.k, self.v, self.dout, self.lse, self.delta = (
            mask, scale, q, k, v, dout, lse, delta,
        )  # fmt: skip
        self.group, self.accumulate = q.shape[1] // k.shape[1], accumulate_dtype(q.dtype)

    def fused(self):
        """Key tiles outside, query tiles inside: s and dp are made once, dq grows as the key tiles pass by."""
        dq, dk, dv = self._zeros(self.q), self._zeros(self.k), self._zeros(self.v)
        for columns, column in visible_tiles(self.mask, self.q.device, by_keys=True):
            for rows, seen in column:
                p, ds, q, k, dout = self._scores(rows, columns, seen)
                dv[:, :, columns] += self._over_group(p.mT @ dout)
                dk[:, :, columns] += self._over_group(ds.mT @ q)
                dq[:, :, rows] += ds @ k
        return dq, dk, dv

    def split(self):
        """One walk over query tiles for dq, one over key tiles for dk and dv: each tile of a gradient is written once."""
        return self.dq(), *self.split_keys()

    def split_keys(self):
        """dk and dv: key tiles outside, a key head's query heads are summed tile by tile."""
        dk, dv = self._zeros(self.k), self._zeros(self.v)
        for columns, column in visible_tiles(self.mask, self.q.device, by_keys=True):
            for rows, seen in column:
                p, ds, q, _, dout = self._scores(rows, columns, seen)
                dv[:, :, columns] += self._over_group(p.mT @ dout)
                dk[:, :, columns] += self._over_group(ds.mT @ q)
        return dk, dv

    def head_parallel(self):
        """As split, but every query head keeps a dk and a dv of its own; they are summed at the end, in head order."""
        return self.dq(), *self.head_parallel_keys()

    def head_parallel_keys(self):
        """dk and dv of each query head, then their sums over each group."""
        heads = self.q.shape[1]
        dk_heads, dv_heads = self._zeros(self.k, heads), self._zeros(self.v, heads)
        for columns, column in visible_tiles(self.mask, self.q.device, by_keys=True):
            for rows, seen in column:
                p, ds, q, _, dout = self._scores(rows, columns, seen)
                dv_heads[:, :, columns] += p.mT @ dout
                dk_heads[:, :, columns] += ds.mT @ q
        return self._over_group(dk_heads), self._over_group(dv_heads)

    def dq(self):
        """dq: query tiles outside, each written once."""
        dq = self._zeros(self.q)
        for rows, row in visible_tiles(self.mask, self.q.device):
            for columns, seen in row:
                _, ds, _, k, _ = self._scores(rows, columns, seen)
                dq[:, :, rows] += ds @ k
        return dq

    def _scores(self, rows, columns, seen):
        """p and scale * ds of one tile, and the q, k and dout that they were made from."""
        q, dout = (read(x, rows, seen.any(1)) for x in (self.q, self.dout))
        k, v = read_keys(self.k, self.v, columns, seen, self.group)
        p = torch.exp(self.scale * q @ k.mT - self.lse[:, :, rows, None]).masked_fill(~seen, 0)
        ds = (p * (dout @ v.mT - self.delta[:, :, rows, None])).masked_fill(~seen, 0)
        return p, self.scale * ds, q, k, dout

    def _over_group(self, x):
        """Sum the query heads of each key head, in order."""
        first, *others = x.unflatten(1, (-1, self.group)).unbind(2)
        for other in others:
            first = first + other
        return first

    def _zeros(self, like, heads=None):
        b, own_heads, tokens, width = like.shape
        return like.new_zeros(b, heads or own_heads, tokens, width, dtype=self.accumulate)


def _batched_rows(*rows: Tensor) -> tuple[Tensor, ...]:
    """lse and delta of packed tensors, (h, t), as a batch of one."""
    return tuple(x.unsqueeze(0) if x.ndim == 2 else x for x in rows)


def make_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Return rowsum(dout * out) - dlse, (b, h, t): once per call, however many steps use it."""
    accumulate = accumulate_dtype(out.dtype)
    delta = (dout.to(accumulate) * out.to(accumulate)).sum(-1).transpose(-1, -2)
    return delta if dlse is None else delta - dlse
