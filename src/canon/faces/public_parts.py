"""Parts of attention on one rank, for algorithms of your own: both passes without autograd, and
`merge`.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from canon.masks.arguments import shown
from canon.masks.mask import Masks
from canon.route.binding import bound
from canon.route.checks import (
    batched,
    check_alike,
    check_gradients,
    check_mask,
    check_method,
    check_tensor,
    check_tensors,
    checked_dtype,
    default_scale,
    under_autocast,
)
from canon.route.packing import attend_each, differentiate_each


def attention_forward(forward: Callable[..., tuple[Tensor, Tensor]]):
    """Return `attention_forward` of a half. ``forward(q, k, v, mask, scale=, out_dtype=)`` takes a
    batch.
    """

    @under_autocast("q", "k", "v")
    @torch.no_grad()
    def attention_forward(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b s g d"],
        v: Float[Tensor, "*b s g dv"],
        mask: Masks,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
        """Return out (b, t, h, dv) and lse (b, h, t) of these queries over these keys: a whole
        result, or a part to `merge`. Not differentiable.

        Args: those of `attention`. ``out_dtype``, by default that of q, should be float32 for parts
            to be merged: the merged result is then rounded once.
        Raises ValueError if the arguments do not fit together. Source: Dao, FlashAttention-2
        (2023), algorithm 1.
        """
        if isinstance(mask, (tuple, list)):
            options = {"scale": scale, "softcap": softcap, "out_dtype": out_dtype}
            return attend_each(partial(bound_forward, **options), q, k, v, mask)
        check_tensors(q, k, v)
        check_mask(q, k, mask)
        out_dtype = checked_dtype("out_dtype", out_dtype, q.dtype)
        options = {"scale": default_scale(q, scale, softcap), "out_dtype": out_dtype}
        out, lse = forward(*batched(q, k, v), mask, **options)
        return (out.squeeze(0), lse.squeeze(0)) if q.ndim == 3 else (out, lse)

    bound_forward = bound(attention_forward, forward)
    return bound_forward


def attention_backward(gradients: Callable[..., tuple[Tensor | None, ...]], notes: str = ""):
    """Return `attention_backward` of a half.

    ``gradients(dout, q, k, v, out, lse, dlse, delta, mask, scale=, method=, grad_dtype=,
    needs_grad=)`` takes a batch."""

    @under_autocast("dout", "q", "k", "v", "out")
    @torch.no_grad()
    def attention_backward(
        dout: Float[Tensor, "*b t h dv"],
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b s g d"],
        v: Float[Tensor, "*b s g dv"],
        out: Float[Tensor, "*b t h dv"],
        lse: Float[Tensor, "*b h t"],
        mask: Masks,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        dlse: Float[Tensor, "*b h t"] | None = None,
        delta: Float[Tensor, "*b h t"] | None = None,
        method: str = "split",
        grad_dtype: torch.dtype | None = None,
        needs_grad: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[
        Float[Tensor, "*b t h d"] | None,
        Float[Tensor, "*b s g d"] | None,
        Float[Tensor, "*b s g dv"] | None,
    ]:
        """Return dq, dk and dv of these queries over these keys. Not differentiable.

        ``out`` and ``lse`` are those over *all* keys that the queries see, also on other ranks. So
        the results for disjoint parts of the keys add up to the whole gradient.

        Args:
            dout, dlse: gradients of out and lse; dlse=None is zero.
            mask, scale, softcap: those of the forward pass.
            delta: rowsum(dout * out) - dlse, (b, h, t), in place of dlse.
            method: "fused", "split", "head_parallel", or "auto": see `backward.py`.
            grad_dtype: dtype of the results; None is the dtype of q.
            needs_grad: whether q, k and v need a gradient. Others are None, and their work is
                skipped: for dk and dv if neither k nor v needs one.

        Raises ValueError if shapes, dtypes or the mask do not fit together, dlse and delta are both
        given, or the method is unknown. Source: Dao, FlashAttention-2 (2023), algorithm 2.
        """
        if isinstance(mask, (tuple, list)):
            return differentiate_each(
                bound_backward,
                dout,
                q,
                k,
                v,
                out,
                lse,
                mask,
                scale=scale,
                softcap=softcap,
                dlse=dlse,
                delta=delta,
                method=method,
                grad_dtype=grad_dtype,
                needs_grad=needs_grad,
            )
        check_tensors(q, k, v)
        check_mask(q, k, mask)
        check_gradients(dout, q, v, out, lse, dlse, delta)
        check_method("method", method)
        if not isinstance(needs_grad, tuple | list) or [*map(type, needs_grad)] != [bool] * 3:
            raise TypeError(f"needs_grad must be three booleans, got {shown(needs_grad)}")
        packed = q.ndim == 3
        statistics = (x.unsqueeze(0) if packed and x is not None else x for x in (lse, dlse, delta))
        grads = gradients(
            *batched(dout, q, k, v, out),
            *statistics,
            mask,
            scale=default_scale(q, scale, softcap),
            method=method,
            grad_dtype=checked_dtype("grad_dtype", grad_dtype, q.dtype),
            needs_grad=needs_grad,
        )
        return tuple(x.squeeze(0) if packed and x is not None else x for x in grads)

    bound_backward = bound(attention_backward, gradients, notes)
    return bound_backward


def merge(merged: Callable[..., tuple[Tensor, Tensor]]):
    """Return `merge` of a half."""

    @under_autocast()
    @torch.no_grad()
    def merge(
        out: Float[Tensor, "*b t h dv"],
        lse: Float[Tensor, "*b h t"],
        other_out: Float[Tensor, "*b t h dv"],
        other_lse: Float[Tensor, "*b h t"],
    ) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
        """Return (out, lse) over the keys of two disjoint parts, with out in the dtype of ``out``.

            lse' = log(exp(lse) + exp(other_lse))
            out' = exp(lse - lse') out + exp(other_lse - lse') other_out

        A part in which a query sees no key (lse -inf) has no weight, whatever its out holds. The
        result is not differentiable. Raises ValueError if the shapes differ. Source: Dao,
        FlashAttention-2 (2023), section 2.3.1."""
        parts = out, lse, other_out, other_lse
        for name, x in zip(("out", "lse", "other_out", "other_lse"), parts, strict=True):
            check_tensor(name, x)
            check_alike((name,), (x,))
        of_lse = (*out.shape[:-3], *out.shape[-2:-4:-1])
        if (
            out.ndim not in (3, 4)
            or out.shape != other_out.shape
            or not of_lse == lse.shape == other_lse.shape
        ):
            raise ValueError(
                "the parts differ in shape, or are not (*b, t, h, dv) and (*b, h, t): out "
                f"{tuple(out.shape)} and {tuple(other_out.shape)}, lse {tuple(lse.shape)} and "
                f"{tuple(other_lse.shape)}"
            )
        return merged(*parts)

    return bound(merge, merged)
