"""`ring_attention`, and the same over own layouts: `zigzag_attention` and `striped_attention`."""

import torch
from jaxtyping import Float
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Masks
from canon.ranks.group import Group
from canon.route.algorithm import Algorithm
from canon.route.attend import attend
from canon.route.operators import declared


def ring_attention(algorithm: Algorithm):
    """Return `ring_attention` of a half."""

    def ring_attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
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
        """Return attention of this rank's queries over the keys of all ranks, which travel round a
        ring. A collective.

        Errors and arguments: `canon.faces`. Source: Liu, Zaharia, Abbeel, Ring Attention (2023).
        """
        options = {
            "scale": scale,
            "softcap": softcap,
            "reduce_dtype": reduce_dtype,
            "backward": backward,
            "return_max_logits": return_max_logits,
        }
        return attend(algorithm, (q, k, v), mask, layout, sink, return_lse, options, group)

    return algorithm.bind(ring_attention)


def zigzag_attention(algorithm: Algorithm):
    """Return `zigzag_attention` of a half."""
    return _over_own_layout(
        algorithm,
        "zigzag_attention",
        """Return `ring_attention` over `Layout.zigzag`. Under a causal mask, all ranks have nearly
        equal work at each step.

        Arguments (except ``layout``), results and the ValueError are those of `ring_attention`.
        Source: Zilin Zhu, ring-flash-attention issue 2 (2024).
        """,
    )


def striped_attention(algorithm: Algorithm):
    """Return `striped_attention` of a half."""
    return _over_own_layout(
        algorithm,
        "striped_attention",
        """Return `ring_attention` over `Layout.striped`. A causal mask stays causal at each step;
        it may lose its diagonal.

        Arguments (except ``layout``), results and the ValueError are those of `ring_attention`.
        Source: Brandon et al., Striped Attention (2023).
        """,
    )


def _over_own_layout(algorithm: Algorithm, name: str, description: str):

    def attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b t g d"],
        v: Float[Tensor, "*b t g dv"],
        mask: Masks | None = None,
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
        options = {
            "scale": scale,
            "softcap": softcap,
            "reduce_dtype": reduce_dtype,
            "backward": backward,
            "return_max_logits": return_max_logits,
        }
        return attend(algorithm, (q, k, v), mask, None, sink, return_lse, options, group)

    attention.__name__, attention.__doc__ = name, description
    return algorithm.bind(attention)


RING = declared(ring_attention)
ZIGZAG = declared(zigzag_attention, layout=Layout.zigzag)
STRIPED = declared(striped_attention, layout=Layout.striped)
