"""Launch the Triton kernels.

paper/in_your_program.md#what-is-guaranteed has the range of scores and values (Gluon's, too), and
the tokens that a NaN reaches. A larger maximum gives NaN, because a GPU rounds m but not the
product in P = exp2(s scale - m). All scores at -inf count as no visible key. In float16, dS is an
operand of MMAs: beyond 65504 (`checks.LARGEST_DS`) it becomes infinite.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from canon.fast.kernels.launcher import is_cpu, launch, tma_loadable
from canon.fast.kernels.triton import blocks
from canon.fast.kernels.triton.blocks import padded
from canon.fast.kernels.triton.config import Config, choose, is_hopper
from canon.fast.kernels.triton.dkdv import dkdv_kernel, sum_heads_kernel
from canon.fast.kernels.triton.dq import dq_kernel
from canon.fast.kernels.triton.forward import forward_kernel, sign_kernel
from canon.fast.kernels.triton.merge import merge_kernel
from canon.fast.kernels.triton.softmax_stats import delta_kernel
from canon.fast.tables.cells import Cells
from canon.fast.tables.tile_costs import L2_BYTES, largest_divisor, needs_more_owners
from canon.fast.tables.work_tables import WorkTable, work_table
from canon.masks.mask import Mask
from canon.route.checks import Scale, accumulate_dtype, split_scale

LOG2E: float = blocks.LOG2E.value
ROWS = Config(blocks.CTA_ROWS.value, 1, 4, 1)  # of kernels without MMAs
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
LARGEST_TILE = 256  # tokens, and columns
COUNTED_TILE = 128, 64  # keys x queries, for `choose_method`


def choose_method(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    multiprocessors: int,
    *given: Any,
) -> str:
    """Return the method for "auto". "fused" is slower: paper/data/kernels_triton_h200.json."""
    b, h, g = q.shape[0], q.shape[2], k.shape[2]
    if h > g and needs_more_owners(mask, *COUNTED_TILE, b * g, b * h, multiprocessors):
        return "head_parallel"
    return "split"


RowStatistics = tuple[Tensor, Tensor]  # lse and delta (b, h, t), with the same strides


def forward(
    q: Tensor, k: Tensor, v: Tensor, cells: Cells, scale: Scale, out: Tensor, lse: Tensor,
    max_logits: Tensor | None = None,
) -> None:  # fmt: skip
    """As `canon.fast.kernels.torch.launch.forward`."""
    scale, softcap = split_scale(scale)
    q, scale = signed(q, scale)
    config, table = plan("forward", q, v, cells, k, v)
    tensors = (q, k, v, tile_source(k, config), tile_source(v, config), out, lse)
    tensors += (lse if max_logits is None else max_logits,)
    options = {"MAX_LOGITS": max_logits is not None, **mma_options(config, softcap, q, v, k, out)}
    run_over_keys(forward_kernel, config, table, tensors, scale, (q, k, v, out, lse), options)


def base2_scale(scale: float, dtype: torch.dtype) -> tuple[float, int]:
    """Return a scale > 0 for scores in base 2, as kernels mask with -inf before they scale, and the
    sign to multiply q with: 0 if the scale rounds to 0.
    """
    if abs(scale) * LOG2E <= (0.0 if dtype == torch.float64 else 2.0**-150):
        return LOG2E, 0
    return abs(scale) * LOG2E, -1 if scale < 0 else 1


def signed(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q times the sign, and the scale."""
    scale, sign = base2_scale(scale, q.dtype)
    if sign == 1:
        return q, scale
    result = q.new_empty(q.shape)
    options = row_options(q, result, accumulate=accumulate_dtype(q.dtype))
    run_rows(sign_kernel, q.shape, (q, result, sign), (q, result), options)
    return result, scale


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, result: Tensor) -> None:
    """As `canon.fast.kernels.torch.rows.delta`."""
    lse = contiguous_rows(lse)
    tensors = (out, dout, lse, lse if dlse is None else contiguous_rows(dlse), result)
    options = {"HAS_DLSE": dlse is not None, **row_options(out, dout, accumulate=result.dtype)}
    run_rows(delta_kernel, out.shape, tensors, tensors, options)


def make_row_statistics(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> RowStatistics:
    """As `canon.fast.kernels.torch.launch.make_row_statistics`."""
    result = torch.empty(lse.shape, dtype=accumulate_dtype(lse.dtype), device=lse.device)
    delta(dout, out, lse, dlse, result)
    return row_statistics(lse, result)


def empty_statistics(lse: Tensor) -> None:
    """Return None: kernels read lse and delta as they are."""


def row_statistics(lse: Tensor, delta: Tensor, statistics: None = None) -> RowStatistics:
    """Return lse and delta with equal strides."""
    lse, delta = map(contiguous_rows, (lse, delta))
    return (
        (lse, delta) if lse.stride() == delta.stride() else (lse.contiguous(), delta.contiguous())
    )


def dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    statistics: RowStatistics,
    cells: Cells,
    scale: Scale,
    dq: Tensor,
) -> None:
    """As `canon.fast.kernels.torch.launch.dq`."""
    (lse, delta), (scale, softcap) = statistics, split_scale(scale)
    config, table = plan("dq", q, v, cells, k, v)
    tensors = (q, k, v, tile_source(k, config), tile_source(v, config), dout, lse, delta, dq)
    options = mma_options(config, softcap, q, v, k, dout, dq)
    run_over_keys(dq_kernel, config, table, tensors, scale, (q, k, v, dout, lse, dq), options)


