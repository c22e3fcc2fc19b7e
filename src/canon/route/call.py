"""A call of an attention function: its algorithm, and its arguments with all defaults.

call = checked_call(RING, q, k, v, mask=mask, layout=layout)   # on this rank alone
out, lse = ring_forward(call, q, k, v)                         # the mathematics, on all ranks
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from canon.masks.arguments import flag
from canon.masks.layout import TILE, Layout, check_size
from canon.masks.mask import Mask
from canon.masks.plan_cache import PLANS, are_noted
from canon.ranks.agreement import GroupState, group_state, refused_together, report
from canon.ranks.digests import Fields, digest_of
from canon.ranks.group import ENDED, Group, Mesh, mesh_of, place_in
from canon.route.algorithm import Algorithm, Declaration, Passes
from canon.route.checks import (
    Scale,
    accumulate_dtype,
    cached,
    check_layout_type,
    check_mask_type,
    check_method,
    checked_dtype,
    default_mask,
    default_scale,
    split_scale,
    transpose_hint,
    warn_of_heads_first,
)
from canon.route.mesh_columns import check_heads, of_column
from canon.route.plan_arguments import warn_of_another_cut, warn_of_documents, warn_of_planned
from canon.route.rank_invariance import check_rank_invariant, check_tiled

# by `torch.get_deterministic_debug_mode`
SWITCH = "False", "True, warn_only=True", "True"
# types of options that a key may hold
PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})


class Arguments(NamedTuple):
    """The arguments of a call, as passed: all options in the order of the signature, and the kind
    of the sink, if any.
    """

    tensors: tuple[Tensor, ...]
    mask: Mask | None
    layout: Layout | None
    group: Group
    options: dict[str, Any]
    sink: str | None = None


class Place(NamedTuple):
    """The group of a call, this process's rank, and the columns of its mesh."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    ranks: int = 1
    columns: int = 1
    mesh: Mesh | None = None


ALONE = Place()


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a call after all checks. Only ``rank`` differs between ranks.

    One object serves all calls of its kind: the same arguments, and q, k, v of the same shapes,
    strides, dtypes and alignment. It is the key of everything that depends on the kind. ``layout``
    is None for `attention`. ``shapes``: of the tensors, with a batch axis.
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
    columns: int = 1
    mesh: Mesh | None = None
    # title, fields and digest, by pass, needed gradients and `torch.get_deterministic_debug_mode`
    _digests: dict[tuple, tuple[str, Fields, int]] = field(default_factory=dict, init=False)

    @property
    def function(self) -> str:
        """The name of the public function."""
        return self.algorithm.function

    @property
    def value_width(self) -> int:
        """The width of V, also where V is projected from other tensors."""
        return self.algorithm.declaration.value_width(self.shapes)

    @property
    def passes(self) -> Passes:
        """Both passes. Those of a mesh exchange heads and run `computed`."""
        algorithm = self.algorithm
        if self.columns > 1:
            return algorithm.side.over_mesh
        if algorithm.invariant is not None and self.options["rank_invariant"]:
            return algorithm.invariant
        return algorithm.forward, algorithm.backward

    @property
    def computed(self) -> "Call":
        """The call that computes: on a mesh, that of a column."""
        return self if self.columns == 1 else self._of_column

    @cached_property
    def _of_column(self) -> "Call":
        layout, shapes = of_column(self.layout, self.shapes, self.rank, self.columns)
        return replace(
            self,
            rank=self.rank // self.columns,
            ranks=self.ranks // self.columns,
            group_reference=None if self.mesh is None else ref(self.mesh.column),
            layout=layout,
            shapes=shapes,
            columns=1,
            mesh=None,
        )

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Return out, lse, the largest score of each head (h,) over all ranks or None, and what
        else the backward pass needs.
        """
        attended = self.passes[0]
        if not self.options["return_max_logits"]:
            out, lse, *others = attended(self, *tensors)
            return out, lse, None, *others
        heads, device = tensors[0].shape[2], tensors[0].device
        largest = torch.full((heads,), -torch.inf, dtype=torch.float32, device=device)
        out, lse, *others = attended(self, *tensors, max_logits=largest)
        if self.ranks > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return out, lse, largest, *others

    @property
    def nbytes(self) -> int:
        """The memory of the call on the host, in bytes (an estimate)."""
        return 1000 + self.mask.nbytes + (0 if self.layout is None else self.layout.nbytes)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the call; None is all ranks. Raises RuntimeError if it has ended."""
        if self.group_reference is None:
            return None
        if (group := self.group_reference()) is None:
            raise RuntimeError(f"{self.function}: {ENDED}")
        return group

    @cached_property
    def plan(self) -> Any:
        """The plan of the algorithm. Raises ValueError if an option does not fit."""
        make = self.algorithm.plan
        assert make is not None
        return PLANS.find((Call, self), lambda: make(self))  # so that the cache counts its memory

    def local_mask(self, owner: int) -> Mask:
        """Return the mask between this rank's queries and the keys of ``owner``."""
        layout = self.layout
        return self.mask if layout is None else layout.local_mask(self.mask, self.rank, owner)

    @property
    def state(self) -> GroupState:
        """The state of the group of several ranks."""
        return group_state(self.group)

    @cached_property
    def fields(self) -> Fields:
        """(name, value) of everything that must be equal on all ranks."""
        names, shapes = self.algorithm.declaration.tensors, self.shapes
        return (
            ("function", self.function),
            ("half", self.algorithm.side.name),
            ("mask", self.mask),
            ("layout", self.layout),
            ("ranks that share the heads", self.columns),
            ("dtype", self.dtype),
            ("device", self.device.type),
            *(
                (f"batch, heads and width of {name}", (x[0], *x[2:]))
                for name, x in zip(names[:3], shapes, strict=False)
            ),
            *(
                (f"shape of {name}", tuple(x))
                for name, x in zip(names[3:], shapes[3:], strict=True)
            ),
            ("sink", self.sink),
            *self.options.items(),
        )

    def agree(self, name: str, needs_grad: tuple[bool, ...]) -> None:
        """Compare this call, and PyTorch's switch, between all ranks. Raises like
        `GroupState.agree`.
        """
        mode = torch.get_deterministic_debug_mode()
        found = self._digests.get((name, needs_grad, mode))
        if found is None:
            names = ", ".join(self.algorithm.declaration.tensors)
            fields = (
                ("pass", name),
                *self.fields,
                ("torch.use_deterministic_algorithms", SWITCH[mode]),
                (f"requires_grad of {names}", needs_grad),
            )
            found = self._digests[name, needs_grad, mode] = (
                f"{self.function} ({name})",
                fields,
                digest_of(fields),
            )
        title, fields, digest = found
        self.state.agree(title, fields, wait=self.device.type == "cpu", digest=digest)


