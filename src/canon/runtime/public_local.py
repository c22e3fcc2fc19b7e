"""The public functions of one rank, and `decode_attention`: signatures, docstrings, checks. Each half binds its algorithms."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.masks.mask import Mask
from canon.runtime.agreement import group_state, named_failures, refused_together
from canon.runtime.attend import attend
from canon.runtime.binding import bound, half_of
from canon.runtime.call import Algorithm
from canon.runtime.checks import (
    Scale,
    any_device,
    batched,
    cached,
    check_gradients,
    check_mask,
    check_method,
    check_parts,
    check_sink,
    check_tensors,
    default_scale,
    kind_of_sink,
    split_scale,
    under_autocast,
)
from canon.runtime.divided_keys import keys_of_all_ranks
from canon.runtime.group import Group, place_in
from canon.runtime.packing import attend_each, check_masks, differentiate_each
from canon.runtime.rank_invariance import check_rank_invariant


def attention(algorithm: Algorithm, notes: str = ""):
    """Return `attention` of a half."""

    def attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b s g d"],
        v: Float[Tensor, "*b s g dv"],
        mask: Mask | Sequence[Mask] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        backward: str = "auto",
        rank_invariant: bool = False,
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Tensor, ...]:
        """Return softmax(scale * q k^T) v over the visible cells, differentiable in q, k and v.

        A query that sees no key gets out 0 and lse -inf. Keys that no query sees and queries that see no key may hold
        anything, NaN included. Under autocast q, k and v are cast as `torch.nn.functional.scaled_dot_product_attention`
        casts them.

        Args:
            q, k, v: (b, t, h, d), (b, s, g, d), (b, s, g, dv), or packed without b. h is a multiple of g. Any strides.
            mask: the visible cells of t queries x s keys, for all sequences; None is causal and needs t = s. A tuple or a
                list of b Masks holds one for each sequence.
            scale: factor of the scores, finite; None is 1 / sqrt(d).
            softcap: the limit of the scores: s becomes softcap * tanh(s / softcap) with s = scale * q k^T, and lse is that of
                the capped scores. Positive; None is no limit.
            sink: a logit (h,) of each query head in the denominator, float32 or in the dtype of q; None is none. out
                becomes out * sigmoid(lse - sink), differentiable in sink, too. lse stays that of the keys alone.
            backward: "fused", "split", "head_parallel", or "auto": the methods of `attention_backward`.
            rank_invariant: let the bits of a query depend on the keys that it sees and their positions modulo 128 alone:
                equal in training on any number of ranks, in prefill by chunks, in decoding, among other documents and in a
                tree. `canon.runtime.rank_invariance` has the contract. "fused" contradicts the option.
            return_lse: also return lse (b, h, t), the natural logarithm of the softmax's denominator, in float32 (float64
                for float64). It is differentiable.
            return_max_logits: also return, as the last result, the largest visible score of each query head (h,), scaled and
                capped, over batch, tokens and ranks: float32, not differentiable, -inf for a head that sees no key.

        Raises:
            ValueError: shapes, dtypes, devices or the mask do not fit together, or ``backward`` is unknown or
                contradicts ``rank_invariant``.

        Warns:
            UserWarning: mask is None, h = g, and there are fewer tokens than heads, as if q were (b, h, t, d).

        Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
        """
        options = {
            "scale": scale,
            "softcap": softcap,
            "backward": backward,
            "rank_invariant": rank_invariant,
            "return_max_logits": return_max_logits,
        }
        return attend(algorithm, q, k, v, mask, None, sink, return_lse, options)

    return bound(attention, algorithm.forward, notes)


def attention_forward(forward: Callable[..., tuple[Tensor, Tensor]]):
    """Return `attention_forward` of a half. ``forward(q, k, v, mask, scale=, out_dtype=)`` takes a batch."""

    @under_autocast("q", "k", "v")
    def attention_forward(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b s g d"],
        v: Float[Tensor, "*b s g dv"],
        mask: Mask | Sequence[Mask],
        *,
        scale: float | None = None,
        softcap: float | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
        """Return out (b, t, h, dv) and lse (b, h, t) of these queries over these keys: a whole result, or a part to `merge`.

        Args: those of `attention`. ``out_dtype`` is the dtype of out, by default that of q. Parts to be merged should be
            float32, so that the merged result is rounded once. The result is not differentiable.
        Raises ValueError if the arguments do not fit together.
        Source: Dao, FlashAttention-2 (2023), algorithm 1.
        """
        if isinstance(mask, (tuple, list)):
            return attend_each(bound_forward, q, k, v, mask, scale=scale, softcap=softcap, out_dtype=out_dtype)
        check_tensors(q, k, v)
        check_mask(q, k, mask)
        options = {"scale": default_scale(q, scale, softcap), "out_dtype": out_dtype or q.dtype}
        out, lse = forward(*batched(q, k, v), mask, **options)
        return (out.squeeze(0), lse.squeeze(0)) if q.ndim == 3 else (out, lse)

    bound_forward = bound(attention_forward, forward)
    return bound_forward


def attention_backward(gradients: Callable[..., tuple[Tensor | None, ...]], notes: str = ""):
    """Return `attention_backward` of a half.

    ``gradients(dout, q, k, v, out, lse, dlse, delta, mask, scale=, method=, grad_dtype=, needs_grad=)`` takes a batch.
    """

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
        softcap: float | None = None,
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
            scale, softcap: those of the forward pass; None is 1 / sqrt(d), and no limit.
            delta: rowsum(dout * out) - dlse, (b, h, t), if the caller has it; dlse must then be None.
            method: "fused", "split", "head_parallel", or "auto": see `backward.py`.
            grad_dtype: dtype of the results; None is the dtype of q.
            needs_grad: whether q, k and v need a gradient. A gradient that is not needed is None. The work for dq
                is skipped if q needs none, the work for dk and dv if neither k nor v needs one.

        Raises:
            ValueError: shapes, dtypes or the mask do not fit together, dlse and delta are both given, or an unknown method.

        The result is not differentiable. Source: Dao, FlashAttention-2 (2023), algorithm 2; methods: `backward.py`.
        """
        if isinstance(mask, (tuple, list)):
            return differentiate_each(
                bound_backward, dout, q, k, v, out, lse, mask,
                scale=scale, softcap=softcap, dlse=dlse, delta=delta, method=method, grad_dtype=grad_dtype,
                needs_grad=needs_grad,
            )  # fmt: skip
        check_tensors(q, k, v)
        check_mask(q, k, mask)
        check_gradients(dout, q, v, out, lse, dlse, delta)
        check_method("method", method)
        packed = q.ndim == 3
        statistics = (x.unsqueeze(0) if packed and x is not None else x for x in (lse, dlse, delta))
        grads = gradients(
            *batched(dout, q, k, v, out), *statistics, mask,
            scale=default_scale(q, scale, softcap), method=method, grad_dtype=grad_dtype or q.dtype, needs_grad=needs_grad,
        )  # fmt: skip
        return tuple(x.squeeze(0) if packed and x is not None else x for x in grads)

    bound_backward = bound(attention_backward, gradients, notes)
    return bound_backward


