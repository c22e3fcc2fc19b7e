"""Enumerate the kernel variants that a model can need: dtype, widths, heads and backend fix the set, whatever the masks.

`collect` launches each kernel with every combination of these properties on small tensors, while compilations are recorded.

    property of a variant           fixed by the model             chosen by a mask, a size or a layout: every value
    constants of the source         D, DV, GROUP, ACC, PRECISION   HEADS, FUSED, ORDERED: the method; INDEXED, HAS_DLSE
    tiles, stages, warps            the table of the backend       Gluon forward: `TABLE` and each of `LONG_TABLE`
    OUT_FLOAT (CUDA)                dtype                          results in float32: parts of a sum
    PACK (Gluon)                    -                              query heads of a tile: divisors of GROUP up to 16
    RANKS (`sum_ranks`)             ranks                          -
    dtypes of out, dq, dk and dv    dtype, reduce_dtype            the accumulation dtype for parts of a sum
    widths of `as_heads`            d + dv, key heads              batches of 1 to 8
    strides of q, k, v and results  multiples of 16                an axis of length 1 has stride 0: `kernel_strides`
    TMA (Triton)                    dtype, widths                  not for a shard without queries or without keys, nor for
                                                                   few queries if no query sees some of the loaded keys
    addresses                       multiples of 16 bytes          -

Every scale needs the same variants. Each soft-cap (SOFTCAP) and calls with rank_invariant=True (KEY_ORDER) need others. These
compile when first used: other strides and addresses, and several sequences of 2^31 elements each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from canon.fast import backward
from canon.fast.device import AVAILABLE, chosen_backend, computing_with, kernels_for
from canon.fast.group_collectives import as_heads
from canon.fast.kernels.gluon import config as gluon_config
from canon.fast.kernels.placed_mask import in_place
from canon.fast.kernels.triton.launch import signed
from canon.fast.kernels.triton.parts import forward_in_parts
from canon.fast.kernels.triton.rows import (
    add_rows,
    add_to_rows,
    copy_statistic,
    copy_statistics,
    copy_tokens,
    mask_statistic,
    pick_rows,
    take_rows,
    zero_rows,
)
from canon.fast.kernels.triton.sink import apply_sink, differentiate_sink
from canon.fast.kernels.triton.sum_ranks import sum_ranks
from canon.fast.local import forward_into, merge, merge_into
from canon.masks.band import Band
from canon.masks.mask import Mask
from canon.runtime.checks import DTYPES, CappedScale, Scale, accumulate_dtype, check_method, checked_softcap

TOKENS = 16  # another number needs the same variants
NEEDED = (True, True, True), (True, False, False), (False, True, True)  # gradients of q, k and v
DEFAULT = "attention", "ring_attention", "zigzag_attention", "striped_attention", "strided_attention", "magi_attention"


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

    @property
    def method(self) -> str:
        """The backward method, for the masks of `Inputs`."""
        return backward.rank_invariant_method(self.backward) if self.rank_invariant else self.backward

    @property
    def scale(self) -> Scale:
        """Any scale, with the soft-cap."""
        return 1.0 if self.softcap is None else CappedScale(1.0, self.softcap)

    @property
    def accumulate(self) -> torch.dtype:
        return accumulate_dtype(self.dtype)

    @property
    def result_dtypes(self) -> set[torch.dtype]:
        """The dtypes of whole results and of parts. With ``rank_invariant`` there are no parts."""
        return {self.dtype} if self.rank_invariant else {self.dtype, self.accumulate}

    @property
    def key_grad_dtypes(self) -> set[torch.dtype]:
        """The dtypes of dk and dv, of results, parts and messages."""
        return self.result_dtypes | (set() if self.rank_invariant else {self.reduce_dtype or self.accumulate})


def warm_up(
    dtype: torch.dtype = torch.bfloat16,
    d: int = 128,
    dv: int | None = None,
    *,
    heads: tuple[int, int] = (32, 8),
    functions: Sequence[str] = DEFAULT,
    backend: str | None = None,
    backward: str = "auto",
    ranks: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    rank_invariant: bool = False,
    softcap: float | None = None,
    return_max_logits: bool = False,
    processes: int | None = None,
    progress: bool = True,
) -> int:
    """Compile every kernel variant that a model can need into the disk cache. Return how many this call compiled.

    Later calls of ``functions`` compile nothing, whatever their masks, sizes, layouts and scales. The first call of a function
    does the same for its own model (`canon.fast.ahead.first_call`). It is no collective: the first process of a host
    compiles for all. Without a CUDA device it only prints a line. Call it after setting
    `torch.use_deterministic_algorithms` and `torch.backends.cuda.matmul.fp32_precision`.

    Args:
        dtype, d, dv: dtype of q, k and v; widths of K and V, multiples of 16. dv None is d.
        heads: numbers of query heads and key heads of one call.
        functions: the functions of `canon.fast` that the model calls.
        backend: as for `canon.fast.backend`. None is the backend that surrounds this call, or the automatic choice.
        backward: the option of the functions.
        ranks: of the group; None is the world size, or 1, 2, 4 and 8 without a process group.
        reduce_dtype: the option of the functions, besides None.
        rank_invariant: compile for calls with this option, not for those without it.
        softcap, return_max_logits: the options of the functions. Each value has kernels of its own.
        processes: compiling processes; None is one per core.
        progress: show a progress bar on the standard error stream.

    Raises:
        ValueError: an argument is not as described.
        RuntimeError: a kernel does not compile, or no kernel supports the model; the message gives the cause.
    """
    widths = d, d if dv is None else dv
    options = {"rank_invariant": rank_invariant, "softcap": softcap}
    model = _checked_model(dtype, *widths, heads, functions, backend, backward, ranks, reduce_dtype, **options)
    model = replace(model, max_logits=return_max_logits)
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1 or None, got {processes}")
    if not torch.cuda.is_available():
        print("canon.fast.warm_up: there is no CUDA device, so there is nothing to compile")
        return 0
    from canon.fast.ahead.compilation import compile_ahead  # only here: needs progress bars and processes

    device = f"cuda:{torch.cuda.current_device()}"
    outcome = compile_ahead(
        partial(collect, model, device), len(steps(model)), identities(model), processes=processes, progress=progress
    )
    if not outcome.complete:
        raise RuntimeError(
            f"warm_up compiled {outcome.compiled} of {outcome.of or 'unknown many'} kernel variants: {outcome.error}"
        )
    return outcome.compiled


def _checked_model(
    dtype, d, dv, heads, functions, backend, backward, ranks, reduce_dtype=None, rank_invariant=False, softcap=None
) -> Model:
    """Return the model. Raise ValueError if an argument of `warm_up` is not as described."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    for name, width in (("d", d), ("dv", dv)):
        if type(width) is not int or width < 16 or width % 16:
            raise ValueError(f"{name} must be a positive multiple of 16, got {width!r}: others compile when used")
    sizes = tuple(heads) if isinstance(heads, Sequence) else ()
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes) or sizes[0] % sizes[1]:
        raise ValueError(f"heads must be (query heads, key heads), the first a multiple of the second, got {heads!r}")
    functions = (functions,) if isinstance(functions, str) else tuple(functions)
    if not functions or not set(functions) <= set(FUNCTIONS):
        raise ValueError(f"functions must be some of {', '.join(FUNCTIONS)}, got {functions}")
    if "latent_attention" in functions and sizes[0] != sizes[1]:
        raise ValueError(f"latent_attention projects a key head for each query head, so heads must be {sizes[:1] * 2}")
    check_method("backward", backward)
    if backend is not None and backend not in AVAILABLE:
        raise ValueError(f"backend must be one of {', '.join(map(repr, AVAILABLE))} or None, got {backend!r}")
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise ValueError(f"ranks must be a positive number of ranks or None, got {ranks!r}")
    if reduce_dtype is not None and reduce_dtype not in DTYPES:
        raise ValueError(f"reduce_dtype must be None or one of {', '.join(map(str, DTYPES))}, got {reduce_dtype}")
    if ranks is None and dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
    return Model(
        dtype, d, dv, sizes, functions, backend or chosen_backend(), backward, (1, 2, 4, 8) if ranks is None else (ranks,),
        reduce_dtype, torch.are_deterministic_algorithms_enabled(), precision_of(dtype), rank_invariant=rank_invariant,
        softcap=checked_softcap(softcap),
    )  # fmt: skip


