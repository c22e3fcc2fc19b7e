"""Run MagiAttention on packed documents, with its default options and its own layout.

Source: SandAI-org/MagiAttention 1.1, magi_attention/api/magi_attn_interface.py.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon.bench.peers import peer_module
from canon.bench.shapes import Shape
from canon.masks.layout import Layout

NAME = "MagiAttention"


def api() -> tuple[Any, str]:
    """Return its module or None, and its version or the reason."""
    return peer_module("magi_attention.api", "magi_attention")


def takes(shape: Shape) -> bool:
    """Return whether it is installed, and the shape is one sequence of packed documents."""
    return shape.b == 1 and bool(shape.lengths) and api()[0] is not None


def planned(shape: Shape, device: torch.device) -> tuple[Layout, Callable[..., Any]]:
    """Return its layout, and its function of this rank's q, k, v. A collective. Raises ValueError
    if it pads the sequence.
    """
    module, group = api()[0], dist.group.WORLD
    ends = torch.tensor([0, *accumulate(shape.lengths)], dtype=torch.int32, device=device)
    key = module.magi_attn_varlen_key(
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        num_heads_q=shape.h,
        num_heads_kv=shape.g,
        head_dim=shape.d,
        pad_size=0,  # it computes the padding itself
        cp_group_or_mesh=group,
        causal=True,
    )
    layout = layout_of(module.get_position_ids(key).tolist(), shape.n)

    def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False):
        out, meta = module.calc_attn(*(x.squeeze(0) for x in (q, k, v)), key)
        out = out.unsqueeze(0)
        return (out, meta.lse.mT.unsqueeze(0)) if return_lse else out

    return layout, attend


def layout_of(positions: list[int], tokens: int) -> Layout:
    """Return the layout of all ranks, from the positions of this rank's tokens. A collective.
    Raises ValueError unless each token is on one rank.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, positions)
    held = sorted(position for own in by_rank for position in own)
    if held != list(range(tokens)):
        raise ValueError(
            f"{NAME} gives its ranks {len(held)} tokens of a sequence of {tokens}, "
            f"{len(set(held))} of them distinct: take a length that it does not pad"
        )
    return Layout([runs(own) for own in by_rank], tokens)


def runs(positions: list[int]) -> list[range]:
    """Return positions as ranges of consecutive ones."""
    starts = [i for i, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1]
    edges = [0, *starts, len(positions)]
    return [range(positions[i], positions[i] + j - i) for i, j in pairwise(edges) if j > i]
