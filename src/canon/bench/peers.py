"""List the contenders of `canon bench kernels`: Canon's kernel backends and backward methods, and
the peers.

canon BACKEND METHOD             forced; "in order": under
                                 `torch.use_deterministic_algorithms(True)`
canon auto                       a call without options; and with ``rank_invariant=True``
SDPA cudnn, SDPA flash           torch's attention, causal or full
SDPA mask, eager, eager float32  dense masks, small shapes
torch varlen                     packed documents
FlexAttention                    compiled, with the BlockMask of the same mask
flash-attn-4 (deterministic)     where it is installed
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from canon.bench.shapes import Shape, asked_for, blocks, packed, tree
from canon.bench.timing import Eager, Run, eager_rounds, peak_mb, take_turns
from canon.testing.judge import Agreement, Attended, agreement

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
FLASH4 = "flash-attn-4"
LARGEST_DENSE = 1 << 32  # cells of a mask that may be written out to make a BlockMask
# the last one: a backend is not installed
DECLINED = ValueError, NotImplementedError, ModuleNotFoundError
# of "eager", which rounds scores: a score s changes its weight by s roundings, not by one
EAGER_BOUND = 8.0
LARGEST_EAGER = 1 << 28  # cells of the scores of all heads, for contenders with dense masks


@dataclass(frozen=True)
class Contender:
    """``make()`` returns a differentiable function (q, k, v) -> out; q (b, t, h, d)."""

    name: str
    make: Callable[[], Attend]
    forward: str  # contenders with equal names here share one forward pass, which is timed once
    declines: bool = False  # errors of `DECLINED` are no failure: this shape is not supported
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # both passes run inside
    bound: float = 1.0  # the largest ratio to the judge's bound

    @property
    def canon(self) -> bool:
        return self.name.startswith("canon")

    def agreeing(
        self, row: dict[str, Any], call: Callable[[], tuple], exact: Attended, honest: Attended
    ) -> tuple | None:
        """Return the results of ``call`` if the last one agrees. Otherwise write the reason into
        the row.
        """
        try:
            made = call()
        except Exception as error:  # a peer may lack a width or a mask
            declined = self.declines and isinstance(error, DECLINED)
            row["declined" if declined else "failed"] = f"{type(error).__name__}: {error}"[:300]
            return None
        row |= verdict_row(agreement(made[-1], exact, honest), self.bound)
        return None if "failed" in row else made

    def inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with self.around():
                return call(*arguments)

        return run


def verdict_row(verdict: Agreement, bound: float = 1.0) -> dict[str, Any]:
    """Return the fields of a row. ``bound``: the largest ratio to the judge's bound."""
    agrees = verdict.agrees or bool(verdict.worst and verdict.worst.ratio <= bound)
    row = {"agrees": agrees, "worst": str(verdict.worst or "")}
    return row if agrees else row | {"failed": f"disagrees: {verdict}"}


def contenders(
    shape: Shape,
    device: torch.device,
    only: str,
    *,
    others: bool = True,
    backend: str | None = None,
) -> list[Contender]:
    """Return Canon and, with ``others``, the peers for this mask.
    ``only`` and ``backend`` filter.
    """
    found = [*_canon(shape, backend)]
    if others:
        found += [*_torch(shape, device), *_dense(shape, device), *_flash4(shape, device)]
    return [contender for contender in found if asked_for(contender.name, only)]


