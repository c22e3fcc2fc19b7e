"""Canon as the attention of Hugging Face transformers.

    register("canon")
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="canon")
    part = layout.shard_batch(batch, rank)
    labels = part.pop("shift_labels")
    del part["labels"]                            # else the model computes a loss of this rank
    with sharded(mask, layout, function="magi"):
        loss = canon.training.sequence_loss(model(**part, use_cache=False).logits, labels)

transformers builds the mask of each kind of layer once in a forward pass. Inside `sharded` it is
the mask of `sharded`, narrowed by the layer's window and by padding, which costs an all-gather of
one byte for each token and kind of layer. Elsewhere, on one process, it is the model's own.

Limits: dropout, position bias, 4-D masks, chunked and custom masks raise. Inside `sharded` so do
hybrid models, `generate`, cross-attention and blocks of images, which its mask holds. Packed
`position_ids` need ``use_cache=False``: with a cache, transformers treats a pack as one document.

Source: transformers 5.23, masking_utils.py and integrations/sdpa_attention.py.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from types import FrameType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.masking_utils import causal_mask_function

from canon.integrations.transformers_masks import (
    LayerMask,
    Pattern,
    kept_queries,
    own_masks,
    padded,
    pattern_of,
    refuse_a_sum,
    refuse_a_tree,
    refuse_another_mask,
)
from canon.masks.arguments import shown
from canon.masks.band import picked
from canon.masks.layout import Layout, check_size
from canon.masks.mask import Mask
from canon.ranks.graph_break import untraced
from canon.ranks.group import Group, place_in
from canon.route.checks import refuse_numbers

__all__ = ["register", "sharded"]

HALVES = ("fast", "reference")
FUNCTIONS = ("ring", "strided", "magi")
LAYERS = {"full_attention", "sliding_attention", "attention", "mlp", "moe"}
OF_A_LAYER = {"group", "scale", "softcap", "sink", "return_lse"}
UNSUPPORTED = {  # keyword of an attention function: remedy
    "dropout": "set attention_dropout=0 in the config",
    "position_bias": 'use attn_implementation="eager"',
    "cache": "leave out continuous batching",
    "output_attentions": "the weights are never stored; leave it out",
    "cu_seq_lens_q": "pass position_ids and use_cache=False; they describe the same documents",
}


def register(name: str = "canon") -> None:
    """Register Canon with transformers, as ``attn_implementation=name``. Outside `sharded`, only
    CUDA tensors use `canon.fast`.
    """
    if not isinstance(name, str):
        raise TypeError(f"register: name must be a string, got {shown(name)}")
    AttentionInterface.register(name, attend_layer)
    AttentionMaskInterface.register(name, build_mask)


@contextmanager
def sharded(
    mask: Mask | None,
    layout: Layout,
    group: Group = None,
    half: str = "fast",
    function: str = "ring",
    **options: Any,
) -> Iterator[None]:
    """Let the ranks of ``group`` hold one sequence together inside the block.

    Args:
        mask: of the whole sequence, for all b sequences; None is causal, with a warning if
            position_ids restart. It replaces the model's own mask.
        layout: the tokens of each rank, at least one.
        group: as in `canon.faces`.
        half: "fast" or "reference".
        function: "ring", "strided" or "magi".
        options: of that function, such as ``reduce_dtype``.

    ``attention_mask`` (b, t) is this rank's part of the padding mask. Padding in some sequences
    only must be invisible in these, as on the right of causal sequences.

    Raises TypeError or ValueError; for a wrong padding mask in the forward pass, on every rank.
    """
    attention = _attention_of(half, function, options, layout, group)
    refuse_numbers(mask, "sharded: mask")
    whole = Mask.causal(layout.tokens) if mask is None else mask
    if not isinstance(whole, Mask):
        raise TypeError(
            f"sharded: mask must be one canon.Mask or None, got {shown(mask)}: one Mask serves the "
            "batch"
        )
    check_size(whole, layout, "sharded: mask")
    sharding = Sharding(whole, attention, layout, group, given=mask is not None)
    token = _current.set(sharding)
    try:
        yield
    finally:
        _current.reset(token)
    if not sharding.called:
        warnings.warn(
            "canon: no model used Canon inside sharded, so each rank attended to its own tokens: "
            'call register("canon") and model.set_attn_implementation("canon")',
            stacklevel=3,
        )


@dataclass(eq=False)
class Sharding:
    """The mask of one kind of layer over the whole sequence, and the attention of all ranks."""

    mask: Mask
    attention: Callable
    layout: Layout
    group: Group
    given: bool  # else the mask is causal over the whole sequence
    called: bool = False  # whether a model has built a mask from it
    missing: bool = False  # whether it did without position_ids
    ndim = property(refuse_another_mask)
    __radd__ = size = refuse_a_sum

    def __getitem__(self, index: Any) -> "Sharding":
        """Return self for ``mask[:, :, :, :]``. Raises ValueError if a model drops queries."""
        tokens = self.layout.tokens
        if kept_queries(index, tokens) != range(tokens):
            raise ValueError(
                f"canon: the model takes [{index}] of its mask, but sharded needs all queries of a "
                "rank: leave out logits_to_keep"
            )
        return self


_current: ContextVar[Sharding | None] = ContextVar("canon_sharding", default=None)


def _attention_of(
    half: str, function: str, options: dict[str, Any], layout: Layout, group: Group
) -> Callable:
    if half not in HALVES:
        raise ValueError(f"sharded: half must be one of {HALVES}, got {shown(half)}")
    if function not in FUNCTIONS:
        raise ValueError(f"sharded: function must be one of {FUNCTIONS}, got {shown(function)}")
    if not isinstance(layout, Layout):
        raise TypeError(f"sharded: layout must be a canon.Layout, got {shown(layout)}")
    if empty := [rank for rank in range(layout.ranks) if not layout.size(rank)]:
        raise ValueError(
            f"sharded: layout gives rank {empty[0]} no tokens, and models of transformers fail "
            "without tokens: use fewer ranks or another layout"
        )
    attention = getattr(import_module(f"canon.{half}"), f"{function}_attention")
    parameters = inspect.signature(attention).parameters.values()
    allowed = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY} - OF_A_LAYER
    if unknown := sorted(options.keys() - allowed):
        raise TypeError(
            f"sharded: {function}_attention has no option {unknown[0]!r}, expected one of "
            f"{sorted(allowed)}"
        )
    return partial(attention, layout=layout, group=group, **options)


@untraced
def build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **_: Any,
) -> LayerMask | Sharding:
    """Return the mask of one kind of layer, inside `sharded` a `Sharding`.

    ``attention_mask`` is bool (b, m) of all tokens so far, False for padding.
    """
    pattern, sharding = pattern_of(mask_function), _current.get()
    rows = range(int(q_offset), int(q_offset) + q_length)
    columns = range(kv_offset, kv_offset + kv_length)
    if sharding is not None:
        sharding.called = True
        if pattern.blocks is not None:
            raise ValueError(
                "canon: inside sharded its mask holds the blocks of images, for all ranks: pass "
                "Mask.with_blocks(starts, stops), and leave out token_type_ids"
            )
        _check_decoder(pattern, config)
        if sharding.layout.ranks > 1:
            check_layers(config)
            _check_rotary(config, sharding.layout.tokens)
        _check_whole(rows, columns, sharding)
        mask = sharding.mask
        if pattern.left is not None or pattern.right is not None:
            refuse_a_tree(mask, sharding.layout)
        if attention_mask is not None:  # a collective
            valid = sharding.layout.unshard(attention_mask.to(torch.uint8), sharding.group)
            mask = padded(mask, valid.bool().cpu())
        return replace(sharding, mask=mask.windowed(pattern.left, pattern.right))
    masks = own_masks(pattern, batch_size, max(rows.stop, columns.stop), attention_mask)
    return LayerMask([mask.crop(rows, columns) for mask in masks])


def check_layers(config: Any) -> None:
    """Raise ValueError for hybrid models."""
    for name in ("layer_types", "layers_block_type"):
        if other := sorted(set(getattr(config, name, None) or ()) - LAYERS):
            raise ValueError(
                f"canon: layers of type {other[0]!r} would mix the tokens of one rank only: use a "
                "model of attention layers"
            )


def _check_decoder(pattern: Pattern, config: Any) -> None:
    several = getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    )
    if several and not pattern.causal:
        raise ValueError(
            "canon: sharded does not support encoders of encoder-decoder models and "
            "cross-attention: call the encoder "
            "outside sharded, and use another attn_implementation for the decoder"
        )


def _check_rotary(config: Any, tokens: int) -> None:
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    for rope in (scaling, *(scaling or {}).values()):
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if kind in ("dynamic", "longrope"):
            most = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            if tokens > most:
                raise ValueError(
                    f"canon: rope_type {kind!r} scales by the largest position of a rank, so ranks "
                    f"would scale differently: divide sequences of at most {most} tokens, or set a "
                    'rope_type that ignores the length, such as "yarn"'
                )


GENERATE = inspect.unwrap(vars(GenerationMixin)["generate"]).__code__


def _check_whole(rows: range, columns: range, sharding: Sharding) -> None:
    """Raise ValueError for a KV cache, whose first pass callers show."""
    frame, forwards = sys._getframe(), []
    while frame is not None and frame.f_code is not GENERATE:
        model = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(model, PreTrainedModel):
            forwards.append(frame)
        frame = frame.f_back
    if frame is not None or rows != columns or rows.start:
        raise ValueError(
            "canon: sharded does not support generate() and a KV cache, or an attention_mask of "
            f"another length than this rank's tokens, and got {len(rows)} queries from token "
            f"{rows.start} on with {len(columns)} keys: generate on one process, outside sharded"
        )
    _check_inputs(forwards, len(rows), sharding)


def _check_inputs(forwards: list[FrameType], tokens: int, sharding: Sharding) -> None:
    missing = bool(forwards)
    for frame in forwards:
        given, (names, _, others) = frame.f_locals, inspect.getargs(frame.f_code)
        if _computes_a_loss(given):
            warnings.warn(
                "canon: the model inside sharded gets labels, so its own loss is one of this rank "
                "alone, and the labels are shifted inside its shard: pass no labels, and pass the "
                "logits and shift_labels to canon.training.sequence_loss",
                stacklevel=2,
            )
        if "position_ids" in names:
            missing = given.get("position_ids") is None
        elif given.get(others, {}).get("position_ids") is not None:
            if frame is forwards[0] and sharding.layout.ranks > 1:
                raise ValueError(
                    f"canon: {type(given['self']).__name__} ignores position_ids, so each rank "
                    "would count its tokens from 0: use a model whose forward takes them"
                )
            missing = False
    _, rank, ranks = place_in("sharded", sharding.group)
    new, sharding.missing = missing and not sharding.missing, missing
    if new and (ranks, tokens) == (sharding.layout.ranks, sharding.layout.size(rank)):
        _warn_of_counting(sharding, rank)


def _computes_a_loss(given: dict[str, Any]) -> bool:
    """Return whether a ``forward`` with these locals makes a wrong loss. One from shift_labels is
    right by another loss function, or divided by a number.
    """
    model, options = given["self"], given.get("kwargs", {})
    if given.get("labels") is None:
        return False
    of_transformers = model.loss_function.__module__.startswith("transformers.")
    divided = options.get("num_items_in_batch") is not None or not of_transformers
    return not (divided and options.get("shift_labels") is not None)


def attend_layer(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention (b, t, h, dv) of one layer, and None for the weights.

    Args:
        query, key, value: (b, h, t, d), (b, g, t, d), (b, g, t, dv).
        attention_mask: the result of `build_mask`. None, only outside `sharded`, is causal or full.
        is_causal: of a layer without a mask; None is ``module.is_causal``, or else True.
        s_aux, softcap: sinks (h,), and the limit of the scores.
        options: unsupported ones raise.
    """
    for name, remedy in UNSUPPORTED.items():
        option = options.get(name)
        if not (option is None or option is False or (name == "dropout" and option == 0)):
            raise ValueError(f"canon: {name}={shown(option)} is not supported: {remedy}")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if isinstance(attention_mask, Sharding):
        if not torch.compiler.is_compiling():
            _look_at_positions(options.get("position_ids"), attention_mask)
        out = attention_mask.attention(
            q, k, v, attention_mask.mask, scale=scaling, softcap=softcap, sink=s_aux
        )
        return out.contiguous(), None
    if isinstance(attention_mask, LayerMask):
        masks = attention_mask.masks
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        masks = _default_mask(q.shape[1], k.shape[1], causal, sliding_window)
    else:
        raise TypeError(
            "canon: attention_mask must be a padding mask (b, n) or None, the layer got "
            f"{shown(attention_mask)}: for other cells use `sharded` with a Mask"
        )
    positions = options.get("position_ids")
    if positions is not None and q.shape[1] == k.shape[1] and not torch.compiler.is_compiling():
        _check_positions(positions, masks)
    if torch.compiler.is_compiling() and not isinstance(masks, Mask):
        _refuse_several_masks()
    half = import_module("canon.fast" if q.is_cuda else "canon.reference")
    out = half.attention(q, k, v, masks, scale=scaling, softcap=softcap, sink=s_aux)
    return out.contiguous(), None


