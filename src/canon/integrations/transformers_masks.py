"""Masks of Hugging Face transformers as masks of Canon.

A mask function becomes a `Pattern`, and `own_masks` makes the square Mask of each sequence from it.
A `LayerMask` holds its part between the queries of one forward pass and the keys of the cache.

Source: transformers 5.23, masking_utils.py.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from canon.masks.band import picked
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.ranks.graph_break import untraced
from canon.ranks.movement import ends_of


class Pattern(NamedTuple):
    """A mask function of transformers, with window bounds and documents (b, n). In ``blocks``
    (b, n) tokens with one number >= 0 see each other.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None
    blocks: Tensor | None = None


def refuse_another_mask(_) -> int:
    """Raise ValueError: only a model that gets a mask and makes one again reads ``ndim``."""
    raise ValueError(
        "canon: this model gives its mask to a language model that makes one again: call the "
        "language model inside `sharded`, with inputs_embeds and a Mask, such as Mask.with_blocks"
    )


def refuse_a_sum(*_: Any) -> Any:
    """Raise ValueError: scores need a tensor."""
    raise ValueError(
        'canon: this model adds its mask to the scores itself: use attn_implementation="eager"'
    )


class LayerMask:
    """The mask of one kind of layer on one process, or a tuple of one for each sequence."""

    __slots__ = ("masks",)
    ndim = property(refuse_another_mask)
    __radd__ = size = refuse_a_sum

    def __init__(self, masks: list[Mask]):
        self.masks = masks[0] if len(set(masks)) == 1 else tuple(masks)

    @untraced
    def __getitem__(self, index: Any) -> "LayerMask":
        masks = [self.masks] if isinstance(self.masks, Mask) else self.masks
        return LayerMask([mask.crop(kept_queries(index, mask.queries)) for mask in masks])

    def contiguous(self) -> "LayerMask":
        """Raise ValueError: only `generate` with a static cache calls this, for a 4-D tensor."""
        raise ValueError(
            "canon: generate() with a static cache needs a mask that is a tensor: leave out "
            "cache_implementation, or use "
            'attn_implementation="sdpa"'
        )


def kept_queries(index: Any, queries: int) -> range:
    """Return the rows of ``mask[:, :, rows, :]``, or raise TypeError."""
    match index:
        case (slice() as batch, slice() as heads, slice() as rows, slice() as keys):
            if batch == heads == keys == slice(None):
                return range(queries)[rows]
    raise TypeError(
        f"canon: the model takes [{index}] of its mask, but a mask of canon.Mask has only [:, :, "
        "rows, :]: use "
        'attn_implementation="sdpa" for this model'
    )


