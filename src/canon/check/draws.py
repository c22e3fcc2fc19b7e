"""Draw the random cases of `canon check --random`, which depend on the seed, their number, the
table, the largest number of ranks and the limits of the module.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from random import Random

from canon import reference
from canon.check.cases import (
    ATTEND,
    DISTRIBUTED,
    EXCHANGES,
    FIXED_LAYOUTS,
    MASKS,
    PLANS,
    REPLICATED,
    WHOLE,
    Case,
    Shape,
)
from canon.check.expressions import any_mask, layout_of, ranges, size, square, tiled_layout
from canon.check.planted_values import TENSORS, VALUES
from canon.reference import Band, Layout, Mask
from canon.testing.judge import Masks

WEIGHTS = {
    "attention": 4,
    "attention_forward": 2,
    "attention_backward": 3,
    "merge": 1,
    "ring_attention": 4,
    "zigzag_attention": 2,
    "striped_attention": 2,
    "strided_attention": 4,
    "magi_attention": 4,
    "dispatch": 1,
    "cast_plan": 1,
    "group_cast": 3,
    "group_reduce": 2,
    "decode_attention": 2,
    "prepare": 1,
    "latent_attention": 3,
}
PREPARED = (
    "ring_attention",
    "striped_attention",
    "latent_attention",
    "strided_attention",
    "magi_attention",
)
FIXED = FIXED_LAYOUTS | {"dispatch": "contiguous"}
ONE_CAST = {"own_keys_first": False}
CASTS: list[dict] = [
    ONE_CAST,
    *[{"own_keys_first": True}] * 2,
    *({"casts": casts} for casts in (2, 3, 5)),
]
RANKS = (3, 6, 5, 4, 3, 2, 2, 3)  # weights of 1 to 8 ranks
RANK_INVARIANT = {"attention", "strided_attention", "magi_attention"}
OVER_MESHES = DISTRIBUTED & set(ATTEND) - {"latent_attention"}
FOR_EACH_SEQUENCE = {
    *ATTEND,
    "attention_forward",
    "attention_backward",
    "decode_attention",
    "dispatch",
}
TILED_TOKENS = 420  # with rank_invariant: four tiles of 128
SOFTCAPS = 1.0, 20.0  # each compiles kernels of its own
LARGE = (1e2, 1e4, 5e5)  # factors of scores: `canon.fast` allows 1e7
TRIES = 2000  # draws of a case; 50 of each function
WORK = 48  # of an interpreted case: about half a second


@dataclass(frozen=True)
class Table:
    """Bounds of the draws."""

    tokens: int  # of functions on one rank
    shared_tokens: int  # of functions on several ranks
    heads: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    dtypes: tuple[str, ...]
    # the only (heads, widths, dtype), if any
    rows: tuple[tuple[tuple[int, int], tuple[int, int], str], ...] = ()
    unusual: bool = True  # strides of any unit, scales of any sign


_HEADS = ((1, 1), (1, 1), (2, 1), (2, 2), (3, 1), (4, 2))
_ROWS = (  # kernels specialise on widths, dtype and heads per group
    ((4, 2), (64, 64), "bfloat16"),
    ((4, 1), (128, 128), "bfloat16"),
    ((2, 2), (128, 64), "float16"),
    ((3, 1), (40, 24), "float32"),
)
TABLES = {
    "cpu": Table(200, 150, _HEADS, (1, 3, 8, 16, 17, 24, 32, 33, 40, 48, 64, 72),
                 ("bfloat16", "bfloat16", "float16", "float32", "float32", "float64")),
    "gluon": Table(150, 100, _HEADS, (16, 24, 50, 64, 96, 128), ("bfloat16", "float16")),
    "cuda": Table(1500, 1500, (), (), (), _ROWS, unusual=False),
}  # fmt: skip
TABLES["cuda gluon"] = TABLES["cuda cuda"] = replace(TABLES["cuda"], rows=_ROWS[:3])


@dataclass(frozen=True)
class Drawn(Case):
    """A random case. ``mask`` and ``layout`` are Python expressions."""

    seed: int = 0
    index: int = 0
    ranks: int = 1

    @property
    def name(self) -> str:
        return f"{self.seed}.{self.index} {self.function}"

    @property
    def kind(self) -> str:
        several = self.mask.startswith("(")
        return "sequences" if several else re.findall(r"Mask\.(\w+)", self.mask)[0]

    @property
    def number(self) -> int:
        return 1_000_003 * self.seed + self.index

    @property
    def masks(self) -> Masks:
        return evaluated(self.mask)

    def layout_of(self, ranks: int) -> Layout:
        return evaluated(self.layout) if self.layout else super().layout_of(1)

    @property
    def draws(self) -> dict[str, str]:
        shape, hidden = vars(self.shape), {"function", "shape", "options", "seed", "index"}
        fields = {x: y for x, y in vars(self).items() if y and x not in hidden}
        of_tensors = {"scale": None, "strides": None} | shape if self.dtype else {}
        of_tensors = {x: y for x, y in of_tensors.items() if x != "latent" or y}
        fields |= of_tensors | dict(self.options)
        fields["differentiated"] = fields.pop("used")
        return {name: str(value) for name, value in fields.items()}


@lru_cache(maxsize=64)
def evaluated(text: str):
    """Evaluate a mask or a layout."""
    names = {"Mask": Mask, "Band": Band, "Layout": Layout, "dispatch": reference.dispatch}
    return eval(text, names)


@dataclass(frozen=True)
class Limits:
    """What a module can do."""

    functions: Collection[str] = tuple(WEIGHTS)
    words: frozenset[str] = frozenset()
    # returns a case that the module accepts, or None
    fit: Callable[[Drawn], Drawn | None] = lambda case: case

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset({"causal"}) if "no-mask" in self.words else self.words & set(MASKS)


def drawn(
    seed: int, index: int, table: str = "cpu", most_ranks: int = 8, limits: Limits = Limits()
) -> Drawn:
    """Return case ``index`` of ``seed``. Raises ValueError if none fits."""
    draw, function, case = Random(f"{seed}/{index}/{table}/{most_ranks}"), "", None
    for number in range(TRIES if WEIGHTS.keys() & set(limits.functions) else 0):
        if number % 50 == 0 and case is None:
            function = ""
            while function not in limits.functions:
                function = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        case = limits.fit(_drawn(draw, function, seed, index, TABLES[table], most_ranks, limits))
        if case is not None and (table.startswith("cuda") or _work(case) <= WORK):
            return case
    words = f" within --features {','.join(sorted(limits.words))}" if limits.words else ""
    raise ValueError(f"--random: no case of {', '.join(sorted(limits.functions))}{words}")


def _work(case: Drawn) -> int:
    if not case.distributed or not case.dtype or case.function in REPLICATED:
        return 0
    mask, layout = evaluated(case.mask), evaluated(case.layout)
    masks = mask if isinstance(mask, tuple) else (mask,) * (case.shape.batch or 1)
    of_rank = lambda mask, rank: len(layout.local_mask(mask, rank, range(case.ranks)).bands)
    bands = sum(of_rank(each, rank) for each in masks for rank in range(case.ranks))
    work = bands // 2 + len(masks) * case.ranks**2 + sum(each.area for each in masks) // 8192
    return work * case.shape.heads[0]


def _drawn(
    draw: Random,
    function: str,
    seed: int,
    index: int,
    table: Table,
    most_ranks: int,
    limits: Limits,
) -> Drawn:
    no_options = bool(limits.words & {"no-options", "no-mask"}) and function in WHOLE
    distributed, replicated = function in DISTRIBUTED, function in REPLICATED
    several = range(1, most_ranks + 1)
    ranks = draw.choices(several, RANKS[:most_ranks])[0] if distributed else 1
    invariant = function in RANK_INVARIANT and draw.random() < 0.3 and not no_options
    tokens = table.shared_tokens if distributed else table.tokens
    n = size(draw, tokens)
    if invariant and draw.random() < 0.8:
        n = draw.randint(100, max(tokens, TILED_TOKENS))
    layout, fixed, prepared = None, None, ""
    is_square = (distributed and not replicated) or limits.kinds
    mask = square(draw, n, only=limits.kinds) if is_square else any_mask(draw, n)
    keys = evaluated(mask).keys
    if replicated:
        fixed = draw.choice(["contiguous", "zigzag", "runs", "runs"])
        layout = layout_of(draw, mask, keys, ranks, fixed)
    elif distributed:
        prepared = draw.choice(PREPARED) if function == "prepare" else ""
        fixed = FIXED.get(prepared or function)
        layout = (tiled_layout if invariant else layout_of)(draw, mask, keys, ranks, fixed)
    dtype, shape = "", Shape((1, 1), (1, 1))
    if function not in PLANS:
        dtype, shape = _shape(draw, table, ranks, "latent_attention" in (function, prepared))
    method, variant, used, options = _options(draw, function, shape, dtype, invariant)
    if no_options:
        method, options = "auto", {}
        variant = "plain" if "no-mask" in limits.words and function in ATTEND else variant
    alone = function in FOR_EACH_SEQUENCE and not (invariant and layout) and variant != "plain"
    if prepared:
        method, variant, options = "auto", prepared, {}
    elif alone and draw.random() < 0.15:
        mask = f"({mask}, {ranges(draw, evaluated(mask).queries, keys)})"
        shape = replace(shape, batch=2)
    elif variant == "plain" and replicated:
        mask, shape = f"Mask.full({evaluated(mask).queries}, {keys})", replace(shape, scale=None)
    elif variant == "plain":
        # a function that makes its layout assumes shards of equal length
        n += -n % ranks
        mask, shape = f"Mask.causal({n})", replace(shape, scale=None)
        layout = layout_of(draw, mask, n, ranks, fixed) if layout else None
    attends = dtype and function not in EXCHANGES
    without_dout = function in {"attention_forward", "merge"} or used.startswith("forward")
    planted = ""
    if attends and not shape.latent:
        planted = _planted(draw, used, without_dout or used == "sum")
    unplanted = attends and variant != "plain" and not planted
    # gradients in float16, a sink's share and projected keys would leave their ranges
    narrow = "float16" in (dtype, options.get("reduce_dtype"))
    large = unplanted and not (narrow or "sink" in options or shape.latent)
    if large and draw.random() < 1 / 10:
        shape = replace(shape, scale=draw.choice(LARGE) * shape.widths[0] ** -0.5)
    elif unplanted and function not in ("merge", "prepare") and draw.random() < 0.2:
        options["softcap"] = draw.choice(SOFTCAPS)
    columns = gcd(ranks, shape.heads[1])
    shares_heads = columns > 1 and function in OVER_MESHES
    if (
        shares_heads
        and options.get("head_stride", 1) == 1
        and variant != "plain"
        and not no_options
        and draw.random() < 0.4
    ):
        options["columns"] = columns
    given = function, mask, dtype, shape, layout, method, variant, tuple(options.items()), used
    offset = draw.choice([0.0, 0.0, 3.0])
    return Drawn(*given, planted, None, offset, seed, index, ranks)


def _planted(draw: Random, used: str, without_dout: bool) -> str:
    value, name = draw.choice(VALUES), draw.choice(TENSORS[:3] if without_dout else TENSORS)
    return "" if used == "lse" or draw.random() < 7 / 8 else f"{value} in {name}"


def _shape(draw: Random, table: Table, ranks: int, has_latents: bool) -> tuple[str, Shape]:
    if table.rows:
        heads, widths, dtype = draw.choice(table.rows)
    else:
        heads = draw.choice([heads for heads in table.heads if ranks <= 4 or heads[0] <= 2])
        widths, dtype = [draw.choice(table.widths) for _ in range(2)], draw.choice(table.dtypes)
        widths = (widths[0], widths[draw.random() < 0.6])
    batch = draw.choice([0, 1, 1, 2] if ranks <= 4 and heads[0] <= 2 else [0, 1])
    scale = draw.choice([None, None, None, 0.5, 2.0] + [-1.0, -0.3, 0.0, 4.0] * table.unusual)
    scale = None if scale is None else scale * widths[0] ** -0.5
    strides = draw.choice([None, (draw.getrandbits(32), 1 if table.unusual else 16)])
    shape = Shape(heads, widths, batch, scale, strides)
    if has_latents:  # a head of K for each query head, wider than k_rope
        d = max(2, widths[0])
        latent = 64, max(8, d // 32 * 8)
        if table.unusual:
            latent = draw.choice(table.widths), draw.randint(1, d - 1)
        shape = replace(shape, heads=(heads[0], heads[0]), widths=(d, widths[1]), latent=latent)
    return dtype, shape


def _options(
    draw: Random, function: str, shape: Shape, dtype: str, invariant: bool
) -> tuple[str, str, str, dict]:
    options: dict = {}
    if function in EXCHANGES:
        casting = function in {"cast_plan", "group_cast", "group_reduce"}
        return "auto", "", "both", draw.choice(CASTS[:5]) if casting else {}
    if function in REPLICATED:
        used = draw.choice(["forward", "forward", "forward, no lse"])
        if used == "forward, no lse" and draw.random() < 0.5:
            return "auto", "plain", used, options
        return "auto", "", used, {"sink": True} if draw.random() < 0.3 else options
    used = draw.choice(["both", "both", "both", "out", "lse", "no lse", "sum"])
    variant = ""
    if function in {"attention_forward", "attention_backward"} and draw.random() < 0.4:
        variant = "part"
    elif function in ATTEND and not invariant and draw.random() < 0.05:
        return "auto", "plain", "no lse", {}
    options |= {"rank_invariant": True} if invariant else {}
    if function in ATTEND and draw.random() < 0.25:
        options["sink"] = True
    if function in DISTRIBUTED and not invariant and draw.random() < 0.35:
        wide = ["float64"] if dtype == "float64" else ["float32", "float64", "bfloat16", "float16"]
        options["reduce_dtype"] = draw.choice(wide)
    if function == "magi_attention":
        options |= draw.choice([ONE_CAST, {}] if invariant else CASTS)
        options["keep_kv"] = draw.random() < 0.3
    if function == "strided_attention":
        options |= _strides(draw, shape.heads[1], invariant)
    methods = (
        ["auto", "split", "head_parallel"] if invariant else ["split", "fused", "head_parallel"]
    )
    if not invariant and function != "attention_backward":
        methods = ["auto", "auto", *methods]
    return draw.choice(methods), variant, used, options


def _strides(draw: Random, heads: int, invariant: bool) -> dict:
    stride = draw.choice([part for part in range(1, heads + 1) if heads % part == 0])
    options: dict = {"head_stride": stride}
    ring = draw.random() < 0.2 and not invariant
    options |= {"backward_schedule": "ring"} if ring else {}
    if stride > 1:
        parts = ["forward_first_stride"] + ["backward_first_stride", "backward_last_stride"] * (
            not ring
        )
        options |= {name: draw.randint(1, stride - 1) for name in parts if draw.random() < 0.5}
        if heads == stride and {"backward_first_stride", "backward_last_stride"} <= options.keys():
            del options["backward_last_stride"]
    return options
