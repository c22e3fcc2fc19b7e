"""List the contenders of `canon bench kernels`: Canon and the peers.

canon BACKEND METHOD      forced; "in order": with deterministic algorithms
canon auto                no options; "repeatable": with deterministic algorithms
SDPA cudnn, SDPA flash    torch's attention, causal or full
SDPA mask                 a dense mask, small shapes
torch varlen              packed documents
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from canon.bench.measuring import Attend, Contender, Settings, listed, reason
from canon.bench.shapes import Shape
from canon.testing.deterministic import deterministic

FLASH4 = "flash-attn-4"
SDPA = {"CUDNN_ATTENTION": "cudnn", "FLASH_ATTENTION": "flash"}  # torch's kernels
LARGEST_DENSE = 1 << 32  # cells of a mask that becomes a BlockMask
LARGEST_SCORES = 1 << 28  # cells of all heads, for "SDPA mask"


def contenders(shape: Shape, settings: Settings) -> list[Contender]:
    """Return Canon and the peers for this mask."""
    device = settings.device
    found = [*_canon(shape, settings), *_torch(shape, device), *_flash4(shape, device)]
    return listed(found, settings)


def installed() -> dict[str, str]:
    """Return the version of each peer outside torch, or the reason."""
    return {FLASH4: peer_module("flash_attn.cute", FLASH4)[1]}


def _canon(shape: Shape, settings: Settings) -> Iterator[Contender]:
    from canon.fast import device

    found = [name for name, backend in device.BACKENDS.items() if backend.compiles]
    for backend in found:
        methods = ["split", "fused", "head_parallel"]
        if shape.h == shape.g:
            methods.remove("head_parallel")  # is split where every head has keys of its own
        if backend == "cuda":
            methods.remove("fused")  # it has no such kernel
        for method in methods:
            yield _forced(shape, backend, method)
        if backend == "gluon":
            yield _forced(shape, backend, "fused", in_order=True)
    for suffix, options in ("", {}), (", rank invariant", {"rank_invariant": True}):
        yield Contender("canon auto" + suffix, partial(attention, shape, "auto", **options))
    auto = partial(attention, shape, "auto")
    yield Contender("canon auto, repeatable", auto, "canon auto", around=deterministic)


def _forced(shape: Shape, backend: str, method: str, in_order: bool = False) -> Contender:
    return Contender(
        f"canon {backend} {method}{' in order' if in_order else ''}",
        partial(attention, shape, method),
        f"canon {backend}",
        declines=True,
        around=partial(forced, backend, in_order),
    )


def attention(shape: Shape, method: str, **options: bool) -> Attend:
    """Return `canon.fast.attention` with this backward method."""
    from canon import fast

    return lambda q, k, v: fast.attention(q, k, v, shape.mask, backward=method, **options)


@contextmanager
def forced(backend: str, in_order: bool = False) -> Iterator[None]:
    """Use a backend for both passes: the backward runs in this thread, too."""
    from canon import fast

    with ExitStack() as inside:
        if in_order:
            inside.enter_context(deterministic())
        inside.enter_context(fast.backend(backend))
        inside.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


def _torch(shape: Shape, device: torch.device) -> Iterator[Contender]:
    if shape.lengths:
        yield Contender("torch varlen", partial(_varlen, shape, device))
    if shape.kind in ("causal", "full"):
        for backend in SDPA:
            yield Contender(f"SDPA {SDPA[backend]}", partial(sdpa, backend, shape))
    yield Contender("FlexAttention", partial(flex, shape, device))
    if shape.b * shape.h * shape.n * shape.keys <= LARGEST_SCORES:
        yield Contender("SDPA mask", partial(_masked_sdpa, shape, device))


def sdpa(backend: str, shape: Shape) -> Attend:
    """Return one of torch's kernels, causal or full."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    given = {"is_causal": shape.kind == "causal", "enable_gqa": shape.h != shape.g}

    def attend(*tensors):
        # by its name each time: torch's context parallel replaces it
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, **given)

    return _heads_first(attend)


def _heads_first(attend: Attend) -> Attend:
    return lambda *tensors: attend(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)


