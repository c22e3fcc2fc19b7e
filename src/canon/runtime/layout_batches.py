"""The part of a rank in a training batch: `Layout.shard_batch`.

    labels, n = 6, documents of 2 and 4      a0 a1 b0 b1 b2 b3      the token at each place
    shift_labels                             a1 -100 b1 b2 b3 -100  the token after it, if the document has one
    position_ids                             0 1 0 1 2 3

A rank cannot shift its own labels, because the label of its last token is on another rank. So labels are shifted before the
sequence is divided. transformers' loss functions accept them as ``shift_labels`` (`ForCausalLMLoss`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canon.masks.arguments import shown
from canon.masks.held_tokens import HeldTokens, positions_on
from canon.masks.mask_inputs import Ints, document_ends

IGNORED = -100  # the label that losses ignore


def sharded_batch(
    layout: HeldTokens, batch: Mapping[str, Tensor], rank: int, cu_seqlens: Ints | None
) -> dict[str, Tensor]:
    """Return this rank's part of the batch. Arguments and errors are those of `Layout.shard_batch`."""
    _check_batch(layout, batch)
    ends = None if cu_seqlens is None else ends_of(layout, cu_seqlens)
    full = dict(batch)
    if "labels" in batch and "shift_labels" not in batch:
        full["shift_labels"] = _shifted(batch["labels"], _starts(layout, batch, ends))
    part = {name: x.index_select(1, positions_on(layout, rank, x.device)) for name, x in full.items()}
    if "position_ids" not in batch:
        like = next(iter(batch.values()))
        positions = document_positions(layout, rank, ends or [0, layout.tokens]).to(like.device)
        part["position_ids"] = positions.repeat(len(like), 1)
    return part


def ends_of(layout: HeldTokens, cu_seqlens: Ints) -> list[int]:
    """Return ``cu_seqlens`` as ints. Raise ValueError or TypeError if it is malformed or does not end at ``tokens``."""
    ends = document_ends(cu_seqlens)
    if ends[-1] != layout.tokens:
        raise ValueError(f"cu_seqlens ends at {ends[-1]}, the layout has {layout.tokens} tokens")
    return ends


def document_positions(layout: HeldTokens, rank: int, ends: list[int]) -> Tensor:
    """Return the position of each local token in its own document: int64 [t], on the CPU."""
    starts = torch.tensor(ends, device="cpu")
    positions = layout.positions(rank)
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


def _check_batch(layout: HeldTokens, batch: Any) -> None:
    """Raise TypeError or ValueError unless all entries are plain tensors (b, n, ...) and the labels (b, n)."""
    if not isinstance(batch, Mapping) or not batch:
        raise TypeError(f"shard_batch: batch must be a dict of one or more tensors, got {shown(batch)}")
    for name, x in batch.items():
        entry = f"shard_batch: entry {name!r}"
        if not isinstance(x, Tensor) or hasattr(x, "to_local"):  # a DTensor
            raise TypeError(f"{entry} must be a plain tensor, got {shown(x)}: leave it out, or convert it")
        if x.ndim < 2 or x.shape[1] != layout.tokens:
            remedy = "pass x[None]" if x.ndim == 1 else "leave it out, or use Layout.shard with the dim of its tokens"
            raise ValueError(
                f"{entry} must be (b, {layout.tokens}, ...), with all tokens of the layout on dim 1, "
                f"got {tuple(x.shape)}: {remedy}"
            )
    if (labels := batch.get("labels")) is None or "shift_labels" in batch:
        return
    if labels.ndim != 2 or labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"shard_batch: labels must be whole numbers (b, n), int64 or int32, got {shown(labels)}")


def _starts(layout: HeldTokens, batch: Mapping[str, Tensor], ends: list[int] | None) -> Tensor:
    """Return whether each token is the first one of a document: bool (b, n) or (1, n)."""
    labels = batch["labels"]
    if ends is None and "position_ids" in batch:
        positions = batch["position_ids"]
        if positions.ndim != 2 or len(positions) not in (1, len(labels)):
            raise ValueError(
                f"shard_batch: position_ids must be (b, n) or (1, n) to find documents, got {tuple(positions.shape)}: "
                "pass cu_seqlens"
            )
        return positions.to(labels.device) == 0
    starts = torch.zeros(1, layout.tokens, dtype=torch.bool, device="cpu")
    starts[0, [start for start in ends or () if start < layout.tokens]] = True
    return starts.to(labels.device)


def _shifted(labels: Tensor, starts: Tensor) -> Tensor:
    """Return the label of the next token at each place, -100 if it starts a document or there is none."""
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:].masked_fill(starts[:, 1:], IGNORED)
    return shifted
