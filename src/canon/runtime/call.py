"""A call of an attention function: its algorithm, and its arguments with all defaults filled in.

    RING = Algorithm(REFERENCE, "ring_attention", ring_forward, ring_backward)    both passes, as functions of a call
    call = RING.call(q, k, v, mask, layout)                                       check the arguments on this rank alone
    out, lse = ring_forward(call, q, k, v)                                        run the mathematics alone, on all ranks

`call_of` finds a repeated call by one key, so nothing is checked twice. `Call.agree` compares it between all ranks, in every
pass. A bad argument on one rank raises on every rank.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from canon.masks.head_groups import default_stride, gathered_bytes
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import PLANS
from canon.runtime.agreement import GroupState, group_state, refused_together
from canon.runtime.checks import (
    Scale,
    any_device,
    cached,
    check_mask_type,
    check_method,
    check_tensors,
    default_mask,
    default_reduce_dtype,
    default_scale,
    split_scale,
    transpose_hint,
    warn_of_heads_first,
)
from canon.runtime.digests import Fields, digest_of
from canon.runtime.group import ENDED, Group, place_in
from canon.runtime.plan_arguments import check_size, stages_of, warn_of_planned
from canon.runtime.rank_invariance import check_rank_invariant, check_tiled, contiguous_tiles

PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})  # types of options that a key may hold


def _no_settings(key: Hashable) -> None:
    """Return None: the algorithms of this half depend on their arguments alone."""


def _no_kernels(call: "Call") -> None:
    """Compile nothing: this half has no kernels."""


@dataclass(frozen=True, eq=False)
class Half:
    """The properties that all algorithms of `canon.reference`, or of `canon.fast`, share.

    ``under_sink(out, lse, sink)`` returns out under a sink. ``settings(key)`` returns the caller's settings that change the
    kernels of a call, and ``restored`` is a context with these settings, for its later passes. ``check_device(q)``
    raises RuntimeError or ValueError if no kernel supports q. ``compile_for(call)`` compiles the kernels that calls of
    this dtype and these heads can need.
    """

    name: str
    under_sink: Callable[[Tensor, Tensor, Tensor], Tensor]
    settings: Callable[[Hashable], Any] = _no_settings
    restored: Callable[[Any], AbstractContextManager] = nullcontext
    check_device: Callable[[Tensor], None] = any_device
    compile_for: Callable[["Call"], None] = _no_kernels


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A public attention function of one half, as two functions of tensors with a batch axis:

        forward(call, q, k, v, max_logits)                                      returns out, lse, *others
        backward(call, needs_grad, dout, dlse, q, k, v, out, lse, *others)      returns dq, dk, dv

    ``others`` are tensors that are saved for the backward pass. Gradients that are not in ``needs_grad`` may be None. dlse
    is None if nothing depends on lse; dout is never None. ``max_logits`` is not passed, or a tensor (h,) that the forward pass
    raises to the largest score of each head. Both run without autocast: inputs are cast before.
    `latent_attention` has a fourth tensor: ``forward(call, q, k, v, weight, max_logits)``. In ``backward`` it is the first of
    ``others``, and its gradient is the last.

    ``plan(call)`` returns the state that all calls of one kind share, such as the steps of a schedule. It is made once, as
    `Call.plan`. ``layout``: the constructor of the function's own layout. ``kept_rows(call)``: the first sizes of ``others``.
    ``tensors``: their public names. ``check`` raises TypeError or ValueError unless they fit together.
    """

    half: Half
    function: str
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    plan: Callable[["Call"], Any] | None = None
    layout: Callable[[int, int], Layout] | None = None
    kept_rows: Callable[["Call"], list[int]] | None = None
    tensors: tuple[str, ...] = ("q", "k", "v")
    check: Callable[..., None] = check_tensors

    def __post_init__(self):
        ALGORITHMS[self.half.name, self.function] = self

    @property
    def is_local(self) -> bool:
        """Whether the function runs on one rank and takes no layout."""
        return self.function == "attention"

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, layout: Layout | None = None,
        *, group: Group = None, weight: Tensor | None = None, **options: Any,
    ) -> "Call":  # fmt: skip
        """Return a call with its defaults, after checks on this rank alone: `forward` then needs no agreement.

        Raises TypeError for an option that the public function does not have.
        """
        if unknown := sorted(options.keys() - DEFAULTS[self.function].keys()):
            raise TypeError(f"{self.function} has no option {', '.join(unknown)}")
        return call_of(self, q, k, v, mask, layout, group, DEFAULTS[self.function] | options, weight=weight)


