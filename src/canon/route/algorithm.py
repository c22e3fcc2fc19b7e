"""An attention function: its declaration for both halves, and its algorithm in each.

RING = declared(ring_attention)                                       # faces: its signature
algorithm = Algorithm(REFERENCE, RING, ring_forward, ring_backward)   # a half: its two passes
ring_attention = public_ring.ring_attention(algorithm)                # the half's function
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.route.binding import bound
from canon.route.checks import any_device, check_tensors

if TYPE_CHECKING:
    from canon.route.call import Call

# keyword arguments that are not options
APART = {"sink", "group", "return_lse"}
# arguments of an operator after its tensors, and after its options
PLACED = ("mask", "has_mask", "layout", "has_layout", "half", "settings")
OF_RANKS = ("group", "needs_grad")
NeedsGrad = tuple[bool, bool, bool]  # of q, k and v
Gradients = tuple[Tensor | None, ...]  # of each tensor, None where it is not needed
Passes = tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Gradients]]
Shapes = tuple[torch.Size, ...]
F = TypeVar("F", bound=Callable[..., Any])

DECLARATIONS: dict[str, "Declaration"] = {}  # by name, for operators and `prepare`
SIDES: dict[str, "Side"] = {}
ALGORITHMS: dict[tuple[str, str], "Algorithm"] = {}  # by side and function, for operators


def _qkv(
    queries: int, keys: int, heads: tuple[int, int], widths: tuple[int, int]
) -> list[tuple[int, ...]]:
    (h, g), (d, dv) = heads, widths
    return [(queries, h, d), (keys, g, d), (keys, g, dv)]


@dataclass(frozen=True, eq=False)
class Declaration:
    """A public attention function, declared once for both halves.

    ``face(algorithm)`` returns the function of a half. Name, options, defaults and operator schema
    derive from its signature. The other fields:

        tensors, expected    the names of its tensors, and their shapes in words
        check(*tensors)      raises TypeError or ValueError unless they fit together
        layout               the constructor of the function's own layout
        resolve(options, shapes, itemsize, layout)    fills in defaults
        contradictions       options that contradict rank_invariant, besides
                             `rank_invariance.COMMON`
        keeps                the option with which the forward pass saves more tensors, or ""
        value_width(shapes)  the width of V
        more_flops(shapes, mask)    the FLOPs of a product besides attention's
        shapes(queries, keys, heads, widths)    of valid tensors without a batch
    """

    face: Callable[["Algorithm"], Callable[..., Any]]
    tensors: tuple[str, ...] = ("q", "k", "v")
    expected: str = "q, k, v all (b, t, heads, width) or all packed (t, heads, width)"
    check: Callable[..., None] = check_tensors
    layout: Callable[[int, int], Layout] | None = None
    resolve: Callable[[dict[str, Any], Shapes, int, Layout | None], dict[str, Any]] = (
        lambda options, *_: options
    )
    contradictions: Mapping[str, tuple[tuple, str, str]] = field(default_factory=dict)
    keeps: str = ""
    value_width: Callable[[Shapes], int] = lambda shapes: shapes[2][-1]
    more_flops: Callable[[Shapes, Mask], int] = lambda *_: 0
    shapes: Callable[[int, int, tuple[int, int], tuple[int, int]], Sequence[tuple[int, ...]]] = _qkv

    @property
    def name(self) -> str:
        """The name of the public function."""
        return self.face.__name__

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options with their defaults, in the order of the signature."""
        return {name: parameter.default for name, parameter in self._options().items()}

    @cached_property
    def schema(self) -> str:
        """The options in the schema language of PyTorch's operators."""

        def stub() -> None: ...

        parameters = [x.replace(default=inspect.Parameter.empty) for x in self._options().values()]
        stub.__signature__ = inspect.Signature(parameters, return_annotation=None)  # pyright: ignore[reportFunctionMemberAccess]
        # an option is never symbolic
        text = torch.library.infer_schema(stub, mutates_args=()).replace("SymInt", "int")
        return text[text.index("*, ") + 3 : text.rindex(") ->")]

    @cached_property
    def is_local(self) -> bool:
        """Whether the function runs on one rank and takes no layout."""
        return "group" not in self._parameters

    def by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return arguments of an operator, after its tensors, by name."""
        names = *PLACED, *self.defaults, *(() if self.is_local else OF_RANKS)
        return dict(zip(names, values, strict=False))

    def _options(self) -> dict[str, inspect.Parameter]:
        return {
            name: x
            for name, x in self._parameters.items()
            if x.kind is x.KEYWORD_ONLY and name not in APART
        }

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.face(_Unbound())).parameters

    def with_defaults(self, options: dict[str, Any], by: str = "") -> dict[str, Any]:
        """Return all options. Raise TypeError for an unknown one."""
        if unknown := sorted(options.keys() - self.defaults.keys()):
            expected = ", ".join(self.defaults)
            raise TypeError(
                f"{by}{self.name} has no option {', '.join(unknown)}: expected {expected}"
            )
        return self.defaults | options


@dataclass(eq=False)
class Side:
    """The properties that all algorithms of a half share.

    ``under_sink(out, lse, sink)`` returns out under a sink. ``settings(key)`` returns the caller's
    settings that change the kernels of a call; ``restored`` is a context with them.
    ``check_device(q)`` raises RuntimeError or ValueError if no kernel supports q.
    ``compile_for(call)`` compiles the model's kernels. ``over_mesh``: both passes on a mesh.
    """

    name: str
    under_sink: Callable[[Tensor, Tensor, Tensor], Tensor]
    settings: Callable[[Hashable], Any] = lambda key: None
    restored: Callable[[Any], AbstractContextManager] = nullcontext
    check_device: Callable[[Tensor], None] = any_device
    compile_for: Callable[["Call"], None] = lambda call: None
    over_mesh: Passes | None = None

    def __post_init__(self):
        SIDES[self.name] = self


@dataclass(frozen=True, eq=False)
class Algorithm:
    """The implementation of a declared function in one half, as two functions of tensors with a
    batch axis:

        forward(call, *tensors, max_logits)
            returns out, lse, *others
        backward(call, needs_grad, dout, dlse, *tensors, out, lse, *others)
            returns the gradient of each tensor

    ``tensors`` are those of the declaration. ``others`` are saved for the backward pass. Unneeded
    gradients may be None; dlse is None if nothing depends on lse. ``max_logits``, if passed, (h,),
    is raised to the largest score of each head.

        invariant       both passes of calls with rank_invariant=True, if they are others
        plan(call)      the state that all calls of one kind share: `Call.plan`
        parts(call, backward)    looks up the plans of the passes, and yields the parts of the call
                        that have kernels, for `prepare`
        kept_rows(call) the first sizes of ``others``
        variants        the names of its groups of kernels (`canon.fast.ahead.kernel_variants`)
        notes           sentences for the public docstring of this half only
    """

    side: Side
    declaration: Declaration
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., Gradients]
    invariant: Passes | None = None
    plan: Callable[["Call"], Any] | None = None
    parts: Callable[["Call", bool], Iterable[Any]] = lambda *_: ()
    kept_rows: Callable[["Call"], list[int]] | None = None
    variants: tuple[str, ...] = ()
    notes: str = ""

    def __post_init__(self):
        ALGORITHMS[self.side.name, self.function] = self

    @property
    def function(self) -> str:
        """The name of the public function."""
        return self.declaration.name

    def bind(self, function: F) -> F:
        """Return the public function as a member of this algorithm's module."""
        return bound(function, self.forward, self.notes)


class _Unbound(Algorithm):
    """The algorithm while a declaration reads its signature."""

    def __init__(self): ...

    def bind(self, function: F) -> F:
        return function
