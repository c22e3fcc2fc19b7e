"""What the Hopper kernels share: barriers, the comparison with a band, and stores straight from accumulators.

A program is three partitions: two *warpgroups* of four warps, which own half of a tile's rows each and do the products,
and one *loader*, which fetches tiles by TMA (the forward kernel may have three warpgroups, and thirds; the fused one has an
*adder* besides). They talk
through mbarriers: ``full`` (a tile has landed: one arrival, of the TMA unit) and ``free`` (a tile has been read: one
arrival from each warpgroup that reads it). A ring of STAGES buffers counts its tiles t = 0, 1, ...: tile t is in buffer
t % STAGES, and its barriers complete phase t // STAGES.

Tiles are boxes of 4-D tensors (b, t, h, d): 1 batch, ROWS / PACK tokens, PACK heads, all of d. So a tile can hold the
query heads of a group side by side (row r: token r // PACK, head r % PACK), any strides will do, rows behind the end and
columns behind the width arrive as 0, and no load crosses into another sequence.

All that there is to do stands in one int32 tensor, ``work`` (`canon.fast.kernels.gluon.tile_scheduler`):
where its items end, six
zeros, and where its turns begin; items of 8 numbers (first row, stop, batch, head, where its spans begin and end, batch *
heads + head, first column); the spans of `canon.fast.tiles`; and for each span its turn, two numbers, if the kernel adds in
order. One pointer, for want of registers. An item is called by where it begins, so the first is 8, and 0 is none.

The first items are the programs' own, of which there are no more than items; so the first loads wait for one read alone, of
the item. What comes next a loader *claims*, from a counter that all programs share, when all tiles of an item are on their
way: then the ring is full, and it would have to wait anyway. Where programs wait for one another
all items are claimed, for there may be no room yet for a program that another one would wait for. A loader *tells* the
warpgroups in shared memory, ahead of the first tile that the item owns: the barriers of that tile say when an item may be
heard, and when the next one be told. At the end it tells 0.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

FIRST = gl.constexpr(0)  # the warpgroups
SECOND = gl.constexpr(1)
THIRD = gl.constexpr(2)
ITEM = gl.constexpr(8)  # numbers each
SPAN = gl.constexpr(8)

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed in Triton 3.8


@gluon.constexpr_function
def product_layout(columns):
    """How four warps hold the result of a product, 64 rows of ``columns``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def row_layout(columns):
    """How they hold one number for each column of it."""
    return gl.SliceLayout(0, product_layout(columns))


@gluon.constexpr_function
def column_layout(columns):
    """How they hold one number for each row of it."""
    return gl.SliceLayout(1, product_layout(columns))