_RING = {"scale": None, "softcap": None, "reduce_dtype": None, "backward": "auto", "return_max_logits": False}
# By function: a test compares them with the public signature.
DEFAULTS: dict[str, dict[str, Any]] = {
    "attention": {
        "scale": None,
        "softcap": None,
        "backward": "auto",
        "rank_invariant": False,
        "return_max_logits": False,
    },
    "ring_attention": _RING,
    "zigzag_attention": _RING,
    "striped_attention": _RING,
    "latent_attention": _RING,
    "strided_attention": _RING
    | {
        "rank_invariant": False,
        "head_stride": None,
        "forward_first_stride": None,
        "backward_first_stride": None,
        "backward_last_stride": None,
        "backward_schedule": "scatter",
    },
    "magi_attention": _RING
    | {"rank_invariant": False, "casts": None, "own_keys_first": None, "stages": None, "keep_kv": False},
}
ALGORITHMS: dict[tuple[str, str], Algorithm] = {}  # by half and function, for operators


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a call after all checks. Only ``rank`` differs between ranks.

    One object serves all calls of its kind: the same arguments, and q, k, v of the same shapes, strides, dtypes and alignment.
    So it can be the key of everything that depends on the kind of a call. ``layout`` is None for `attention`.
    ``options``: the function's other options. ``settings``: see `Half`. ``shapes``: of q, k, v, with a batch axis, and of the
    weight, if the function has one.
    """

    algorithm: Algorithm
    rank: int
    ranks: int
    group_reference: Any  # weak: the cache of calls must not keep a group alive
    mask: Mask
    layout: Layout | None
    scale: Scale
    reduce_dtype: torch.dtype
    backward: str
    options: dict[str, Any]
    settings: Any
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    sink: str | None = None

    @property
    def function(self) -> str:
        """The name of the public function."""
        return self.algorithm.function

    def maxima(self, q: Tensor) -> dict[str, Tensor]:
        """Return the keyword arguments with which the forward pass finds the largest score of each head (h,) on this rank."""
        return {"max_logits": torch.full((q.shape[2],), -torch.inf, dtype=torch.float32, device=q.device)}

    def largest(self, max_logits: Tensor) -> Tensor:
        """Return the largest score of each head (h,) over all ranks."""
        if self.ranks > 1:
            dist.all_reduce(max_logits, dist.ReduceOp.MAX, group=self.group)
        return max_logits

    @property
    def nbytes(self) -> int:
        """The memory of the call on the host, in bytes (an estimate)."""
        return 1000 + self.mask.nbytes + (0 if self.layout is None else self.layout.nbytes)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the call; None is all ranks. Raises RuntimeError if the group has ended."""
        if self.group_reference is None:
            return None
        if (group := self.group_reference()) is None:
            raise RuntimeError(f"{self.function}: {ENDED}")
        return group

    @cached_property
    def plan(self) -> Any:
        """The plan of the algorithm. Raises ValueError, on every rank, if an option does not fit the tensors."""
        make = self.algorithm.plan
        assert make is not None
        return PLANS.find((Call, self), lambda: make(self))  # so that the cache counts its memory

    def local_mask(self, owner: int) -> Mask:
        """Return the mask between this rank's queries and the keys of ``owner``, in local coordinates."""
        return self.mask if self.layout is None else self.layout.local_mask(self.mask, self.rank, owner)

    # ------------------------------------------------------------------ agreement between ranks
    @property
    def state(self) -> GroupState:
        """The state of the group. Valid for calls of more than one rank only."""
        return group_state(self.group)

    @cached_property
    def fields(self) -> Fields:
        """(name, value) of everything that must be equal on all ranks."""
        names, shapes, (scale, softcap) = self.algorithm.tensors, self.shapes, split_scale(self.scale)
        return (
            ("function", self.function),
            ("half", self.algorithm.half.name),
            ("mask", self.mask),
            ("layout", self.layout),
            ("dtype", self.dtype),
            ("device", self.device.type),
            *(
                (f"batch, heads and width of {name}", (x[0], *x[2:]))
                for name, x in zip(names[:3], shapes, strict=False)
            ),
            *((f"shape of {name}", tuple(x)) for name, x in zip(names[3:], shapes[3:], strict=True)),
            ("scale", scale),
            ("softcap", softcap),
            ("reduce_dtype", self.reduce_dtype),
            ("backward", self.backward),
            ("sink", self.sink),
            ("options", tuple((name, type(value).__name__, value) for name, value in self.options.items())),
        )

    @cached_property
    def _digests(self) -> dict[tuple[str, tuple[bool, ...]], tuple[str, Fields, int]]:
        """The name, the fields and the digest of each pass, by its name and by the tensors that need a gradient."""
        return {}

    def agree(self, name: str, needs_grad: tuple[bool, ...]) -> None:
        """Compare this call between all ranks at the start of its pass ``name``. Raises like `GroupState.agree`."""
        found = self._digests.get((name, needs_grad))
        if found is None:
            names = ", ".join(self.algorithm.tensors)
            fields = (("pass", name), *self.fields, (f"requires_grad of {names}", needs_grad))
            found = self._digests[name, needs_grad] = f"{self.function} ({name})", fields, digest_of(fields)
        title, fields, digest = found
        self.state.agree(title, fields, wait=self.device.type == "cpu", digest=digest)