@untraced
def _refuse_several_masks() -> None:
    raise ValueError(
        "canon: a compiled model takes one mask, but the sequences of this batch are padded or "
        "packed differently: pass one sequence, or leave torch.compile out"
    )


# the last position_ids and their masks: layers share them
_checked: list[tuple[Any, tuple]] = [(lambda: None, ())]


def _check_positions(positions: Tensor, masks: Mask | tuple[Mask, ...]) -> None:
    known = _checked[0][1] if _checked[0][0]() is positions else ()
    if not _are_readable(positions) or any(masks is one for one in known):
        return
    steps = torch.diff(positions, prepend=positions.new_full((len(positions), 1), -1)).cpu()
    by_row = (masks,) * len(steps) if isinstance(masks, Mask) else masks
    for step, mask in zip(steps.expand(len(by_row), -1), by_row, strict=True):
        restarts, jumps = (x.nonzero().flatten().tolist() for x in (step < 1, step > 1))
        # padding does not see itself
        if any(_sees(mask, token, token) and _sees(mask, token, token - 1) for token in restarts):
            raise ValueError(
                "canon: position_ids restart at a token that sees the one before it, because the "
                "model does not give them to its mask, or use_cache is True: pass "
                "use_cache=False, or use canon.integrations.transformers.sharded with a Layout of "
                "one rank and Mask.documents"
            )
        # transformers begins a document at a jump
        if dist.is_initialized() and any(_sees(mask, token, token) for token in jumps):
            _warn_of_a_shard()
    _checked[0] = ref(positions), (*known, masks)


