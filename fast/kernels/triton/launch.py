"""From tensors to kernel launches: tables, configurations, strides and grids.

Tensors are 4-D, checked, and on one device; lse, delta are (b, h, t). What is written is given, and may hold anything
before (but for dq of the fused method, which is added to).

**Range**, of this backend and of the Hopper kernels. Scores, scale q k, may be up to 1e7 in magnitude (6e15 in float64), and
values up to 1e21. A query whose largest score is beyond gets NaN for out and lse: P is exp2(s scale - m), whose product a GPU
does not round as m was rounded, so P of the largest score would be 0 or infinite. Scores far below the largest may be of any
size. A query whose scores are all -inf counts as one that sees no key.

**NaN and infinities** reach the tokens that see them. A product also multiplies the hidden cells of a tile by 0, and 0 times
NaN is NaN; so they reach some tokens that share a tile, of other documents, too:

    in      out                 lse              dq                           dk                      dv
    q       its query           its query        its query                    keys of shared tiles    keys that it sees
    k       queries that        the same         the same, and queries        keys that those         keys that those
            see it                               of shared tiles              queries see             queries see
    v       queries of          none             the same as out              keys that those         none
            shared tiles                                                      queries see
    dout    none                none             its query                    keys that it sees       keys of shared tiles

A query and a key share a tile if a kernel loads both for one product. Tiles have at most 256 rows and columns. So a key
shares tiles with queries fewer than 256 tokens from one that sees a key fewer than 256 tokens from it, and with no other.
"""

import warnings
from dataclasses import replace
from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from canon.fast.kernels.launcher import launch
from canon.fast.kernels.triton.backward import delta_kernel, dkdv_kernel, dq_kernel, sum_heads_kernel
from canon.fast.kernels.triton.config import Config, choose, is_hopper
from canon.fast.kernels.triton.forward import forward_kernel
from canon.fast.kernels.triton.merge import merge_kernel
from canon.fast.tile_costs import needs_more_owners
from canon.fast.tiles import WorkTable, work_table
from canon.reference.checks import accumulate_dtype
from canon.reference.mask import Mask

LOG2E = 1.4426950408889634
L2_BYTES = 32 << 20  # what heads that run side by side may read again and again; caches hold 40 to 60 MB
ROWS = Config(32, 1, 4, 1)  # of the kernels without products: tokens a program
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
COUNTED_TILE = 128, 64  # keys x queries: `choose_method` counts the work of dk and dv in tiles of this size


def choose_method(q: Tensor, k: Tensor, v: Tensor, mask: Mask, multiprocessors: int) -> str:
    """Return the backward method for "auto": "head_parallel" where "split" would leave SMs idle, else "split".

    "head_parallel" has an owner of dk and dv for each query head, "split" for each key head. It is chosen if the busiest SM
    has over a quarter more work under "split". "fused" is never chosen: this backend adds to dq in any order.
    """
    b, h, g = q.shape[0], q.shape[2], k.shape[2]
    if h > g and needs_more_owners(mask, *COUNTED_TILE, b * g, b * h, multiprocessors):
        return "head_parallel"
    return "split"


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, out: Tensor, lse: Tensor) -> None:
    """Writes out (b, t, h, dv) and lse (b, h, t)."""
    q, k, v = map(addressable, (q, k, v))
    config, table = plan("forward", q, v, mask, k, v)
    group = q.shape[2] // k.shape[2]
    sign = 0 if vanishes(scale, q.dtype) else -1 if scale < 0 else 1  # goes to q
    base2_scale = (abs(scale) if sign else 1.0) * LOG2E
    tensors = (q, k, v, source(k, config), source(v, config), out, lse)
    arguments = (*tensors, table.tiles, table.spans, base2_scale, len(table), q.shape[2])
    options = {"SIGN": sign, "GROUP": group, **product_options(config, q, v, k, out)}
    width = side_by_side(batch_heads(q), group, bytes_each_head(k, v))
    run(forward_kernel, len(table) * batch_heads(q), config, arguments, width, (q, k, v, out, lse), options)


def vanishes(scale: float, dtype: torch.dtype) -> bool:
    """Whether the kernels' dtype takes the scale for 0: then -inf, the score of a hidden cell, would become NaN."""
    return abs(scale) * LOG2E <= (0.0 if dtype == torch.float64 else 2.0**-150)


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, result: Tensor) -> None:
    """Writes result (b, h, t) = rowsum(dout * out) - dlse, 0 where lse is -inf."""
    dout, out = map(addressable, (dout, out))
    other = lse if dlse is None else dlse
    arguments = (out, dout, lse, other, result, out.shape[1], out.shape[2])
    options = {"HAS_DLSE": dlse is not None, **line_options(result.dtype, out, dout)}
    run(delta_kernel, programs(out), ROWS, arguments, batch_heads(out), (out, dout, lse, other, result), options)


Lines = tuple[Tensor, Tensor]


