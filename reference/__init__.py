"""Every algorithm in plain PyTorch: the definition of the results, written to be read. Read the
files in this order:

    tiles, local, backward               attention on one rank, tile by tile, and its gradients
    ring, strided                        several ranks: keys travel, or are gathered
    group_collectives, magi, planner     each rank receives only the keys that its queries see
    owner_computes                       equal bits on any number of ranks
    latent, decode, preparation          latents that travel; few queries; plans made ahead
    mesh                                 two dimensions: heads are exchanged for tokens before

A call of `zigzag_attention` takes six steps to the product of queries and keys, because both halves
share its route:

    zigzag_attention    canon.faces.public_ring   the signature, its docstring and its defaults
    attend              canon.route.attend        look up or check the call, and compare it between
                                                  ranks
    Attention.forward   canon.route.autograd      an autograd Function
    ring_forward        ring                      the loop over steps
    tiled_forward       local                     the online softmax
    scores_of           tiles                     q k^T
"""

from canon.masks.band import Band
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.reference.decode import decode_attention
from canon.reference.latent import latent_attention
from canon.reference.local import (
    REFERENCE,
    attention,
    attention_backward,
    attention_forward,
    merge,
)
from canon.reference.magi import (
    cast_plan,
    dispatch,
    group_cast,
    group_reduce,
    magi_attention,
    plan_report,
)
from canon.reference.mesh import mesh_backward, mesh_forward
from canon.reference.preparation import prepare
from canon.reference.ring import ring_attention, striped_attention, zigzag_attention
from canon.reference.strided import strided_attention

REFERENCE.over_mesh = mesh_forward, mesh_backward

__all__ = [
    "Band",
    "Layout",
    "Mask",
    "attention",
    "attention_backward",
    "attention_forward",
    "cast_plan",
    "decode_attention",
    "dispatch",
    "group_cast",
    "group_reduce",
    "latent_attention",
    "magi_attention",
    "merge",
    "plan_report",
    "prepare",
    "ring_attention",
    "strided_attention",
    "striped_attention",
    "zigzag_attention",
]
