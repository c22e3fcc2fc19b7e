"""List the cases of `canon check`: functions, masks, layouts, dtypes and shapes.

plain         no mask is passed, and no lse is returned
part          a partial result of a schedule: delta is given, and the results are float32
sink          a sink is passed; its gradients are added over the ranks
sequences     a tuple with a mask for each sequence
last          a mask with the last queries only
few           a mask with 17 queries and 5,000 keys or more: the documents come several times
cancelling    causal over two heavy keys with opposite values, so that partial results are larger
              than out: merging them in 16 bits shows. The dtype has 16 bits if possible.
nan in k      one element of a visible token of k is NaN; the results of all queries that see it
              are, too

Each mask has its own shape. Dtypes alternate over masks, layouts and methods.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from canon import reference
from canon.masks.layout import TILE
from canon.reference import Layout
from canon.testing.judge import Masks

LAYOUTS: dict[str, Callable[[Any, int], Layout]] = {  # only "planned" takes a tuple of masks
    "contiguous": lambda mask, ranks: Layout.contiguous(mask.keys, ranks),
    "zigzag": lambda mask, ranks: Layout.zigzag(mask.keys, ranks),
    "striped": lambda mask, ranks: Layout.striped(mask.keys, ranks),
    "planned": lambda mask, ranks: reference.dispatch(mask, ranks, **interleaving(mask, ranks)),
}
# with ``rank_invariant=True``; "striped" has no whole tiles
TILED_LAYOUTS: dict[str, Callable[[Any, int], Layout]] = {
    "contiguous": lambda mask, ranks: Layout.contiguous(mask.queries, ranks, TILE),
    "zigzag": lambda mask, ranks: Layout.zigzag(mask.queries, ranks, TILE),
    "striped": LAYOUTS["striped"],
    "dispatch": lambda mask, ranks: reference.dispatch(mask, ranks, rank_invariant=True),
}
METHODS = ("split", "fused", "head_parallel")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
TAKE_A_LAYOUT = {"ring_attention", "latent_attention", "strided_attention", "magi_attention"}
# pure functions of masks: their cases have no dtype
PLANS = {"dispatch", "cast_plan", "plan_report"}
# cases without attention: `canon.check.exchanges`
EXCHANGES = PLANS | {"group_cast", "group_reduce", "Layout"}
FIXED_LAYOUTS = {"zigzag_attention": "zigzag", "striped_attention": "striped"}
REPLICATED = {"decode_attention"}  # all ranks hold the queries, and return the same bits
RINGS = "ring_attention", "zigzag_attention", "striped_attention", "latent_attention"
ATTEND = "attention", *RINGS, "strided_attention", "magi_attention"
DISTRIBUTED = {*ATTEND[1:], "prepare"} | REPLICATED | EXCHANGES
STRIDED = {  # variant: mask, layout, options
    "": ("documents", "contiguous", {}),
    "split_last": ("documents", "zigzag", {"head_stride": 2, "backward_last_stride": 1}),
    "ring_backward": ("causal", "striped", {"backward_schedule": "ring"}),
    "split_first": (
        "window",
        "zigzag",
        {"head_stride": 2, "forward_first_stride": 1, "backward_first_stride": 1},
    ),
    "one_by_one": ("full", "striped", {}),
    "sink": ("documents", "zigzag", {"sink": True, "head_stride": 2}),
    "branches": ("tree", "zigzag", {"head_stride": 2}),
    "softcap": ("documents", "zigzag", {"softcap": 2.0, "head_stride": 2}),
    "of_each": ("sequences", "zigzag", {"head_stride": 1}),
}
MAGI = {
    "": ("documents", "planned", {}),
    "one_step": ("causal", "planned", {"own_keys_first": False}),
    "two_casts": ("window", "planned", {"casts": 2}),
    "kept": ("block_causal", "planned", {"casts": 2, "keep_kv": True}),
    "three_casts": ("full", "zigzag", {"casts": 3}),
    "two_parts": ("cancelling", "striped", {"casts": 2, "used": "forward"}),
    "sink": ("documents", "planned", {"sink": True, "casts": 2}),
    "branches": ("tree", "planned", {"casts": 2}),
    "softcap": ("window", "planned", {"softcap": 1.0, "sink": True, "casts": 2}),
    "of_each": ("sequences", "planned", {"casts": 2}),
}
LATENT = (  # mask, layout, method
    ("documents", "zigzag", "auto"), ("causal", "zigzag", "auto"), ("window", "striped", "auto"),
    ("full", "contiguous", "auto"), ("sequences", "contiguous", "head_parallel"),
)  # fmt: skip
PREPARED = {  # function: layout
    "ring_attention": "zigzag", "striped_attention": "striped", "latent_attention": "zigzag",
    "strided_attention": "contiguous", "magi_attention": "planned",
}  # fmt: skip
CASTS = (  # variant, mask, layout
    ("one_cast", "documents", "planned"),
    ("two_casts", "documents", "planned"),
    ("one_cast", "documents", "striped"),
    ("two_casts", "documents", "striped"),
    ("two_casts", "window", "zigzag"),
)
PLANTED = (  # function, mask, layout, options, planted
    ("attention", "causal", None, {}, "inf in dout"),
    ("attention", "documents", None, {"variant": "sink", "sink": True}, "nan in k"),
    ("attention", "sequences", None, {}, "inf in v"),
    ("attention_backward", "window", None, {"method": "fused"}, "inf in q"),
    ("merge", "block_causal", None, {}, "nan in v"),
    ("ring_attention", "documents", "contiguous", {}, "nan in k"),
    ("zigzag_attention", "block_causal", "zigzag", {"variant": "sink", "sink": True}, "nan in v"),
    ("strided_attention", "window", "contiguous", {"head_stride": 2}, "nan in q"),
    ("magi_attention", "documents", "planned", {}, "nan in dout"),
    ("decode_attention", "last", "contiguous", {"used": "forward"}, "-inf in k"),
    ("attention", "few in a window", None, {"used": "forward"}, "nan in v"),
)
CAST_PLANS = {  # mask: layout, casts, own_keys_first
    "documents": ("planned", 2, True),
    "causal": ("zigzag", 1, False),
    "window": ("striped", 1, True),
    "block_causal": ("planned", 3, True),
    "full": ("contiguous", 1, True),
    "tree": ("planned", 2, True),
}
# Names without a case: both halves share them, or they compute no result (`backend`, `warm_up`,
# ...).
OPTIONAL = "sink", "softcap", "rank_invariant"  # parameters that a module may lack
VOCABULARY = {"Band", "Mask", "Layout", "backend", "warm_up"}


def interleaving(mask: Masks, ranks: int) -> dict[str, Any]:
    """Return arguments of `dispatch` with which chunks of few tokens interleave."""
    tokens = (mask[0] if isinstance(mask, tuple) else mask).queries
    return dict(
        chunk=max(1, tokens // (8 * ranks)), imbalance=1.0, cells_per_us=1, tokens_per_us=1000
    )


@dataclass(frozen=True)
class Shape:
    """Heads (h, g), widths (d, dv), batch and strides of the tensors."""

    heads: tuple[int, int]
    widths: tuple[int, int]
    batch: int = 0  # 0 means packed
    contiguous: bool = True
    scale: float | None = None
    strides: int | None = None  # seed of random strides
    latent: tuple[int, int] | None = None  # widths of a random latent and of k_rope


SHAPES = {  # by mask: (on the CPU, on GPUs)
    "documents": (Shape((4, 2), (32, 32)), Shape((8, 2), (128, 128))),
    "causal": (Shape((2, 1), (64, 32), batch=1), Shape((4, 1), (128, 64), batch=1)),
    "window": (
        Shape((2, 2), (48, 48), contiguous=False),
        Shape((4, 4), (96, 96), contiguous=False),
    ),
    "block_causal": (Shape((3, 1), (32, 32), scale=0.15), Shape((6, 1), (64, 64), scale=0.11)),
    "full": (Shape((1, 1), (64, 64), batch=2), Shape((8, 1), (64, 64), batch=2)),
}
MASKS = (*SHAPES, "tree")
SHAPES |= {  # masks of some functions only
    "last": (Shape((4, 2), (32, 32), batch=1), Shape((8, 2), (128, 128), batch=1)),
    "last full": (Shape((3, 1), (32, 32)), Shape((8, 1), (64, 64))),
    "few": (Shape((4, 2), (32, 32), batch=1), Shape((8, 2), (128, 128), batch=1)),
    "few in a window": (Shape((3, 1), (32, 16), batch=2), Shape((4, 1), (128, 64), batch=2)),
    "sequences": (Shape((2, 1), (32, 16), batch=2), Shape((4, 2), (128, 64), batch=2)),
    "last of sequences": (Shape((2, 1), (32, 32), batch=2), Shape((4, 1), (128, 128), batch=2)),
    "tree": (Shape((4, 2), (32, 16), batch=1), Shape((8, 2), (128, 128), batch=1)),
    "wide": (Shape((2, 1), (512, 512), batch=1), Shape((4, 1), (512, 512), batch=1)),
    "cancelling": (Shape((2, 1), (32, 32), batch=1), Shape((4, 2), (128, 128), batch=1)),
    "last cancelling": (Shape((2, 1), (32, 32), batch=1), Shape((4, 2), (128, 128), batch=1)),
}


@dataclass(frozen=True)
class Case:
    """One function on one input."""

    function: str
    mask: str
    dtype: str  # "" for functions without tensors
    shape: Shape
    layout: str | None = None
    method: str = "auto"
    variant: str = ""  # name of the options
    options: tuple[tuple[str, Any], ...] = ()
    # The differentiated results: both, out or lse (both are returned), "no lse" or "sum" (of out;
    # lse is not returned), "forward" (none) or "forward, no lse" (none; only out is returned).
    used: str = "both"
    planted: str = ""  # a value and a tensor, such as "nan in k"

    @property
    def name(self) -> str:
        parts = (
            self.function,
            self.layout,
            self.mask,
            self.dtype,
            self.method,
            self.variant,
            self.planted,
        )
        return "/".join(part for part in parts if part and part != "auto")

    @property
    def kind(self) -> str:
        """The kind of the mask; "sequences" if each sequence has its own."""
        return "causal" if self.mask == "cancelling" else self.mask

    @property
    def distributed(self) -> bool:
        return self.function in DISTRIBUTED

    @property
    def has_latents(self) -> bool:
        # `prepare` names the prepared function as variant
        return "latent_attention" in (self.function, self.variant)

    @property
    def returns_lse(self) -> bool:
        return self.used in {"both", "out", "lse", "forward"}

    @property
    def has_sink(self) -> bool:
        return dict(self.options).get("sink", False)

    @property
    def softcap(self) -> float | None:
        return dict(self.options).get("softcap")

    def layout_of(self, mask: Masks, ranks: int) -> Layout:
        one = mask[0] if isinstance(mask, tuple) and self.layout != "planned" else mask
        return LAYOUTS[self.layout or "contiguous"](one, ranks if self.distributed else 1)


def declined_by(backend: str | None, case: Case) -> str:
    """Return why a kernel backend does not support a case, "" if it does."""
    if backend not in ("gluon", "cuda") or not case.dtype or case.function in EXCHANGES | {"merge"}:
        return ""
    if max(case.shape.widths) > 256:
        return f"the {backend} kernels support heads up to 256 wide"
    if backend == "gluon":
        return ""
    if case.softcap is not None:
        return "the CUDA kernels have no soft-cap"
    if case.dtype not in ("bfloat16", "float16"):
        return f"the CUDA kernels do not support {case.dtype}"
    fused = case.method == "fused" and case.function != "attention_forward"
    return "the CUDA backend has no fused kernel" if fused else ""


def all_cases(dtypes: list[str], gpu: bool) -> list[Case]:
    """Return all cases. They alternate between ``dtypes``. With other dtypes, float64 has only two
    cases.
    """
    alternating = [name for name in dtypes if name != "float64"] or ["float64"]
    cases: list[Case] = []

    def add(
        function: str,
        mask: str,
        layout: str | None = None,
        method="auto",
        dtype="",
        variant="",
        used="both",
        planted="",
        **options,
    ) -> None:
        number = (
            list(SHAPES).index(mask)
            + (list(LAYOUTS).index(layout) if layout else 0)
            + METHODS.count(method)
        )
        turns = [
            name for name in alternating if "cancelling" in mask and DTYPES[name].itemsize == 2
        ] or alternating
        dtype = "" if function in PLANS else dtype or turns[number % len(turns)]
        shape = SHAPES[mask][gpu]
        # a key head that the value does not reach
        if planted and shape.heads[1] == 1 and shape.batch < 2:
            shape = replace(shape, heads=(2, 2))
        cases.append(
            Case(
                function,
                mask,
                dtype,
                shape,
                layout,
                method,
                variant,
                tuple(options.items()),
                used,
                planted,
            )
        )

    _add_local(add)
    _add_rings(add)
    for mask, layout, method in LATENT:
        add("latent_attention", mask, layout, method)
    add("latent_attention", "window", "zigzag", variant="softcap", softcap=1.5)
    add("latent_attention", "documents", "zigzag", variant="sink", sink=True)
    _add_decode(add)
    for function, layout in PREPARED.items():
        add("prepare", "documents", layout, variant=function)
    for function, variants in (("strided_attention", STRIDED), ("magi_attention", MAGI)):
        for variant, (mask, layout, options) in variants.items():
            add(function, mask, layout, variant=variant, **options)
    _add_exchanges(add)
    for function, mask, layout, options, planted in PLANTED:
        add(function, mask, layout, planted=planted, **options)
    if "float64" in dtypes and alternating != ["float64"]:
        add("attention", "documents", dtype="float64")
        add("ring_attention", "causal", "zigzag", dtype="float64")
    return cases


def _add_local(add: Callable[..., None]) -> None:
    for mask in MASKS:
        add("attention", mask)
    add("attention", "wide")
    add("attention", "causal", variant="plain")
    add("attention", "documents", variant="sink", sink=True)
    add("attention", "sequences", variant="sink", sink=True)
    for mask in ("documents", "block_causal"):
        add("attention_forward", mask)
        add("merge", mask)
    for mask, method in (
        ("documents", "split"),
        ("documents", "fused"),
        ("documents", "head_parallel"),
        ("window", "split"),
        ("block_causal", "fused"),
        ("sequences", "split"),
        ("tree", "head_parallel"),
    ):
        add("attention_backward", mask, method=method)
    for mask in ("documents", "few in a window"):
        add("attention", mask, variant="softcap", softcap=1.5)
    add("attention_forward", "causal", variant="softcap", softcap=20.0)
    for mask, method in (("window", "split"), ("causal", "fused"), ("documents", "head_parallel")):
        add("attention_backward", mask, method=method, variant="softcap", softcap=2.0)
    for function in ("attention", "attention_forward"):
        add(function, "sequences")
    add("attention", "few in a window")
    add("attention_forward", "few in a window", variant="part")
    add("attention_forward", "window", variant="part")
    add("attention_backward", "causal", method="split", variant="part")


def _add_rings(add: Callable[..., None]) -> None:
    for mask in MASKS:
        for layout in ("contiguous", "zigzag", "striped"):
            add("ring_attention", mask, layout)
    add("ring_attention", "documents", "zigzag", "fused")
    add("ring_attention", "documents", "contiguous", "head_parallel")
    add("ring_attention", "causal", "zigzag", variant="plain")
    for function, layout in FIXED_LAYOUTS.items():
        for mask in ("documents", "causal", "block_causal", "sequences"):
            add(function, mask, layout)
    add("ring_attention", "sequences", "contiguous", variant="sink", sink=True)
    for function, layout in (("ring_attention", "contiguous"), *FIXED_LAYOUTS.items()):
        add(function, "documents", layout, variant="sink", sink=True)
        add(function, "window", layout, variant="softcap", softcap=1.5)
    for function, layout in (
        ("ring_attention", "zigzag"),
        ("ring_attention", "striped"),
        *FIXED_LAYOUTS.items(),
    ):
        add(function, "cancelling", layout, used="forward")


def _add_decode(add: Callable[..., None]) -> None:
    for layout in ("contiguous", "zigzag"):
        add("decode_attention", "last", layout, used="forward")
    add("decode_attention", "last", "contiguous", variant="sink", used="forward", sink=True)
    add("decode_attention", "few", "contiguous", used="forward")
    add("decode_attention", "last", "zigzag", variant="softcap", used="forward", softcap=1.5)
    add("decode_attention", "last of sequences", "zigzag", used="forward")
    add("decode_attention", "last cancelling", "contiguous", used="forward")
    add("decode_attention", "last full", "contiguous", variant="plain", used="forward, no lse")


def _add_exchanges(add: Callable[..., None]) -> None:
    for function in ("group_cast", "group_reduce"):
        for variant, mask, layout in CASTS:
            add(
                function,
                mask,
                layout,
                variant=variant,
                casts=1 + (variant == "two_casts"),
                own_keys_first=True,
            )
    for mask, (layout, casts, own_keys_first) in CAST_PLANS.items():
        add("dispatch", mask)
        add("cast_plan", mask, layout, casts=casts, own_keys_first=own_keys_first)
        add("plan_report", mask, layout)
    add("dispatch", "sequences")
    for layout, mask in zip(
        LAYOUTS, ("documents", "window", "block_causal", "causal"), strict=True
    ):
        add("Layout", mask, layout)


def accepts(module: Any, case: Case) -> bool:
    """Return whether the module has the functions that a case calls, with the parameters of
    `OPTIONAL` that it passes.
    """
    if case.function == "prepare" and not hasattr(module, case.variant):
        return False
    options = dict(case.options)
    passed = [(case.function, name) for name in OPTIONAL if options.get(name)]
    passed += [("attention", "rank_invariant")] if options.get("rank_invariant") else []
    of = {function: parameters_of(module, function) for function, _ in passed}
    return all(
        name in of[f] or any(x.kind is x.VAR_KEYWORD for x in of[f].values()) for f, name in passed
    )


def parameters_of(module: Any, function: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function of the module, {} if there is none."""
    try:
        return inspect.signature(getattr(module, function)).parameters
    except (AttributeError, TypeError, ValueError):
        return {}