def precision_of(dtype: torch.dtype) -> str:
    """Return PyTorch's precision of float32 products; other dtypes do not depend on it."""
    return torch.backends.cuda.matmul.fp32_precision if dtype == torch.float32 else "none"


def collect(model: Model, device: str, progress: Callable[[int], None] = lambda done: None) -> None:
    """Launch all variants that the model's functions can need; call ``progress(done)`` after each of `steps`.

    Raises ValueError if no kernel supports the model on this device.
    """
    torch.use_deterministic_algorithms(model.deterministic)
    torch.backends.cuda.matmul.fp32_precision = model.precision
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    with computing_with(model.backend):
        for done, step in enumerate(steps(model), 1):
            step(model, device)
            progress(done)


def steps(model: Model) -> list[Callable[[Model, str], None]]:
    """Return the groups of launches that the model's functions need, each once."""
    chosen = dict.fromkeys(step for function in model.functions for step in FUNCTIONS[function])
    if set(model.functions) <= RINGS and 1 not in model.ranks:  # a result is a sum of parts, or one step has all keys
        chosen = {whole_forward if step is whole_passes else step: None for step in chosen}
    if model.rank_invariant:
        chosen = {step: None for step in chosen if step not in OF_PARTS}
    if not model.has_sink:
        chosen.pop(sinks, None)
    return list(chosen)


