"""`latent_attention`, and its sizes."""

import torch
from jaxtyping import Float
from torch import Tensor

from canon.faces.latent_arguments import (
    NAMES,
    check_latent,
    latent_shapes,
    projection_flops,
    value_width,
    with_head,
)
from canon.masks.layout import Layout
from canon.masks.mask import Masks
from canon.ranks.group import Group
from canon.route.algorithm import Algorithm
from canon.route.attend import attend
from canon.route.operators import declared


def latent_attention(algorithm: Algorithm):
    """Return `latent_attention` of a half."""

    def latent_attention(
        q: Float[Tensor, "*b t h d"],
        latent: Float[Tensor, "*b t rank"],
        k_rope: Float[Tensor, "*b t rope"],
        up_weight: Float[Tensor, "rows rank"],
        mask: Masks | None = None,
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
        """Return multi-head latent attention. Latents travel round a ring; each rank projects them
        to K and V. A collective.

        A token sends rank + rope values instead of h (d + dv), but every rank projects all that it
        receives: `canon.reference.latent` has bytes, FLOPs and limits.

        Args:
            q: queries. Their last ``rope`` columns have the rotary embedding.
            latent: the compressed keys and values, normalised.
            k_rope: the part of K that all heads share, with the rotary embedding.
            up_weight: the weight of the projection, (h * (d - rope + dv), rank), equal on all
                ranks: ``kv_b_proj.weight`` in transformers. Each head has d - rope rows for K, then
                dv rows for V. A rank's gradient is the sum over its own queries: add those of all.
            reduce_dtype: dtype in which the gradients of latent and k_rope are sent.

        Errors and the other arguments: `canon.faces`. Source: DeepSeek-AI, DeepSeek-V2 (2024),
        section 2.1.
        """
        options = {
            "scale": scale,
            "softcap": softcap,
            "reduce_dtype": reduce_dtype,
            "backward": backward,
            "return_max_logits": return_max_logits,
        }
        tensors = q, with_head(latent), with_head(k_rope), up_weight
        return attend(algorithm, tensors, mask, layout, sink, return_lse, options, group)

    return algorithm.bind(latent_attention)


LATENT = declared(
    latent_attention,
    tensors=NAMES,
    expected="q (b, t, h, d), latent and k_rope (b, t, 1, width), or all three without b, and "
    "up_weight (rows, rank)",
    check=check_latent,
    value_width=value_width,
    more_flops=projection_flops,
    shapes=latent_shapes,
)
