"""`decode_attention`: queries that all ranks hold, over keys that are divided among the ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.masks.arguments import flag
from canon.masks.mask import Mask, Masks
from canon.ranks.agreement import agree, named_failures, refused_together, report
from canon.ranks.divided_keys import keys_of_all_ranks
from canon.ranks.graph_break import untraced
from canon.ranks.group import Group, place_in
from canon.route.binding import bound, half_of
from canon.route.checks import (
    Scale,
    any_device,
    batched,
    cached,
    check_mask,
    check_sink,
    check_tensors,
    default_scale,
    kind_of_sink,
    split_scale,
    under_autocast,
)
from canon.route.packing import check_masks
from canon.route.rank_invariance import check_rank_invariant


def is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph captures work on x now."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def keys_travel(*arguments: Any) -> None:
    """Return None, in place of a result: all keys have to travel."""


def decode_attention(
    decode: Callable[..., tuple[Tensor, Tensor]],
    attention: Callable[..., Any],
    check_device: Callable[[Tensor], None] = any_device,
    in_order: Callable[
        [Tensor, Tensor, Tensor], Callable[..., tuple[Tensor, Tensor] | None]
    ] = lambda *_: keys_travel,
    notes: str = "",
):
    """Return `decode_attention` of a half: ``decode(q, k, v, mask, scale, sink, group, rank,
    ranks)`` after the checks. ``in_order(q, k, v)`` returns the function for several ranks with
    ``rank_invariant``, which returns None where all keys have to travel.
    """

    @under_autocast("q", "k", "v")
    def decode_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b s g d"],
        v: Float[Tensor, "*b s g dv"],
        mask: Masks | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        rank_invariant: bool = False,
        group: Group = None,
        return_lse: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
        """Return attention of queries that all ranks hold over keys that the ranks divide, to
        generate or evaluate. A collective. All ranks return the same bits.

        Args:
            q: (b, t, h, d), or packed without b, equal on all ranks.
            k, v: this rank's keys, (b, s, g, d), (b, s, g, dv), or packed. s may differ between
                ranks, and may be 0.
            mask: the visible cells of t queries x s keys of this rank, or b Masks. None: all.
            scale, softcap, sink: as in `attention`; the sink is equal on all ranks.
            rank_invariant: return the bits of `attention` with this option, on any number of ranks.
                The keys of all ranks follow each other, and those of each rank begin at a multiple
                of 128. K and V travel to all ranks, unless notes below say otherwise, and the host
                waits. Dividing the heads among ranks, with `attention` on each, needs no messages.
            group: as in `canon.faces`. A mesh ("tokens", "heads") stands for its ranks: no heads
                are exchanged.
            return_lse: also return lse (b, h, t) over the keys of all ranks.

        Not differentiable. Raises ValueError or TypeError on every rank, if arguments do not fit
        together, or dtypes, scales or shapes except s differ between ranks; RuntimeError for
        ``rank_invariant`` on several ranks while a CUDA graph is captured. Source: Dao,
        FlashAttention-2 (2023), section 2.3.1, for the merge.
        """
        given, rank, ranks, mask, checked, compute = _agreed(
            q, k, v, mask, scale, softcap, sink, rank_invariant, return_lse, group,
            decode, in_order, check_device,
        )  # fmt: skip
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

    return untraced(bound(decode_attention, decode, notes))


def _agreed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Masks | None,
    scale: Any,
    softcap: Any,
    sink: Tensor | None,
    rank_invariant: Any,
    return_lse: Any,
    group: Group,
    decode: Callable[..., Any],
    in_order: Callable[..., Callable[..., Any]],
    check_device: Callable[[Tensor], None],
) -> tuple[dist.ProcessGroup | None, int, int, Masks, Scale, Callable[..., Any]]:
    name = "decode_attention"
    try:
        group, rank, ranks = place_in(name, group)
    except ValueError as error:
        report(name, group, error)
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
        check_rank_invariant(name, {}, {"rank_invariant": rank_invariant})
        flag("return_lse", return_lse)
        if rank_invariant and ranks > 1 and is_captured(q):
            raise RuntimeError(
                f"{name}: with rank_invariant=True on several ranks the host waits, so a CUDA "
                "graph cannot be captured: divide "
                "the heads among ranks, and call attention(..., rank_invariant=True)"
            )
        compute = decode
        if rank_invariant:
            compute = in_order(*batched(q, k, v)) if ranks > 1 else keys_travel
    if ranks > 1:
        fields = (
            ("half", half_of(decode)),
            ("device", q.device.type),
            ("shape of q", tuple(q.shape)),
            ("batch, heads and width of k", (*k.shape[:-3], *k.shape[-2:])),
            ("batch, heads and width of v", (*v.shape[:-3], *v.shape[-2:])),
            *zip(("scale", "softcap"), split_scale(scale), strict=True),
            ("sink", kind_of_sink(sink)),
            ("rank_invariant", rank_invariant),
            ("way", compute.__name__),
        )
        agree(name, group, ranks, q, *fields)
    return group, rank, ranks, mask, scale, compute
