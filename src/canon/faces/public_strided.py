"""`strided_attention`, and the default of its stride."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from canon.masks.head_groups import default_stride, gathered_bytes, steps_of
from canon.masks.layout import Layout
from canon.masks.mask import Masks
from canon.ranks.group import Group
from canon.route.algorithm import Algorithm, Shapes
from canon.route.attend import attend
from canon.route.operators import declared


def strided_attention(algorithm: Algorithm):
    """Return `strided_attention` of a half."""

    def strided_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
        mask: Masks | None = None,
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
        """Return attention of this rank's queries over the keys of all ranks, some key heads at a
        time. A collective.

        Args:
            head_stride: key heads in a head group, a divisor of g. None: the largest with at most 1
                GiB of gathered K and V (`default_stride` in `canon.masks.head_groups`).
            forward_first_stride, backward_first_stride: key heads in the first step, less than
                head_stride. None: no split.
            backward_last_stride: key heads in the last step, likewise. One head group is split only
                once. Splits rarely pay on one host.
            backward_schedule: "scatter", or "ring": the backward pass of `ring_attention`, whose
                memory does not grow with the ranks. It takes no backward strides.

        Errors and the other arguments: `canon.faces`. Strides that do not fit the heads, and an
        option or a layout that contradicts rank_invariant, also raise. Strides change results by
        rounding only. Source: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2.
        """
        options = {
            "head_stride": head_stride,
            "forward_first_stride": forward_first_stride,
            "backward_first_stride": backward_first_stride,
            "backward_last_stride": backward_last_stride,
            "backward_schedule": backward_schedule,
            "scale": scale,
            "softcap": softcap,
            "reduce_dtype": reduce_dtype,
            "backward": backward,
            "rank_invariant": rank_invariant,
            "return_max_logits": return_max_logits,
        }
        return attend(algorithm, (q, k, v), mask, layout, sink, return_lse, options, group)

    return algorithm.bind(strided_attention)


def _with_stride(
    options: dict[str, Any], shapes: Shapes, itemsize: int, layout: Layout | None
) -> dict[str, Any]:
    (b, _, g, d), dv = shapes[1], shapes[2][-1]
    if options["head_stride"] is None and layout is not None:
        stride = default_stride(g, gathered_bytes(layout, b * (d + dv) * itemsize))
        options = options | {"head_stride": stride}
    steps_of(g, options)  # raises
    return options


RING_SUMS = ("scatter",), "adds dk and dv rank after rank", 'with backward_schedule="scatter"'
STRIDED = declared(
    strided_attention, resolve=_with_stride, contradictions={"backward_schedule": RING_SUMS}
)
