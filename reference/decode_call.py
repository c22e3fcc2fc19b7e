"""The checks before `decode_attention`: arguments fit together on each rank, and ranks agree on all but the number of keys."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from canon.reference.arguments import place_in
from canon.reference.band import Band
from canon.reference.checks import check_mask, check_tensors, default_scale
from canon.reference.group_state import group_state, refused_together
from canon.reference.mask import Mask
from canon.reference.packing import check_masks
from canon.reference.plan_cache import cached_plan

NAME = "decode_attention"


def agreed_decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Sequence[Mask] | None, scale: float | None, group: Any
) -> tuple[int, int, Mask | Sequence[Mask], float]:
    """Return this rank, the number of ranks, the mask and the scale, after a comparison between all ranks. A collective.

    Raises ValueError or TypeError on every rank, if the arguments of one rank do not fit together or differ from those of
    the others.
    """
    rank, ranks = place_in(NAME, group)
    with refused_together(NAME, group, ranks):
        check_tensors(q, k, v)
        if mask is None:
            mask = _all_keys(q.shape[-3], k.shape[-3])
        elif isinstance(mask, (tuple, list)):
            check_masks(q, k, v, mask)
        else:
            check_mask(q, k, mask)
        scale = default_scale(q, scale)
    if ranks > 1:
        fields = (
            ("function", NAME),
            ("dtype", q.dtype),
            ("device", q.device.type),
            ("shape of q", tuple(q.shape)),
            ("batch, heads and width of k", (*k.shape[:-3], *k.shape[-2:])),
            ("batch, heads and width of v", (*v.shape[:-3], *v.shape[-2:])),
            ("scale", scale),
        )
        group_state(group).agree(NAME, fields, wait=q.device.type == "cpu")
    return rank, ranks, mask, scale


@cached_plan
def _all_keys(queries: int, keys: int) -> Mask:
    """Return the mask in which every query sees every key."""
    return Mask.of_disjoint([Band(0, queries, 0, keys)] if queries and keys else [], queries, keys)