def has_option(module: Any, function: str) -> bool:
    """Return whether the module has the function, with a parameter ``rank_invariant``."""
    return "rank_invariant" in parameters_of(module, function)


@dataclass(frozen=True)
class Coverage:
    """The functions of a module, sorted by whether cases test them."""

    tested: list[str]
    imported: list[str]  # from canon, so they are not tested
    absent: list[str]
    untried: list[str]  # public functions of the module or of the reference without a case


def covered(module: Any, reference: Any) -> Coverage:
    """Return which functions of ``module`` have cases."""
    tried = {case.function for case in all_cases(["float32"], False)} & set(vars(reference))

    def public(half: Any) -> set[str]:
        names = getattr(half, "__all__", None) or [
            name for name in vars(half) if not name.startswith("_")
        ]
        return {name for name in names if callable(getattr(half, name, None))} - VOCABULARY

    in_canon = module.__name__.startswith("canon.")
    package = module.__name__ if in_canon else module.__name__.partition(".")[0]
    home = {name: str(getattr(getattr(module, name), "__module__", "")) for name in public(module)}
    own = {name for name, of in home.items() if f"{of}.".startswith(f"{package}.")}
    known = {name for name in tried if callable(getattr(module, name, None))}
    halves = () if in_canon else (reference, sys.modules.get("canon.fast"))
    imported = {
        name
        for name in known
        if any(getattr(module, name) is getattr(half, name, None) for half in halves)
    }
    untried = (own | public(reference)) - tried
    return Coverage(*map(sorted, (known - imported, imported, tried - known, untried)))