def run_over_keys(
    kernel, config: Config, table: WorkTable, tensors, scale: float, strided, options: dict
) -> None:
    """Launch a CTA for each tile of queries and query head. ``tensors`` begin with q, k, v."""
    q, k, v, *_ = tensors
    group = q.shape[2] // k.shape[2]
    arguments = (*tensors, table.tiles, table.spans, scale, len(table.tiles), q.shape[2], group)
    options |= {"KEY_ORDER": table.key_order}
    l2_heads = heads_in_l2(batch_heads(q), group, head_bytes(k, v))
    run(kernel, len(table.tiles) * batch_heads(q), config, arguments, l2_heads, strided, options)


def dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    statistics: RowStatistics,
    cells: Cells,
    scale: Scale,
    dk: Tensor,
    dv: Tensor,
    dq: Tensor | None = None,
    ordered: bool = False,
) -> None:
    """As `canon.fast.kernels.torch.launch.dkdv`. Atomics add to dq, so ``ordered`` raises
    RuntimeError, or warns under `torch.use_deterministic_algorithms(True, warn_only=True)`.
    """
    if ordered:
        _refuse_atomics()
    (lse, delta), (scale, softcap) = statistics, split_scale(scale)
    config, table = plan("dkdv" if dq is None else "fused", q, v, cells, q, dout)
    heads = q.shape[2] // dk.shape[2]  # query heads of an owner
    dq_or_any = dk if dq is None else dq
    tensors = q, k, v, dout, tile_source(q, config), tile_source(dout, config), lse, delta
    tensors += dq_or_any, dk, dv
    sizes = len(table.tiles), dk.shape[2], q.shape[2] // k.shape[2], heads
    arguments = (*tensors, table.tiles, table.spans, scale, *sizes)
    options = {"FUSED": dq is not None, "KEY_ORDER": table.key_order}
    options["HEADS"] = heads if table.key_order else 0
    options |= mma_options(config, softcap, q, v, k, dout, dq_or_any, dk, dv)
    ctas = len(table.tiles) * batch_heads(dk)
    l2_heads = heads_in_l2(batch_heads(dk), 1, heads * head_bytes(q, dout))
    strided = (q, k, v, dout, lse, dq_or_any, dk, dv)
    for make_dk, make_dv in [(True, False), (False, True)] if config.apart else [(True, True)]:
        options |= {"MAKE_DK": make_dk, "MAKE_DV": make_dv}
        run(dkdv_kernel, ctas, config, arguments, l2_heads, strided, options)