def identities(model: Model) -> list[tuple]:
    """Return all that decides the variants of each step, for stamps."""
    reduced = None if model.reduce_dtype in model.result_dtypes else model.reduce_dtype
    key = replace(model, functions=(), ranks=(), reduce_dtype=reduced, has_sink=True)
    places = {rank_sums: model.ranks}
    return [(key, step.__name__, ranks) for step in steps(model) for ranks in places.get(step, (0,))]


class Inputs:
    """The tensors and the mask of a small call. ``out`` also serves as dout."""

    def __init__(self, model: Model, device: str, queries: int = TOKENS, keys: int = TOKENS):
        (h, g), d, dv = model.heads, model.d, model.dv
        shapes = (queries, h, d), (keys, g, d), (keys, g, dv), (queries, h, dv)
        self.q, self.k, self.v, self.out = (torch.zeros(1, *x, dtype=model.dtype, device=device) for x in shapes)
        self.model = model
        mask = Mask([Band(0, queries, 0, keys)], queries, keys)
        self.mask = in_place(mask) if model.rank_invariant else mask
        self.indices = torch.arange(queries, device=device)

    def statistic(self) -> Tensor:
        _, t, h, _ = self.q.shape
        return torch.zeros(1, h, t, dtype=self.model.accumulate, device=self.q.device)

    def max_logits(self) -> Tensor | None:
        return self.q.new_zeros(self.q.shape[2], dtype=torch.float32) if self.model.max_logits else None


def all_inputs(model: Model, device: str) -> list[Inputs]:
    """Return usual inputs, and inputs without queries or without keys: TMA cannot describe empty tensors."""
    return [Inputs(model, device, *sizes) for sizes in ((TOKENS, TOKENS), (0, TOKENS), (TOKENS, 0))]


def whole_passes(model: Model, device: str) -> None:
    """Launch the passes of one rank: results have the dtype of q."""
    _forward(model, device, model.dtype)
    for x in all_inputs(model, device):
        lse = x.statistic()
        for dlse, method, choice, needed in product((None, lse), methods(x), dq_choices(x), NEEDED):
            with method(), choice():
                backward.gradients(x.out, x.q, x.k, x.v, x.out, lse, dlse, x.mask, model.scale, model.method, needed)


def whole_forward(model: Model, device: str) -> None:
    """Launch the forward for all keys: out has the dtype of q."""
    _forward(model, device, model.dtype)


def forward_parts(model: Model, device: str) -> None:
    """Launch the forward for some keys: out has the accumulation dtype."""
    _forward(model, device, model.accumulate)


def _forward(model: Model, device: str, dtype: torch.dtype) -> None:
    for x in all_inputs(model, device):
        if model.backend != "cuda":
            signed(x.q, -1.0)
        for choice in forward_choices(x):
            with choice():
                results = x.out.to(dtype), x.statistic()
                forward_into(x.q, x.k, x.v, x.mask, model.scale, *results, max_logits=x.max_logits())