def call_of(
    algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor, mask: Any, layout: Any, group: Any,
    options: dict[str, Any], sink: str | None = None, weight: Any = None,
) -> Call:  # fmt: skip
    """Return the call with its defaults filled in. A repeated call is found by its key and not checked again.

    Args: ``options``, all options by name, in one order for each function; ``sink``, the kind of the sink, if any; ``weight``,
    the fourth tensor of a function that has one.
    Raises ValueError or TypeError on every rank, if the arguments of one rank do not fit together.
    """
    group, rank, ranks = (None, 0, 1) if algorithm.is_local else place_in(algorithm.function, group)
    key = _key(algorithm, q, k, v, mask, layout, group, rank, ranks, options, sink, weight)
    if key is None:  # perhaps numbers of NumPy
        options = {name: x.item() if isinstance(x, np.number) else x for name, x in options.items()}
        key = _key(algorithm, q, k, v, mask, layout, group, rank, ranks, options, sink, weight)
    if key is not None and (call := PLANS.get(key)) is not None:
        return call
    with refused_together(algorithm.function, group, ranks):
        call = _checked(algorithm, q, k, v, mask, layout, group, rank, ranks, options, sink, weight, key)
    algorithm.half.compile_for(call)
    # Calls with equal arguments share one object, however the arguments were passed.
    scale, softcap = split_scale(call.scale)
    filled = {"scale": scale, "softcap": softcap, "reduce_dtype": call.reduce_dtype, "backward": call.backward}
    filled |= call.options
    resolved = {name: filled.get(name) for name in options}
    same = _key(algorithm, q, k, v, call.mask, call.layout, group, rank, ranks, resolved, sink, weight)
    if same is not None:
        call = PLANS.find(same, lambda: call)
    return call if key is None else PLANS.put(key, call)


def _key(
    algorithm: Algorithm, q: Any, k: Any, v: Any, mask: Any, layout: Any, group: Any, rank: int, ranks: int,
    options: dict[str, Any], sink: str | None, weight: Any,
) -> tuple | None:  # fmt: skip
    """Return a key of calls that need the same checks and the same kernels, None for arguments of unusual types."""
    values = tuple(options.values())
    types = tuple(map(type, values))  # 1 and True are equal as keys
    if not PLAIN.issuperset(types) or not (mask is None or type(mask) is Mask):
        return None
    if not (layout is None or type(layout) is Layout):
        return None
    group = None if group is None else ref(group)
    try:
        key = (
            algorithm, mask, layout, group, rank, ranks, sink, values, types,
            type(q), q.shape, q.stride(), q.dtype, q.device, q.data_ptr() & 15,
            type(k), k.shape, k.stride(), k.dtype, k.device, k.data_ptr() & 15,
            type(v), v.shape, v.stride(), v.dtype, v.device, v.data_ptr() & 15,
        )  # fmt: skip
        if weight is not None:
            key += type(weight), kinds_of(weight)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or one without strides or memory (torch.func)
        return None
    return *key, algorithm.half.settings(key)