def _refuse_atomics() -> None:
    message = (
        'backward="fused" adds to dq in any order except on Hopper, but '
        "torch.use_deterministic_algorithms(True) is set"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(f'{message}: use "split" or "head_parallel"')
    warnings.warn(message, stacklevel=3)


def sum_heads(dk_parts: Tensor, dv_parts: Tensor | None, dk: Tensor, dv: Tensor | None) -> None:
    """As `canon.fast.kernels.torch.rows.sum_heads`."""
    width = 0 if dv is None else dv.shape[-1]
    tensors = (dk_parts, dk_parts if dv_parts is None else dv_parts, dk, dk if dv is None else dv)
    options = {"DV": width, **row_options(*tensors, accumulate=dk_parts.dtype)}
    arguments = (*tensors, dk_parts.shape[2] // dk.shape[2])
    run_rows(sum_heads_kernel, dk.shape, arguments, tensors, options)


def merge(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    new_out: Tensor,
    new_lse: Tensor,
    rows: Tensor | None = None,
) -> None:
    """As `canon.fast.kernels.torch.rows.merge`."""
    other_lse = contiguous_rows(other_lse)
    if lse is not new_lse:
        lse = contiguous_rows(lse)
    tensors = (out, lse, other_out, other_lse, new_out, new_lse)
    table = other_lse if rows is None else rows
    options = row_options(out, other_out, new_out, accumulate=accumulate_dtype(new_lse.dtype))
    options["INDEXED"] = rows is not None
    run_rows(merge_kernel, other_out.shape, (*tensors, table), tensors, options)


def run_rows(kernel, shape: Sequence[int], arguments, strided, options) -> None:
    """Launch a kernel without MMAs on the tokens and heads of ``shape``."""
    b, t, h, *_ = shape
    run(kernel, -(-t // ROWS.rows) * b * h, ROWS, (*arguments, t, h), b * h, strided, options)


def run(kernel, ctas, config, arguments, l2_heads, strided, options) -> None:
    """Launch with the arguments, ``l2_heads`` and the strides of ``strided``."""
    if not ctas:
        return
    for x in strided:
        if x.ndim == 3 and contiguous_rows(x) is not x:
            raise ValueError(
                f"{kernel.__name__} needs row statistics with a last stride of 1, got strides "
                f"{x.stride()}"
            )
    arguments = (*arguments, l2_heads, *stride_arguments(strided))
    options = {**options, "num_warps": config.warps, "num_stages": config.stages}
    launch(kernel, ctas, arguments[0].device, arguments, **options)


def stride_arguments(tensors: Sequence[Tensor]) -> Iterator[tuple[int, ...] | int]:
    """Yield the strides of each tensor: a tuple, on which Triton specialises, for (b, t, h, d); two
    numbers for (b, h, t)."""
    for x in tensors:
        if x.ndim == 4:
            yield kernel_strides(x)
        else:
            yield from kernel_strides(x)[:2]


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x (b, h, t) if its last stride is 1, else a contiguous copy."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def kernel_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides, 0 for an axis of length 1 except the last: fewer variants."""
    return *[
        0 if n == 1 else stride for n, stride in zip(x.shape[:-1], x.stride(), strict=False)
    ], x.stride(-1)


def mma_options(
    config: Config, softcap: float | None, q: Tensor, v: Tensor, *others: Tensor
) -> dict:
    """Return the constants of the kernels with MMAs."""
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "D": q.shape[-1],
        "DV": v.shape[-1],
        "ALIGN": stride_divisor(q, v, *others),
        "ACC": triton_dtype(accumulate_dtype(q.dtype)),
        "PRECISION": "tf32" if tf32 else "ieee",
        "SOFTCAP": softcap,
        "TMA": config.tma,
        "PARTIAL_STAGES": config.partial_stages,
        "BM": config.rows,
        "BN": config.columns,
        "PARTIAL_BN": config.partial_columns or config.columns,
    }


def row_options(*tensors: Tensor, accumulate: torch.dtype | None = None) -> dict:
    """Return the constants of the kernels without MMAs."""
    options = {"D": tensors[0].shape[-1], "ALIGN": stride_divisor(*tensors)}
    return options if accumulate is None else options | {"ACC": triton_dtype(accumulate)}


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's dtype."""
    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]


def stride_divisor(*tensors: Tensor) -> int:
    """Return the greatest of 8, 4, 2 and 1 that divides every stride but the last; 1 also if 16
    does, which Triton detects; 0 if an offset inside a tile may exceed 32 bits."""
    if any(LARGEST_TILE * (x.stride(-1) + kernel_strides(x)[-3]) >= 2**31 for x in tensors):
        return 0
    divisor = gcd(16, *(stride for x in tensors for stride in x.stride()[:-1]))
    return 1 if divisor == 16 else divisor


def batch_heads(x: Tensor) -> int:
    """Return batches times heads."""
    return x.shape[0] * x.shape[2]


def head_bytes(*tensors: Tensor) -> int:
    """Return the bytes of one head of all these tensors."""
    return sum(x.shape[1] * x.shape[3] * x.element_size() for x in tensors)


def heads_in_l2(count: int, group: int, bytes_each: int) -> int:
    """Return how many heads run at a time: groups, which read ``bytes_each`` again."""
    return group * largest_divisor(count // group, bytes_each, L2_BYTES)


def plan(
    kernel: str, q: Tensor, v: Tensor, cells: Cells, *visited: Tensor
) -> tuple[Config, WorkTable]:
    """Return the configuration and work table of a kernel that visits ``visited``."""
    describable = all(map(has_descriptor, visited))
    config = choose(kernel, q, v, describable)
    if config.tma and not describable:  # only if `forced`
        config = replace(config, tma=False)
    transposed = kernel in ("dkdv", "fused")
    # widths of tiles may not depend on how much of a tile the rows see
    if cells.places is not None:
        config = replace(config, partial_columns=0)
    partial = config.partial_columns or config.columns
    return config, work_table(
        cells, config.rows, config.columns, partial, transposed, True, q.device
    )


def tile_source(x: Tensor, config: Config) -> Tensor | TensorDescriptor:
    """Return a descriptor for loads of full tiles of x if ``config.tma``, else x."""
    if not config.tma:
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, config.columns, 1, x.shape[3]])


def has_descriptor(x: Tensor) -> bool:
    """Return whether TMA can describe x."""
    fits = x.numel() > 0 and x.shape[-1] == padded(x.shape[-1]) and tma_loadable(x, every_axis=True)
    return fits and (is_cpu(x.device) or is_hopper(x.device))
