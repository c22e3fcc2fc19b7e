"""Decode attention: all ranks hold the same few queries, the keys are divided among the ranks.

    rank 0   q, K0 V0 -> out_0, lse_0 \
    rank 1   q, K1 V1 -> out_1, lse_1  } one all-gather -> merge in rank order -> out, equal on all
    rank 2   q, K2 V2 -> out_2, lse_2 /

Partial results are float32 (float64 for float64). Each rank merges those of all ranks in rank order
and rounds once, so all ranks return the same bits. A sink is applied after the last merge. With
rank_invariant=True all keys travel to all ranks (`canon.ranks.divided_keys`).

Cost of a rank with s_r keys, n ranks:

    messages          one all-gather; before it, one of 8 bytes compares the arguments
    elements received (n - 1) b t h (dv + 1) in the accumulation dtype
    FLOPs             those of `attention_forward` for t queries x s_r keys, and n - 1 merges
    memory            n times b t h (dv + 1) in the accumulation dtype

Limits: the result is not differentiable. Ranks do not compare their numbers of keys.

Source: Tri Dao, FlashAttention-2 (2023), section 2.3.1, for the merge.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from canon.faces import public_decode
from canon.masks.mask import Masks
from canon.reference.local import attention, attention_forward, merged
from canon.route.checks import Scale, accumulate_dtype, split_scale
from canon.route.sink_weights import weighted

__all__ = ["decode_attention"]


def decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Masks, scale: Scale, sink: Tensor | None,
    group: dist.ProcessGroup | None, rank: int, ranks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (b, t, h, dv) in the dtype of q, and lse (b, h, t), over the keys of all ranks."""
    number, softcap = split_scale(scale)
    part = attention_forward(
        q, k, v, mask, scale=number, softcap=softcap, out_dtype=accumulate_dtype(q.dtype)
    )
    (out, lse), *others = _parts_of_ranks(*part, ranks, group)
    for other in others:
        out, lse = merged(out, lse, *other)
    return (out if sink is None else weighted(out, lse, sink)).to(q.dtype), lse


decode_attention = public_decode.decode_attention(decode, attention)


def _parts_of_ranks(
    out: Tensor, lse: Tensor, ranks: int, group: dist.ProcessGroup | None
) -> list[tuple[Tensor, Tensor]]:
    if ranks == 1 or not out.numel():
        return [(out, lse)]
    sent = torch.cat([out.flatten(), lse.flatten()])
    received = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(received, sent, group=group)
    return [(x[: out.numel()].view(out.shape), x[out.numel() :].view(lse.shape)) for x in received]