def checked_call(
    algorithm: Algorithm,
    *tensors: Tensor,
    mask: Any = None,
    layout: Any = None,
    group: Group = None,
    **options: Any,
) -> Call:
    """Return a call with its defaults, after checks on this rank alone."""
    return call_of(
        algorithm,
        Arguments(tensors, mask, layout, group, algorithm.declaration.with_defaults(options)),
    )


def call_of(algorithm: Algorithm, given: Arguments) -> Call:
    """Return the call with its defaults. Raises ValueError or TypeError on every rank."""
    place = place_of(algorithm.declaration, given.group)
    key = _key(algorithm, given, place)
    if key is None:  # perhaps numbers of NumPy
        options = {
            name: x.item() if isinstance(x, np.number) else x for name, x in given.options.items()
        }
        given = given._replace(options=options)
        key = _key(algorithm, given, place)
    if key is not None and (call := PLANS.get(key)) is not None:
        return call
    with refused_together(algorithm.function, place.group, place.ranks):
        call = made_call(
            algorithm, given, place, algorithm.side.settings(None) if key is None else key[-1]
        )
    algorithm.side.compile_for(call)
    if place.mesh is not None:
        call.state.meshes.add(place.mesh)
    # equal arguments share one object, however they were passed
    given = given._replace(mask=call.mask, layout=call.layout, options=call.options)
    if (same := _key(algorithm, given, place)) is not None:
        call = PLANS.put(same, call)
    return call if key is None else PLANS.put(key, call)


def place_of(declaration: Declaration, group: Group) -> Place:
    """Return the place of this process in a group or a mesh."""
    if declaration.is_local:
        return ALONE
    name = declaration.name
    try:
        mesh = mesh_of(name, group)
    except ValueError as error:
        report(name, group, error)
    if mesh is None:
        return Place(*place_in(name, group))
    return Place(*place_in(name, mesh), mesh.columns, mesh)


def _key(algorithm: Algorithm, given: Arguments, place: Place) -> tuple | None:
    """Return a key of calls with the same checks and kernels, None for unusual types."""
    tensors, mask, layout, _, options, sink = given
    values = tuple(options.values())
    types = tuple(map(type, values))  # 1 and True are equal as keys
    if not PLAIN.issuperset(types) or not (mask is None or type(mask) is Mask):
        return None
    if not (layout is None or type(layout) is Layout):
        return None
    group = None if place.group is None else ref(place.group)
    try:
        kinds = [
            (type(x), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) for x in tensors
        ]
        key = (algorithm, mask, layout, group, *place[1:], sink, values, types, *kinds)
    # no tensor, or one without strides or memory (torch.func)
    except (AttributeError, RuntimeError, TypeError):
        return None
    # the kernels of `compile_for` depend on the switch
    return *key, torch._C._get_deterministic_algorithms(), algorithm.side.settings(key)