def few_queries(model: Model, device: str) -> None:
    """Launch the kernels of parts of the keys. Keys that no query sees exclude descriptors."""
    if model.backend in (None, "triton"):
        x = Inputs(model, device)
        for mask, dtype in product((x.mask, Mask([Band(0, TOKENS, 1, TOKENS)], TOKENS, TOKENS)), model.result_dtypes):
            results = x.out.to(dtype), x.statistic()
            forward_in_parts(x.q, x.k, x.v, mask, model.scale, *results, x.max_logits())


def backward_parts(model: Model, device: str) -> None:
    """Launch the backward for some keys: gradients may have the accumulation dtype."""
    for x in all_inputs(model, device):
        lse = x.statistic()
        for dlse in (None, lse):
            backward.make_delta(x.out, x.out, lse, dlse)
        rows = backward.QueryInputs(x.out, x.q, lse, lse)
        for dtype, own, method, choice, needed in product(
            model.result_dtypes, model.key_grad_dtypes, methods(x), dq_choices(x), NEEDED
        ):
            dtypes = dtype, own, own  # of dq, and of dk and dv
            grads = (y.to(z) if wanted else None for y, z, wanted in zip((x.q, x.k, x.v), dtypes, needed, strict=True))
            with method(), choice():
                backward.begin_backward(rows, x.k, x.v, x.mask, model.scale, model.method, *grads)()


def masked_rows(model: Model, device: str) -> None:
    """Launch the copies and fills beside a mask, which the Gluon kernels need."""
    x, lse = Inputs(model, device), Inputs(model, device).statistic()
    if not packs_heads(kernels_for(x.q, x.v)):
        return
    mask_statistic(lse)
    copy_statistic(lse, lse)
    for y in (x.q, x.v):
        copy_tokens(y, y, x.indices.to(torch.int8))
        for dtype in model.result_dtypes:
            zero_rows(y.to(dtype))


def merges(model: Model, device: str) -> None:
    """Launch the merges of parts, of all tokens and of some."""
    x = Inputs(model, device)
    out, lse = x.out.to(model.accumulate), x.statistic()
    for rows in (None, x.indices):
        merge_into(out, lse, out, lse, rows)
    merge_into(out, lse, out, lse, result=x.out)
    copy_tokens(out, x.out)


def whole_merges(model: Model, device: str) -> None:
    """Launch `merge`: each out may have both dtypes."""
    x = Inputs(model, device)
    for dtype, other in product(model.result_dtypes, model.result_dtypes):
        merge(x.out.to(dtype), x.statistic(), x.out.to(other), x.statistic())


def active_rows(model: Model, device: str) -> None:
    """Launch the kernels that take active queries, add their dq, and add dk and dv to received sums."""
    x = Inputs(model, device)
    for y in (x.q, x.out):
        pick_rows(y, x.indices)
    copy_statistics(x.statistic(), x.statistic(), (x.statistic(), x.statistic()), x.indices)
    dq = x.q.to(model.accumulate)
    add_to_rows(dq, x.indices, dq)
    for y, dtype in product((x.k, x.v), model.key_grad_dtypes):
        add_to_rows(y.to(dtype), x.indices, y.to(model.accumulate))


def sinks(model: Model, device: str) -> None:
    """Launch the kernels of a sink, in both dtypes."""
    x, lse = Inputs(model, device), Inputs(model, device).statistic()
    for dtype in {model.dtype, model.accumulate}:
        sink = torch.zeros(model.heads[0], dtype=dtype, device=device)
        apply_sink(x.out, lse, sink, torch.empty_like(x.out))
        for dout_keys in (None, torch.empty_like(x.out)):
            differentiate_sink(x.out, x.out, lse, sink, dout_keys, torch.empty_like(lse))


def rank_sums(model: Model, device: str) -> None:
    """Launch the sums over ranks of `strided_attention`."""
    x = Inputs(model, device)
    for ranks, dtype in product(model.ranks, model.key_grad_dtypes):
        for total in (x.k, x.v):
            sum_ranks(torch.stack([total.to(dtype)] * ranks, 1), total)


