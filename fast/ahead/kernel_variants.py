"""Enumerate the kernel variants that a model can need, whatever the masks.

`collect` launches each kernel on small tensors in every way that a mask, a size or a layout may
choose. Other strides and addresses, and several sequences of 2^31 elements each, compile when first
used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from canon.fast import backward
from canon.fast.active_queries import pick_rows
from canon.fast.device import backend_for, computing_with, rows_for
from canon.fast.group_collectives import as_heads
from canon.fast.kernels.gluon import config as gluon_config
from canon.fast.local import forward_into, merge, merge_into
from canon.fast.ring import VARIANTS
from canon.fast.tables.cells import Cells, in_place
from canon.masks.band import Band
from canon.masks.mask import Mask
from canon.route.algorithm import ALGORITHMS, NeedsGrad
from canon.route.checks import CappedScale, Scale, accumulate_dtype

TOKENS = 16  # another number needs the same variants
NEEDED = (True, True, True), (True, False, False), (False, True, True)  # gradients of q, k and v


@dataclass(frozen=True)
class Model:
    """All that decides which kernel variants can be needed. ``heads``: query heads, key heads."""

    dtype: torch.dtype
    d: int
    dv: int
    heads: tuple[int, int]
    functions: tuple[str, ...]
    backend: str | None = None
    backward: str = "auto"
    ranks: tuple[int, ...] = ()
    reduce_dtype: torch.dtype | None = None
    deterministic: bool = False  # torch.use_deterministic_algorithms
    precision: str = "none"  # torch.backends.cuda.matmul.fp32_precision
    has_sink: bool = True
    rank_invariant: bool = False
    softcap: float | None = None
    max_logits: bool = False  # of return_max_logits
    over_mesh: bool = False  # heads are exchanged

    @property
    def method(self) -> str:
        return (
            backward.rank_invariant_method(self.backward) if self.rank_invariant else self.backward
        )

    @property
    def fewest_heads(self) -> tuple[int, int]:
        """The fewest heads with the same variants."""
        group, most = self.heads[0] // self.heads[1], self.packs[-1]
        if self.depends_on_strides:
            return self.heads
        if self.rank_invariant:  # a constant of the Triton kernel of dk and dv
            return group, 1
        return min(group, 3) if most == 1 else most, 1

    @property
    def depends_on_strides(self) -> bool:
        """Whether the number of heads decides what divides a token's strides."""
        return self.d % 16 + self.dv % 16 > 0

    @property
    def packs(self) -> list[int]:
        group = self.heads[0] // self.heads[1]
        return [pack for pack in (1, 2, 4, 8, 16) if group % pack == 0]

    @property
    def scale(self) -> Scale:
        return 1.0 if self.softcap is None else CappedScale(1.0, self.softcap)

    @property
    def accumulate(self) -> torch.dtype:
        return accumulate_dtype(self.dtype)

    @property
    def result_dtypes(self) -> set[torch.dtype]:
        """The dtypes of whole results and of parts; with ``rank_invariant`` there are no parts."""
        return {self.dtype} if self.rank_invariant else {self.dtype, self.accumulate}

    @property
    def key_grad_dtypes(self) -> set[torch.dtype]:
        return self.result_dtypes | (
            set() if self.rank_invariant else {self.reduce_dtype or self.accumulate}
        )


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision of float32 products."""
    return torch.backends.cuda.matmul.fp32_precision if dtype == torch.float32 else "none"


def collect(model: Model, device: str) -> None:
    """Launch all variants that the model's functions can need. Raises ValueError if no kernel
    supports the model here.
    """
    if torch.are_deterministic_algorithms_enabled() != model.deterministic:
        torch.use_deterministic_algorithms(model.deterministic)  # imports PyTorch's compiler
    torch.backends.cuda.matmul.fp32_precision = model.precision
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    inputs = Inputs(model, device)
    with computing_with(model.backend):
        for step in steps(model):
            step(inputs)


def steps(model: Model) -> list[Callable[["Inputs"], None]]:
    """Return the groups of launches that the model's functions need, each once."""
    unused = set() if model.has_sink else {sinks}
    algorithms = [ALGORITHMS.get(("fast", x)) for x in model.functions]
    # of rings, a result is a sum of parts, or one step has all keys
    if 1 not in model.ranks and all(x and x.variants == VARIANTS for x in algorithms):
        unused |= {whole_backward}
    unused |= OF_PARTS if model.rank_invariant else {few_queries_in_order, few_queries_on_ranks}
    found = dict.fromkeys(x for name in model.functions for x in variants_of(name))
    exchanges = [exchanged_rows] if model.over_mesh else []
    return [step for step in found if step not in unused] + exchanges