def row_statistics(lse: Tensor, delta: Tensor) -> Lines:
    """lse and delta (b, h, t) as `dq` and `dkdv` want them: strided alike."""
    return (lse, delta) if lse.stride() == delta.stride() else (lse.contiguous(), delta.contiguous())


def dq(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lines: Lines, mask: Mask, scale: float, dq: Tensor) -> None:
    """Writes dq (b, t, h, d)."""
    q, k, v, dout = map(addressable, (q, k, v, dout))
    lse, delta = lines
    config, table = plan("dq", q, v, mask, k, v)
    group = q.shape[2] // k.shape[2]
    tensors = (q, k, v, source(k, config), source(v, config), dout, lse, delta, dq)
    arguments = (*tensors, table.tiles, table.spans, scale, len(table), q.shape[2])
    options = {"GROUP": group, **product_options(config, q, v, k, dout, dq)}
    width = side_by_side(batch_heads(q), group, bytes_each_head(k, v))
    run(dq_kernel, len(table) * batch_heads(q), config, arguments, width, (q, k, v, dout, lse, dq), options)


def dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lines: Lines,
    mask: Mask,
    scale: float,
    dk: Tensor,
    dv: Tensor,
    dq: Tensor | None = None,
    ordered: bool = False,
) -> None:
    """Writes dk (b, s, o, d) and dv (b, s, o, dv); o, the owners, are the key heads, or the query heads.

    With ``dq`` (b, t, h, d), in the accumulation dtype, adds to it by atomics: the fused method. If that is to be ``ordered``
    it raises RuntimeError, or warns under `torch.use_deterministic_algorithms(True, warn_only=True)`.
    """
    if ordered:
        told = 'backward="fused" adds to dq in any order but on Hopper, and torch.use_deterministic_algorithms(True) was called'
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(f'{told}: use "split" or "head_parallel"')
        warnings.warn(told, stacklevel=2)
    q, k, v, dout = map(addressable, (q, k, v, dout))
    lse, delta = lines
    config, table = plan("dkdv" if dq is None else "fused", q, v, mask, q, dout)
    heads = q.shape[2] // dk.shape[2]  # query heads of an owner
    any_dq = dk if dq is None else dq
    tensors = (q, k, v, dout, source(q, config), source(dout, config), lse, delta, any_dq, dk, dv)
    arguments = (*tensors, table.tiles, table.spans, scale, len(table), dk.shape[2])
    options: dict = {
        "FUSED": dq is not None,
        "GROUP": q.shape[2] // k.shape[2],
        "HEADS": heads,
    }
    options |= product_options(config, q, v, k, dout, any_dq, dk, dv)
    width = side_by_side(batch_heads(dk), 1, heads * bytes_each_head(q, dout))
    strided = (q, k, v, dout, lse, any_dq, dk, dv)
    for made in [(True, False), (False, True)] if config.apart else [(True, True)]:
        options |= {"MAKE_DK": made[0], "MAKE_DV": made[1]}
        run(dkdv_kernel, len(table) * batch_heads(dk), config, arguments, width, strided, options)


def sum_heads(x: Tensor, total: Tensor) -> None:
    """Writes total (b, s, g, d) = the sum of each group of heads of x (b, s, h, d), first to last."""
    group = x.shape[2] // total.shape[2]
    arguments = (x, total, x.shape[1], total.shape[2])
    run(
        sum_heads_kernel,
        programs(total),
        ROWS,
        arguments,
        batch_heads(total),
        (x, total),
        {"GROUP": group, **line_options(x.dtype, x, total)},
    )


def merge(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    new_out: Tensor,
    new_lse: Tensor,
    rows: Tensor | None = None,
) -> None:
    """Writes new_out (b, t, h, dv), new_lse (b, h, t): the merge of two parts. They may be out and lse themselves.

    ``rows`` (int64, each once): of these tokens alone, which are all that the other part has.
    """
    out, other_out = map(addressable, (out, other_out))
    tensors = (out, lse, other_out, other_lse, new_out, new_lse)
    table = other_lse if rows is None else rows
    options = line_options(accumulate_dtype(new_lse.dtype), out, other_out, new_out) | {"INDEXED": rows is not None}
    arguments = (*tensors, table, other_out.shape[1], out.shape[2])
    run(merge_kernel, programs(other_out), ROWS, arguments, batch_heads(out), tensors, options)


def run(kernel, programs, config, arguments, width, strided, options) -> None:
    """Launches ``programs`` of a kernel: its arguments, then the width of the grid, then the strides of ``strided``.

    Raises ValueError if the device has too little shared memory after all.
    """
    if not programs:
        return
    for x in strided:
        if x.ndim == 4 and _reach(x) >= 2**31:  # what is read was made `addressable`: this is written
            raise ValueError(
                f"strides {x.stride()} are too wide for {kernel.__name__}, which counts in 32 bits in a tile"
            )
    arguments = (*arguments, width, *(x.stride() for x in strided))
    options = {**options, "num_warps": config.warps, "num_stages": config.stages}
    try:
        launch(kernel, programs, strided[0].device, arguments, **options)
    except OutOfResources as error:
        raise ValueError(
            f"{kernel.__name__} with {config} needs {error.required} of {error.name}, this device has {error.limit}: "
            "use a narrower dtype or canon.reference"
        ) from error


