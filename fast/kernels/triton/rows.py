"""Gather, scatter and sum rows (tokens) by an index table; copy and fill rows under a mask.
`canon.fast.kernels.torch.rows` describes what several functions write.

Copies and fills are kernels because `canon.fast.replay` records kernels only.
"""

from torch import Tensor
from triton import language as tl

from canon.fast.kernels.triton import launch
from canon.fast.kernels.triton.blocks import (
    CTA_ROWS,
    ROW_NUMBERS,
    cta_rows,
    kernel,
    load_tile,
    padded,
    row_pointers,
    rows_of,
    statistic_head_pointer,
    store_rows,
    store_tile,
)

# the other row operations of a backend
from canon.fast.kernels.triton.launch import delta as delta
from canon.fast.kernels.triton.launch import merge as merge
from canon.fast.kernels.triton.launch import sum_heads as sum_heads
from canon.fast.kernels.triton.sink import apply_sink as apply_sink
from canon.fast.kernels.triton.sink import differentiate_sink as differentiate_sink
from canon.fast.kernels.triton.sum_ranks import sum_ranks as sum_ranks
from canon.route.checks import accumulate_dtype


@kernel(*ROW_NUMBERS)
def take_rows_kernel(
    k,
    v,
    rows,
    out,
    tokens,
    heads,
    batch_heads,
    k_strides,
    v_strides,
    out_strides,
    D: tl.constexpr,
    DV: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write out[:, i] = concat(k[:, rows[i]], v[:, rows[i]])."""
    _, index, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    row, target = tl.load(rows + index, mask=valid, other=0), tl.cast(index, tl.int64)
    keep = valid[:, None] & (tl.arange(0, padded(D))[None, :] < D)
    values = tl.load(row_pointers(k, batch, head, row, k_strides, D, ALIGN), mask=keep, other=0.0)
    tl.store(row_pointers(out, batch, head, target, out_strides, D, ALIGN), values, mask=keep)
    keep = valid[:, None] & (tl.arange(0, padded(DV))[None, :] < DV)
    values = tl.load(row_pointers(v, batch, head, row, v_strides, DV, ALIGN), mask=keep, other=0.0)
    tl.store(row_pointers(out, batch, head, target, out_strides, DV, ALIGN) + D, values, mask=keep)


@kernel(*ROW_NUMBERS)
def row_kernel(
    x,
    part,
    rows,
    tokens,
    heads,
    batch_heads,
    x_strides,
    part_strides,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write part[:, i] = x[:, rows[i]]. With ADD, update x[:, rows[i]] += part[:, i]."""
    _, index, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    keep = valid[:, None] & (tl.arange(0, padded(D))[None, :] < D)
    row = tl.load(rows + index, mask=valid, other=0)
    x_rows = row_pointers(x, batch, head, row, x_strides, D, ALIGN)
    part_rows = row_pointers(part, batch, head, tl.cast(index, tl.int64), part_strides, D, ALIGN)
    values = tl.load(x_rows, mask=keep, other=0.0)
    if ADD:
        tl.store(x_rows, values + tl.load(part_rows, mask=keep, other=0.0), mask=keep)
    else:
        tl.store(part_rows, values, mask=keep)


@kernel(*ROW_NUMBERS)
def add_rows_kernel(
    x,
    received,
    first,
    places,
    total,
    tokens,
    heads,
    batch_heads,
    x_strides,
    received_strides,
    total_strides,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write total[:, i]: x[:, i] plus received[:, places[first[i] : first[i + 1]]]."""
    _, row, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    token = tl.cast(row, tl.int64)
    begin = tl.load(first + row, mask=valid, other=0)
    number = tl.load(first + row + 1, mask=valid, other=0) - begin
    keep = valid[:, None] & (tl.arange(0, padded(D))[None, :] < D)
    acc = tl.load(
        row_pointers(x, batch, head, token, x_strides, D, ALIGN), mask=keep, other=0.0
    ).to(ACC)
    for i in range(0, tl.max(number, 0)):
        more = i < number
        place = tl.load(places + begin + i, mask=more, other=0)
        values = row_pointers(received, batch, head, place, received_strides, D, ALIGN)
        acc += tl.load(values, mask=keep & more[:, None], other=0.0).to(ACC)
    target = row_pointers(total, batch, head, token, total_strides, D, ALIGN)
    tl.store(target, acc.to(total.dtype.element_ty), mask=keep)


@kernel(*ROW_NUMBERS, statistics=("lse", "delta", "lse_part", "delta_part"))
def statistics_kernel(
    lse,
    delta,
    lse_part,
    delta_part,
    rows,
    tokens,
    heads,
    batch_heads,
    lse_stride_b,
    lse_stride_h,
    delta_stride_b,
    delta_stride_h,
    lse_part_stride_b,
    lse_part_stride_h,
    delta_part_stride_b,
    delta_part_stride_h,
):
    """Write lse_part[:, :, i] = lse[:, :, rows[i]], and likewise delta_part."""
    _, index, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    row = tl.load(rows + index, mask=valid, other=0)
    values = tl.load(
        statistic_head_pointer(lse, batch, head, lse_stride_b, lse_stride_h) + row, mask=valid
    )
    target = statistic_head_pointer(lse_part, batch, head, lse_part_stride_b, lse_part_stride_h)
    tl.store(target + index, values, mask=valid)
    values = tl.load(
        statistic_head_pointer(delta, batch, head, delta_stride_b, delta_stride_h) + row, mask=valid
    )
    target = statistic_head_pointer(
        delta_part, batch, head, delta_part_stride_b, delta_part_stride_h
    )
    tl.store(target + index, values, mask=valid)


@kernel(*ROW_NUMBERS)
def copy_kernel(
    x,
    copy,
    states,
    tokens,
    heads,
    batch_heads,
    x_strides,
    copy_strides,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_STATES: tl.constexpr,
):
    """Write copy = x. HAS_STATES: only where ``states`` is 1, and 0 where it is 0."""
    first, rows, written, batch, head = cta_rows(tokens, heads, batch_heads)
    read = written
    if HAS_STATES:
        state = tl.load(states + rows, mask=written, other=-1)
        read = state == 1
        written = state >= 0
    values = load_tile(x, batch, head, x_strides, first, read, D, ALIGN)
    store_tile(copy, batch, head, copy_strides, first, written, values, D, ALIGN)


@kernel(*ROW_NUMBERS)
def zero_rows_kernel(
    x,
    tokens,
    heads,
    batch_heads,
    x_strides,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write x = 0."""
    first, _, _, batch, head = cta_rows(tokens, heads, batch_heads)
    zeros = tl.zeros([CTA_ROWS, padded(D)], x.dtype.element_ty)
    target = rows_of(x, batch, head, x_strides, CTA_ROWS, D, ALIGN)
    store_rows(target, first, first + tl.arange(0, CTA_ROWS) < tokens, zeros, D, ALIGN)


@kernel(
    *ROW_NUMBERS,
    "x_stride_t",
    "result_stride_t",
    statistics=("x", "result"),
    pointers=("rows",),
)
def statistic_kernel(
    x,
    result,
    rows,
    x_stride_b,
    x_stride_h,
    x_stride_t,
    result_stride_b,
    result_stride_h,
    result_stride_t,
    tokens,
    heads,
    batch_heads,
    MASKED: tl.constexpr,
    INDEXED: tl.constexpr,
):
    """Write result = x, INDEXED: x[:, :, rows], MASKED: -inf, without reading x."""
    _, index, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    token = tl.cast(index, tl.int64)
    target = statistic_head_pointer(result, batch, head, result_stride_b, result_stride_h)
    target += token * result_stride_t
    if MASKED:
        tl.store(target, float("-inf"), mask=valid)
    else:
        if INDEXED:
            token = tl.load(rows + index, mask=valid, other=0)
        source = statistic_head_pointer(x, batch, head, x_stride_b, x_stride_h)
        tl.store(target, tl.load(source + token * x_stride_t, mask=valid), mask=valid)


def take_rows(k: Tensor, v: Tensor, rows: Tensor, out: Tensor) -> None:
    """Launch `take_rows_kernel`; the last stride of out is 1."""
    options = {**launch.row_options(k, v, out), "DV": v.shape[-1]}
    launch.run_rows(take_rows_kernel, out.shape, (k, v, rows, out), (k, v, out), options)


def copy_rows(x: Tensor, part: Tensor, rows: Tensor) -> None:
    """Launch `row_kernel`; ``rows`` is int64."""
    if x.shape[3] == 1:
        copy_statistic(_of_heads(x), _of_heads(part), rows)
    else:
        _run_row_kernel(x, part, rows, add=False)


def copy_statistics(lse: Tensor, delta: Tensor, parts: tuple[Tensor, Tensor], rows: Tensor) -> None:
    """Launch `statistics_kernel`."""
    lse, delta = map(launch.contiguous_rows, (lse, delta))
    b, h, n = parts[0].shape
    tensors = lse, delta, *parts
    launch.run_rows(statistics_kernel, (b, n, h), (*tensors, rows), tensors, {})


def add_to_rows(total: Tensor, rows: Tensor, part: Tensor) -> None:
    """Launch `row_kernel` with ADD; ``rows`` are distinct."""
    _run_row_kernel(total, part, rows, add=True)


def _run_row_kernel(x: Tensor, part: Tensor, rows: Tensor, add: bool) -> None:
    options = {**launch.row_options(x, part), "ADD": add}
    launch.run_rows(row_kernel, part.shape, (x, part, rows), (x, part), options)


def add_rows(x: Tensor, received: Tensor, first: Tensor, places: Tensor, total: Tensor) -> None:
    """Launch `add_rows_kernel`; total may be x."""
    tensors = x, received, total
    options = launch.row_options(*tensors, accumulate=accumulate_dtype(x.dtype))
    launch.run_rows(add_rows_kernel, x.shape, (x, received, first, places, total), tensors, options)


def copy_tokens(x: Tensor, copy: Tensor, states: Tensor | None = None) -> None:
    """Launch `copy_kernel`; ``states`` is int8."""
    if x.shape[3] == 1 and states is None:
        copy_statistic(_of_heads(x), _of_heads(copy))
        return
    options = launch.row_options(x, copy) | {"HAS_STATES": states is not None}
    launch.run_rows(
        copy_kernel, x.shape, (x, copy, x if states is None else states), (x, copy), options
    )


def zero_rows(x: Tensor) -> None:
    """Write x = 0."""
    launch.run_rows(zero_rows_kernel, x.shape, (x,), (x,), launch.row_options(x))


def copy_statistic(x: Tensor, result: Tensor, rows: Tensor | None = None) -> None:
    """Launch `statistic_kernel`; ``rows`` is int64."""
    _run_statistic_kernel(x, result, rows, masked=False)


def mask_statistic(x: Tensor) -> None:
    """Write x (b, h, t) = -inf. Strides may be any."""
    _run_statistic_kernel(x, x, None, masked=True)


def _run_statistic_kernel(x: Tensor, result: Tensor, rows: Tensor | None, masked: bool) -> None:
    b, h, n = result.shape
    options = {"MASKED": masked, "INDEXED": rows is not None}
    arguments = (x, result, x if rows is None else rows, *x.stride(), *result.stride())
    launch.run_rows(statistic_kernel, (b, n, h), arguments, (), options)


def _of_heads(x: Tensor) -> Tensor:
    """Return x (b, t, h, 1) as (b, h, t), whose strides compile no variants."""
    return x[..., 0].transpose(1, 2)
