"""Building blocks of the Triton kernels. Tensors x are (b, t, h, d), row statistics (b, h, t).
Names in capitals are constants of the compiler.

An address is a pointer to a head plus the start of the tile (64 bits) plus constant offsets in it
(32 bits; 64 if ALIGN = 0): an iteration adds one number. ALIGN divides every stride but the last,
in elements: wide loads need it.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# rows of a CTA without MMAs; NumPy likes large tiles
CTA_ROWS = tl.constexpr(128 if triton.knobs.runtime.interpret else 32)
# of x^3, x^5, ...: least relative error for |x| < 0.55
TANH = -0.33332947, 0.13320725, -0.05267181, 0.016437572
TANH_3, TANH_5, TANH_7, TANH_9 = map(tl.constexpr, TANH)


def kernel(*numbers: str, statistics: tuple[str, ...] = (), pointers: tuple[str, ...] = ()):
    """Decorate a kernel: these arguments, and strides of ``statistics``, compile no variants."""
    strides = [f"{name}_stride_{axis}" for name in statistics for axis in "bh"]
    return triton.jit(
        do_not_specialize=[*numbers, *strides],
        do_not_specialize_on_alignment=[*statistics, *pointers],
    )


@triton.constexpr_function
def padded(width):
    """Return the next power of two, at least 16."""
    return max(16, triton.next_power_of_2(width))


TILE_NUMBERS = "tile_count", "heads", "group", "l2_heads"  # of a kernel with MMAs
ROW_NUMBERS = "tokens", "heads", "batch_heads"


@triton.jit
def cta_work_tile(tiles, count, heads, l2_heads):
    """Return the table entry, batch and head of this CTA. ``l2_heads`` heads share the L2 cache."""
    pid = tl.program_id(0)
    batch_head = pid // (count * l2_heads) * l2_heads + pid % l2_heads
    entry = tiles + pid % (count * l2_heads) // l2_heads * 5
    return entry, batch_head // heads, batch_head % heads


@triton.jit
def cta_rows(tokens, heads, batch_heads):
    """Return (first row, rows, whether they exist, batch, head) of this CTA's rows."""
    pid = tl.program_id(0)
    first = pid // batch_heads * CTA_ROWS
    batch, head = pid % batch_heads // heads, pid % batch_heads % heads
    rows = first + tl.arange(0, CTA_ROWS)
    return first, rows, rows < tokens, batch, head


@triton.jit
def base2(lse):
    """Return lse log2(e), and 1e30 for -inf: then a weight is 0, not NaN."""
    return tl.where(lse == float("-inf"), 1e30, lse * LOG2E)


@triton.jit
def tanh(x):
    """Return tanh(x) and its derivative, without cancellation, to 4e-7, in float64 to 1e-15."""
    y = x * x
    if x.dtype == tl.float64:  # Lambert's continued fraction
        small = x / (1 + y / (3 + y / (5 + y / (7 + y / (9 + y / (11 + y / (13 + y / 15)))))))
    else:
        small = x + x * y * (TANH_3 + y * (TANH_5 + y * (TANH_7 + y * TANH_9)))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    inverse = 1.0 / (1.0 + e)
    large = (1.0 - e) * inverse
    return tl.where(
        tl.abs(x) < 0.55, small, tl.where(x < 0, -large, large)
    ), 4.0 * e * inverse * inverse


@triton.jit
def capped(s, scale, SOFTCAP):
    """Return softcap * tanh(s * scale / softcap), in base 2, and its slope."""
    ratio, slope = tanh(s * (scale * (1.0 / (SOFTCAP * LOG2E))))
    return ratio * (SOFTCAP * LOG2E), slope


@triton.jit
def accumulate_mma(acc, a, b, PRECISION):
    """Return acc + a b, with wide a b first: acc would be rounded after each term."""
    # the compiler would turn acc + tl.dot(a, b) into tl.dot(a, b, acc)
    if a.dtype.primitive_bitwidth > 16:
        return acc - tl.dot(-a, b, input_precision=PRECISION, out_dtype=acc.dtype)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def head_pointer(x, batch, head, strides, ALIGN):
    """Return the pointer to one head of x."""
    start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]
    if ALIGN > 1:  # such a hint on an argument would be lost
        start = tl.multiple_of(start, ALIGN)
    return x + start


@triton.jit
def row_pointers(x, batch, head, rows, strides, WIDTH, ALIGN):
    """Return pointers (rows, padded d) to ``rows`` (int64) of one head of x."""
    start = head_pointer(x, batch, head, strides, ALIGN) + rows[:, None] * strides[1]
    return start + tl.arange(0, padded(WIDTH)).to(tl.int64)[None, :] * strides[3]