def tensors_of(algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor, weight: Any) -> tuple:
    """Return q, k, v, and the weight if the function has one."""
    return (q, k, v, weight)[: len(algorithm.tensors)]


def kinds_of(*tensors: Tensor) -> Hashable:
    """Return a key of the tensors' kinds: shapes, strides, dtypes, devices and alignment."""
    return tuple([(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) for x in tensors])


def _checked(
    algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor, mask: Any, layout: Any, group: Any, rank: int, ranks: int,
    options: dict[str, Any], sink: str | None, weight: Any, key: tuple | None,
) -> Call:  # fmt: skip
    """Check the arguments on this rank, and fill in their defaults."""
    algorithm.check(*tensors_of(algorithm, q, k, v, weight))
    algorithm.half.check_device(q)
    given = mask, layout
    checked = "scale", "softcap", "reduce_dtype", "backward"
    own = {name: value for name, value in options.items() if name not in checked}
    check_method("backward", options["backward"])
    if "stages" in own:
        pair = own.pop("casts"), own.pop("own_keys_first")
        own["stages"] = stages_of(*pair, own["stages"], own["rank_invariant"] is True)
    if "rank_invariant" in own:
        check_rank_invariant(
            algorithm.function, backward=options["backward"], reduce_dtype=options.get("reduce_dtype"), **own
        )
    if algorithm.is_local:
        mask, layout = default_mask(q, k, mask), None
    else:
        invariant = own.get("rank_invariant", False)
        mask, layout = mask_and_layout(algorithm, q, k, mask, layout, rank, ranks, invariant)
        if invariant:
            check_tiled(algorithm.function, layout)
    if not isinstance(own["return_max_logits"], bool):
        raise TypeError(f"return_max_logits must be True or False, got {own['return_max_logits']!r}")
    hash(tuple(own.values()))  # raises TypeError for an option that is a list
    warn_of_heads_first(algorithm.function, q, k, *given)  # after all errors
    shapes = tuple(x.unsqueeze(0).shape if x.ndim == 3 else x.shape for x in tensors_of(algorithm, q, k, v, weight))
    if own.get("head_stride", 1) is None:
        (b, _, g, d), dv = shapes[1], v.shape[-1]
        own["head_stride"] = default_stride(g, gathered_bytes(layout, b * (d + dv) * k.element_size()))
    return Call(
        algorithm, rank, ranks, None if group is None else ref(group), mask, layout,
        default_scale(q, options["scale"], options["softcap"]),
        default_reduce_dtype(q, options.get("reduce_dtype")), options["backward"], own,
        algorithm.half.settings(None) if key is None else key[-1], shapes, q.dtype, q.device, sink,
    )  # fmt: skip


def mask_and_layout(
    algorithm: Algorithm, q: Tensor, k: Tensor, mask: Mask | None, layout: Layout | None, rank: int, ranks: int,
    rank_invariant: bool = False,
) -> tuple[Mask, Layout]:  # fmt: skip
    """Return the mask and the layout with their defaults. Raise unless they fit q and k on this rank."""
    if q.shape[-3] != k.shape[-3]:
        hint = transpose_hint((q, k.shape[-2]))
        raise ValueError(f"q and k of a rank must hold the same tokens, got {q.shape[-3]} and {k.shape[-3]}{hint}")
    if mask is not None:
        check_mask_type(mask)
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(
            f"layout must be a canon.Layout or None, got {type(layout).__name__}: build one with Layout.zigzag, ..."
        )
    tokens = mask.queries if mask is not None else layout.tokens if layout is not None else ranks * q.shape[-3]
    is_default = layout is None and algorithm.layout is None
    if layout is None:
        layout = cached(algorithm.layout or (contiguous_tiles if rank_invariant else Layout.contiguous), tokens, ranks)
    mask = cached(Mask.causal, tokens) if mask is None else mask
    check_size(mask, layout)
    if layout.ranks != ranks:
        raise ValueError(f"the layout is for {layout.ranks} ranks, the group has {ranks}")
    if q.shape[-3] != layout.size(rank):
        hint = transpose_hint((q, layout.size(rank))) or ": pass the layout that divided the tokens" * is_default
        raise ValueError(f"the layout gives rank {rank} {layout.size(rank)} tokens, q holds {q.shape[-3]}{hint}")
    warn_of_planned(algorithm.function, mask, layout, rank, is_default)
    return mask, layout