MOST = 16  # layouts; each is looked at once, as reading from a GPU takes time
_looked: set[tuple[int, bool]] = set()  # hashes of layouts, and whether a mask was given


def _look_at_positions(positions: Tensor | None, sharding: Sharding) -> None:
    """Warn if positions restart without a mask, or count the tokens of this rank."""
    layout, whole = sharding.layout, _current.get()
    looked_at = hash(layout), sharding.given
    if positions is None or whole is None or len(_looked) >= MOST or looked_at in _looked:
        return
    if whole.missing or not _are_readable(positions):
        return
    _, rank, ranks = place_in("sharded", sharding.group)
    if ranks != layout.ranks or positions.shape[1] != layout.size(rank):
        return  # attention raises on all ranks
    _looked.add(looked_at)
    positions, in_sequence = positions.cpu(), layout.positions(rank)
    restarts = (positions.diff() < 1) & (in_sequence.diff() == 1)
    if not sharding.given and bool(restarts.any()):
        warnings.warn(
            "canon: position_ids restart, but without a mask sharded is causal over the whole "
            "sequence, so a document sees those before it: pass Mask.documents(cu_seqlens), or "
            "Mask.from_position_ids of the whole sequence",
            stacklevel=2,
        )
    if bool((positions == torch.arange(layout.size(rank), device="cpu")).all()):
        _warn_of_counting(whole, rank)


