"""What all kernels share: finding their work, loading tiles of rows, and comparing with a band.

Addresses: a pointer to the head in 64 bits, plus the first row of the tile in 64 bits, plus offsets inside the tile
in 32 bits. The offsets do not change in a loop, so an iteration adds one number to a pointer.
"""

import triton
import triton.language as tl


@triton.jit
def program_work(tiles, count, heads, width):
    """The tile and the (batch, head) of this program.

    ``width`` heads run side by side, so that what they share stays in the L2 cache; for each, longest tile first.
    """
    pid = tl.program_id(0)
    batch_head = pid // (count * width) * width + pid % width
    entry = tiles + pid % (count * width) // width * 5
    return entry, batch_head // heads, batch_head % heads


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a b. Elements of more than two bytes: the product by itself first, or acc would be rounded at every term of it."""
    if a.dtype.primitive_bitwidth > 16:  # acc + tl.dot(a, b) would be made tl.dot(a, b, acc)
        return acc - tl.dot(-a, b, input_precision=PRECISION, out_dtype=acc.dtype)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def head_pointer(x, batch, head, strides, UNIT: tl.constexpr):
    """Where one head of x (b, t, h, d) begins. Every stride but the last is a multiple of UNIT elements."""
    start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]
    if UNIT > 1:  # said of the product: of an argument the compiler would forget it
        start = tl.multiple_of(start, UNIT)
    return x + start


@triton.jit
def row_pointers(x, batch, head, rows, strides, PAD: tl.constexpr, UNIT: tl.constexpr):
    """Where the elements of some ``rows`` (int64) of one head of x (b, t, h, d) are, PAD wide."""
    whole = head_pointer(x, batch, head, strides, UNIT) + rows[:, None] * strides[1]
    return whole + tl.arange(0, PAD)[None, :] * strides[3]


@triton.jit
def line_pointer(x, batch, head, strides):
    """Where one head of x (b, h, t) begins."""
    return x + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def offsets(strides, ROWS: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr):
    """Offsets inside a tile of ROWS tokens, PAD wide. Every stride but the last is a multiple of UNIT elements."""
    rows = tl.arange(0, ROWS)[:, None] * strides[1]
    if UNIT > 1:
        rows = tl.multiple_of(rows, [UNIT, UNIT])
    return rows + tl.arange(0, PAD)[None, :] * strides[3]


@triton.jit
def row_start(first, stride, UNIT: tl.constexpr):
    """Where row ``first`` (or head, with that stride) begins, counted from the pointer of its head."""
    start = tl.cast(first, tl.int64) * stride
    if UNIT > 1:
        start = tl.multiple_of(start, UNIT)
    return start


@triton.jit
def whole_source(x, batch, head, strides, ROWS: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr, TMA: tl.constexpr):
    """What `load_whole` takes tiles of one head from: its descriptor, or a pointer and offsets."""
    if TMA:
        return x, head
    else:
        return head_pointer(x, batch, head, strides, UNIT), offsets(strides, ROWS, PAD, UNIT)


@triton.jit
def load_whole(
    source,
    batch,
    first,
    head,
    strides,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    UNIT: tl.constexpr,
    TMA: tl.constexpr,
):
    """The tile that begins at row ``first``, all of whose rows exist; 0 beyond WIDTH.

    ``head`` counts from the head that ``source`` was made for.
    """
    if TMA:
        return tl.reshape(source[0].load([batch, first, source[1] + head, 0]), [ROWS, PAD])
    else:
        x = source[0] + row_start(first, strides[1], UNIT) + row_start(head, strides[2], UNIT) + source[1]
        if WIDTH == PAD:
            return tl.load(x)
        else:
            return tl.load(x, mask=(tl.arange(0, PAD) < WIDTH)[None, :], other=0.0)


@triton.jit
def load_some_rows(
    pointer, offset, first, stride, inside, WIDTH: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr = 1
):
    """The tile that begins at row ``first``; 0 in rows that are not ``inside`` and beyond WIDTH."""
    keep = inside[:, None]
    if WIDTH != PAD:
        keep = keep & (tl.arange(0, PAD) < WIDTH)[None, :]
    return tl.load(pointer + row_start(first, stride, UNIT) + offset, mask=keep, other=0.0)


@triton.jit
def store_rows(
    pointer, offset, first, stride, inside, x, WIDTH: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr = 1
):
    """Writes the rows of a tile that are ``inside``, in the dtype of the destination."""
    keep = inside[:, None]
    if WIDTH != PAD:
        keep = keep & (tl.arange(0, PAD) < WIDTH)[None, :]
    tl.store(pointer + row_start(first, stride, UNIT) + offset, x.to(pointer.dtype.element_ty), mask=keep)


@triton.jit
def line_rows(pointer, first, head, strides, ROWS: tl.constexpr):
    """Addresses of ROWS numbers of a line (b, h, t), from ``first`` on; ``head`` counts from the pointer's."""
    start = tl.cast(first, tl.int64) * strides[2] + tl.cast(head, tl.int64) * strides[1]
    return pointer + start + tl.arange(0, ROWS) * strides[2]


@triton.jit
def seen_columns(span, rows):
    """left, right of each row: it sees the columns left <= j < right of this span's band."""
    row_start, row_stop = tl.load(span + 2), tl.load(span + 3)
    start, stop = tl.load(span + 4), tl.load(span + 5)
    left = tl.maximum(rows + tl.load(span + 6), start)
    right = tl.minimum(rows + tl.load(span + 7) + 1, stop)
    return left, tl.where((rows >= row_start) & (rows < row_stop), right, left)


@triton.jit
def seen_cells(left, right, COLUMNS: tl.constexpr):
    """Which of the COLUMNS columns of a tile each row sees: left <= column < right."""
    column = tl.arange(0, COLUMNS)[None, :]
    return (column >= left[:, None]) & (column < right[:, None])
