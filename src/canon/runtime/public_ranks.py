"""The public attention functions of several ranks: signatures and docstrings. Each half binds its algorithms to them.

These arguments are common to all of them:

    q, k, v           this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or all three without the batch axis. h is
                      a multiple of g
    mask              over the whole sequence; None is causal. A tuple or a list of b Masks holds one for each sequence
    layout            the tokens of each rank, for all sequences; None is contiguous (zigzag and striped have their own)
    scale             factor of the scores; None is 1 / sqrt(d)
    softcap           limit of the scores, as in `attention`; None is none
    sink              a logit (h,) of each query head, as in `attention`, equal on all ranks. A rank's gradient of it is the
                      sum over its own tokens: add the gradients of all ranks, as for every replicated parameter
    group             a ProcessGroup or a DeviceMesh of one dimension; None is all ranks. Without torch.distributed this
                      process is the only rank
    reduce_dtype      dtype in which dk and dv are sent; None is float32 (float64 for float64)
    backward          "fused", "split", "head_parallel" or "auto", for every step: see `backward.py`
    rank_invariant    return, on any number of ranks, the bits that one rank would return (`owner_computes.py`). Each piece of
                      the layout, a run of tokens on one rank, must begin at a multiple of 128, in the sequence and in the
                      rank's shard. layout=None is then contiguous with such pieces
    return_lse        also return lse (b, h, t) or (h, t), the natural logarithm of the softmax's denominator without the
                      sink, in float32 (float64 for float64). It is differentiable
    return_max_logits also return, as the last result, the largest scores (h,), as in `attention`

All ranks must call the function and its backward pass, with equal masks, layouts, dtypes, batches, heads, widths, scales,
options and requires_grad. The sequence is as long as the mask; without a mask, as the layout; without both, W t tokens.
A ValueError or TypeError is raised on every rank, if the arguments of one rank do not fit together or differ between ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.runtime.attend import attend
from canon.runtime.binding import bound
from canon.runtime.call import Algorithm
from canon.runtime.group import Group
from canon.runtime.latent_arguments import with_head


def _options(
    scale: float | None, softcap: float | None, reduce_dtype: torch.dtype | None, backward: str, return_max_logits: bool
) -> dict[str, Any]:
    """Return the options that all functions share, by name."""
    return {
        "scale": scale,
        "softcap": softcap,
        "reduce_dtype": reduce_dtype,
        "backward": backward,
        "return_max_logits": return_max_logits,
    }


def ring_attention(algorithm: Algorithm):
    """Return `ring_attention` of a half."""

    def ring_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
        mask: Mask | Sequence[Mask] | None = None,
        layout: Layout | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        group: Group = None,
        reduce_dtype: torch.dtype | None = None,
        backward: str = "auto",
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Tensor, ...]:
        """Return attention of this rank's queries over the keys of all ranks, which travel round a ring. A collective.

        Args: `canon.runtime.public_ranks` lists them. q, k, v (b, t, h, d), (b, t, g, d), (b, t, g, dv), or without b.
        Raises ValueError or TypeError on every rank, if arguments of a rank do not fit together or differ between ranks.
        Source: Liu, Zaharia, Abbeel, Ring Attention (2023).
        """
        options = _options(scale, softcap, reduce_dtype, backward, return_max_logits)
        return attend(algorithm, q, k, v, mask, layout, sink, return_lse, options, group)

    return bound(ring_attention, algorithm.forward)


def zigzag_attention(algorithm: Algorithm):
    """Return `zigzag_attention` of a half."""

    def zigzag_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
        mask: Mask | Sequence[Mask] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        group: Group = None,
        reduce_dtype: torch.dtype | None = None,
        backward: str = "auto",
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Tensor, ...]:
        """Return `ring_attention` over `Layout.zigzag`. Under a causal mask, all ranks have nearly equal work at each step.

        Arguments (except ``layout``), results and errors are those of `ring_attention`; it raises ValueError likewise.
        Source: Zilin Zhu, ring-flash-attention issue 2 (2024).
        """
        options = _options(scale, softcap, reduce_dtype, backward, return_max_logits)
        return attend(algorithm, q, k, v, mask, None, sink, return_lse, options, group)

    return bound(zigzag_attention, algorithm.forward)


def striped_attention(algorithm: Algorithm):
    """Return `striped_attention` of a half."""

    def striped_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
        mask: Mask | Sequence[Mask] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        group: Group = None,
        reduce_dtype: torch.dtype | None = None,
        backward: str = "auto",
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Tensor, ...]:
        """Return `ring_attention` over `Layout.striped`. A causal mask stays causal at each step; it may lose its diagonal.

        Arguments (except ``layout``), results and errors are those of `ring_attention`; it raises ValueError likewise.
        Source: Brandon et al., Striped Attention (2023).
        """
        options = _options(scale, softcap, reduce_dtype, backward, return_max_logits)
        return attend(algorithm, q, k, v, mask, None, sink, return_lse, options, group)

    return bound(striped_attention, algorithm.forward)


def latent_attention(algorithm: Algorithm):
    """Return `latent_attention` of a half."""

    def latent_attention(
        q: Float[Tensor, "*b t h d"],
        latent: Float[Tensor, "*b t rank"],
        k_rope: Float[Tensor, "*b t rope"],
        up_weight: Float[Tensor, "rows rank"],
        mask: Mask | Sequence[Mask] | None = None,
        layout: Layout | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        group: Group = None,
        reduce_dtype: torch.dtype | None = None,
        backward: str = "auto",
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Tensor, ...]:
        """Return multi-head latent attention. Latents travel round a ring; each rank projects them to K and V. A collective.

        A token sends rank + rope values instead of h (d + dv): 576 instead of 40,960 in DeepSeek-V3, 71 times fewer. The price
        is that every rank projects all tokens that it receives. It pays where messages of K and V would take longer than
        attention: `canon.reference.latent` has bytes, FLOPs and limits.

        Args:
            q: queries. Their last ``rope`` columns have the rotary embedding.
            latent: the compressed keys and values of a token, as `torch.nn.Linear` reads them: after their normalisation.
            k_rope: the part of K that all heads share, with the rotary embedding.
            up_weight: the weight of the projection, (h * (d - rope + dv), rank), equal on all ranks: ``kv_b_proj.weight`` in
                transformers. Each head has d - rope rows for K, then dv rows for V. K of a head ends with k_rope. A rank's
                gradient of it is the sum over its own queries: add the gradients of all ranks.
            scale: factor of the scores; None is 1 / sqrt(d).
            reduce_dtype: dtype in which the gradients of latent and k_rope are sent; None is float32 (float64 for float64).

        `canon.runtime.public_ranks` lists the others. All tensors of tokens may be without b.
        Raises ValueError or TypeError on every rank, if arguments of a rank do not fit together or differ between ranks.
        Source: DeepSeek-AI, DeepSeek-V2 (2024), section 2.1.
        """
        options = _options(scale, softcap, reduce_dtype, backward, return_max_logits)
        tokens = with_head(latent), with_head(k_rope)
        return attend(algorithm, q, *tokens, mask, layout, sink, return_lse, options, group, up_weight)

    return bound(latent_attention, algorithm.forward)


def strided_attention(algorithm: Algorithm):
    """Return `strided_attention` of a half."""

    def strided_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
        mask: Mask | Sequence[Mask] | None = None,
        layout: Layout | None = None,
        *,
        head_stride: int | None = None,
        forward_first_stride: int | None = None,
        backward_first_stride: int | None = None,
        backward_last_stride: int | None = None,
        backward_schedule: str = "scatter",
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        group: Group = None,
        reduce_dtype: torch.dtype | None = None,
        backward: str = "auto",
        rank_invariant: bool = False,
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Tensor, ...]:
        """Return attention of this rank's queries over the keys of all ranks, some key heads at a time. A collective.

        Args:
            head_stride: number of key heads in a head group, a divisor of g. None: the largest with at most 1 GiB of gathered
                K and V (`default_stride` in `canon.masks.head_groups`).
            forward_first_stride, backward_first_stride: number of key heads in the first step, less than head_stride. None:
                no split.
            backward_last_stride: number of key heads in the last step, likewise. If both backward strides are given, there
                must be two head groups or more: one group is split only once. Splits rarely pay on one host: in all
                recorded pairs, both passes take 0.99 to 1.14 times as long.
            backward_schedule: "scatter", or "ring": the backward pass of `ring_attention`, whose memory does not grow with
                the number of ranks. It takes no backward strides.

        `canon.runtime.public_ranks` lists the others. q, k, v (b, t, h, d), (b, t, g, d), (b, t, g, dv), or without b.
        "scatter" rounds a rank's part of dk and dv to reduce_dtype once. Strides change results by rounding only.
        Raises ValueError or TypeError on every rank, if arguments of a rank do not fit together or differ between ranks;
        also if strides do not fit the heads, a backward stride is given with "ring", or an option or the layout contradicts
        rank_invariant. Source: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2; the others: `strided.py`.
        """
        options = _options(scale, softcap, reduce_dtype, backward, return_max_logits) | {
            "rank_invariant": rank_invariant,
            "head_stride": head_stride,
            "forward_first_stride": forward_first_stride,
            "backward_first_stride": backward_first_stride,
            "backward_last_stride": backward_last_stride,
            "backward_schedule": backward_schedule,
        }
        return attend(algorithm, q, k, v, mask, layout, sink, return_lse, options, group)

    return bound(strided_attention, algorithm.forward)


def magi_attention(algorithm: Algorithm):
    """Return `magi_attention` of a half."""

    def magi_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
        mask: Mask | Sequence[Mask] | None = None,
        layout: Layout | None = None,
        *,
        casts: int | None = None,
        own_keys_first: bool | None = None,
        keep_kv: bool = False,
        stages: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        group: Group = None,
        reduce_dtype: torch.dtype | None = None,
        backward: str = "auto",
        rank_invariant: bool = False,
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Tensor, ...]:
        """Return attention of this rank's queries over the keys that they see, on all ranks. A collective.

        Args:
            casts: the largest number of casts, 1 by default. Each is in flight during the step before it is used.
            own_keys_first: True: step 0 uses own keys alone, while the first cast is in flight. False: step 0 waits for the
                only cast and uses all keys. None: by the mask and the layout (`own_keys_come_first` in
                `canon.masks.cast_plan`); True for several casts, False with rank_invariant.
            keep_kv: keep the received keys for the backward pass instead of receiving them again.
            stages: the older form of casts and own_keys_first. 0 is casts=1, own_keys_first=False; n is casts=n,
                own_keys_first=True.

        `canon.runtime.public_ranks` lists the others. q, k, v (b, t, h, d), (b, t, g, d), (b, t, g, dv), or without b.
        ``layout`` comes from `dispatch`, or is any other. rank_invariant needs one whose pieces begin at multiples
        of 128, as those of ``dispatch(mask, ranks, rank_invariant=True)``.
        Raises ValueError or TypeError on every rank, if arguments of a rank do not fit together or differ between ranks;
        also if an option or the layout contradicts rank_invariant. Source: Tao and Huang, MagiAttention (2025).
        """
        options = _options(scale, softcap, reduce_dtype, backward, return_max_logits) | {
            "rank_invariant": rank_invariant,
            "casts": casts,
            "own_keys_first": own_keys_first,
            "stages": stages,
            "keep_kv": keep_kv,
        }
        return attend(algorithm, q, k, v, mask, layout, sink, return_lse, options, group)

    return bound(magi_attention, algorithm.forward)