def cast_rows(model: Model, device: str) -> None:
    """Launch the kernels of group casts and group reduces."""
    x = Inputs(model, device)
    take_rows(x.k, x.v, x.indices, torch.cat([x.k, x.v], -1))
    for batch, dtype in product(range(1, 9), model.key_grad_dtypes):  # it can change the widths of `as_heads`
        rows = torch.empty(TOKENS, batch, model.heads[1], model.d + model.dv, dtype=dtype, device=device)
        total = as_heads(rows.to(model.accumulate))
        add_rows(total, as_heads(rows), x.indices.new_zeros(TOKENS + 1), x.indices, total)
    for batch, tokens in product(range(1, 9), (TOKENS, TOKENS + 1)):  # strides of lse depend on the tokens
        statistic = torch.zeros(batch, model.heads[0], tokens, dtype=model.accumulate, device=device)
        sent = statistic.new_empty(TOKENS, batch, model.heads[0], 2).transpose(0, 1)
        take_rows(*[statistic.transpose(1, 2)[..., None]] * 2, x.indices, sent)


Choice = Callable[[], AbstractContextManager]


def forward_choices(x: Inputs) -> list[Choice]:
    """Return contexts that force each configuration of the forward, and each number of heads in a tile."""
    kernels = kernels_for(x.q, x.v)
    if not packs_heads(kernels):
        return [nullcontext]
    if x.model.rank_invariant:
        return [partial(_gluon_choice, kernels, pack) for pack in packs(x)]
    chosen, *pads = gluon_config.choose("forward", x.q.shape[3], x.v.shape[3])
    configs = [chosen, *gluon_config.LONG_TABLE.get(("forward", tuple(pads)), {}).values()]
    return [partial(_gluon_choice, kernels, pack, config) for config in configs for pack in packs(x)]


def dq_choices(x: Inputs) -> list[Choice]:
    """Return contexts that force each number of heads in a tile of dq."""
    kernels = kernels_for(x.q, x.v)
    return [partial(_gluon_choice, kernels, pack) for pack in packs(x)] if packs_heads(kernels) else [nullcontext]


def packs_heads(kernels: ModuleType) -> bool:
    """Return whether query heads may share a tile: in the Gluon kernels."""
    return hasattr(kernels, "packing")


def packs(x: Inputs) -> list[int]:
    """Return the numbers of query heads that may share a Gluon tile."""
    return [pack for pack in (1, 2, 4, 8, 16) if x.q.shape[2] // x.k.shape[2] % pack == 0]


@contextmanager
def _gluon_choice(kernels: ModuleType, pack: int, config: gluon_config.Config | None = None) -> Iterator[None]:
    with (
        _replaced(kernels, "packing", lambda *_: pack),
        gluon_config.forced(forward=config) if config else nullcontext(),
    ):
        yield


def methods(x: Inputs) -> list[Choice]:
    """Return contexts that force each method that "auto" may choose; another method stays."""
    if x.model.method != "auto":
        return [nullcontext]
    names = ["split"] + ["head_parallel"] * (x.q.shape[2] > x.k.shape[2])
    if packs_heads(kernels_for(x.q, x.v, "fused")) and gluon_config.padded_to("fused", x.q.shape[3], x.v.shape[3]):
        names.append("fused")
    return [partial(_replaced, backward, "automatic", lambda *_, name=name: name) for name in names]


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


OF_PARTS = {forward_parts, few_queries, merges, active_rows, rank_sums}  # never with rank_invariant
RINGS = {"ring_attention", "zigzag_attention", "striped_attention", "latent_attention"}
RING = whole_passes, forward_parts, backward_parts, masked_rows, merges, active_rows, sinks
FUNCTIONS = {
    "attention": (whole_passes, masked_rows, few_queries, sinks),
    "attention_forward": (whole_forward, forward_parts, masked_rows, few_queries),
    "attention_backward": (whole_passes, backward_parts, masked_rows),
    "merge": (whole_merges,),
    "decode_attention": (whole_forward, forward_parts, masked_rows, few_queries, merges),
    **dict.fromkeys(sorted(RINGS), RING),
    "strided_attention": (whole_passes, backward_parts, masked_rows, active_rows, sinks, rank_sums),
    "magi_attention": (*RING, cast_rows),
}