def _warn_of_counting(whole: Sharding, rank: int) -> None:
    layout = whole.layout
    counted = torch.arange(layout.size(rank), device="cpu")
    if layout.positions(rank).equal(counted):
        return
    with suppress(ValueError):  # the mask has no documents, as in a tree
        if not layout.document_positions(rank, whole.mask).equal(counted):
            warnings.warn(
                "canon: position_ids count the tokens of this rank from 0, not those of the "
                "sequence: pass the position_ids that layout.shard_batch returns",
                stacklevel=2,
            )


def _are_readable(positions: Tensor) -> bool:
    """Return whether positions are (b, t), outside of a CUDA graph's capture."""
    captured = positions.is_cuda and torch.cuda.is_current_stream_capturing()
    return positions.ndim == 2 and not captured


def _sees(mask: Mask, query: int, key: int) -> bool:
    rows, columns = range(query, query + 1), range(key, key + 1)
    return bool(picked(mask.bands_near(rows), rows, columns))


@cache
def _warn_of_a_shard() -> None:
    warnings.warn(
        "canon: position_ids are those of a part of a sequence, but the model runs outside of "
        "canon.integrations.transformers.sharded: this rank attends to its own tokens alone",
        stacklevel=2,
    )


def _default_mask(tokens: int, keys: int, causal: bool, sliding_window: int | None) -> Mask:
    """Return the mask of a layer without one."""
    if tokens != keys:
        raise ValueError(
            f"canon: a layer with {tokens} queries and {keys} keys has no mask from "
            "transformers.masking_utils: use "
            'attn_implementation="sdpa" there'
        )
    if _current.get() is not None:
        raise ValueError(
            "canon: this layer has no mask from transformers.masking_utils, so sharded cannot "
            "serve it: choose another "
            'attn_implementation for this part of the model, as {"vision_config": "sdpa", '
            '"text_config": "canon"}'
        )
    if sliding_window is None:
        return Mask.causal(tokens) if causal else Mask.full(tokens)
    return Mask.window(tokens, sliding_window - 1, 0 if causal else sliding_window - 1)
