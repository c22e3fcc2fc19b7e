"""The cases of `canon check`: a row of `TABLE` is a case for each of its masks and layouts.

plain            no mask is passed, and no lse is returned
part             a partial result of a schedule: delta is given, and the results are float32
rank_invariant   has the bits of `attention` on one rank
columns          over a mesh ("tokens", "heads") with so many columns, or a divisor of the ranks
few              a mask with 17 queries and 5,000 keys or more
cancelling       causal over two heavy keys with opposite values: merging in 16 bits shows
nan in k         one element of a visible token of k is NaN

Dtypes alternate over masks, layouts and methods.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import torch

from canon import reference
from canon.check.documents import Documents
from canon.masks.layout import TILE
from canon.reference import Layout, Mask
from canon.route.algorithm import DECLARATIONS
from canon.testing.judge import Masks

TABLE = """\
function           | layouts                     | masks | fields and options
attention          |                             | *, wide, few in a window, sequences |
attention          |                             | causal | variant="plain", used="no lse"
attention          |                             | cancelling | used="forward"
attention          |                             | documents, sequences | variant="sink", sink=True
attention          |  | documents, few in a window | variant="softcap", softcap=1.5
attention_forward  |                             | documents, block_causal, sequences |
attention_forward  |                             | few in a window, window | variant="part"
attention_forward  |                             | causal | variant="softcap", softcap=20.0
merge              |                             | documents, block_causal |
attention_backward |                             | documents, window, sequences | method="split"
attention_backward |                             | documents, block_causal | method="fused"
attention_backward |                             | documents, tree | method="head_parallel"
attention_backward |                             | causal | method="split", variant="part"
attention_backward |  | window | method="split", variant="softcap", softcap=2.0
attention_backward |  | causal | method="fused", variant="softcap", softcap=2.0
attention_backward |  | documents | method="head_parallel", variant="softcap", softcap=2.0
ring_attention     | contiguous, zigzag, striped | * |
ring_attention     | zigzag                      | documents | method="fused"
ring_attention     | contiguous                  | documents | method="head_parallel"
ring_attention     | zigzag                      | causal | variant="plain", used="no lse"
ring_attention     | contiguous                  | sequences, documents | variant="sink", sink=True
ring_attention     | contiguous                  | window | variant="softcap", softcap=1.5
ring_attention     | zigzag, striped             | cancelling | used="forward"
zigzag_attention   |                             | documents, causal, block_causal, sequences |
zigzag_attention   |                             | documents | variant="sink", sink=True
zigzag_attention   |                             | window | variant="softcap", softcap=1.5
zigzag_attention   |                             | cancelling | used="forward"
striped_attention  |                             | documents, causal, block_causal, sequences |
striped_attention  |                             | documents | variant="sink", sink=True
striped_attention  |                             | window | variant="softcap", softcap=1.5
striped_attention  |                             | cancelling | used="forward"
latent_attention   | zigzag                      | documents, causal |
latent_attention   | striped                     | window |
latent_attention   | contiguous                  | full |
latent_attention   | contiguous                  | sequences | method="head_parallel"
latent_attention   | zigzag                      | window | variant="softcap", softcap=1.5
latent_attention   | zigzag                      | documents | variant="sink", sink=True
decode_attention   | contiguous, zigzag          | last | used="forward"
decode_attention   | contiguous                  | last | variant="sink", used="forward", sink=True
decode_attention   | contiguous                  | few, last cancelling | used="forward"
decode_attention   | zigzag | last | variant="softcap", used="forward", softcap=1.5
decode_attention   | zigzag                      | last of sequences | used="forward"
decode_attention   | contiguous | last full | variant="plain", used="forward, no lse"
prepare            | zigzag                      | documents | variant="ring_attention"
prepare            | striped                     | documents | variant="striped_attention"
prepare            | zigzag                      | documents | variant="latent_attention"
prepare            | contiguous                  | documents | variant="strided_attention"
prepare            | planned                     | documents | variant="magi_attention"
strided_attention  | contiguous                  | documents |
strided_attention  | zigzag | documents | variant="split_last", head_stride=2, \
    backward_last_stride=1
strided_attention  | striped | causal | variant="ring_backward", backward_schedule="ring"
strided_attention  | zigzag | window | variant="split_first", head_stride=2, \
    forward_first_stride=1, backward_first_stride=1