def identities(model: Model) -> list[tuple]:
    """Return all that decides the variants of each step, for stamps. Ratios of heads share
    kernels.
    """
    h, g = model.heads
    reduced = None if model.reduce_dtype in model.result_dtypes else model.reduce_dtype
    shared = {"functions": (), "ranks": (), "has_sink": True, "over_mesh": False}
    varies = model.depends_on_strides or model.rank_invariant
    heads = model.fewest_heads if varies else (0, 0)
    key = replace(model, heads=heads, reduce_dtype=reduced, **shared)
    usual = [*model.packs, *(["groups"] if h > g else [])]
    of_steps = {rank_sums: model.ranks, cast_rows: [model.heads]}
    of_steps |= dict.fromkeys((few_queries_in_order, few_queries_on_ranks), model.packs[-1:])
    return [(key, step.__name__, x) for step in steps(model) for x in of_steps.get(step, usual)]


class Inputs:
    """The tensors and the mask of a small call. ``out`` also serves as dout."""

    def __init__(self, model: Model, device: str, queries: int = TOKENS, keys: int = TOKENS):
        (h, g), d, dv = model.fewest_heads, model.d, model.dv
        shapes = (queries, h, d), (keys, g, d), (keys, g, dv), (queries, h, dv)
        self.q, self.k, self.v, self.out = (
            torch.zeros(1, *x, dtype=model.dtype, device=device) for x in shapes
        )
        self.model = model
        self.mask = Mask([Band(0, queries, 0, keys)], queries, keys)
        self.cells = Cells(self.mask, in_place(self.mask) if model.rank_invariant else None)
        self.indices = torch.arange(queries, device=device)

    def statistic(self) -> Tensor:
        _, t, h, _ = self.q.shape
        return torch.zeros(1, h, t, dtype=self.model.accumulate, device=self.q.device)

    def max_logits(self) -> Tensor | None:
        return (
            self.q.new_zeros(self.q.shape[2], dtype=torch.float32)
            if self.model.max_logits
            else None
        )

    def of_all_sizes(self) -> list["Inputs"]:
        return [
            self,
            *(Inputs(self.model, self.q.device, *sizes) for sizes in ((0, TOKENS), (TOKENS, 0))),
        ]


def whole_forward(inputs: Inputs) -> None:
    """Launch the forward for all keys."""
    _forward(inputs, inputs.model.dtype)


def forward_parts(inputs: Inputs) -> None:
    """Some keys, into the accumulation dtype."""
    _forward(inputs, inputs.model.accumulate)


def _forward(inputs: Inputs, dtype: torch.dtype) -> None:
    from canon.fast.kernels.triton import launch

    for x in inputs.of_all_sizes():
        if x.model.backend != "cuda":
            launch.signed(x.q, -1.0)
        for _ in tiles_forced(x, "forward"):
            results = x.out.to(dtype), x.statistic()
            given = x.q, x.k, x.v, x.cells, x.model.scale
            forward_into(*given, *results, max_logits=x.max_logits())


def few_queries(x: Inputs) -> None:
    """Keys that no query sees exclude descriptors."""
    if "parts" in (found := backend_for(x.q, x.v, extra="parts")).extras:
        for mask, dtype in product(
            (x.mask, Mask([Band(0, TOKENS, 1, TOKENS)], TOKENS, TOKENS)), x.model.result_dtypes
        ):
            results = x.out.to(dtype), x.statistic()
            given = x.q, x.k, x.v, Cells(mask), x.model.scale
            found.forward_in_parts(*given, *results, x.max_logits())


def few_queries_in_order(x: Inputs) -> None:
    """In key order, and the forward after them."""
    for kernels, pack, y in slices_forced(x):
        few, config = kernels.few_queries_launch, kernels.forward_config(x.q, x.v, x.cells)[0]
        planned = few.few_queries_plan(y.cells, pack, config.columns, 1, y.q.device)
        with _replaced(few, "few_queries", planned):
            for _ in tiles_forced(y, "forward"):
                forward_into(y.q, y.k, y.v, y.cells, y.model.scale, y.out, y.statistic())