# ------------------------------------------------------------------ what kernels are told at compile time
def product_options(config: Config, q: Tensor, v: Tensor, *others: Tensor) -> dict:
    """Constants of the kernels with matrix products."""
    d_pad, dv_pad = pads(q, v)
    return {
        "D": q.shape[-1],
        "DV": v.shape[-1],
        "D_PAD": d_pad,
        "DV_PAD": dv_pad,
        "UNIT": unit(q, v, *others),
        "ACC": triton_dtype(accumulate_dtype(q.dtype)),
        "PRECISION": "tf32"
        if q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        else "ieee",
        "TMA": config.tma,
        "PARTIAL_STAGES": config.partial_stages,
        "BM": config.rows,
        "BN": config.columns,
        "PARTIAL_BN": config.partial_columns or config.columns,
    }


def line_options(accumulate: torch.dtype, *tensors: Tensor) -> dict:
    """Constants of the kernels without."""
    width = tensors[0].shape[-1]
    return {
        "D": width,
        "D_PAD": padded(width),
        "UNIT": unit(*tensors),
        "ACC": triton_dtype(accumulate),
        "BM": ROWS.rows,
    }


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """float32 or float64 as Triton names them."""
    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]


def padded(width: int) -> int:
    """The next power of two, at least 16: the least that a matrix product takes."""
    return max(16, triton.next_power_of_2(width))


def pads(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Both widths, padded."""
    return padded(q.shape[-1]), padded(v.shape[-1])


def unit(*tensors: Tensor) -> int:
    """What divides every stride but the last: 8, 4, 2 elements or 1; it decides how wide loads may be.

    Multiples of 16 Triton finds by itself: then 1, so that nothing is compiled twice.
    """
    divisor = gcd(16, *(stride for x in tensors for stride in x.stride()[:-1]))
    return 1 if divisor == 16 else divisor


# ------------------------------------------------------------------ grids and addresses
def batch_heads(x: Tensor) -> int:
    """Batches times heads of x (b, t, h, d)."""
    return x.shape[0] * x.shape[2]


def programs(x: Tensor) -> int:
    """How many programs of ROWS tokens each x (b, t, h, d) makes."""
    return -(-x.shape[1] // ROWS.rows) * batch_heads(x)


def bytes_each_head(*tensors: Tensor) -> int:
    """What one head of these (b, t, h, d) holds."""
    return sum(x.shape[1] * x.shape[3] * x.element_size() for x in tensors)


@lru_cache
def side_by_side(lines: int, group: int, bytes_each: int) -> int:
    """How many of the ``lines`` run side by side: whole groups, a divisor, and what they read fits the L2 cache."""
    groups = lines // group
    fitting = [n for n in range(1, groups + 1) if groups % n == 0 and (n == 1 or n * bytes_each <= L2_BYTES)]
    return group * max(fitting, default=1)


def plan(kernel: str, q: Tensor, v: Tensor, mask: Mask, *visited: Tensor) -> tuple[Config, WorkTable]:
    """Configuration and table of a kernel that visits tiles of ``visited``."""
    describable = all(map(has_descriptor, visited))
    config = choose(kernel, *pads(q, v), q.element_size(), q.device, describable)
    if config.tma and not describable:  # only where it was forced
        config = replace(config, tma=False)
    transposed = kernel in ("dkdv", "fused")
    return config, work_table(mask, config.rows, config.columns, config.partial_columns, transposed, q.device)


def source(x: Tensor, config: Config) -> Tensor | TensorDescriptor:
    """What a kernel loads tiles of x (b, t, h, d) from: x, or its descriptor."""
    if not config.tma:
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, config.columns, 1, x.shape[3]])


def has_descriptor(x: Tensor) -> bool:
    """Whether the hardware can load tiles of x by itself: sizes, strides and alignment fit a descriptor."""
    strides = [stride * x.element_size() for stride in x.stride()[:-1]]
    return (
        (x.device.type == "cpu" or is_hopper(x.device))
        and x.numel() > 0
        and x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and x.shape[-1] == padded(x.shape[-1])
        and all(stride % 16 == 0 and 0 < stride < 2**40 for stride in strides)
    )


def addressable(x: Tensor) -> Tensor:
    """x, or a contiguous copy if the offsets inside one tile could leave 32 bits."""
    return x if _reach(x) < 2**31 else x.contiguous()


def _reach(x: Tensor) -> int:
    """How far offsets inside a tile of x (b, t, h, d) may go: no tile has more rows, or is wider, than 256."""
    return 256 * (x.stride(1) + x.stride(3))
