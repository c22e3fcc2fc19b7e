"""The cases of `canon check`: which functions, masks, layouts, dtypes and shapes are tried, and on which inputs.

    function           masks                                    layouts                       methods
    attention          all five                                 -                             auto
    attention_forward  documents, block_causal                  -                             -
    attention_backward documents, window                        -                             split, fused, head_parallel
    merge              documents, block_causal                  -                             -
    ring_attention     all five                                 contiguous, zigzag, striped   auto; two cases of the others
    zigzag, striped    documents, causal, block_causal          their own                     auto
    strided_attention  all five                                 contiguous, zigzag, striped   auto, strides of all kinds

Each mask comes with a shape and a form of its own: heads in groups, dv != d, packed and batched, and tensors
that are not contiguous. The dtypes take turns, so that each meets every function and, over the layouts, every mask.
What no query sees, and queries that see nothing, hold NaN. Functions that have no case here are named by `covered`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from canon.reference import Layout, Mask
from canon.testing.documents import Documents, projected
from canon.testing.judge import Attended, oracle, orders

LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
METHODS = ("split", "fused", "head_parallel")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DISTRIBUTED = {"ring_attention", "zigzag_attention", "striped_attention", "strided_attention"}
TAKE_A_LAYOUT = {"ring_attention", "strided_attention"}
STRIDED = (  # mask, layout, options of strided_attention
    ("documents", "contiguous", {}),
    ("documents", "zigzag", {"head_stride": 2, "backward_last_stride": 1}),
    ("causal", "striped", {"backward_schedule": "ring"}),
    ("window", "zigzag", {"head_stride": 2, "forward_first_stride": 1, "backward_first_stride": 1}),
    ("block_causal", "contiguous", {"pack_first": False}),
    ("full", "striped", {}),
)
VOCABULARY = {"Band", "Mask", "Layout", "backend", "suggest_strides"}  # nothing here can disagree with an oracle


@dataclass(frozen=True)
class Shape:
    """Heads and widths, packed or batched, contiguous or not."""

    heads: tuple[int, int]
    widths: tuple[int, int]
    batch: int = 0  # 0 is packed
    contiguous: bool = True
    scale: float | None = None


SHAPES = {  # by mask; the second is for GPUs
    "documents": (Shape((4, 2), (32, 32)), Shape((8, 2), (128, 128))),
    "causal": (Shape((2, 1), (64, 32), batch=1), Shape((4, 1), (128, 64), batch=1)),
    "window": (Shape((2, 2), (48, 48), contiguous=False), Shape((4, 4), (96, 96), contiguous=False)),
    "block_causal": (Shape((3, 1), (32, 32), scale=0.15), Shape((6, 1), (64, 64), scale=0.11)),
    "full": (Shape((2, 1), (64, 64), batch=2), Shape((8, 1), (64, 64), batch=2)),
}
MASKS = tuple(SHAPES)


@dataclass(frozen=True)
class Case:
    """One function on one input."""

    function: str
    mask: str
    dtype: str
    shape: Shape
    layout: str | None = None
    method: str = "auto"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        chosen = [f"{name}={value}" for name, value in self.options]
        parts = (self.function, self.layout, self.mask, self.dtype, self.method, ",".join(chosen))
        return "/".join(part for part in parts if part and part != "auto")

    @property
    def distributed(self) -> bool:
        return self.function in DISTRIBUTED

    def layout_of(self, tokens: int, ranks: int) -> Layout:
        return LAYOUTS[self.layout or "contiguous"](tokens, ranks if self.distributed else 1)


def all_cases(dtypes: list[str], gpu: bool) -> list[Case]:
    """Every case, the dtypes taking turns. float64 is tried on two functions only where others are asked for too."""
    turns = [name for name in dtypes if name != "float64"] or ["float64"]
    cases: list[Case] = []

    def add(function: str, mask: str, layout: str | None = None, method="auto", dtype="", **options: Any) -> None:
        turn = MASKS.index(mask) + (list(LAYOUTS).index(layout) if layout else 0) + METHODS.count(method)
        dtype = dtype or turns[turn % len(turns)]
        cases.append(Case(function, mask, dtype, SHAPES[mask][gpu], layout, method, tuple(options.items())))

    for mask in MASKS:
        add("attention", mask)
    for mask in ("documents", "block_causal"):
        add("attention_forward", mask)
        add("merge", mask)
    for mask, method in (("documents", "split"), ("documents", "fused"), ("documents", "head_parallel"),
                         ("window", "split"), ("block_causal", "fused")):  # fmt: skip
        add("attention_backward", mask, method=method)
    for mask in MASKS:
        for layout in LAYOUTS:
            add("ring_attention", mask, layout)
    add("ring_attention", "documents", "zigzag", "fused")
    add("ring_attention", "documents", "contiguous", "head_parallel")
    for function, layout in (("zigzag_attention", "zigzag"), ("striped_attention", "striped")):
        for mask in ("documents", "causal", "block_causal"):
            add(function, mask, layout)
    for mask, layout, options in STRIDED:
        add("strided_attention", mask, layout, **options)
    if "float64" in dtypes and turns != ["float64"]:
        add("attention", "documents", dtype="float64")
        add("ring_attention", "causal", "zigzag", dtype="float64")
    return cases


def covered(module: Any, reference: Any) -> tuple[list[str], list[str], list[str]]:
    """(functions that are tried, those that ``module`` lacks, public ones that no case tries)."""
    tried = {case.function for case in all_cases(["float32"], False)} & set(vars(reference))

    def public(half: Any) -> set[str]:
        names = getattr(half, "__all__", None) or [name for name in vars(half) if not name.startswith("_")]
        return {name for name in names if callable(getattr(half, name, None))} - VOCABULARY

    def own(half: Any) -> set[str]:  # a module without __all__ shows what it imports, too
        named = hasattr(half, "__all__")
        return {n for n in public(half) if named or getattr(getattr(half, n), "__module__", "") == half.__name__}

    known = {name for name in tried if callable(getattr(module, name, None))}
    return sorted(known), sorted(tried - known), sorted((own(module) | public(reference)) - tried)


# ---------------------------------------------------------------------- inputs
@dataclass(frozen=True)
class Inputs:
    """A whole sequence, the same on every rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    mask: Mask
    scale: float | None