def kinds_of(*tensors: Tensor) -> Hashable:
    """Return a key of the tensors' shapes, strides, dtypes, devices and alignment."""
    return tuple([(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) for x in tensors])


def made_call(algorithm: Algorithm, given: Arguments, place: Place, settings: Any) -> Call:
    """Check the arguments on this rank, and fill in their defaults."""
    tensors, mask, layout, _, options, sink = given
    declaration, (group, rank, ranks, columns, _) = algorithm.declaration, place
    declaration.check(*tensors)
    q, k, *_ = tensors
    passed = mask, layout
    if not are_noted():  # plans are made ahead
        algorithm.side.check_device(q)
    check_method("backward", options["backward"])
    check_rank_invariant(algorithm.function, declaration.contradictions, options)
    invariant = options.get("rank_invariant", False)
    if declaration.is_local:
        mask, layout = default_mask(q, k, mask), None
    else:
        mask, layout = mask_and_layout(declaration, q, k, mask, layout, place, invariant)
    shapes = tuple(x.unsqueeze(0).shape if x.ndim == 3 else x.shape for x in tensors)
    computed = layout, shapes
    if columns > 1:
        check_heads(declaration, shapes, ranks, columns)
        computed = of_column(layout, shapes, rank, columns)
    options = declaration.resolve(options, computed[1], q.element_size(), computed[0])
    if invariant and layout is not None:
        check_tiled(algorithm.function, computed[0], columns)
    for name, default in declaration.defaults.items():
        if isinstance(default, bool):
            flag(name, options[name])
    scale = default_scale(q, options["scale"], options["softcap"])
    number, softcap = split_scale(scale)
    reduce_dtype = checked_dtype(
        "reduce_dtype", options.get("reduce_dtype"), accumulate_dtype(q.dtype)
    )
    filled = {"scale": number, "softcap": softcap, "reduce_dtype": reduce_dtype}
    options = {name: filled.get(name, x) for name, x in options.items()}
    warn_of_heads_first(algorithm.function, q, k, *passed)  # after all errors
    return Call(
        algorithm, rank, ranks, None if group is None else ref(group), mask, layout,
        scale, reduce_dtype, options["backward"], options,
        settings, shapes, q.dtype, q.device, sink, columns, place.mesh,
    )  # fmt: skip


def mask_and_layout(
    declaration: Declaration,
    q: Tensor,
    k: Tensor,
    mask: Mask | None,
    layout: Layout | None,
    place: Place,
    rank_invariant: bool,
) -> tuple[Mask, Layout]:
    """Return the mask and the layout with their defaults. Raise unless they fit q and k."""
    rank, ranks = place.rank, place.ranks
    if q.shape[-3] != k.shape[-3]:
        hint = transpose_hint((q, k.shape[-2]))
        raise ValueError(
            f"q and k of a rank must hold the same tokens, got {q.shape[-3]} and "
            f"{k.shape[-3]}{hint}"
        )
    if mask is not None:
        check_mask_type(mask)
    check_layout_type(layout)
    is_default = layout is None and declaration.layout is None
    if layout is None:
        tokens = ranks * q.shape[-3] if mask is None else mask.queries
        multiple = (TILE,) if rank_invariant else ()
        layout = cached(declaration.layout or Layout.contiguous, tokens, ranks, *multiple)
    elif mask is None:
        warn_of_documents(declaration.name, layout)
    mask = cached(Mask.causal, layout.tokens) if mask is None else mask
    check_size(mask, layout)
    if layout.ranks != ranks:
        raise ValueError(f"the layout is for {layout.ranks} ranks, the group has {ranks}")
    if q.shape[-3] != layout.size(rank):
        hint = transpose_hint((q, layout.size(rank))) or (
            ": pass the layout that divided the tokens"
            if is_default
            else ": divide q, k and v by this layout"
        )
        raise ValueError(
            f"the layout gives rank {rank} {layout.size(rank)} tokens, q holds {q.shape[-3]}{hint}"
        )
    if not warn_of_planned(declaration.name, mask, layout, rank, place.columns, is_default):
        warn_of_another_cut(declaration.name, layout, rank)
    return mask, layout
