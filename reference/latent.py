"""Latent attention (MLA): latents travel round the ring, and each rank projects them to K and V
after their arrival.

A token has a latent c of ``rank`` values, the model's name for this width, and a part r of K of
``rope`` values with the rotary embedding, for all heads together. Head i projects c. The rows of
``up_weight`` are Wk_0, Wv_0, Wk_1, Wv_1, ...:

    K_i = [c Wk_i^T | r]   V_i = c Wv_i^T   out_i = attention of q_i (d wide) over K_i, V_i (dv)

    values of a token            DeepSeek-V3: h = 128, d = 128 + 64, dv = 128, rank = 512, rope = 64
    K and V     h (d + dv)       40,960
    c and r     rank + rope         576, 71 times fewer

The schedule is that of `ring_attention`, with c and r in place of K and V; each step projects
before it attends. The gradients dK and dV of a step stay on the rank, and become

    dc = sum over heads of dK_i[nope] Wk_i + dV_i Wv_i    dr = sum over heads of dK_i[rope]
    dWk_i = sum over steps and tokens of dK_i[nope]^T c   dWv_i = the same sum of dV_i^T c

dc and dr join the sums that follow the latents, in reduce_dtype. A rank's gradient of ``up_weight``
is the part of its own queries, and does not travel.

Cost of a rank for s tokens in equal shards of t on n ranks, elements of e bytes, E in reduce_dtype.
R = h (d - rope + dv) rows:

                      messages    bytes received                FLOPs, beyond those of attention
    forward   c, r    2 (n - 1)   (n - 1) b t (rank + rope) e   2 b s rank R
    backward  c, r    2 (n - 1)   the same                      6 b s rank R: again, dc, dWk and dWv
              dc, dr  2 (n - 1)   (n - 1) b t (rank + rope) E
    memory    the projection of a step and K, b t h (2 d - rope + dv) elements; backward also dK and
              dV, and both once more in float32

A model that projects before `ring_attention` computes 1/n of these projections. So latents pay for
few tokens a rank: for DeepSeek-V3 forward, at F FLOP/s and B bytes/s, below 2 F / B - 820.

Limits: those of the ring.

Source: DeepSeek-AI, DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
Model (2024), section 2.1.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from canon.faces import public_latent
from canon.faces.latent_arguments import hidden_keys, sizes_of, visible_only
from canon.masks.mask import Mask
from canon.reference.local import REFERENCE
from canon.reference.ring import ring_backward, ring_forward, ring_parts
from canon.route.algorithm import Algorithm, Gradients
from canon.route.call import Call
from canon.route.checks import accumulate_dtype

__all__ = ["latent_attention"]


def latent_forward(
    call: Call,
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    up_weight: Tensor,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q, and lse (b, h, t). latent (b, t, 1, rank), k_rope
    (b, t, 1, rope).
    """
    return ring_forward(call, q, latent, k_rope, max_logits, read=Projection(call, up_weight).keys)


def latent_backward(
    call: Call,
    needs_grad: tuple[bool, ...],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    up_weight: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Gradients:
    """Return dq, dlatent, dk_rope and dup_weight in the dtype of q; the last three together."""
    projection, of_keys = Projection(call, up_weight), any(needs_grad[1:])
    needs_grad = needs_grad[0], of_keys, of_keys
    grads = ring_backward(
        call,
        needs_grad,
        dout,
        dlse,
        q,
        latent,
        k_rope,
        out,
        lse,
        projection.keys,
        projection.gradients,
    )
    return *grads, projection.dup_weight.to(q.dtype) if of_keys else None


class Projection:
    """The projection of the latents that this rank holds in a step. ``dup_weight``: the sum over
    the steps so far.
    """

    def __init__(self, call: Call, up_weight: Tensor):
        q, _, k_rope, weight = call.shapes
        self.sizes, self.up_weight = sizes_of(q, k_rope, weight), up_weight
        self.dup_weight = torch.zeros_like(up_weight, dtype=accumulate_dtype(up_weight.dtype))

    def keys(self, mask: Mask, latent: Tensor, k_rope: Tensor) -> Sequence[Tensor]:
        """Return K and V (b, tokens, h, width) of a step. Tokens that ``mask`` hides count as 0."""
        self.latent, k_rope = (visible_only(x, mask) for x in (latent, k_rope))
        heads, nope, _, value, _ = self.sizes
        by_head = (self.latent[:, :, 0] @ self.up_weight.mT).unflatten(-1, (heads, nope + value))
        k_nope, v = by_head.split([nope, value], -1)
        return torch.cat([k_nope, k_rope.expand(-1, -1, heads, -1)], -1), v

    def gradients(self, dk: Tensor, dv: Tensor) -> list[Tensor]:
        """Return the gradients of the last step's latent and k_rope, and add to ``dup_weight``."""
        dk_nope, dk_rope = dk.split([self.sizes.nope, self.sizes.rope], -1)
        # (b, t, rows), as the projection has returned them
        projected = torch.cat([dk_nope, dv], -1).flatten(2)
        latent, weight = (x.to(projected.dtype) for x in (self.latent[:, :, 0], self.up_weight))
        self.dup_weight += projected.flatten(0, 1).mT @ latent.flatten(0, 1)
        return [(projected @ weight).unsqueeze(2), dk_rope.sum(2, keepdim=True)]


def latent_parts(call: Call, backward: bool) -> Iterator[Mask]:
    """Yield the local mask of each step, and look up the keys that no query sees."""
    for mask in ring_parts(call, backward):
        hidden_keys(mask)
        yield mask


LATENT = Algorithm(
    REFERENCE, public_latent.LATENT, latent_forward, latent_backward, parts=latent_parts
)
latent_attention = public_latent.latent_attention(LATENT)