strided_attention  | striped                     | full | variant="one_by_one"
strided_attention  | zigzag | documents | variant="sink", sink=True, head_stride=2
strided_attention  | zigzag                      | tree | variant="branches", head_stride=2
strided_attention  | zigzag | documents | variant="softcap", softcap=2.0, head_stride=2
strided_attention  | zigzag                      | sequences | variant="of_each", head_stride=1
magi_attention     | planned                     | documents |
magi_attention     | planned                     | causal | variant="one_step", \
    own_keys_first=False
magi_attention     | planned                     | window | variant="two_casts", casts=2
magi_attention     | planned | block_causal | variant="kept", casts=2, keep_kv=True
magi_attention     | zigzag                      | full | variant="three_casts", casts=3
magi_attention     | striped | cancelling | variant="two_parts", casts=2, used="forward"
magi_attention     | planned                     | documents | variant="sink", sink=True, casts=2
magi_attention     | planned                     | tree | variant="branches", casts=2
magi_attention     | planned | window | variant="softcap", softcap=1.0, sink=True, casts=2
magi_attention     | planned                     | sequences | variant="of_each", casts=2
attention          |        | documents, causal | variant="rank_invariant", rank_invariant=True
strided_attention  | contiguous, zigzag | documents, causal | variant="rank_invariant", \
    rank_invariant=True
magi_attention     | planned | documents, causal | variant="rank_invariant", rank_invariant=True
ring_attention     | zigzag | documents | variant="columns", columns=2, sink=True
zigzag_attention   |                             | window | variant="columns", columns=2
strided_attention  | contiguous                  | tree | variant="columns", columns=2
magi_attention     | planned                     | documents | variant="columns", columns=2
group_cast, group_reduce | planned, striped | documents | variant="one_cast", casts=1, \
    own_keys_first=True
group_cast, group_reduce | planned, striped | documents | variant="two_casts", casts=2, \
    own_keys_first=True