def merge(merged: Callable[..., tuple[Tensor, Tensor]]):
    """Return `merge` of a half."""

    @under_autocast()
    def merge(
        out: Float[Tensor, "*b t h dv"],
        lse: Float[Tensor, "*b h t"],
        other_out: Float[Tensor, "*b t h dv"],
        other_lse: Float[Tensor, "*b h t"],
    ) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
        """Return (out, lse) over the keys of two disjoint parts, with out in the dtype of ``out``.

            lse' = log(exp(lse) + exp(other_lse))        out' = exp(lse - lse') out + exp(other_lse - lse') other_out

        A part in which a query sees no key (lse -inf) has no weight, whatever its out holds. The result is not
        differentiable. Raises ValueError if the shapes differ. Source: Dao, FlashAttention-2 (2023), section 2.3.1.
        """
        check_parts(out, lse, other_out, other_lse)
        return merged(out, lse, other_out, other_lse)

    return bound(merge, merged)


def is_captured(x: Tensor) -> bool:
    """Return whether work on x is captured in a CUDA graph now."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def keys_travel(*arguments: Any) -> None:
    """Return None, in place of a result: all keys have to travel."""


def decode_attention(
    decode: Callable[..., tuple[Tensor, Tensor]],
    attention: Callable[..., Any],
    check_device: Callable[[Tensor], None] = any_device,
    in_order: Callable[[Tensor, Tensor, Tensor], Callable[..., tuple[Tensor, Tensor] | None]] = lambda *_: keys_travel,
    notes: str = "",
):
    """Return `decode_attention` of a half: ``decode(q, k, v, mask, scale, sink, group, rank, ranks)``, after the checks.

    ``in_order(q, k, v)`` returns the function to be called on several ranks with ``rank_invariant``. Its arguments are those
    of ``decode``. It returns None, on all ranks, where only the half's function ``attention`` over the keys of all ranks will
    do.
    """

    @under_autocast("q", "k", "v")
    def decode_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b s g d"],
        v: Float[Tensor, "*b s g dv"],
        mask: Mask | Sequence[Mask] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        rank_invariant: bool = False,
        group: Group = None,
        return_lse: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
        """Return attention of queries that all ranks hold over keys that are divided among the ranks. A collective.

        Use it to generate or evaluate: few queries see many keys. Each rank computes the part of its own keys. All ranks
        merge the parts in rank order and round once, so they return the same bits.

        Args:
            q: (b, t, h, d), or packed without b, equal on all ranks.
            k, v: this rank's keys, (b, s, g, d), (b, s, g, dv), or packed. s may differ between ranks, and may be 0.
            mask: the visible cells of t queries x s keys of this rank, or b Masks, one for each sequence. None: all are seen.
            scale: factor of the scores; None is 1 / sqrt(d).
            softcap: the limit of the scores, as in `attention`; None is none.
            sink: a logit (h,) of each query head, as in `attention`, equal on all ranks. It is applied after the last merge.
            rank_invariant: return the bits that `attention` with this option returns for these queries, on any number of
                ranks. The keys of all ranks follow each other, and those of each rank begin at a multiple of 128. K and V
                travel to all ranks, unless notes below say otherwise, and the host waits: no CUDA graph can be captured.
                Dividing the heads among ranks, and calling `attention` with this option on each, needs no messages.
            group: a ProcessGroup or a DeviceMesh of one dimension; None is all ranks. Without torch.distributed this
                process is the only rank.
            return_lse: also return lse (b, h, t) over the keys of all ranks, as `attention` does.

        The result is not differentiable. Raises ValueError or TypeError on every rank, if the arguments of one rank do not
        fit together, or dtypes, scales or shapes except s differ between ranks; RuntimeError for ``rank_invariant`` on several
        ranks while a CUDA graph is captured. Source: Dao, FlashAttention-2 (2023), section 2.3.1, for the merge.
        """

        def way(several: bool) -> Callable[..., tuple[Tensor, Tensor] | None]:
            if not rank_invariant:
                return decode
            return in_order(*batched(q, k, v)) if several else keys_travel

        agreed = _agreed(q, k, v, mask, scale, softcap, sink, rank_invariant, group, half_of(decode), check_device, way)
        given, rank, ranks, mask, checked, compute = agreed
        with torch.no_grad(), named_failures("decode_attention", given, ranks):
            result = compute(*batched(q, k, v), mask, checked, sink, given, rank, ranks)
            if result is None:
                k, v, mask = keys_of_all_ranks("decode_attention", k, v, mask, given, ranks)
                options = {"scale": scale, "softcap": softcap, "sink": sink, "rank_invariant": True}
                return attention(q, k, v, mask, return_lse=return_lse, **options)
        out, lse = result
        if q.ndim == 3:
            out, lse = out.squeeze(0), lse.squeeze(0)
        return (out, lse) if return_lse else out

    return bound(decode_attention, decode, notes)


def _agreed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Sequence[Mask] | None,
    scale: Any,
    softcap: Any,
    sink: Tensor | None,
    rank_invariant: Any,
    group: Group,
    half: str,
    check_device: Callable[[Tensor], None],
    way: Callable[[bool], Callable[..., Any]],
) -> tuple[dist.ProcessGroup | None, int, int, Mask | Sequence[Mask], Scale, Callable[..., Any]]:
    """Return the process group, the rank, the number of ranks, the mask, the scale, and the function of ``way(several ranks)``.

    Ranks are compared before.
    """
    name = "decode_attention"
    group, rank, ranks = place_in(name, group)
    with refused_together(name, group, ranks):
        check_tensors(q, k, v)
        check_device(q)
        if mask is None:
            mask = cached(Mask.full, q.shape[-3], k.shape[-3])
        elif isinstance(mask, (tuple, list)):
            check_masks(q, k, v, mask)
        else:
            check_mask(q, k, mask)
        scale = default_scale(q, scale, softcap)
        check_sink(q, sink)
        check_rank_invariant(name, rank_invariant)
        if rank_invariant and ranks > 1 and is_captured(q):
            raise RuntimeError(
                f"{name}: with rank_invariant=True on several ranks the host waits, so a CUDA graph cannot be captured: divide "
                "the heads among ranks, and call attention(..., rank_invariant=True)"
            )
        compute = way(ranks > 1)
    if ranks > 1:
        fields = (
            ("function", name),
            ("half", half),
            ("dtype", q.dtype),
            ("device", q.device.type),
            ("shape of q", tuple(q.shape)),
            ("batch, heads and width of k", (*k.shape[:-3], *k.shape[-2:])),
            ("batch, heads and width of v", (*v.shape[:-3], *v.shape[-2:])),
            *zip(("scale", "softcap"), split_scale(scale), strict=True),
            ("sink", kind_of_sink(sink)),
            ("rank_invariant", rank_invariant),
            ("way", compute.__name__),
        )
        group_state(group).agree(name, fields, wait=q.device.type == "cpu")
    return group, rank, ranks, mask, scale, compute