def inputs(case: Case, documents: Documents, device: str) -> Inputs:
    """What ``case`` runs on; every layout, and every function, of one mask and dtype gets the same."""
    return _inputs(case.mask, case.dtype, case.shape, documents, device)


@lru_cache(maxsize=12)
def _inputs(mask_name: str, dtype_name: str, shape: Shape, documents: Documents, device: str) -> Inputs:
    dtype, tokens = DTYPES[dtype_name], documents.tokens
    rows = [
        projected(documents, Layout.zigzag(tokens, 3), shape.heads, shape.widths, row)
        for row in range(shape.batch or 1)
    ]
    q, k, v = (torch.stack(x) for x in zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(2309)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator)
    if dtype.itemsize == 2:
        lean = _lean(documents)[:, None, None]
        v, dout = v + lean, dout + lean
    dlse = 4 * torch.randn(q.shape[0], q.shape[2], tokens, generator=generator)
    mask = _mask(mask_name, documents)
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    for x, unseen in ((q, _unseen(mask, 0)), (dout, _unseen(mask, 0)), (k, _unseen(mask, 1)), (v, _unseen(mask, 1))):
        x[:, unseen] = torch.nan
    dlse = dlse.double() if dtype == torch.float64 else dlse
    tensors = [x if shape.batch else x[0] for x in (q, k, v, dout, dlse)]
    return Inputs(*(x.to(device) for x in tensors), mask, shape.scale)