def measured_both(
    found: Iterable[Contender],
    call: Callable[[Contender], tuple[Run, Attended]],
    exact: Attended,
    honest: Attended,
    rounds: int,
    device: torch.device,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Return a row with ``fields`` for each contender. ``call`` returns both of its passes, and
    results for the judge.
    """
    rows, runs, eager = [], [], []
    for contender in found:
        rows.append(row := {"contender": contender.name, **fields, "canon": contender.canon})
        if made := contender.agreeing(row, partial(call, contender), exact, honest):
            row |= {"peak_mb": peak_mb(made[0], device), "both_ms": []}
            runs.append((made[0], row["both_ms"]))
            eager.append(Eager.listed(row, "both", made[0]))
    take_turns(runs, rounds)
    eager_rounds(eager, rounds, device)
    return rows


def verdict_of(row: dict[str, Any]) -> str:
    """Return the column "agrees" of a row."""
    return row.get("failed") or row.get("declined") or f"{row['agrees']} ({row['worst']})"


def both_passes(attend: Attend, leaves: Sequence[Tensor], dout: Tensor) -> None:
    """Run both passes of a function."""
    torch.autograd.grad(attend(*leaves), leaves, dout)


def last_head(shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Return views of the last sequence and of the last key head with its queries: a wrong offset
    shows there.
    """
    group = shape.h // shape.g
    return [q[-1:, :, -group:], k[-1:, :, -1:], v[-1:, :, -1:], dout[-1:, :, -group:]]


def of_last_head(shape: Shape, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Attended:
    """Return the results for `last_head`."""
    dq, dk, dv, out = last_head(shape, dq, dk, dv, out)
    return Attended(out, None, dq, dk, dv)


def attended(attend: Attend, leaves: Sequence[Tensor], dout: Tensor) -> Attended:
    """Return out and the gradients of the leaves."""
    out = attend(*leaves)
    return Attended(out.detach(), None, *torch.autograd.grad(out, leaves, dout))


def installed() -> dict[str, str]:
    """Return the version of each peer outside torch, or why it is absent."""
    return {FLASH4: flash4_module()[1]}


def _canon(shape: Shape, chosen: str | None) -> Iterator[Contender]:
    from canon.fast import device

    methods = ["split", "fused", "head_parallel"]
    if shape.h == shape.g:
        methods.remove("head_parallel")  # is split where every head has keys of its own
    for backend in [chosen] if chosen else [x.name for x in device.BACKENDS.values() if x.compiles]:
        for method in methods:
            if (backend, method) == ("cuda", "fused"):
                continue  # this backend has no fused kernel
            name, make, around = (
                f"canon {backend}",
                partial(attention, shape, method),
                partial(forced, backend),
            )
            yield Contender(f"{name} {method}", make, name, declines=True, around=around)
        if backend == "gluon":
            make = partial(attention, shape, "fused")
            yield Contender(
                f"{name} fused in order",
                make,
                name,
                declines=True,
                around=partial(forced, "gluon", in_order=True),
            )
    yield Contender("canon auto", partial(attention, shape, "auto"), "canon auto")
    name = "canon auto, rank invariant"
    yield Contender(name, partial(attention, shape, "auto", rank_invariant=True), name)


def attention(shape: Shape, method: str, **options: bool) -> Attend:
    """Return `canon.fast.attention` with this backward method."""
    from canon import fast

    return lambda q, k, v: fast.attention(q, k, v, shape.mask, backward=method, **options)


@contextmanager
def forced(backend: str, in_order: bool = False) -> Iterator[None]:
    """Use a backend for both passes: the backward runs in this thread, too."""
    from canon import fast

    with (
        deterministic() if in_order else nullcontext(),
        fast.backend(backend),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms, without filling new memory with NaN."""
    before, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def _torch(shape: Shape, device: torch.device) -> Iterator[Contender]:
    if packed(shape.n, shape.mask_name):
        yield Contender("torch varlen", partial(_varlen, shape, device), "torch varlen")
    if shape.mask_name.partition(":")[0] in ("causal", "full"):
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            name = f"SDPA {backend.split('_')[0].lower()}"
            yield Contender(name, partial(_sdpa_by, backend, shape), name)
    yield Contender("FlexAttention", partial(flex, shape, device), "FlexAttention")


def _sdpa_by(backend: str, shape: Shape) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options: dict[str, Any] = {
        "is_causal": shape.mask_name == "causal",
        "enable_gqa": shape.h != shape.g,
    }

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(
                1, 2
            )

    return attend


def _dense(shape: Shape, device: torch.device) -> Iterator[Contender]:
    if shape.b * shape.h * shape.n * shape.keys > LARGEST_EAGER:
        return
    for name, make in DENSE.items():
        bound = EAGER_BOUND if name == "eager" else 1.0
        yield Contender(name, partial(make, shape, device), name, bound=bound)


def _eager(scores_dtype: torch.dtype | None, shape: Shape, device: torch.device) -> Attend:
    """Return softmax(q k^T / sqrt(d) + mask) v as models write it, with scores and softmax in
    ``scores_dtype`` (None: of q).
    """
    hidden = ~shape.mask.dense().to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _by_query_head(q, k, v)
        wide_q, wide_k = (x.to(scores_dtype or x.dtype) for x in (q, k))
        scores = torch.matmul(wide_q, wide_k.transpose(2, 3)) * shape.d**-0.5
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return torch.matmul(weights.to(v.dtype), v).transpose(1, 2)

    return attend


def _masked_sdpa(shape: Shape, device: torch.device) -> Attend:
    """Return SDPA with a dense mask."""
    seen = shape.mask.dense().to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _by_query_head(q, k, v)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(
            1, 2
        )

    return attend


def _by_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    return (
        (q, k, v)
        if group == 1
        else (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )


DENSE: dict[str, Callable[[Shape, torch.device], Attend]] = {
    "SDPA mask": _masked_sdpa,
    "eager": partial(_eager, None),
    "eager float32": partial(_eager, torch.float32),
}


def _varlen(shape: Shape, device: torch.device) -> Attend:
    from torch.nn.attention import varlen

    lengths = [b - a for a, b in pairwise(packed(shape.n, shape.mask_name) or ())] * shape.b
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"window_size": (-1, 0)}
    # torch 2.11 has no grouped heads here: it gets a copy of each key head for each query head
    repeated = 1
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        options["enable_gqa"] = shape.h != shape.g
    else:
        repeated = shape.h // shape.g

    def attend(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(repeated, 1) if repeated > 1 else x for x in (k, v))
        out = varlen.varlen_attn(
            q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), **options
        )
        return out.unflatten(0, (shape.b, shape.n))

    return attend


def flex(
    shape: Shape, device: torch.device, kernel_options: dict[str, Any] | None = None
) -> Attend:
    """Return compiled FlexAttention with the BlockMask of the shape's mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # a function is compiled for eight shapes, and then no more
    block_mask = None
    if shape.mask.area < shape.n * shape.keys:
        make = (
            torch.compile(create_block_mask)
            if shape.n * shape.keys > LARGEST_DENSE
            else create_block_mask
        )
        block_mask = make(
            visible(shape, device), None, None, shape.n, shape.keys, device=device.type
        )
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = shape.h != shape.g
        out = compiled(
            q, k, v, block_mask=block_mask, enable_gqa=grouped, kernel_options=kernel_options
        )
        return out.transpose(1, 2)

    return attend


def visible(shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    """Return the mask as FlexAttention's function of batch, head, query i and key j."""
    if cu_seqlens := packed(shape.n, shape.mask_name):
        ends = torch.tensor(cu_seqlens, device=device)
        document = (
            torch.searchsorted(ends, torch.arange(shape.n, device=device), right=True) - 1
        ).int()
        return lambda b, h, i, j: (i >= j) & (document[i] == document[j])
    kind, _, number = shape.mask_name.partition(":")
    if kind == "causal":
        return lambda b, h, i, j: i >= j
    if kind == "window":
        left = int(number)
        return lambda b, h, i, j: (i >= j) & (j >= i - left)
    if kind == "full":
        return lambda b, h, i, j: i >= 0
    if kind == "prefix":
        end = int(number)
        return lambda b, h, i, j: (i >= j) | (j < end)
    if sizes := tree(shape.n, shape.mask_name):
        trunk, branches, tokens = sizes
        ends = torch.tensor(
            [shape.n] * trunk
            + [trunk + (1 + i // tokens) * tokens for i in range(branches * tokens)]
        )
        ends = ends.to(device)  # behind the last query that sees a key
        return lambda b, h, i, j: (i >= j) & (i < ends[j])
    if (of_blocks := blocks(shape.n, shape.mask_name)) is not None:
        block = torch.tensor(of_blocks, device=device)
        return lambda b, h, i, j: block[i] >= block[j]
    raise ValueError(f"mask {shape.mask_name!r} has no mask function for FlexAttention")


@functools.cache
def flash4_module() -> tuple[Any, str]:
    """Return the module, or None, and its version, or why it is absent."""
    try:
        module = importlib.import_module("flash_attn.cute")
    except ModuleNotFoundError as error:
        return None, f"not installed ({error})"
    except Exception as error:  # for example an ImportError of a compiled dependency
        return None, f"cannot be imported ({type(error).__name__}: {error})"[:300]
    try:
        return module, version(FLASH4)
    except PackageNotFoundError:
        return module, "unknown version"


def _flash4(shape: Shape, device: torch.device) -> list[Contender]:
    module, _ = flash4_module()
    # it has no such masks
    if module is None or shape.mask_name.partition(":")[0] in ("prefix", "blocks", "tree"):
        return []
    make = partial(
        _flash4_packed if packed(shape.n, shape.mask_name) else _flash4_dense, module, shape, device
    )
    names = {FLASH4: False, f"{FLASH4} deterministic": True}  # the same forward pass
    return [
        Contender(name, partial(make, deterministic), FLASH4)
        for name, deterministic in names.items()
    ]


def _flash4_dense(module, shape: Shape, device: torch.device, deterministic: bool) -> Attend:
    kind, _, number = shape.mask_name.partition(":")
    options: dict[str, Any] = {"causal": kind == "causal", "deterministic": deterministic}
    if kind == "window":
        options["window_size"] = (int(number), 0)
    elif kind not in ("causal", "full"):
        raise ValueError(f"mask {shape.mask_name!r} has no arguments for {FLASH4}")
    return lambda q, k, v: first(module.flash_attn_func(q, k, v, **options))


def _flash4_packed(_, shape: Shape, device: torch.device, deterministic: bool) -> Attend:
    lengths = [b - a for a, b in pairwise(packed(shape.n, shape.mask_name) or ())] * shape.b
    return flash4_varlen(lengths, lengths, device, deterministic=deterministic)


def flash4_varlen(
    queries: list[int], keys: list[int], device: torch.device, **options: Any
) -> Attend:
    """Return flash-attn-4 over sequences of these lengths. The last query of each sees all its
    keys.
    """
    module, version = flash4_module()
    if module is None:
        raise ModuleNotFoundError(version)
    options |= {"causal": True, "max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
    for name, lengths in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys)):
        options[name] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def attend(q, k, v):
        out = first(module.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), **options))
        return out.unflatten(0, q.shape[:2])

    return attend


def first(result) -> Tensor:
    """Return out: some versions of flash-attn-4 return (out, lse)."""
    return result[0] if isinstance(result, tuple) else result