@gluon.constexpr_function
def shared_layout(columns):
    """Factors of two-byte elements in shared memory, swizzled over at most 64 columns."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def factor_layout(columns):
    """How they hold the left factor of a product with ``columns`` columns, 2-byte elements."""
    return gl.DotOperandLayout(0, product_layout(columns), 2)


@builtin
def tma_add(descriptor, coordinates, source, _semantic=None):
    """global[coordinates] += shared memory, by the TMA unit. Triton 3.6 and 3.7 can, but have no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def await_added():
    """Wait until global memory holds what this warp has had added: ``tma.store_wait`` looks at shared memory alone.

    No proxy fence is needed behind it: the completion of a bulk operation is followed by an implicit one (PTX ISA,
    Data Movement and Conversion Instructions, Async Proxy). The barrier carries it from the lane that added to all.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_acquire(place):
    """Load the number at ``place``; what its writer did before `store_release` has happened before the next operation.

    PTX ISA, Memory Consistency Model, Release and Acquire Patterns (8.8) and Causality Order (8.9.5).
    """
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [place.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_release(place, number):
    """Store a number at ``place``, by one lane, behind all that this warp has done and waited for."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; elect.sync _|one, 0xffffffff; @one st.release.gpu.global.s32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [place.to(gl.int64), number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def back_off():
    """Leave the memory system alone for about 30 ns."""
    gl.inline_asm_elementwise("nanosleep.u32 32; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_async_global():
    """Order the TMA operations that follow behind what `load_acquire` has observed.

    TMA works in the async proxy, and acquiring orders the generic proxy alone: operations of one proxy in different CTAs
    are not ordered by causality without a proxy fence (PTX ISA 8.9.5, proxy-preserved base causality order).
    """
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def spread(x, like):
    """x, a number for each column, in every row of ``like``: what a product begins at.

    Moved where this stands: the assembler would do so behind the product that is issued next, and have the two wait for one
    another.
    """
    x, _ = gl.broadcast(gl.expand_dims(x, 0), like)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def turn_of(work, span):
    """Whose number a span waits for at what it adds to, 0 is nobody's, and the number that it leaves there."""
    at = work + gl.load(work + 7) + (span - gl.load(work)) // (SPAN // 2)
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER barriers that complete a phase after ARRIVALS."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.constexpr_function
def one_layout(warps):
    """How a partition holds one number: every thread does."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def places(NUMBER: gl.constexpr):
    """Where NUMBER items can be told."""
    return gl.allocate_shared_memory(gl.int32, [NUMBER, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def tell(place, item):
    """Write an item there. The thread that arrives at a barrier afterwards is one of those that write."""
    place.store(gl.full([1], item, gl.int32, one_layout(gl.num_warps())))


@gluon.jit
def tell_end(place, full, free, parity):
    """Write 0 there once the last item has been let go; no load says that it may be heard."""
    mbarrier.wait(free, parity)
    tell(place, 0)
    mbarrier.arrive(full, count=1)


@gluon.jit
def hear(place, full, parity):
    """Wait for the item that is told there."""
    mbarrier.wait(full, parity)
    return gl.max(place.load(one_layout(gl.num_warps())), 0)  # of one number: a load, and nothing more


@gluon.jit
def take_turn(WARPGROUP: gl.constexpr):
    """Wait until the warpgroup before has called `pass_turn`: a named barrier, which Gluon has no function for."""
    ID: gl.constexpr = 8 + WARPGROUP  # Triton itself takes the lower ones
    gl.inline_asm_elementwise(f"bar.sync {ID}, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Let the next warpgroup go on."""
    ID: gl.constexpr = 8 + (WARPGROUP + 1) % WARPGROUPS
    gl.inline_asm_elementwise(f"bar.arrive {ID}, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch(descriptor, batch, row, head, full, buffer):
    """Start to load the box that begins there, and have it complete a phase of ``full``."""
    mbarrier.expect(full, descriptor.block_type.nbytes)
    tma_load(descriptor, [batch, row, head, 0], full, buffer)


@gluon.jit
def first_item():
    """This program's first item."""
    return ITEM * (1 + gl.program_id(0))


@gluon.jit
def claim(work, counter, ALL: gl.constexpr = False):
    """Claim the next item, of ALL or of those behind the programs' first. Return 0 if none is left.

    The counter is relaxed: a claim carries no data. Each program needs a number that no other has, which atomicity alone
    gives. ``work`` was written before the launch, and nobody writes it during the kernel, so all its loads are ordinary.
    """
    end = gl.load(work)
    item = ITEM * (1 + (0 if ALL else gl.num_programs(0)))
    if item < end:
        item += gl.atomic_add(counter, ITEM, sem="relaxed")
    return gl.where(item < end, item, 0)


@gluon.jit
def place_of(work, item):
    """first row, stop, batch, head."""
    return gl.load(work + item), gl.load(work + item + 1), gl.load(work + item + 2), gl.load(work + item + 3)


@gluon.jit
def spans_of(work, item):
    """Where its spans begin, and end."""
    return gl.load(work + item + 4), gl.load(work + item + 5)


@gluon.jit
def line_of(work, item):
    """batch * heads + head."""
    return gl.load(work + item + 6)


@gluon.jit
def columns_of(work, span, COLUMNS: gl.constexpr):
    """The first column of a span, and that behind its last tile."""
    column = gl.load(work + span)
    return column, column + gl.load(work + span + 1) * COLUMNS


@gluon.jit
def first_tile(work, item):
    """Where its first tile is, and where its spans end: the first span, their end, a column, the tiles left of the span."""
    span, span_end = spans_of(work, item)
    return span, span_end, gl.load(work + item + 7), gl.load(work + span + 1)


@gluon.jit
def next_tile(work, span, column, left, span_end, COLUMNS: gl.constexpr):
    """Where the tile behind that one is; it is none if the span is ``span_end``."""
    column += COLUMNS
    left -= 1
    if left == 0:
        span += SPAN
        if span < span_end:
            column, left = gl.load(work + span), gl.load(work + span + 1)
    return span, column, left


@gluon.jit
def is_partial(work, span):
    """Whether its tiles have to be compared with its band; a full span has none."""
    return gl.load(work + span + 3) > 0


@gluon.jit
def finite(m):
    """0 in place of -inf, the maximum of a row that has seen no column yet: -inf - -inf would be NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def hide_unseen(x, work, span, first, column, hidden, PACK: gl.constexpr):
    """x, whose rows begin at ``first`` and columns at ``column``, but ``hidden`` where the span's band hides a cell."""
    row_start, row_stop = gl.load(work + span + 2), gl.load(work + span + 3)
    start, stop = gl.load(work + span + 4), gl.load(work + span + 5)
    lo, hi = gl.load(work + span + 6), gl.load(work + span + 7)
    zero = gl.minimum(
        stop, 0
    )  # no compiler knows that: what it is joined to is not held in registers from the start on
    rows = first + (gl.arange(0, x.shape[0], column_layout(x.shape[1])) ^ zero) // PACK
    left = gl.maximum(rows + lo, start) - column  # the row sees left <= j < right of this tile
    right = gl.minimum(rows + hi + 1, stop) - column
    right = gl.where((rows >= row_start) & (rows < row_stop), right, 0)
    j = gl.expand_dims(gl.arange(0, x.shape[1], row_layout(x.shape[1])), 0)
    # bits 1 and 2 of a column are the lane's, the others constants: so written, no register holds a column number
    lane = (j & 6) ^ zero
    left, right = gl.expand_dims(left, 1) - lane, gl.expand_dims(right, 1) - lane
    return gl.where(((j & ~6) >= left) & ((j & ~6) < right), x, hidden)


@gluon.jit
def unless_zero(x, p):
    """Return x, and 0 where p is 0: dP of a hidden cell may be NaN, and 0 times NaN is NaN.

    Inline assembly, because the assembler would evaluate a select in every tile, not only behind the branch.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred keep; setp.neu.f32 keep, $2, 0.0; selp.f32 $0, $1, 0.0, keep; }",
        "=f,0,f",
        [x, p],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def wide_layout(columns):
    """A product again, but four lanes hold 8 columns of a row each, side by side, where they held two of every 8."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.constexpr_function
def exchange():
    """PTX: four lanes have words 0 to 3 each of two rows, alternately; word i of lane j becomes word j of lane i."""
    lines = ["{ .reg .pred odd, high; .reg .b32 bits, mine, theirs; mov.u32 bits, %laneid; and.b32 mine, bits, 1;"]
    lines += ["setp.ne.u32 odd, mine, 0; and.b32 mine, bits, 2; setp.ne.u32 high, mine, 0;"]
    lines += [f"mov.b32 ${i}, ${8 + i};" for i in range(8)]
    # Of a pair of words two lanes keep one each: whoever is upper gives the lower one for the other lane's upper one.
    for apart, upper in ((1, "odd"), (2, "high")):
        for row, word in ((row, word) for row in (0, 1) for word in range(4) if not word & apart):
            low, high = f"${2 * word + row}", f"${2 * (word | apart) + row}"
            lines.append(f"selp.b32 mine, {low}, {high}, {upper}; shfl.sync.bfly.b32 theirs, mine, {apart}, 31, -1;")
            lines.append(f"selp.b32 {low}, theirs, {low}, {upper}; selp.b32 {high}, {high}, theirs, {upper};")
    return " ".join(lines) + " }"


@gluon.jit
def exchanged(x):
    """x, 2-byte elements held as a product: of every 32 columns, 8 i + 2 j and 8 j + 2 i change places, two at a time."""
    return gl.inline_asm_elementwise(
        exchange(), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [x], dtype=x.dtype, is_pure=True, pack=16
    )


@gluon.jit
def widened(x):
    """x, 2-byte elements held as a product, in `wide_layout`: so 16 bytes are written at a time, and whole sectors."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    y = exchanged(x).reshape([M, N // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])
    return gl.convert_layout(y, wide_layout(N), assert_trivial=True)


@gluon.constexpr_function
def side_by_side(dtype):
    """How many columns of a row a lane writes at a time."""
    return 8 if dtype.primitive_bitwidth == 16 else 2


@gluon.jit
def store_tile(start, x, line, left, stride_t, stride_h, column: gl.constexpr, WIDTH: gl.constexpr, PACK: gl.constexpr):
    """Write the first ``left`` rows of x from the address ``start`` on, and its columns, the first of them ``column``."""
    UNIT: gl.constexpr = side_by_side(start.dtype.element_ty)
    LAYOUT: gl.constexpr = wide_layout(x.shape[1]) if UNIT == 8 else product_layout(x.shape[1])
    x = x.to(start.dtype.element_ty)
    if UNIT == 8:
        x = widened(x)
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    zero = gl.minimum(line, 0)  # as in hide_unseen
    d = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    lane = gl.max_constancy(gl.multiple_of((d & (3 * UNIT)) ^ zero, [1, UNIT]), [1, UNIT])
    rest = gl.max_contiguous(gl.multiple_of(d & ~(3 * UNIT), [1, UNIT]), [1, UNIT])
    r = r ^ zero
    offset = gl.expand_dims(r // PACK * stride_t + r % PACK * stride_h, 1)
    keep = gl.expand_dims(r // PACK < left, 1)
    if column + x.shape[1] > WIDTH:
        keep = keep & (d < WIDTH - column)
    gl.store(start + column + offset + lane + rest, x, mask=keep)