def _mask(name: str, documents: Documents) -> Mask:
    cu_seqlens, tokens = documents.cu_seqlens, documents.tokens
    if name == "block_causal":  # each document sees itself and those before it, but for a little padding
        blocks = torch.repeat_interleave(torch.arange(len(documents.lengths)), torch.tensor(documents.lengths))
        place = torch.arange(tokens) / max(1, tokens)
        return Mask.block_causal(blocks, q_valid=(place < 0.6) | (place > 0.7), k_valid=(place < 0.65) | (place > 0.8))
    return {
        "documents": lambda: Mask.documents(cu_seqlens),
        "causal": lambda: Mask.causal(tokens),
        "window": lambda: Mask.window(tokens, tokens // 5, 16),
        "full": lambda: Mask.documents(cu_seqlens, causal=False),
    }[name]()


def _lean(documents: Documents) -> Tensor:
    """What is added to v and dout of 16 bits: 3 in the outer quarters of a token's document, -3 in the middle half.

    Sums over a document cancel, those over a part of it do not. So rounding partial sums to 16 bits shows, as it would
    not among numbers without a sign in common, while the honest error, which is one per term, stays what it is.
    """
    places = torch.cat([torch.arange(n) / max(1, n) for n in documents.lengths])
    return torch.where((places < 0.25) | (places >= 0.75), 3.0, -3.0)


def _unseen(mask: Mask, axis: int) -> Tensor:
    """Queries (0) that see no key, or keys (1) that no query sees."""
    unseen = torch.ones(mask.keys if axis else mask.queries, dtype=torch.bool)
    for band in mask.bands:  # every row and column of a band is seen
        unseen[slice(band.k_start, band.k_stop) if axis else slice(band.q_start, band.q_stop)] = False
    return unseen


@lru_cache(maxsize=12)
def _expected(mask_name: str, dtype_name: str, shape: Shape, documents: Documents, device: str):
    x = _inputs(mask_name, dtype_name, shape, documents, device)
    arguments = (x.q, x.k, x.v, x.dout, x.mask, x.scale, x.dlse)
    return oracle(*arguments), orders(*arguments)


def expected(case: Case, documents: Documents, device: str) -> tuple[Attended, list[Attended]]:
    """The oracle's answer, and honest ones in the dtype of the case."""
    return _expected(case.mask, case.dtype, case.shape, documents, device)


# ---------------------------------------------------------------------- running
def run(module: Any, case: Case, x: Inputs, layout: Layout, rank: int) -> Attended:
    """What ``module`` gives for this rank's part of ``x``. Local functions get the whole."""
    q, k, v, dout = (_own(t, layout, rank, -3, case.shape) for t in (x.q, x.k, x.v, x.dout))
    dlse = layout.shard(x.dlse, rank, x.dlse.dim() - 1)
    runner: Callable = _RUNNERS.get(case.function, _whole)
    return runner(module, case, q, k, v, dout, dlse, x, layout)


def _own(x: Tensor, layout: Layout, rank: int, dim: int, shape: Shape) -> Tensor:
    """This rank's tokens, in its own memory; heads outermost and rows with a gap where the case asks for strides."""
    mine = layout.shard(x, rank, x.dim() + dim)
    if shape.contiguous:
        return mine
    apart = mine.new_empty(*mine.transpose(-3, -2).shape[:-1], mine.shape[-1] + 16)[..., : mine.shape[-1]]
    return apart.copy_(mine.transpose(-3, -2)).transpose(-3, -2)


def _whole(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    """A differentiable function, forward and backward."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    arguments = (*leaves, x.mask, layout) if case.function in TAKE_A_LAYOUT else (*leaves, x.mask)
    options = dict(case.options, scale=x.scale, backward=case.method, return_lse=True)
    out, lse = getattr(module, case.function)(*arguments, **options)
    return Attended(out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse)))


def _forward(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    return Attended(*module.attention_forward(q, k, v, x.mask, scale=x.scale))


def _backward(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    forward = module if hasattr(module, "attention_forward") else _reference()
    out, lse = forward.attention_forward(q, k, v, x.mask, scale=x.scale)
    grads = module.attention_backward(dout, q, k, v, out, lse, x.mask, scale=x.scale, dlse=dlse, method=case.method)
    return Attended(None, None, *grads)


def _merge(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    """Two uneven parts of the keys, attended to by the reference in float32, put together by the module."""
    middle, n = x.mask.keys // 3, x.mask.keys
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    parts: list[Tensor] = []
    for keys in (range(0, middle), range(middle, n)):
        some = (t[..., keys.start : keys.stop, :, :] for t in (k, v))
        parts += _reference().attention_forward(q, *some, x.mask.crop(keys=keys), scale=x.scale, out_dtype=wide)
    return Attended(*module.merge(*parts))


def _reference() -> Any:
    from canon import reference

    return reference


_RUNNERS = {"attention_forward": _forward, "attention_backward": _backward, "merge": _merge}
