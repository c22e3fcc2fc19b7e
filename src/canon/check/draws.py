"""Draw the random cases of `canon check --random`.

Case i of seed S is a pure function of S, i, the table and the largest number of ranks. A mask or layout is a Python
expression. On GPUs a table has few shapes, because each is compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from random import Random

from canon import reference
from canon.check.cases import ATTEND, DISTRIBUTED, EXCHANGES, FIXED_LAYOUTS, PLANS, PREPARED, REPLICATED, Case, Shape
from canon.check.planted_values import TENSORS, VALUES
from canon.reference import Band, Layout, Mask
from canon.testing.judge import Masks

WEIGHTS = {
    "attention": 4, "attention_forward": 2, "attention_backward": 3, "merge": 1, "ring_attention": 4,
    "zigzag_attention": 2, "striped_attention": 2, "strided_attention": 4, "magi_attention": 4, "dispatch": 1,
    "cast_plan": 1, "plan_report": 1, "group_cast": 3, "group_reduce": 2, "Layout": 1, "decode_attention": 2, "prepare": 1,
    "latent_attention": 3,
}  # fmt: skip
RANKS = (3, 6, 5, 4, 3, 2, 2, 3)  # weights of 1 to 8 ranks
RANK_INVARIANT = {"attention", "strided_attention", "magi_attention"}
FOR_EACH_SEQUENCE = {*ATTEND, "attention_forward", "attention_backward", "decode_attention", "dispatch"}
TILED_TOKENS = 420  # tokens of a draw with rank_invariant, or more on a GPU: four tiles of 128
SOFTCAPS = 1.0, 20.0  # few, because each compiles kernels of its own
LARGE = (1e2, 1e4, 5e5)  # factors of scores: the largest come near 1e7, the limit of `canon.fast`
WORK = 48  # largest `_work` of an interpreted case: about half a second


@dataclass(frozen=True)
class Table:
    """Bounds of the draws."""

    tokens: int  # of functions on one rank
    shared_tokens: int  # of functions on several ranks
    heads: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    dtypes: tuple[str, ...]
    rows: tuple[tuple[tuple[int, int], tuple[int, int], str], ...] = ()  # the only (heads, widths, dtype), if any
    unusual: bool = True  # any strides, scales of any sign


_HEADS = ((1, 1), (1, 1), (2, 1), (2, 2), (3, 1), (4, 2))
_ROWS = (  # kernels are compiled for each row: they specialise on widths, dtype and heads per group
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
    "cuda gluon": Table(1500, 1500, (), (), (), _ROWS[:3], unusual=False),
    "cuda cuda": Table(1500, 1500, (), (), (), _ROWS[:3], unusual=False),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn(Case):
    """A random case. ``mask`` and ``layout`` are Python expressions."""

    seed: int = 0
    index: int = 0
    ranks: int = 1

    @property
    def name(self) -> str:
        return f"{self.seed}.{self.index} {self.function}"

    def layout_of(self, mask: Masks, ranks: int) -> Layout:
        return evaluated(self.layout) if self.layout else super().layout_of(mask, 1)

    @property
    def draws(self) -> dict[str, str]:
        shape, draws = self.shape, {"ranks": str(self.ranks), "mask": self.mask}
        draws |= {"layout": self.layout} if self.layout else {}
        if self.dtype:
            draws |= {"dtype": self.dtype, "heads": f"{shape.heads}", "widths": f"{shape.widths}"}
            draws |= {"batch": str(shape.batch) if shape.batch else "packed", "scale": str(shape.scale)}
            draws |= {"strides": "contiguous" if shape.strides is None else f"random, seed {shape.strides}"}
            draws |= {"latent, k_rope": f"{shape.latent} wide"} if shape.latent else {}
            draws |= {"method": self.method, "variant": self.variant or "-", "differentiated": self.used}
            draws |= {"planted": self.planted} if self.planted else {}
        return draws | {name: str(value) for name, value in self.options}


@lru_cache(maxsize=64)
def evaluated(text: str):
    """Evaluate the expression of a mask or a layout."""
    return eval(text, {"Mask": Mask, "Band": Band, "Layout": Layout, "dispatch": reference.dispatch})


def drawn(seed: int, index: int, table: str = "cpu", most_ranks: int = 8) -> Drawn:
    """Return case ``index`` of ``seed``."""
    draw = Random(f"{seed}/{index}/{table}/{most_ranks}")
    function = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    case = _drawn(draw, function, seed, index, TABLES[table], most_ranks)
    while not table.startswith("cuda") and _work(case) > WORK:
        case = _drawn(draw, function, seed, index, TABLES[table], most_ranks)
    return case


def _work(case: Drawn) -> int:
    if not case.distributed or not case.dtype or case.function in REPLICATED:
        return 0
    mask, layout = evaluated(case.mask), evaluated(case.layout)
    masks = mask if isinstance(mask, tuple) else (mask,) * (case.shape.batch or 1)
    of_rank = lambda mask, rank: len(layout.local_mask(mask, rank, range(case.ranks)).bands)
    bands = sum(of_rank(each, rank) for each in masks for rank in range(case.ranks))
    work = bands // 2 + len(masks) * case.ranks**2 + sum(each.area for each in masks) // 8192
    return work * case.shape.heads[0]


def _drawn(draw: Random, function: str, seed: int, index: int, limits: Table, most_ranks: int) -> Drawn:
    ranks = draw.choices(range(1, most_ranks + 1), RANKS[:most_ranks])[0] if function in DISTRIBUTED else 1
    invariant = function in RANK_INVARIANT and draw.random() < 0.3
    tokens = limits.shared_tokens if function in DISTRIBUTED else limits.tokens
    n = _size(draw, tokens)
    if invariant and draw.random() < 0.8:
        n = draw.randint(100, max(tokens, TILED_TOKENS))
    layout, fixed = None, None
    if function in DISTRIBUTED - REPLICATED:
        mask = _square(draw, n)
        prepared = draw.choice(list(PREPARED)) if function == "prepare" else ""
        fixed = FIXED_LAYOUTS.get(prepared or function) or ("contiguous" if function == "dispatch" else None)
        layout = (_tiled_layout if invariant else _layout)(draw, mask, evaluated(mask).queries, ranks, fixed)
    else:
        mask, prepared = _any_mask(draw, n), ""
    if function in REPLICATED:
        layout = _layout(
            draw, mask, evaluated(mask).keys, ranks, draw.choice(["contiguous", "zigzag", "uneven", "empty"])
        )
    has_latents = "latent_attention" in (function, prepared)
    dtype, shape = ("", Shape((1, 1), (1, 1))) if function in PLANS else _shape(draw, limits, ranks, has_latents)
    method, variant, used, options = _options(draw, function, shape, dtype, invariant)
    if prepared:
        method, variant, options = "auto", prepared, {}
    elif function in FOR_EACH_SEQUENCE and not (invariant and layout) and variant != "plain" and draw.random() < 0.15:
        sizes = evaluated(mask).queries, evaluated(mask).keys
        mask, shape = f"({mask}, {_ranges(draw, *sizes)})", replace(shape, batch=2)
    elif variant == "plain" and function in REPLICATED:
        mask, shape = f"Mask.full({evaluated(mask).queries}, {evaluated(mask).keys})", replace(shape, scale=None)
    elif variant == "plain":
        n += -n % ranks  # without a mask, a function that makes its layout assumes shards of equal length
        mask, shape = f"Mask.causal({n})", replace(shape, contiguous=True, scale=None)
        layout = _layout(draw, mask, n, ranks, fixed) if layout else None
    attends = dtype and function not in EXCHANGES
    planted = _planted(draw, function, used) if attends and not shape.latent else ""
    unplanted = attends and variant != "plain" and not planted
    if unplanted and _may_be_large(dtype, shape, options) and draw.random() < 1 / 10:
        shape = replace(shape, scale=draw.choice(LARGE) * shape.widths[0] ** -0.5)
    elif unplanted and function not in ("merge", "prepare") and draw.random() < 0.2:
        options["softcap"] = draw.choice(SOFTCAPS)
    return Drawn(
        function, mask, dtype, shape, layout, method, variant, tuple(options.items()), used, planted, seed, index, ranks
    )


def _planted(draw: Random, function: str, used: str) -> str:
    """Return a value and a tensor for one case in eight, else "". A tensor that the case does not use gets none."""
    without_dout = used == "sum" or used.startswith("forward") or function in {"attention_forward", "merge"}
    value, name = draw.choice(VALUES), draw.choice(TENSORS[:3] if without_dout else TENSORS)
    return "" if used == "lse" or draw.random() < 7 / 8 else f"{value} in {name}"


def _may_be_large(dtype: str, shape: Shape, options: dict) -> bool:
    """Return whether large scores leave all results finite: gradients exceed float16, and a sink's share underflows.

    Rounding of projected keys changes the largest score.
    """
    return "float16" not in (dtype, options.get("reduce_dtype")) and "sink" not in options and not shape.latent


def _size(draw: Random, most: int) -> int:
    if draw.random() < 0.06:
        return draw.choice([0, 1, 1, 2])
    return max(1, round(3 * (most / 3) ** draw.random()))


def _shape(draw: Random, limits: Table, ranks: int, has_latents: bool) -> tuple[str, Shape]:
    if limits.rows:
        heads, widths, dtype = draw.choice(limits.rows)
    else:
        heads = draw.choice([heads for heads in limits.heads if ranks <= 4 or heads[0] <= 2])
        widths, dtype = (draw.choice(limits.widths), draw.choice(limits.widths)), draw.choice(limits.dtypes)
        widths = widths if draw.random() < 0.6 else (widths[0], widths[0])
    batch = draw.choice([0, 1, 1, 2] if ranks <= 4 and heads[0] <= 2 else [0, 1])
    scale = draw.choice([None, None, None, 0.5, 2.0] + [-1.0, -0.3, 0.0, 4.0] * limits.unusual)
    scale = None if scale is None else scale * widths[0] ** -0.5
    strides = draw.choice([None, draw.getrandbits(32)]) if limits.unusual else None
    shape = Shape(heads, widths, batch, draw.random() < 0.6, scale, strides)
    if has_latents:  # a head of K for each query head, wider than k_rope
        d = max(2, widths[0])
        latent = (draw.choice(limits.widths), draw.randint(1, d - 1)) if limits.unusual else (64, max(8, d // 32 * 8))
        shape = replace(shape, heads=(heads[0], heads[0]), widths=(d, widths[1]), latent=latent)
    return dtype, shape


def _options(draw: Random, function: str, shape: Shape, dtype: str, invariant: bool) -> tuple[str, str, str, dict]:
    options: dict = {}
    if function in EXCHANGES:
        if function in {"cast_plan", "group_cast", "group_reduce"}:
            options["stages"] = draw.choice([0, 1, 1, 2, 3])
        return "auto", "", "both", options
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
        stages = draw.choice([0, None] if invariant else [0, 1, 1, 2, 3, 5])
        options |= {"stages": stages, "keep_kv": draw.random() < 0.3}
    if function == "strided_attention":
        options |= _strides(draw, shape.heads[1], invariant)
    if invariant:
        return draw.choice(["auto", "split", "head_parallel"]), variant, used, options
    methods = ["split", "fused", "head_parallel"] if function == "attention_backward" else ["auto", "auto", "split",
                "fused", "head_parallel"]  # fmt: skip
    return draw.choice(methods), variant, used, options


def _strides(draw: Random, heads: int, invariant: bool) -> dict:
    stride = draw.choice([part for part in range(1, heads + 1) if heads % part == 0])
    options: dict = {"head_stride": stride}
    ring = draw.random() < 0.2 and not invariant
    options |= {"backward_schedule": "ring"} if ring else {}
    if stride > 1:
        parts = ["forward_first_stride"] + ["backward_first_stride", "backward_last_stride"] * (not ring)
        options |= {name: draw.randint(1, stride - 1) for name in parts if draw.random() < 0.5}
        if heads == stride and {"backward_first_stride", "backward_last_stride"} <= options.keys():
            del options["backward_last_stride"]
    return options


def _square(draw: Random, n: int, parts: bool = True) -> str:
    left, right = (draw.choice([None, -1, 0, draw.randint(0, n)]) for _ in range(2))
    kinds: dict[str, Callable[[], str]] = {
        "full": lambda: f"Mask.full({n})",
        "causal": lambda: f"Mask.causal({n})",
        "window": lambda: f"Mask.window({n}, left={left}, right={right})",
        "documents": lambda: _documents(draw, n),
        "prefix": lambda: f"Mask.prefix({n}, {draw.randint(0, n)})",
        "block_causal": lambda: f"Mask.block_causal({_blocks(draw, n)}{_validity(draw, n, 'qk')})",
        "ranges": lambda: _ranges(draw, n, n),
        "tree": lambda: _tree(draw, n),
        "concat": lambda: _concat(draw, n, lambda size: _square(draw, size, False)),
    }
    names = [*kinds, "documents", "documents"]
    return kinds[draw.choice([name for name in names if parts or name != "concat"])]()


def _any_mask(draw: Random, n: int) -> str:
    kind = draw.choice(["square", "square", "square", "causal", "ranges", "blocks", "crop", "shift", "concat"])
    keys = _size(draw, max(3, 2 * n))
    if kind == "causal":
        return f"Mask.causal({n}, {keys})"
    if kind == "ranges":
        return _ranges(draw, n, keys)
    if kind == "blocks":
        validity = _validity(draw, n, "q") + _validity(draw, keys, "k")
        return f"Mask.block_causal({_blocks(draw, n)}, {_blocks(draw, keys)}{validity})"
    if kind == "crop":
        q, k = (sorted(draw.randint(0, n) for _ in range(2)) for _ in range(2))
        return f"{_square(draw, n)}.crop(range({q[0]}, {q[1]}), range({k[0]}, {k[1]}))"
    if kind == "shift":
        return f"{_square(draw, n)}.shift({draw.randint(-n // 3, 20)}, {draw.randint(-n // 3, 20)})"
    if kind == "concat":
        return _concat(draw, n, lambda size: _ranges(draw, size, draw.randint(0, 2 * size)))
    return _square(draw, n)


def _documents(draw: Random, n: int) -> str:
    ends = [0, *sorted(draw.randint(0, n) for _ in range(draw.choice([0, 1, 2, 3, 5, 9]))), n]
    if draw.random() < 0.3:  # empty documents
        ends = sorted([*ends, draw.choice(ends), draw.choice(ends)])
    if draw.random() < 0.1:  # many short documents: query heads share a tile
        ends = [*range(0, n, draw.randint(1, 7) if n < 60 else draw.randint(3, 16)), n]
    window = ", ".join(str(draw.choice([None, draw.randint(0, max(1, n // 3))])) for _ in range(2))
    options = ("" if draw.random() < 0.7 else ", causal=False") + (
        f", window=({window})" if draw.random() < 0.4 else ""
    )
    return f"Mask.documents({ends}{options})"


def _tree(draw: Random, n: int) -> str:
    """Return `Mask.tree` with empty nodes and gaps. The last node ends the mask at n tokens."""
    starts = sorted(draw.randint(0, n) for _ in range(draw.choice([1, 2, 5, 9, 20])))
    lengths = [
        draw.choice([stop - start] * 3 + [draw.randint(0, stop - start)]) for start, stop in pairwise([*starts, n])
    ]
    parents, path = [], [-1]
    for node in range(len(starts)):
        path = path[: draw.randint(max(1, len(path) - 3), len(path))]
        parents.append(path[-1])
        path.append(node)
    return f"Mask.tree({[*parents, -1]}, {[*lengths, 0]}, {[*starts, n]})"


def _runs(draw: Random, n: int, most: int, values: Callable[[], int]) -> str:
    cuts = [0, *sorted(draw.randint(0, n) for _ in range(draw.randint(0, most))), n]
    runs = [(values(), b - a) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    return " + ".join(f"[{value}] * {length}" for value, length in runs) or "[]"


def _blocks(draw: Random, n: int) -> str:
    return _runs(draw, n, 5, lambda: draw.randint(-1, 4))


def _validity(draw: Random, n: int, sides: str) -> str:
    arguments = [f", {side}_valid={_runs(draw, n, 4, lambda: draw.randint(0, 1))}" for side in sides]
    return "".join(argument for argument in arguments if draw.random() < 0.5)


def _ranges(draw: Random, queries: int, keys: int) -> str:
    """Return `Mask.ranges` with all four types. Slices come from the rows of a grid: none overlap."""
    rows, columns, kinds = [], [], []
    cuts = sorted({0, queries, *(draw.randint(0, queries) for _ in range(draw.randint(0, 3)))})
    for start, stop in zip(cuts, cuts[1:], strict=False):
        edges = sorted({draw.randint(0, keys) for _ in range(draw.randint(1, 4))})
        for left, right in zip(edges, edges[1:], strict=False):
            if draw.random() < 0.8:
                rows.append([start, stop])
                columns.append([left, right])
                kinds.append(draw.randint(0, 3))
    return f"Mask.ranges({rows}, {columns}, {kinds}, queries={queries}, keys={keys})"


def _concat(draw: Random, n: int, part: Callable[[int], str]) -> str:
    cuts = [0, *sorted(draw.randint(0, n) for _ in range(draw.randint(1, 2))), n]
    return f"Mask.concat([{', '.join(part(b - a) for a, b in zip(cuts, cuts[1:], strict=False))}])"


def _tiled_layout(draw: Random, mask: str, n: int, ranks: int, _: str | None) -> str:
    """Return a layout whose pieces begin at multiples of 128 tokens, in the sequence and on their rank."""
    kind = draw.choice(["contiguous", "zigzag", "planned", "tiles"])
    if kind == "planned":
        return f"dispatch({mask}, {ranks}, rank_invariant=True)"
    if kind != "tiles":
        return f"Layout.{kind}({n}, {ranks}, 128)"
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start in range(0, n, 128):
        draw.choice(held).append((start, min(n, start + 128)))
    for pieces in held:
        draw.shuffle(pieces)
        pieces.sort(key=lambda piece: piece[1] - piece[0] < 128)  # a short piece is the last one
    texts = ["[" + ", ".join(f"range({start}, {stop})" for start, stop in pieces) + "]" for pieces in held]
    return f"Layout([{', '.join(texts)}], {n})"


def _layout(draw: Random, mask: str, n: int, ranks: int, fixed: str | None) -> str:
    kind = fixed or draw.choice(["contiguous", "zigzag", "striped", "planned", "uneven", "empty", "ranges", "steps"])
    if kind in {"contiguous", "zigzag", "striped"}:
        return f"Layout.{kind}({n}, {ranks})"
    if kind == "planned":
        chunk = max(1, n // draw.choice([ranks, 2 * ranks, 8 * ranks]))
        rates = "" if draw.random() < 0.3 else ", imbalance=1.0, cells_per_us=1, tokens_per_us=1000"
        return f"dispatch({mask}, {ranks}, chunk={chunk}{rates})"
    step = draw.randint(2, 5) if kind == "steps" else 1
    pieces: list[tuple[int, int]] = []
    for residue in range(min(step, n)):
        length = len(range(residue, n, step))
        count = ranks - 1 if kind == "uneven" else draw.randint(0, ranks)
        cuts = sorted({0, length, *(draw.randint(0, length) for _ in range(count))})
        edges = [residue + step * cut for cut in cuts]
        pieces += zip(edges, edges[1:], strict=False)
    held: list[list[str]] = [[] for _ in range(ranks)]
    if kind == "uneven":
        owners = list(range(ranks))
    else:
        holders = draw.sample(range(ranks), draw.randint(1, ranks)) if kind == "empty" else list(range(ranks))
        draw.shuffle(pieces)
        owners = [draw.choice(holders) for _ in pieces]
    for owner, (start, stop) in zip(owners, pieces, strict=False):
        held[owner].append(f"range({start}, {stop}" + (f", {step})" if step > 1 else ")"))
    return f"Layout([{', '.join('[' + ', '.join(ranges) + ']' for ranges in held)}], {n})"
