"""Launch the CUDA kernels. Ranges and NaN are those of `canon.fast.kernels.triton.launch`.

q, k, v and dout have two bytes and widths that are multiples of 16 up to 256, on sm_80 or later;
else ValueError. All bits repeat.
"""

import torch
from torch import Tensor

from canon.fast.kernels.cuda.config import Config, choose
from canon.fast.kernels.cuda.kernel import Kernel, Variant
from canon.fast.kernels.launcher import capability, copy_back, gpu_of, is_cpu, launch, tma_loadable
from canon.fast.kernels.triton import launch as portable
from canon.fast.kernels.triton.launch import (
    RowStatistics,
    base2_scale,
    batch_heads,
    contiguous_rows,
    head_bytes,
    heads_in_l2,
    kernel_strides,
)
from canon.fast.tables.cells import Cells
from canon.fast.tables.work_tables import WorkTable, work_table
from canon.route.checks import Scale, split_scale

DTYPES = torch.bfloat16, torch.float16
CAPABILITY = 8, 0  # for `cp.async` and MMAs of bfloat16
FORWARD = Kernel("forward", pointers=7, strides=14, numbers="fiiiii")
DQ = Kernel("dq", pointers=9, strides=17, numbers="fiiii")
DKDV = Kernel("dkdv", pointers=10, strides=20, numbers="fiiiii")

row_statistics = portable.row_statistics
make_row_statistics, empty_statistics = portable.make_row_statistics, portable.empty_statistics
choose_method = portable.choose_method


def forward(
    q: Tensor, k: Tensor, v: Tensor, cells: Cells, scale: Scale, out: Tensor, lse: Tensor
) -> None:
    """As `canon.fast.kernels.torch.launch.forward`."""
    check(q)
    q, k, v = map(loadable, (q, k, v))
    (own_out,) = writable(q, out)
    own_lse = lse if contiguous_rows(lse) is lse else lse.new_empty(lse.shape)
    config, table = plan("forward", q, v, cells)
    group = q.shape[2] // k.shape[2]
    scale, sign = base2_scale(uncapped(scale), q.dtype)
    l2_heads = heads_in_l2(batch_heads(q), group, head_bytes(k, v))
    numbers = scale, sign, len(table.tiles), q.shape[2], group, l2_heads
    tensors = (q, k, v, own_out, own_lse)
    run(FORWARD, config, table, tensors, tensors, numbers, own_out)
    copy_back(out, own_out)
    copy_back(lse, own_lse)


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
    check(q)
    q, k, v, dout = map(loadable, (q, k, v, dout))
    (own_dq,), (lse, delta) = writable(q, dq), statistics
    config, table = plan("dq", q, v, cells)
    group = q.shape[2] // k.shape[2]
    l2_heads = heads_in_l2(batch_heads(q), group, head_bytes(k, v))
    numbers = uncapped(scale), len(table.tiles), q.shape[2], group, l2_heads
    pointers = (q, k, v, dout, lse, delta, own_dq)
    run(DQ, config, table, pointers, (q, k, v, dout, own_dq, lse), numbers, own_dq)
    copy_back(dq, own_dq)


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
    """As `canon.fast.kernels.torch.launch.dkdv`. Raises ValueError if ``dq`` is given."""
    if dq is not None:
        raise ValueError(
            'the CUDA backend has no fused kernel: use backward="split", "head_parallel" or "auto"'
        )
    check(q)
    q, k, v, dout = map(loadable, (q, k, v, dout))
    (own_dk, own_dv), (lse, delta) = writable(q, dk, dv), statistics
    config, table = plan("dkdv", q, v, cells)
    owners, heads = dk.shape[2], q.shape[2] // dk.shape[2]
    l2_heads = heads_in_l2(batch_heads(dk), 1, heads * head_bytes(q, dout))
    numbers = uncapped(scale), len(table.tiles), owners, heads, q.shape[2] // k.shape[2], l2_heads
    pointers = (q, k, v, dout, lse, delta, own_dk, own_dv)
    run(DKDV, config, table, pointers, (q, k, v, dout, own_dk, own_dv, lse), numbers, own_dk)
    copy_back(dk, own_dk)
    copy_back(dv, own_dv)


def check(q: Tensor) -> None:
    """Raise ValueError for other tensors."""
    remedy = 'use backend("triton")'
    if q.dtype not in DTYPES:
        raise ValueError(f"the CUDA kernels support bfloat16 and float16, not {q.dtype}: {remedy}")
    if is_cpu(q.device):
        raise ValueError(f"the CUDA kernels need tensors on a GPU, got {q.device}: {remedy}")
    if (found := capability(q.device)) < CAPABILITY:
        raise ValueError(
            f"the CUDA kernels need an sm_80 or later, this device is {found}: {remedy}"
        )


def uncapped(scale: Scale) -> float:
    """Return the scale, or raise ValueError if it has a soft-cap."""
    number, softcap = split_scale(scale)
    if softcap is not None:
        raise ValueError(
            f'the CUDA kernels have no soft-cap, got softcap={softcap}: use backend("triton")'
        )
    return number


def loadable(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if 16 bytes of a row cannot be read at a time, or tokens or
    heads share memory."""
    if tma_loadable(x):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def writable(q: Tensor, *results: Tensor) -> list[Tensor]:
    """Return each result if kernels can write it, else a new tensor; all of one dtype."""
    dtypes = {x.dtype for x in results}
    dtype = (
        results[0].dtype
        if len(dtypes) == 1 and dtypes <= {q.dtype, torch.float32}
        else torch.float32
    )
    fits = lambda x: x.stride(3) == 1 and x.dtype == dtype
    return [x if fits(x) else torch.empty(x.shape, dtype=dtype, device=x.device) for x in results]


def plan(kernel: str, q: Tensor, v: Tensor, cells: Cells) -> tuple[Config, WorkTable]:
    """Return the configuration and the work table."""
    config = choose(kernel, q.shape[-1], v.shape[-1], gpu_of(q.device))
    transposed = kernel == "dkdv"
    return config, work_table(
        cells, config.rows, config.columns, config.columns, transposed, False, q.device
    )


def run(
    kernel: Kernel, config: Config, table: WorkTable, tensors, strided, numbers, result: Tensor
) -> None:
    """Launch a CTA for each tile of the table and head of the result."""
    ctas = len(table.tiles) * batch_heads(result)
    if not ctas:
        return
    strides = (stride for x in strided for stride in kernel_strides(x)[:-1])
    variant = variant_of(config, strided[0], strided[2], result.dtype)
    arguments = (*tensors, table.tiles, table.spans, *strides, *numbers)
    launch(kernel, ctas, result.device, arguments, variant=variant)


def variant_of(config: Config, q: Tensor, v: Tensor, result: torch.dtype) -> Variant:
    """Return the variant for these tensors."""
    macros = config.macros() | {
        "CANON_D": q.shape[-1],
        "CANON_DV": v.shape[-1],
        "CANON_BF16": int(q.dtype == torch.bfloat16),
        "CANON_OUT_FLOAT": int(result == torch.float32),
    }
    return Variant(tuple(sorted(macros.items())), config.warps, config.shared_bytes)