def _masked_sdpa(shape: Shape, device: torch.device) -> Attend:
    seen, repeated = shape.mask.dense().to(device), shape.h // shape.g

    def attend(q, k, v):
        k, v = (x.repeat_interleave(repeated, 1) if repeated > 1 else x for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return _heads_first(attend)


def _varlen(shape: Shape, device: torch.device) -> Attend:
    from torch.nn.attention import varlen

    ends, longest = _cu_seqlens(shape, device), max(shape.lengths)
    options: dict[str, Any] = {"window_size": (-1, 0)}
    # torch 2.11 has no grouped heads here: it gets copies of key heads
    repeated = 1
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        options["enable_gqa"] = shape.h != shape.g
    else:
        repeated = shape.h // shape.g

    def attend(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(repeated, 1) if repeated > 1 else x for x in (k, v))
        out = varlen.varlen_attn(q, k, v, ends, ends, longest, longest, **options)
        return out.unflatten(0, (shape.b, shape.n))

    return attend


def _cu_seqlens(shape: Shape, device: torch.device) -> Tensor:
    ends = [0, *accumulate(shape.lengths * shape.b)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def flex(shape: Shape, device: torch.device) -> Attend:
    """Return compiled FlexAttention with the shape's mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # a function is compiled for eight shapes only
    block_mask, cells = None, shape.n * shape.keys
    if shape.mask.area < cells:
        make = torch.compile(create_block_mask) if cells > LARGEST_DENSE else create_block_mask
        seen = visible(shape, device)
        block_mask = make(seen, None, None, shape.n, shape.keys, device=device.type)
    compiled = torch.compile(flex_attention, dynamic=False)
    return _heads_first(partial(compiled, block_mask=block_mask, enable_gqa=shape.h != shape.g))


def visible(shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    """Return the mask as FlexAttention's function."""
    if shape.kind == "causal":
        return lambda b, h, i, j: i >= j
    if shape.kind == "full":
        return lambda b, h, i, j: i >= 0
    if shape.kind == "window":
        (left,) = shape.numbers
        return lambda b, h, i, j: (i >= j) & (j >= i - left)
    if shape.kind == "prefix":
        (end,) = shape.numbers
        return lambda b, h, i, j: (i >= j) | (j < end)
    if shape.kind == "tree":
        trunk, branches, tokens = shape.numbers
        lengths, ends = [tokens] * branches, [shape.n] * trunk
    else:  # packed documents
        trunk, lengths, ends = 0, shape.lengths, []
    for stop, length in zip(accumulate(lengths, initial=trunk), [0, *lengths], strict=True):
        ends += [stop] * length
    end = torch.tensor(ends, device=device)  # behind the last query that sees a key
    return lambda b, h, i, j: (i >= j) & (i < end[j])


@functools.cache
def peer_module(name: str, package: str) -> tuple[Any, str]:
    """Return the module or None, and the version of its package or the reason."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return None, f"not installed ({error})"
    except Exception as error:  # for example an OSError of a compiled library
        return None, f"cannot be imported ({reason(error)})"
    try:
        return module, version(package)
    except PackageNotFoundError:
        return module, "unknown version"


def _flash4(shape: Shape, device: torch.device) -> Iterator[Contender]:
    module, _ = peer_module("flash_attn.cute", FLASH4)
    # it has no other masks
    if module is not None and (shape.lengths or shape.kind in ("causal", "full", "window")):
        for suffix, deterministic in ("", False), (" deterministic", True):
            make = partial(_flash4_attend, module, shape, device, deterministic)
            yield Contender(FLASH4 + suffix, make, FLASH4)  # the same forward pass


def _flash4_attend(
    module: ModuleType, shape: Shape, device: torch.device, deterministic: bool
) -> Attend:
    options: dict[str, Any] = {"causal": shape.kind != "full", "deterministic": deterministic}
    if not shape.lengths:
        if shape.kind == "window":
            options |= {"causal": False, "window_size": (*shape.numbers, 0)}
        return lambda q, k, v: first(module.flash_attn_func(q, k, v, **options))
    ends, longest = _cu_seqlens(shape, device), max(shape.lengths)
    options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}

    def attend(q, k, v):
        out = first(module.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), **options))
        return out.unflatten(0, q.shape[:2])

    return attend


def first(result) -> Tensor:
    """Return out. Some versions return (out, lse)."""
    return result[0] if isinstance(result, tuple) else result
