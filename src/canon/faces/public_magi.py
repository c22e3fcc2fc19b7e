"""`magi_attention`, and the meaning of its casts."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Masks
from canon.ranks.group import Group
from canon.route.algorithm import Algorithm, Shapes
from canon.route.attend import attend
from canon.route.operators import declared
from canon.route.plan_arguments import checked_casts


def magi_attention(algorithm: Algorithm):
    """Return `magi_attention` of a half."""

    def magi_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
        mask: Masks | None = None,
        layout: Layout | None = None,
        *,
        casts: int | None = None,
        own_keys_first: bool | None = None,
        keep_kv: bool = False,
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
        """Return attention of this rank's queries over the keys that they see, on all ranks. A
        collective.

        Args:
            layout: from ``dispatch(mask, ranks)``, with rank_invariant=True if the call has it, or
                any other.
            casts: the largest number of casts, 1 by default. Each is in flight during the step
                before its use.
            own_keys_first: True: step 0 uses own keys alone, while the first cast is in flight.
                False: step 0 waits for the only cast. None: by the mask and the layout
                (`own_keys_come_first` in `canon.masks.cast_plan`); True for several casts, False
                with rank_invariant.
            keep_kv: keep the received keys for the backward pass, which else receives them again.

        Errors and the other arguments: `canon.faces`. An option or a layout that contradicts
        rank_invariant also raises. Source: Tao and Huang, MagiAttention (2025).
        """
        options = {
            "casts": casts,
            "own_keys_first": own_keys_first,
            "keep_kv": keep_kv,
            "scale": scale,
            "softcap": softcap,
            "reduce_dtype": reduce_dtype,
            "backward": backward,
            "rank_invariant": rank_invariant,
            "return_max_logits": return_max_logits,
        }
        return attend(algorithm, (q, k, v), mask, layout, sink, return_lse, options, group)

    return algorithm.bind(magi_attention)


def _with_casts(
    options: dict[str, Any], shapes: Shapes, itemsize: int, layout: Layout | None
) -> dict[str, Any]:
    casts, own_keys_first = checked_casts(options["casts"], options["own_keys_first"])
    if options["rank_invariant"] is True:
        own_keys_first = False
    return options | {"casts": casts, "own_keys_first": own_keys_first}


REASON = "adds the keys of one cast after another", "with own_keys_first=False or None"
IN_ORDER = {"casts": ((None, 1), *REASON), "own_keys_first": ((None, False), *REASON)}
MAGI = declared(magi_attention, resolve=_with_casts, contradictions=IN_ORDER, keeps="keep_kv")