def pattern_of(function: Callable) -> Pattern:
    """Return its pattern. Raises ValueError if bands cannot describe it."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if getattr(function, "__module__", None) != causal_mask_function.__module__:
        name = f"{getattr(function, '__module__', None)}.{name}"
    held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    match name.removesuffix(".<locals>.inner_mask"):
        case "causal_mask_function":
            return Pattern(causal=True)
        case "bidirectional_mask_function":
            return Pattern()
        case "sliding_window_overlay":
            return Pattern(left=held["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return Pattern(left=held["sliding_window"], right=held["sliding_window"])
        case "packed_sequence_mask_function":
            return Pattern(documents=held["packed_sequence_mask"])
        # positions ascend by 1 in a document, so distances are the same
        case "remap_positions_for_packed_sequence":
            return pattern_of(held["mask_function"])
        case "and_masks.<locals>.and_mask":
            patterns = [pattern_of(part) for part in held["mask_functions"]]
            if not any(x.blocks is not None for x in patterns) or _only_windows(patterns[1:]):
                return _both(patterns)
        case "or_masks.<locals>.or_mask":
            first, *others = held["mask_functions"]
            pattern = pattern_of(first)
            if pattern.left is pattern.right is None and [x.__qualname__ for x in others] == BLOCKS:
                ids = inspect.getclosurevars(others[0]).nonlocals["block_sequence_ids"]
                return pattern._replace(blocks=ids)
    raise ValueError(
        f"canon: the mask function {name} is not supported, only causal, bidirectional, sliding "
        "window, padding, packed position_ids, and blocks of images inside the window are: use "
        'attn_implementation="flex_attention", or `sharded` with a Mask that holds these cells, '
        "such as Mask.with_blocks"
    )


BLOCKS = ["blockwise_overlay.<locals>.inner_mask"]


def _only_windows(patterns: list[Pattern]) -> bool:
    return all(x == Pattern(left=x.left, right=x.right) for x in patterns)


def _both(patterns: list[Pattern]) -> Pattern:
    causal, lefts, rights, documents, _ = zip(*patterns, strict=True)
    return Pattern(
        any(causal),
        min((x for x in lefts if x is not None), default=None),
        min((x for x in rights if x is not None), default=None),
        next((x for x in documents if x is not None), None),
        patterns[0].blocks,
    )


def own_masks(pattern: Pattern, sequences: int, n: int, valid: Tensor | None) -> list[Mask]:
    """Return the Mask of each sequence over its n tokens.

    ``valid`` is bool (b, m), False for padding. Tokens from m on are padding.
    """
    rows = [Mask.causal(n) if pattern.causal else Mask.full(n)] * sequences
    if pattern.documents is not None:
        documents = pattern.documents.cpu().expand(sequences, -1)
        rows = [Mask.documents(_ends(row), causal=pattern.causal) for row in documents]
    if pattern.blocks is not None:
        blocks = pattern.blocks.cpu()
        rows = [mask.with_blocks(*_edges(ids[:n])) for mask, ids in zip(rows, blocks, strict=True)]
    if valid is not None and (valid.shape[1] < n or not valid.all()):
        rows = [_seen(mask, _runs(row[:n])) for mask, row in zip(rows, valid.cpu(), strict=True)]
    return [mask.windowed(pattern.left, pattern.right) for mask in rows]


def padded(mask: Mask, valid: Tensor) -> Mask:
    """Hide the keys that are padding in all sequences. Raise ValueError if a query sees others."""
    some = valid.any(0)
    mask = _seen(mask, _runs(some))
    for place, row in enumerate(valid):
        hidden = _runs(some & ~row)
        if any(picked(mask.bands, rows, columns) for rows in _runs(row) for columns in hidden):
            raise ValueError(
                f"canon: in sequence {place} of {len(valid)}, a token sees padding of an "
                "attention_mask that differs between sequences. Several ranks take one mask for "
                "the batch: pad on the right of causal sequences, or pack them into one, and pass "
                "Mask.documents"
            )
    return mask


def refuse_a_tree(mask: Mask, layout: Layout) -> None:
    """Raise ValueError for a tree."""
    try:
        ends_of(layout, mask)
    except ValueError:
        raise ValueError(
            "canon: the mask of sharded is a tree, but the model's sliding window counts packed "
            "tokens, not those of a branch: use a model without windows, or separate sequences"
        ) from None


def _seen(mask: Mask, keys: list[range]) -> Mask:
    if keys == [range(mask.keys)]:
        return mask
    bands, rows = [], range(mask.queries)
    for columns in keys:
        bands += picked(mask.bands, rows, columns, 0, columns.start)
    return Mask.of_disjoint(bands, mask.queries, mask.keys)


def _runs(valid: Tensor) -> list[range]:
    outside = torch.zeros(1, dtype=torch.int, device=valid.device)
    edges = torch.diff(valid.int(), prepend=outside, append=outside)
    starts, stops = ((edges == edge).nonzero().flatten().tolist() for edge in (1, -1))
    return [range(*pair) for pair in zip(starts, stops, strict=True)]


def _edges(blocks: Tensor) -> tuple[Tensor, Tensor]:
    ids, lengths = torch.unique_consecutive(blocks, return_counts=True)
    stops, inside = lengths.cumsum(0), ids >= 0
    if len(ids[inside].unique()) < int(inside.sum()):
        raise ValueError(
            "canon: tokens of one block of images are apart in the sequence: use `sharded` with a "
            "Layout of one rank and a Mask.union that holds these cells"
        )
    return (stops - lengths)[inside], stops[inside]


def _ends(documents: Tensor) -> list[int]:
    lengths = torch.unique_consecutive(documents, return_counts=True)[1]
    return [0, *lengths.cumsum(0).tolist()]