group_cast, group_reduce | zigzag | window | variant="two_casts", casts=2, own_keys_first=True
dispatch           |                             | *, sequences |
cast_plan          | planned                     | documents, tree | casts=2, own_keys_first=True
cast_plan          | planned                     | block_causal | casts=3, own_keys_first=True
cast_plan          | striped                     | window | casts=1, own_keys_first=True
cast_plan          | contiguous                  | full | casts=1, own_keys_first=True
cast_plan          | zigzag                      | causal | casts=1, own_keys_first=False
attention          |                             | causal | planted="inf in dout"
attention          |  | documents | planted="nan in k", variant="sink", sink=True
attention          |                             | sequences | planted="inf in v"
attention_backward |                             | window | planted="inf in q", method="fused"
merge              |                             | block_causal | planted="nan in v"
ring_attention     | contiguous                  | documents | planted="nan in k"
zigzag_attention   |  | block_causal | planted="nan in v", variant="sink", sink=True
strided_attention  | contiguous                  | window | planted="nan in q", head_stride=2
magi_attention     | planned                     | documents | planted="nan in dout"
decode_attention   | contiguous                  | last | planted="-inf in k", used="forward"
attention          |  | few in a window | planted="nan in v", used="forward"
attention          |                             | documents | dtype="float64"
ring_attention     | zigzag                      | causal | dtype="float64"
"""
MASK_TABLE = """\
mask | from documents that end at ends, the last at n | heads, widths on the CPU | on GPUs
documents | Mask.documents(ends) | (4, 2), (32, 32) | (8, 2), (128, 128)
causal | Mask.causal(n) | (2, 1), (64, 32), batch=1 | (4, 1), (128, 64), batch=1
window | Mask.window(n - 1, n // 5, 16) | (2, 2), (48, 48), strides=(1, 1) | \
    (4, 4), (96, 96), strides=(1, 16)
block_causal | block_causal(lengths) | (3, 1), (32, 32), scale=0.15 | (6, 1), (64, 64), scale=0.11
full | Mask.documents(ends, causal=False) | (1, 1), (64, 64), batch=2 | (8, 1), (64, 64), batch=2
last | Mask.causal(LAST, n) | (4, 2), (32, 32), batch=1 | (8, 2), (128, 128), batch=1
last full | Mask.full(LAST, n) | (3, 1), (32, 32) | (8, 1), (64, 64)
few | Mask.causal(FEW, n) | (4, 2), (32, 32), batch=1 | (8, 2), (128, 128), batch=1
few in a window | Mask.window(n, n // 2, 5).crop(queries=late) | (3, 1), (32, 16), batch=2 | \
    (4, 1), (128, 64), batch=2
sequences | Mask.documents(ends), Mask.window(n, n // 3, 5) | (2, 1), (32, 16), batch=2 | \
    (4, 2), (128, 64), batch=2
last of sequences | Mask.causal(n).crop(last), Mask.window(n, n // 2, 0).crop(last) | \
    (2, 1), (32, 32), batch=2 | (4, 1), (128, 128), batch=2
tree | tree(lengths) | (4, 2), (32, 16), batch=1 | (8, 2), (128, 128), batch=1
wide | Mask.causal(n) | (2, 1), (512, 512), batch=1 | (4, 1), (512, 512), batch=1
cancelling | Mask.causal(n) | (2, 1), (32, 32), batch=1 | (4, 2), (128, 128), batch=1
last cancelling | Mask.causal(LAST, n) | (2, 1), (32, 32), batch=1 | (4, 2), (128, 128), batch=1
"""
LAST = 5  # queries of `decode_attention`
FEW = 17  # queries
# keys at least: `canon.fast` cuts them into parts, the first on 4 ranks too
MANY_KEYS = {"few": 18_000, "few in a window": 5_000}
MASKS = "documents", "causal", "window", "block_causal", "full", "tree"  # * in `TABLE`
LAYOUTS: dict[str, Callable[[Any, int], Layout]] = {  # only "planned" takes a tuple of masks
    "contiguous": lambda mask, ranks: Layout.contiguous(mask.keys, ranks),
    "zigzag": lambda mask, ranks: Layout.zigzag(mask.keys, ranks),
    "striped": lambda mask, ranks: Layout.striped(mask.keys, ranks),
    "planned": lambda mask, ranks: reference.dispatch(mask, ranks, **interleaving(mask, ranks)),
}
TILED_LAYOUTS: dict[str, Callable[[Any, int], Layout]] = {  # "striped" has no whole tiles
    "contiguous": lambda mask, ranks: Layout.contiguous(mask.queries, ranks, TILE),
    "zigzag": lambda mask, ranks: Layout.zigzag(mask.queries, ranks, TILE),
    "striped": LAYOUTS["striped"],
    "planned": lambda mask, ranks: reference.dispatch(mask, ranks, rank_invariant=True),
}
METHODS = ("split", "fused", "head_parallel")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
ATTEND = tuple(DECLARATIONS)
FIXED_LAYOUTS = {name: one.layout.__name__ for name, one in DECLARATIONS.items() if one.layout}
TAKE_A_LAYOUT = {name for name, one in DECLARATIONS.items() if not (one.is_local or one.layout)}
REPLICATED = {"decode_attention"}  # all ranks return the same bits
WHOLE = {*ATTEND, "prepare"} | REPLICATED
PLANS = {"dispatch", "cast_plan"}  # their cases have no dtype
EXCHANGES = PLANS | {"group_cast", "group_reduce"}  # `canon.check.exchanges`
DISTRIBUTED = WHOLE - {"attention"} | EXCHANGES
OPTIONAL = "sink", "softcap", "rank_invariant"  # parameters that a module may lack
# names without a case
VOCABULARY = {"Band", "Mask", "Layout", "plan_report", "backend", "warm_up"}


def interleaving(mask: Masks, ranks: int) -> dict[str, Any]:
    """Return arguments of `dispatch` that let short chunks interleave."""
    tokens = (mask[0] if isinstance(mask, tuple) else mask).queries
    return dict(
        chunk=max(1, tokens // (8 * ranks)), imbalance=1.0, cells_per_us=1, tokens_per_us=1000
    )


@dataclass(frozen=True)
class Shape:
    """Heads, widths and strides of the tensors."""

    heads: tuple[int, int]
    widths: tuple[int, int]
    batch: int = 0  # 0 means packed
    scale: float | None = None
    strides: tuple[int, int] | None = None  # seed and unit of random strides, see `inputs.placed`
    latent: tuple[int, int] | None = None  # widths of the latent and of k_rope


def _masks() -> Iterator[tuple[str, str, tuple[Shape, Shape]]]:
    for line in MASK_TABLE.splitlines()[1:]:
        name, expression, *shapes = (column.strip() for column in line.split("|"))
        on_cpu, on_gpu = (eval(f"Shape({shape})") for shape in shapes)
        yield name, expression, (on_cpu, on_gpu)


EXPRESSIONS = {name: expression for name, expression, _ in _masks()}
SHAPES = {name: shapes for name, _, shapes in _masks()}


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
    documents: Documents | None = None
    offset: float = 0.0  # of v and dout, of both signs
    number = 1  # seed of the inputs

    @property
    def name(self) -> str:
        parts = self.function, self.layout, self.mask, self.dtype, self.method, self.variant
        return "/".join(part for part in (*parts, self.planted) if part and part != "auto")

    @property
    def kind(self) -> str:
        return "causal" if self.mask == "cancelling" else self.mask

    @property
    def distributed(self) -> bool:
        return self.function in DISTRIBUTED

    @property
    def has_latents(self) -> bool:
        return self.shape.latent is not None

    @property
    def returns_lse(self) -> bool:
        return self.used in {"both", "out", "lse", "forward"}

    @property
    def has_dlse(self) -> bool:
        return self.used in {"both", "lse"}

    @property
    def has_sink(self) -> bool:
        return dict(self.options).get("sink", False)

    @property
    def softcap(self) -> float | None:
        return dict(self.options).get("softcap")

    @property
    def rank_invariant(self) -> bool:
        return dict(self.options).get("rank_invariant", False)

    @property
    def masks(self) -> Masks:
        assert self.documents is not None
        return mask_of(self.mask, self.documents)

    @property
    def of_inputs(self) -> "Case":
        """The case with only the fields on which inputs depend."""
        function = "merge" if self.function == "merge" else "attention"
        used = self.used if self.used in ("lse", "sum") else "both"
        return replace(
            self, function=function, layout=None, method="auto", variant="", options=(), used=used
        )

    def layout_of(self, ranks: int) -> Layout:
        mask = self.masks
        one = mask[0] if isinstance(mask, tuple) and self.layout != "planned" else mask
        layouts = TILED_LAYOUTS if self.rank_invariant else LAYOUTS
        return layouts[self.layout or "contiguous"](one, ranks if self.distributed else 1)


def declined_by(backend: str | None, case: Case) -> str:
    """Return why a kernel backend declines a case, or ""."""
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


def block_causal(lengths: Sequence[int]) -> Mask:
    """Return a mask in which documents see themselves and earlier ones, except padding."""
    blocks = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(blocks)) / max(1, len(blocks))
    q_valid = (position < 0.6) | (position > 0.7)
    return Mask.block_causal(blocks, q_valid=q_valid, k_valid=(position < 0.65) | (position > 0.8))


def tree(lengths: Sequence[int]) -> Mask:
    """Return a tree with a node for each document, with a gap at its end."""
    depths = [min(place, (1, 2, 2)[place % 3]) for place in range(len(lengths))]
    parents = [
        max((i for i in range(place) if depths[i] < depths[place]), default=-1)
        for place in range(len(depths))
    ]
    nodes = [n - n // 8 for n in lengths]
    return Mask.tree([*parents, -1], [*nodes, 0], [0, *accumulate(lengths)])


@lru_cache(maxsize=64)
def mask_of(name: str, documents: Documents) -> Masks:
    """Return a mask over the documents."""
    n = documents.tokens
    names = {"Mask": Mask, "block_causal": block_causal, "tree": tree, "n": n, "FEW": FEW}
    names |= {"ends": documents.cu_seqlens, "lengths": documents.lengths, "LAST": min(LAST, n)}
    names |= {"last": range(max(0, n - LAST), n), "late": range(n - 2000, n - 2000 + FEW)}
    return eval(EXPRESSIONS[name], names)


def rows() -> Iterator[tuple[str, str | None, str, dict[str, Any]]]:
    """Yield (function, layout, mask, fields and options) of each case."""
    for line in TABLE.splitlines()[1:]:
        function, layouts, masks, given = (column.strip() for column in line.split("|"))
        masks = masks.replace("*", ", ".join(MASKS))
        for each in product(function.split(", "), masks.split(", "), layouts.split(", ")):
            function, mask, layout = each
            yield function, layout or FIXED_LAYOUTS.get(function), mask, eval(f"dict({given})")


def all_cases(dtypes: list[str], gpu: bool, documents: Documents | None = None) -> list[Case]:
    """Return all cases. float64 has two cases, unless it is the only dtype."""
    alternating = [name for name in dtypes if name != "float64"] or ["float64"]
    cases = []
    for function, layout, mask, given in rows():
        number = list(SHAPES).index(mask) + METHODS.count(given.get("method"))
        number += list(LAYOUTS).index(layout) if layout else 0
        narrow = [name for name in alternating if DTYPES[name].itemsize == 2]
        turns = ("cancelling" in mask and narrow) or alternating
        dtype = given.pop("dtype", "")
        if dtype and (dtype not in dtypes or dtype in alternating):
            continue
        dtype = "" if function in PLANS else dtype or turns[number % len(turns)]
        shape = SHAPES[mask][gpu]
        # a key head that the value does not reach
        if "planted" in given and shape.heads[1] == 1 and shape.batch < 2:
            shape = replace(shape, heads=(2, 2))
        if "latent_attention" in (function, given.get("variant")):
            shape = replace(shape, latent=(shape.widths[0], shape.widths[0] // 4))
        own = documents and documents.at_least(MANY_KEYS.get(mask, 0))
        names = ("method", "variant", "used", "planted")
        fields = {name: given.pop(name) for name in names if name in given}
        cases.append(
            Case(
                function,
                mask,
                dtype,
                shape,
                layout,
                options=(*given.items(),),
                documents=own,
                offset=3.0 * (dtype in ("bfloat16", "float16")),
                **fields,
            )
        )
    return cases


def matches(name: str, only: str | None) -> bool:
    """Match a name with the glob of `--only`."""
    return fnmatch(name, f"*{only or ''}*")


def accepts(module: Any, case: Case) -> bool:
    """Return whether the module has the functions and parameters of a case."""
    if case.function == "prepare" and not hasattr(module, case.variant):
        return False
    options = dict(case.options)
    passed = [(case.function, name) for name in OPTIONAL if options.get(name)]
    passed += [("attention", "rank_invariant")] if options.get("rank_invariant") else []
    passed += [(case.function, "group")] if "columns" in options else []
    shape, in_canon = case.shape, module.__name__.startswith("canon.")
    if case.planted and shape.heads[1] == 1 and shape.batch < 2 and not in_canon:
        return False  # the value may reach all results
    return all(name in parameters_of(module, function) for function, name in passed)


def parameters_of(module: Any, function: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, {} without one."""
    try:
        return inspect.signature(getattr(module, function)).parameters
    except (AttributeError, TypeError, ValueError):
        return {}


def has_option(module: Any, function: str) -> bool:
    """Return whether rank_invariant is an option."""
    return "rank_invariant" in parameters_of(module, function)


def nothing_to_check(module: Any, names: Iterable[str]) -> ValueError:
    """Return the error for a module without these."""
    return ValueError(
        f"{module.__name__} has none of the functions {', '.join(sorted(names))}; those that it "
        "imports from canon do not count"
    )


@dataclass(frozen=True)
class Coverage:
    """The functions of a module, by whether cases test them."""

    tested: list[str]
    imported: list[str]  # from canon, so they are not tested
    absent: list[str]
    untried: list[str]  # public functions without a case


def covered(module: Any) -> Coverage:
    """Return what the cases test of a module."""
    tried = {function for function, *_ in rows()}

    def public(half: Any) -> set[str]:
        names = getattr(half, "__all__", [name for name in vars(half) if name[0] != "_"])
        return {name for name in names if callable(getattr(half, name, None))} - VOCABULARY

    in_canon = module.__name__.startswith("canon.")
    package = module.__name__ if in_canon else module.__name__.partition(".")[0]
    home = {name: getattr(getattr(module, name), "__module__", "") for name in public(module)}
    own = {name for name, of in home.items() if f"{of}.".startswith(f"{package}.")}
    known = {name for name in tried if callable(getattr(module, name, None))}
    halves = () if in_canon else (reference, sys.modules.get("canon.fast"))
    from_half = lambda name, half: getattr(module, name) is getattr(half, name, None)
    imported = {name for name in known for half in halves if from_half(name, half)}
    untried = (own | public(reference)) - tried
    return Coverage(*map(sorted, (known - imported, imported, tried - known, untried)))
