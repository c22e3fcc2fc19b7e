"""Rows by a table: those that travel, and those that a step computes.

`take_rows` reads each row of K and V that is sent, and writes it once. `add_rows` reads each row and all that came for it,
in the table's order, and writes the sum once: one fixed order, no atomics, the same bits every time. `pick_rows` and
`add_to_rows` read and write the rows of a table alone, each once.
"""

import triton
import triton.language as tl
from torch import Tensor

from canon.fast.kernels.triton import launch
from canon.fast.kernels.triton.blocks import row_pointers
from canon.reference.checks import accumulate_dtype


@triton.jit(do_not_specialize=["count", "heads", "lines"])
def take_rows_kernel(
    k,
    v,
    rows,
    out,
    count,
    heads,
    lines,
    k_strides,
    v_strides,
    out_strides,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
):
    """out[:, i] (b, n, g, d + dv) = k[:, rows[i]] beside v[:, rows[i]]."""
    place = tl.program_id(0) // lines * BM + tl.arange(0, BM)
    batch, head = tl.program_id(0) % lines // heads, tl.program_id(0) % lines % heads
    here = place < count
    row, to = tl.load(rows + place, mask=here, other=0), tl.cast(place, tl.int64)
    keep = here[:, None] & (tl.arange(0, D_PAD)[None, :] < D)
    some = tl.load(row_pointers(k, batch, head, row, k_strides, D_PAD, UNIT), mask=keep, other=0.0)
    tl.store(row_pointers(out, batch, head, to, out_strides, D_PAD, UNIT), some, mask=keep)
    keep = here[:, None] & (tl.arange(0, DV_PAD)[None, :] < DV)
    some = tl.load(row_pointers(v, batch, head, row, v_strides, DV_PAD, UNIT), mask=keep, other=0.0)
    tl.store(row_pointers(out, batch, head, to, out_strides, DV_PAD, UNIT) + D, some, mask=keep)


@triton.jit(do_not_specialize=["count", "heads", "lines"])
def row_kernel(
    x,
    part,
    rows,
    count,
    heads,
    lines,
    x_strides,
    part_strides,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    ADD: tl.constexpr,
):
    """part[:, i] (b, n, h, d) = x[:, rows[i]]; or, ADD, x[:, rows[i]] += part[:, i]."""
    place = tl.program_id(0) // lines * BM + tl.arange(0, BM)
    batch, head = tl.program_id(0) % lines // heads, tl.program_id(0) % lines % heads
    here = place < count
    keep = here[:, None] & (tl.arange(0, D_PAD)[None, :] < D)
    whole = row_pointers(x, batch, head, tl.load(rows + place, mask=here, other=0), x_strides, D_PAD, UNIT)
    picked = row_pointers(part, batch, head, tl.cast(place, tl.int64), part_strides, D_PAD, UNIT)
    values = tl.load(whole, mask=keep, other=0.0)
    if ADD:
        tl.store(whole, values + tl.load(picked, mask=keep, other=0.0), mask=keep)
    else:
        tl.store(picked, values, mask=keep)


@triton.jit(do_not_specialize=["count", "heads", "lines"])
def add_rows_kernel(
    x,
    received,
    first,
    places,
    total,
    count,
    heads,
    lines,
    x_strides,
    received_strides,
    total_strides,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
):
    """total[:, i] (b, t, g, d) = x[:, i] + the sum of received[:, places[j]] over first[i] <= j < first[i + 1], in order."""
    row = tl.program_id(0) // lines * BM + tl.arange(0, BM)
    batch, head = tl.program_id(0) % lines // heads, tl.program_id(0) % lines % heads
    here, line = row < count, tl.cast(row, tl.int64)
    begin = tl.load(first + row, mask=here, other=0)
    number = tl.load(first + row + 1, mask=here, other=0) - begin
    keep = here[:, None] & (tl.arange(0, D_PAD)[None, :] < D)
    acc = tl.load(row_pointers(x, batch, head, line, x_strides, D_PAD, UNIT), mask=keep, other=0.0).to(ACC)
    for i in range(0, tl.max(number, 0)):
        more = i < number
        place = tl.load(places + begin + i, mask=more, other=0)
        some = row_pointers(received, batch, head, place, received_strides, D_PAD, UNIT)
        acc += tl.load(some, mask=keep & more[:, None], other=0.0).to(ACC)
    target = row_pointers(total, batch, head, line, total_strides, D_PAD, UNIT)
    tl.store(target, acc.to(total.dtype.element_ty), mask=keep)


def take_rows(k: Tensor, v: Tensor, rows: Tensor, out: Tensor) -> None:
    """Writes out (b, n, g, d + dv), last stride 1: the ``rows`` (int64) of k (b, t, g, d) and v (b, t, g, dv)."""
    d, dv = k.shape[-1], v.shape[-1]
    options = {
        "D": d,
        "DV": dv,
        "D_PAD": launch.padded(d),
        "DV_PAD": launch.padded(dv),
        "UNIT": launch.unit(k, v, out),
        "BM": launch.ROWS.rows,
    }
    arguments = (k, v, rows, out, len(rows), k.shape[2])
    launch.run(
        take_rows_kernel, launch.programs(out), launch.ROWS, arguments, launch.batch_heads(out), (k, v, out), options
    )


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[:, rows], (b, n, h, d), of x (b, t, h, d); ``rows`` int64."""
    part = x.new_empty(x.shape[0], len(rows), *x.shape[2:])
    _row(x, part, rows, add=False)
    return part


def add_to_rows(total: Tensor, rows: Tensor, part: Tensor) -> None:
    """total[:, rows] += part: (b, t, h, d), int64 (n), each once, and (b, n, h, d)."""
    _row(total, part, rows, add=True)


def _row(x: Tensor, part: Tensor, rows: Tensor, add: bool) -> None:
    options = {
        "D": x.shape[-1],
        "D_PAD": launch.padded(x.shape[-1]),
        "UNIT": launch.unit(x, part),
        "BM": launch.ROWS.rows,
        "ADD": add,
    }
    arguments = (x, part, rows, len(rows), x.shape[2])
    launch.run(row_kernel, launch.programs(part), launch.ROWS, arguments, launch.batch_heads(x), (x, part), options)


def add_rows(x: Tensor, received: Tensor, first: Tensor, places: Tensor, total: Tensor) -> None:
    """Writes total (b, t, g, d) = x + what came for each row; it may be x itself.

    ``received`` (b, n, g, d); row i's are received[:, places[first[i] : first[i + 1]]], added in this order; int64 both.
    """
    options = launch.line_options(accumulate_dtype(x.dtype), x, received, total)
    arguments = (x, received, first, places, total, x.shape[1], x.shape[2])
    tensors = (x, received, total)
    launch.run(add_rows_kernel, launch.programs(x), launch.ROWS, arguments, launch.batch_heads(x), tensors, options)
