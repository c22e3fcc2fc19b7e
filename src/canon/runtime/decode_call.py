"""The checks before `decode_attention`: arguments fit together on each rank, and ranks agree on all but the number of keys."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from canon.masks.mask import Mask
from canon.runtime.agreement import group_state, refused_together
from canon.runtime.checks import cached, check_mask, check_sink, check_tensors, default_scale, kind_of_sink
from canon.runtime.group import Group, place_in
from canon.runtime.packing import check_masks

NAME = "decode_attention"


def agreed_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Sequence[Mask] | None,
    scale: float | None,
    sink: Tensor | None,
    group: Group,
) -> tuple[Any, int, int, Mask | Sequence[Mask], float]:
    """Return the group, this rank, the number of ranks, the mask and the scale, after a comparison between all ranks.

    Raises ValueError or TypeError on every rank, if the arguments of one rank do not fit together or differ from those of
    the others.
    """
    group, rank, ranks = place_in(NAME, group)
    with refused_together(NAME, group, ranks):
        check_tensors(q, k, v)
        if mask is None:
            mask = cached(Mask.full, q.shape[-3], k.shape[-3])
        elif isinstance(mask, (tuple, list)):
            check_masks(q, k, v, mask)
        else:
            check_mask(q, k, mask)
        scale = default_scale(q, scale)
        check_sink(q, sink)
    if ranks > 1:
        fields = (
            ("function", NAME),
            ("dtype", q.dtype),
            ("device", q.device.type),
            ("shape of q", tuple(q.shape)),
            ("batch, heads and width of k", (*k.shape[:-3], *k.shape[-2:])),
            ("batch, heads and width of v", (*v.shape[:-3], *v.shape[-2:])),
            ("scale", scale),
            ("sink", kind_of_sink(sink)),
        )
        group_state(group).agree(NAME, fields, wait=q.device.type == "cpu")
    return group, rank, ranks, mask, scale
