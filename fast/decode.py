"""Merge the parts of all ranks in place. Each rank's kernel writes its part into the buffer of the
one message; with a list of masks the part is copied there.

Source: `canon.reference.decode`.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from canon.faces import public_decode
from canon.fast.decode_in_order import in_order
from canon.fast.device import check_inputs
from canon.fast.local import attention, attention_forward, forward_into, merge_into
from canon.fast.tables.cells import Cells
from canon.fast.transport.messages import transport_for
from canon.masks.mask import Masks
from canon.route.checks import Scale, accumulate_dtype, split_scale
from canon.route.sink_weights import weighted

__all__ = ["decode_attention"]


def decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Masks, scale: Scale, sink: Tensor | None,
    group: dist.ProcessGroup | None, rank: int, ranks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    buffer, parts = _empty_parts(q, v, ranks)
    if isinstance(mask, (tuple, list)):
        number, softcap = split_scale(scale)
        result = attention_forward(
            q, k, v, mask, scale=number, softcap=softcap, out_dtype=buffer.dtype
        )
        for target, source in zip(parts[rank], result, strict=True):
            target.copy_(source)
    else:
        forward_into(q, k, v, Cells(mask), scale, *parts[rank], whole=True)
    (out, lse), *others = parts
    if others and out.numel():
        transport_for(group, q.device).all_gather(buffer).wait()
        for other in others:
            merge_into(out, lse, *other)
    return (out if sink is None else weighted(out, lse, sink)).to(q.dtype), lse


NOTES = """
    With ``rank_invariant`` on Hopper (bfloat16 or float16), K and V stay on their ranks for up to
    64 queries and 256 rows (queries x heads) for a key head: maxima and sums travel
    (`canon.fast.decode_in_order`). """
decode_attention = public_decode.decode_attention(decode, attention, check_inputs, in_order, NOTES)


def _empty_parts(q: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    (b, t, h, _), dv = q.shape, v.shape[-1]
    of_out, of_lse = b * t * h * dv, b * h * t
    # each part starts at a multiple of 256 bytes, for wide stores
    size = -(-(of_out + of_lse) // 64) * 64
    buffer = torch.empty(ranks * size, dtype=accumulate_dtype(q.dtype), device=q.device)
    rows = buffer.view(ranks, size)
    return buffer, [
        (x[:of_out].view(b, t, h, dv), x[of_out : of_out + of_lse].view(b, h, t)) for x in rows
    ]