def slices_forced(x: Inputs) -> Iterator[tuple[ModuleType, int, Inputs]]:
    """Yield the Hopper kernels, heads of a tile, and inputs of each number of rows, for each width
    of slices.
    """
    kernels = backend_for(x.q, x.v).module
    if not packs_heads(kernels) or x.model.max_logits:
        return
    few = kernels.few_queries_launch
    pack = few.heads_of_tile(x.q, x.k)
    for width, rows in product(few.SLICES, few.P_ROWS):
        with _replaced(few, "slice_width", width):
            yield kernels, pack, Inputs(x.model, x.q.device, max(1, rows // pack), TOKENS)


def few_queries_on_ranks(x: Inputs) -> None:
    """Launch the Hopper kernels of `decode_in_order`."""
    for kernels, _, y in slices_forced(x):
        if not kernels.takes_keys_of_ranks(y.q, y.k, y.v):
            continue
        lse = y.statistic()
        counter = torch.zeros(2, dtype=torch.int32, device=y.q.device)
        scale = y.model.scale
        o, sums, qkv = y.out.float(), lse.new_zeros(2, *lse.shape, 4), (y.q, y.k, y.v)
        weights = kernels.weights_of_rank(*qkv, y.cells)
        kernels.write_first_maxima(*qkv, lse, y.cells, scale)
        kernels.write_weights(*qkv, lse, *weights, counter, y.cells, scale, 1, 0)
        kernels.add_values(*qkv, *weights, o, sums, y.cells)
        kernels.write_results(o, sums, lse, y.out, lse, counter, 1, 0)


def whole_backward(inputs: Inputs) -> None:
    """Launch the backward of one rank."""
    model = inputs.model
    for x in inputs.of_all_sizes():
        lse = x.statistic()
        for needed in backward_forced(x):
            for dlse in (None, lse):
                given = x.out, x.q, x.k, x.v, x.out, lse, dlse
                backward.gradients(*given, x.cells, model.scale, model.method, needed)


def backward_parts(inputs: Inputs) -> None:
    """Launch the backward for some keys, perhaps into the accumulation dtype."""
    model = inputs.model
    for x in inputs.of_all_sizes():
        lse = x.statistic()
        for dlse in (None, lse):
            backward.make_delta(x.out, x.out, lse, dlse)
        rows = backward.QueryInputs(x.out, x.q, lse, lse)
        for needed in backward_forced(x):
            for dtype, own in product(model.result_dtypes, model.key_grad_dtypes):
                dtypes = dtype, own, own  # of dq, and of dk and dv
                grads = (
                    y.to(z) if wanted else None
                    for y, z, wanted in zip((x.q, x.k, x.v), dtypes, needed, strict=True)
                )
                given = rows, x.k, x.v, x.cells, model.scale, model.method
                backward.backward_into(*given, *grads)


def masked_rows(x: Inputs) -> None:
    """Launch Gluon's copies and fills for masked rows."""
    if not packs_heads(backend_for(x.q, x.v).module):
        return
    from canon.fast.kernels.triton import rows

    lse = x.statistic()
    rows.mask_statistic(lse)
    rows.copy_statistic(lse, lse)
    for y in (x.q, x.v):
        rows.copy_tokens(y, y, x.indices.to(torch.int8))
        for dtype in x.model.result_dtypes:
            rows.zero_rows(y.to(dtype))


def merges(x: Inputs) -> None:
    """Launch the merges of parts."""
    out, lse = x.out.to(x.model.accumulate), x.statistic()
    for rows in (None, x.indices):
        merge_into(out, lse, out, lse, rows)
    merge_into(out, lse, out, lse, result=x.out)
    rows_for(out).copy_tokens(out, x.out)


def whole_merges(x: Inputs) -> None:
    """Launch `merge` in both dtypes."""
    for dtype, other in product(x.model.result_dtypes, x.model.result_dtypes):
        merge(x.out.to(dtype), x.statistic(), x.out.to(other), x.statistic())


def active_rows(x: Inputs) -> None:
    """Launch the kernels that take active queries."""
    for y in (x.q, x.out):
        pick_rows(y, x.indices)
    operations = rows_for(x.q)
    operations.copy_statistics(
        x.statistic(), x.statistic(), (x.statistic(), x.statistic()), x.indices
    )
    dq = x.q.to(x.model.accumulate)
    operations.add_to_rows(dq, x.indices, dq)
    for y, dtype in product((x.k, x.v), x.model.key_grad_dtypes):
        operations.add_to_rows(y.to(dtype), x.indices, y.to(x.model.accumulate))


def sinks(x: Inputs) -> None:
    """Launch the kernels of a sink."""
    lse, operations = x.statistic(), rows_for(x.q)
    for dtype in {x.model.dtype, x.model.accumulate}:
        sink = torch.zeros(x.q.shape[2], dtype=dtype, device=lse.device)
        operations.apply_sink(x.out, lse, sink, torch.empty_like(x.out))
        for dout_keys in (None, torch.empty_like(x.out)):
            operations.differentiate_sink(x.out, x.out, lse, sink, dout_keys, torch.empty_like(lse))


def rank_sums(x: Inputs) -> None:
    """Launch the sums over ranks of `strided_attention`."""
    for ranks, dtype, total in product(x.model.ranks, x.model.key_grad_dtypes, (x.k, x.v)):
        rows_for(x.q).sum_ranks(torch.stack([total.to(dtype)] * ranks, 1), total)


def cast_rows(x: Inputs) -> None:
    """Launch the kernels of group collectives."""
    (h, g), accumulate, operations = x.model.heads, x.model.accumulate, rows_for(x.q)
    operations.take_rows(x.k, x.v, x.indices, torch.cat([x.k, x.v], -1))
    # it can change the widths of `as_heads`
    for batch, dtype in product(range(1, 9), x.model.key_grad_dtypes):
        rows = x.k.new_empty(TOKENS, batch, g, x.model.d + x.model.dv, dtype=dtype)
        total = as_heads(rows.to(accumulate))
        operations.add_rows(
            total, as_heads(rows), x.indices.new_zeros(TOKENS + 1), x.indices, total
        )
    # strides of lse depend on the tokens
    for batch, tokens in product(range(1, 9), (TOKENS, TOKENS + 1)):
        statistic = x.q.new_zeros(batch, h, tokens, dtype=accumulate)
        sent = statistic.new_empty(TOKENS, batch, h, 2).transpose(0, 1)
        operations.take_rows(*[statistic.transpose(1, 2)[..., None]] * 2, x.indices, sent)


def exchanged_rows(x: Inputs) -> None:
    """Launch the copies for messages of a mesh."""
    for y in (x.q, x.k, x.v, x.out, x.statistic().transpose(1, 2)[..., None]):
        operations = rows_for(y)
        operations.copy_tokens(y, torch.empty_like(y))
        operations.copy_rows(y, torch.empty_like(y), x.indices)


def packs_heads(kernels: ModuleType) -> bool:
    """Return whether query heads may share a tile."""
    return hasattr(kernels, "packing")


def tiles_forced(x: Inputs, kernel: str) -> Iterator[None]:
    """Yield while each packing and forward configuration is forced."""
    kernels, configs = backend_for(x.q, x.v).module, [{}]
    if not packs_heads(kernels):
        yield
        return
    if kernel == "forward" and not x.model.rank_invariant:
        chosen, *pads = gluon_config.choose(kernel, x.q.shape[3], x.v.shape[3])
        long_table = gluon_config.LONG_TABLE.get((kernel, tuple(pads)), {})
        configs = [{kernel: config} for config in (chosen, *long_table.values())]
    for config, pack in product(configs, x.model.packs):
        with _replaced(kernels, "packing", pack), gluon_config.forced(**config):
            yield


def backward_forced(x: Inputs) -> Iterator[NeedsGrad]:
    """Yield the needed gradients, while each method of "auto" and tile of dq is forced."""
    names = ["split"] + ["head_parallel"] * (x.q.shape[2] > x.k.shape[2])
    if packs_heads(backend_for(x.q, x.v, "fused").module) and gluon_config.padded_to(
        "fused", x.q.shape[3], x.v.shape[3]
    ):
        names.append("fused")
    for name in names if x.model.method == "auto" else ("another method stays",):
        with _replaced(backward, "automatic", name):
            for _ in tiles_forced(x, "dq"):
                yield from NEEDED


@contextmanager
def _replaced(module: ModuleType, name: str, result: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, lambda *_: result)
    try:
        yield
    finally:
        setattr(module, name, original)


OF_PARTS = {forward_parts, few_queries, merges, active_rows, rank_sums}  # never with rank_invariant
FEW_QUERIES = few_queries, few_queries_in_order, few_queries_on_ranks
LOCAL = {  # functions that are no algorithms
    "attention_forward": ("whole_forward", "forward_parts", "masked_rows", "few_queries"),
    "attention_backward": ("whole_forward", "whole_backward", "backward_parts", "masked_rows"),
    "merge": ("whole_merges",),
    "decode_attention": (
        "whole_forward",
        "forward_parts",
        "masked_rows",
        "merges",
        *(x.__name__ for x in FEW_QUERIES),
    ),
}


def variants_of(function: str) -> list[Callable[[Inputs], None]]:
    """Return a function's groups of launches."""
    names = LOCAL[function] if function in LOCAL else ALGORITHMS["fast", function].variants
    return [globals()[name] for name in names]


def functions() -> list[str]:
    """Return the names of all functions with kernels."""
    return [*LOCAL, *(function for side, function in ALGORITHMS if side == "fast")]