@triton.jit
def statistic_head_pointer(x, batch, head, batch_stride, head_stride):
    """Return the pointer to one head, last stride 1."""
    return x + tl.cast(batch, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride


@triton.jit
def statistic_pointers(pointer, first, head, head_stride, ROWS):
    """Return pointers to ROWS values from token ``first`` on; ``head`` counts from ``pointer``."""
    return pointer + tl.cast(head, tl.int64) * head_stride + first + tl.arange(0, ROWS)


@triton.jit
def tile_offsets(strides, ROWS, WIDTH, ALIGN):
    """Return the offsets (ROWS, padded) inside a tile."""
    row, column = tl.arange(0, ROWS), tl.arange(0, padded(WIDTH))
    if ALIGN == 0:
        row, column = row.to(tl.int64), column.to(tl.int64)
    rows = row[:, None] * strides[1]
    if ALIGN > 1:
        rows = tl.multiple_of(rows, [ALIGN, ALIGN])
    return rows + column[None, :] * strides[3]


@triton.jit
def row_start(first, stride, ALIGN):
    """Return the offset of row (or head) ``first``."""
    start = tl.cast(first, tl.int64) * stride
    if ALIGN > 1:
        start = tl.multiple_of(start, ALIGN)
    return start


@triton.jit
def rows_of(x, batch, head, strides, ROWS, WIDTH, ALIGN):
    """Return (pointer to one head of x, offsets inside a tile, strides)."""
    return (
        head_pointer(x, batch, head, strides, ALIGN),
        tile_offsets(strides, ROWS, WIDTH, ALIGN),
        strides,
    )


@triton.jit
def full_tile_source(x, batch, head, strides, ROWS, WIDTH, ALIGN, TMA):
    """Return the source of `load_full_tile`."""
    if TMA:
        return x, head, strides
    else:
        return rows_of(x, batch, head, strides, ROWS, WIDTH, ALIGN)


@triton.jit
def load_full_tile(source, batch, first, head, ROWS, WIDTH, ALIGN, TMA):
    """Return a tile (ROWS, padded) of existing rows; ``head`` counts from ``source``."""
    if TMA:
        tile = source[0].load([batch, first, source[1] + head, 0])
        return tl.reshape(tile, [ROWS, padded(WIDTH)])
    else:
        strides = source[2]
        x = (
            source[0]
            + row_start(first, strides[1], ALIGN)
            + row_start(head, strides[2], ALIGN)
            + source[1]
        )
        if padded(WIDTH) == WIDTH:
            return tl.load(x)
        else:
            return tl.load(x, mask=(tl.arange(0, padded(WIDTH)) < WIDTH)[None, :], other=0.0)


@triton.jit
def load_rows(source, first, valid, WIDTH, ALIGN=1):
    """Return the tile from row ``first`` on, 0 in rows not ``valid`` and from WIDTH on."""
    keep = valid[:, None]
    if padded(WIDTH) != WIDTH:
        keep = keep & (tl.arange(0, padded(WIDTH)) < WIDTH)[None, :]
    return tl.load(
        source[0] + row_start(first, source[2][1], ALIGN) + source[1], mask=keep, other=0.0
    )


@triton.jit
def store_rows(target, first, valid, x, WIDTH, ALIGN=1):
    """Write the ``valid`` rows of tile x, in the dtype of ``target``."""
    keep = valid[:, None]
    if padded(WIDTH) != WIDTH:
        keep = keep & (tl.arange(0, padded(WIDTH)) < WIDTH)[None, :]
    pointer = target[0] + row_start(first, target[2][1], ALIGN) + target[1]
    tl.store(pointer, x.to(pointer.dtype.element_ty), mask=keep)


@triton.jit
def load_tile(x, batch, head, strides, first, valid, WIDTH, ALIGN):
    """As `load_rows`, of one head of x."""
    source = rows_of(x, batch, head, strides, valid.shape[0], WIDTH, ALIGN)
    return load_rows(source, first, valid, WIDTH, ALIGN)


@triton.jit
def store_tile(x, batch, head, strides, first, valid, tile, WIDTH, ALIGN):
    """As `store_rows`, to one head of x."""
    target = rows_of(x, batch, head, strides, valid.shape[0], WIDTH, ALIGN)
    store_rows(target, first, valid, tile, WIDTH, ALIGN)


@triton.jit
def visible_columns(span, rows):
    """Return (left, right): in the span's band each row sees the columns left <= j < right."""
    row_first, row_stop = tl.load(span + 2), tl.load(span + 3)
    start, stop = tl.load(span + 4), tl.load(span + 5)
    left = tl.maximum(rows + tl.load(span + 6), start)
    right = tl.minimum(rows + tl.load(span + 7) + 1, stop)
    return left, tl.where((rows >= row_first) & (rows < row_stop), right, left)


@triton.jit
def visible_mask(left, right, COLUMNS):
    """Return a bool mask (rows, COLUMNS): left <= column < right."""
    column = tl.arange(0, COLUMNS)[None, :]
    return (column >= left[:, None]) & (column < right[:, None])


@triton.jit
def chained_stop(span, COLUMNS):
    """Return the column behind a chained span's tile (`key_order`), or another's first column."""
    return tl.load(span) + tl.where(tl.load(span + 3) < 0, COLUMNS, 0)


@triton.jit
def visible_in_chain(spans, span, rows, first, COLUMNS):
    """Return the cells (rows, COLUMNS) in any band of a chained span, and the columns that a band
    touches. Words of 64 columns take few registers."""
    columns = tl.arange(0, COLUMNS)
    touched = columns < 0
    low = tl.zeros_like(rows).to(tl.int64)
    high = low
    band = spans + tl.load(span + 2) * 8
    for _ in range(-tl.load(span + 3)):
        left, right = visible_columns(band, rows)
        left, right = left - first, tl.maximum(left, right) - first
        low |= bits_from(left) & ~bits_from(right)
        if COLUMNS > 64:
            high |= bits_from(left - 64) & ~bits_from(right - 64)
        touched = touched | (
            (columns + first >= tl.load(band + 4)) & (columns + first < tl.load(band + 5))
        )
        band += 8
    if COLUMNS > 64:
        word = tl.where((columns < 64)[None, :], low[:, None], high[:, None])
    else:
        word = low[:, None]
    return ((word >> (columns % 64).to(tl.int64)[None, :]) & 1) != 0, touched


@triton.jit
def bits_from(first):
    """Return int64 words with the bits from ``first`` on. A shift by 64 is undefined."""
    ones = tl.full(first.shape, -1, tl.int64)
    return tl.where(first >= 64, 0, ones << tl.minimum(tl.maximum(first, 0), 63).to(tl.int64))
