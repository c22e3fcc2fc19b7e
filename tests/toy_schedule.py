"""A schedule of its own in one file: each rank attends to the keys of all ranks, in ascending or in
descending order.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon import fast, reference
from canon.fast import backward as fast_backward
from canon.fast import local as fast_local
from canon.fast.half import FAST, Part
from canon.fast.tables.cells import Cells
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.ranks.group import Group
from canon.reference.backward import gradients
from canon.reference.local import REFERENCE, tiled_forward
from canon.route.algorithm import Algorithm
from canon.route.attend import attend
from canon.route.operators import declared


def toy_attention(algorithm: Algorithm):
    """Return `toy_attention` of a half."""

    def toy_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
        mask: Mask | Sequence[Mask] | None = None,
        layout: Layout | None = None,
        *,
        descending: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        group: Group = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
        backward: str = "auto",
    ) -> Float[Tensor, "*b t h dv"] | tuple[Tensor, ...]:
        """Return attention of this rank's queries over the keys of all ranks."""
        options = {
            "descending": descending,
            "scale": scale,
            "softcap": softcap,
            "return_max_logits": return_max_logits,
            "backward": backward,
        }
        return attend(algorithm, (q, k, v), mask, layout, None, return_lse, options, group)

    return algorithm.bind(toy_attention)


def order_of(call):
    return sorted(range(call.ranks), reverse=call.options["descending"])


def mask_of(call):
    return call.layout.local_mask(call.mask, call.rank, order_of(call))


def gathered(x, call):
    if call.ranks == 1:
        return x
    parts = [
        x.new_empty(x.shape[0], call.layout.size(rank), *x.shape[2:]) for rank in range(call.ranks)
    ]
    dist.all_gather(parts, x.contiguous(), group=call.group)
    return torch.cat([parts[rank] for rank in order_of(call)], 1)


def passes(forward, differentiate):
    """Return both passes, from those of one rank."""

    def toy_forward(call, q, k, v, max_logits=None):
        return forward(q, gathered(k, call), gathered(v, call), mask_of(call), call, max_logits)

    def toy_backward(call, needs_grad, dout, dlse, q, k, v, out, lse):
        keys, order = (gathered(k, call), gathered(v, call)), order_of(call)
        dq, *sums = differentiate(dout, q, *keys, out, lse, dlse, mask_of(call), call)
        if call.ranks > 1:
            [dist.all_reduce(x, group=call.group) for x in sums]
        sizes = [call.layout.size(rank) for rank in order]
        return dq, *(x.split(sizes, 1)[order.index(call.rank)] for x in sums)

    return toy_forward, toy_backward


ALL = (True, True, True)
TOY = declared(toy_attention)
READ = passes(
    lambda q, k, v, mask, call, max_logits: tiled_forward(
        q, k, v, mask, scale=call.scale, out_dtype=q.dtype, max_logits=max_logits
    ),
    lambda dout, q, k, v, out, lse, dlse, mask, call: gradients(
        dout, q, k, v, out, lse, dlse, None, mask,
        scale=call.scale, method=call.backward, grad_dtype=q.dtype, needs_grad=ALL,
    ),
)  # fmt: skip
QUICK = passes(
    lambda q, k, v, mask, call, max_logits: fast_local.forward_part(
        q, k, v, mask, scale=call.scale, out_dtype=q.dtype, max_logits=max_logits
    ),
    lambda dout, q, k, v, out, lse, dlse, mask, call: fast_backward.gradients(
        dout, q, k, v, out, lse, dlse, Cells(mask), call.scale, call.backward, ALL
    ),
)
SIDES = {
    reference: Algorithm(REFERENCE, TOY, *READ, parts=lambda call, backward: [mask_of(call)]),
    fast: Algorithm(
        FAST,
        TOY,
        *QUICK,
        parts=lambda call, backward: [Part(mask_of(call), call.shapes[1][2])],
    ),
}
TOYS = {half: toy_attention(algorithm) for half, algorithm in SIDES.items()}
