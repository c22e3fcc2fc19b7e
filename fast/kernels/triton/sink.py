"""Apply a sink to the out of all keys, and differentiate it, each in one pass over out.

    a = sigmoid(lse - sink)                      out = a out_keys
    r = rowsum(dout * out_keys)                  dout_keys = a dout          dlse = a (1 - a) r

Rows with lse -inf get 0. Source: `canon.reference.local`."""

import triton
import triton.language as tl
from torch import Tensor

from canon.fast.kernels.triton import launch
from canon.fast.kernels.triton.blocks import (
    ROW_NUMBERS,
    cta_rows,
    kernel,
    load_tile,
    statistic_head_pointer,
    store_tile,
)


@triton.jit
def sink_weights(lse, sink, batch, head, rows, valid, lse_stride_b, lse_stride_h, ACC):
    """Return a, a (1 - a), both from exp(-|lse - sink|), and whether the query sees a key."""
    lse_rows = statistic_head_pointer(lse, batch, head, lse_stride_b, lse_stride_h) + rows
    lse_row = tl.load(lse_rows, mask=valid, other=float("-inf")).to(ACC)
    active = valid & (lse_row != float("-inf"))
    x = tl.where(active, lse_row - tl.load(sink + head).to(ACC), float("-inf"))
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e), e / ((1.0 + e) * (1.0 + e)), active


@kernel(*ROW_NUMBERS, statistics=("lse",))
def sink_kernel(
    out,
    lse,
    sink,
    result,
    tokens,
    heads,
    batch_heads,
    out_strides,
    lse_stride_b,
    lse_stride_h,
    result_strides,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write result = a out."""
    first, rows, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    a, _, _ = sink_weights(lse, sink, batch, head, rows, valid, lse_stride_b, lse_stride_h, ACC)
    x = load_tile(out, batch, head, out_strides, first, valid, D, ALIGN).to(ACC)
    weighted = x * a[:, None]
    store_tile(result, batch, head, result_strides, first, valid, weighted, D, ALIGN)


@kernel(*ROW_NUMBERS, statistics=("lse", "dlse"))
def sink_backward_kernel(
    dout,
    out,
    lse,
    sink,
    dout_keys,
    dlse,
    tokens,
    heads,
    batch_heads,
    dout_strides,
    out_strides,
    lse_stride_b,
    lse_stride_h,
    dout_keys_strides,
    dlse_stride_b,
    dlse_stride_h,
    HAS_DOUT_KEYS: tl.constexpr,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write dlse and, with HAS_DOUT_KEYS, dout_keys."""
    first, rows, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    a, slope, active = sink_weights(
        lse, sink, batch, head, rows, valid, lse_stride_b, lse_stride_h, ACC
    )
    dout_tile = load_tile(dout, batch, head, dout_strides, first, active, D, ALIGN).to(ACC)
    out_tile = load_tile(out, batch, head, out_strides, first, active, D, ALIGN).to(ACC)
    dlse_rows = statistic_head_pointer(dlse, batch, head, dlse_stride_b, dlse_stride_h) + rows
    tl.store(dlse_rows, slope * tl.sum(out_tile * dout_tile, 1), mask=valid)
    if HAS_DOUT_KEYS:
        keys_tile = dout_tile * a[:, None]
        store_tile(dout_keys, batch, head, dout_keys_strides, first, valid, keys_tile, D, ALIGN)


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor, result: Tensor) -> None:
    """Launch `sink_kernel`."""
    lse, sink = launch.contiguous_rows(lse), sink.contiguous()
    options = launch.row_options(out, result, accumulate=lse.dtype)
    launch.run_rows(sink_kernel, out.shape, (out, lse, sink, result), (out, lse, result), options)


def differentiate_sink(
    dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor, dout_keys: Tensor | None, dlse: Tensor
) -> None:
    """Launch `sink_backward_kernel`. ``out`` is that of the keys."""
    lse, sink = launch.contiguous_rows(lse), sink.contiguous()
    written = out if dout_keys is None else dout_keys
    options = {"HAS_DOUT_KEYS": dout_keys is not None}
    options |= launch.row_options(dout, out, written, accumulate=lse.dtype)
    arguments, strided = (dout, out, lse, sink, written, dlse), (dout, out, lse, written, dlse)
    launch.run_rows(sink_backward_kernel, out.shape, arguments, strided, options)
