"""All inline PTX of the Hopper kernels, and the operations that Triton has without a name for them in Gluon.

    function                instruction                                  reason
    tma_reduce_add          cp.reduce.async.bulk.tensor ... .add         Gluon 3.6 and 3.7 have no name for it
    wait_for_reductions     cp.async.bulk.wait_group 0                   Gluon waits for the source only (.read)
    load_acquire            ld.acquire.gpu                               Gluon has no load with memory order
    store_release           st.release.gpu                               Gluon has no store with memory order
    back_off                nanosleep.u32                                not in Gluon
    fence_async_global      fence.proxy.async.global                     not in Gluon
    ping_pong_wait          bar.sync                                     Gluon has no named barriers
    ping_pong_arrive        bar.arrive                                   Gluon has no named barriers
    broadcast_rows          mov.b32                                      fixes the place where an accumulator is initialised
    keep_where_nonzero      setp, selp                                   the assembler hoists a plain select out of its branch
    transpose_words         shfl.sync.bfly, selp                         Gluon would go through shared memory
    rescale_rows            vote.sync.any, mul.f32                       a branch for a whole warp
    zero_rows               vote.sync.any, mov.f32                       a branch for a whole warp
    declare_registers       .reg                                         state of one thread, which Gluon cannot express
    any_above               setp.gt, bar.red.or.pred, vote.sync.ballot   a vote of a warpgroup with a uniform result
    round_and_keep          cvt.rn.bf16x2.f32 or cvt.rn.f16x2.f32        keeps a copy of rounded P for `add_rounding_excess`
    add_rounding_excess     vote.sync.any, sub.f32                       a branch for a whole warp

A function that ends in ``_ptx`` returns assembly text; tests/test_ptx.py runs the text on an emulated warp. The simulator
(`canon.simulator`) replaces the other functions by Python equivalents. Where a function has no result, its text
ends in "mov.u32 $0, 0", because `gl.inline_asm_elementwise` must return a value.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


# ------------------------------------------------------------------ TMA reductions
@builtin
def tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    """Start global[coordinates] += shared memory by TMA (cp.reduce.async.bulk.tensor)."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def wait_for_reductions():
    """Wait until all TMA reductions of this warp are complete in global memory (cp.async.bulk.wait_group).

    ``tma.store_wait`` waits only until shared memory has been read. No proxy fence is needed afterwards: the completion of
    a bulk operation implies one (PTX ISA, Data Movement and Conversion Instructions, Async Proxy). The warp barrier orders
    all lanes after the lane that issued the reductions.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


# ------------------------------------------------------------------ memory order between CTAs
@gluon.jit
def load_acquire(pointer):
    """Load an int32 with acquire semantics (ld.acquire.gpu); pairs with `store_release`.

    PTX ISA, Memory Consistency Model, Release and Acquire Patterns (section 8.8) and Causality Order (section 8.9.5).
    """
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_release(pointer, number):
    """Store an int32 from one lane (st.release.gpu). The release orders earlier operations of that lane before the store.

    Another lane may have issued the reductions. The warp barrier in `wait_for_reductions` puts them before this lane's store.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred one; elect.sync _|one, 0xffffffff; @one st.release.gpu.global.s32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointer.to(gl.int64), number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def back_off():
    """Sleep for at most 64 ns (nanosleep: up to twice its operand), so that polling leaves memory bandwidth to others."""
    gl.inline_asm_elementwise("nanosleep.u32 32; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_async_global():
    """Order later TMA operations behind the writes that `load_acquire` observed (fence.proxy.async.global).

    TMA runs in the async proxy, but an acquire orders only the generic proxy. Without a proxy fence, causality does not
    order operations of the async proxy in different CTAs (PTX ISA, section 8.9.5: proxy-preserved base causality order).
    """
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# ------------------------------------------------------------------ ping-pong scheduling of warpgroups
@gluon.jit
def ping_pong_wait(WARPGROUP: gl.constexpr):
    """Wait until the previous warpgroup calls `ping_pong_arrive` (bar.sync on a named barrier of two warpgroups)."""
    ID: gl.constexpr = 8 + WARPGROUP  # Triton itself uses the lower ones
    gl.inline_asm_elementwise(f"bar.sync {ID}, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ping_pong_arrive(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Let the next warpgroup issue its MMAs (bar.arrive)."""
    ID: gl.constexpr = 8 + (WARPGROUP + 1) % WARPGROUPS
    gl.inline_asm_elementwise(f"bar.arrive {ID}, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# ------------------------------------------------------------------ element-wise operations with a fixed place
@gluon.jit
def broadcast_rows(x, like):
    """Return the vector x (one element for each column) in every row of a block like ``like``, as an initial accumulator.

    The moves are volatile assembly (mov.b32), so they stay here. The assembler would otherwise move them behind the next
    MMA and make one MMA wait for the other.
    """
    x, _ = gl.broadcast(gl.expand_dims(x, 0), like)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def keep_where_nonzero(x, p):
    """Return x, and 0 where p is 0 (setp, selp): dP of a hidden cell may be NaN, and 0 times NaN is NaN.

    A plain select would be evaluated in every tile, because the assembler hoists it out of its branch.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred keep; setp.neu.f32 keep, $2, 0.0; selp.f32 $0, $1, 0.0, keep; }",
        "=f,0,f",
        [x, p],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


# ------------------------------------------------------------------ transpose within a quad
@gluon.constexpr_function
def transpose_words_ptx():
    """Return PTX that transposes words among the four lanes of a quad, for two rows at once.

    Each lane has words 0 to 3 of both rows, alternately. Word i of lane j becomes word j of lane i.
    """
    lines = ["{ .reg .pred odd, high; .reg .b32 bits, mine, theirs; mov.u32 bits, %laneid; and.b32 mine, bits, 1;"]
    lines += ["setp.ne.u32 odd, mine, 0; and.b32 mine, bits, 2; setp.ne.u32 high, mine, 0;"]
    lines += [f"mov.b32 ${i}, ${8 + i};" for i in range(8)]
    # Two lanes swap one word of a pair: the upper lane gives its lower word for the other lane's upper word.
    for apart, upper in ((1, "odd"), (2, "high")):
        for row, word in ((row, word) for row in (0, 1) for word in range(4) if not word & apart):
            low, high = f"${2 * word + row}", f"${2 * (word | apart) + row}"
            lines.append(f"selp.b32 mine, {low}, {high}, {upper}; shfl.sync.bfly.b32 theirs, mine, {apart}, 31, -1;")
            lines.append(f"selp.b32 {low}, theirs, {low}, {upper}; selp.b32 {high}, {high}, theirs, {upper};")
    return " ".join(lines) + " }"


@gluon.jit
def transpose_words(x):
    """Return x (two bytes, in `mma_layout`). Of every 32 columns, pairs 8 i + 2 j and 8 j + 2 i are swapped (i, j = 0 to 3)."""
    return gl.inline_asm_elementwise(
        transpose_words_ptx(),
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [x],
        dtype=x.dtype,
        is_pure=True,
        pack=16,
    )


# ------------------------------------------------------------------ rows of the output accumulator
@gluon.constexpr_function
def in_place_constraints(number):
    """Return constraints for ``number`` results, as many inputs in the same registers, and as many factors."""
    return ",".join(["=f"] * number + [str(i) for i in range(number)] + ["f"] * number)


@gluon.constexpr_function
def rescale_rows_ptx(number):
    """Return PTX that multiplies ``number`` elements by as many factors, unless all factors of the warp are 1.

    A thread holds elements of two rows; elements 0 and 2 are of different rows.
    """
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * number + i};" for i in range(number))
    return (
        f"{{ .reg .pred some, any; setp.neu.f32 some, ${2 * number}, 1.0; "
        f"setp.neu.or.f32 some, ${2 * number + 2}, 1.0, some; vote.sync.any.pred any, some, -1; "
        f"@!any bra.uni DONE; {products} DONE: }}"
    )


@gluon.jit
def rescale_rows(x, factors):
    """Return the accumulator x times ``factors`` (of the same shape, equal within a row)."""
    N: gl.constexpr = x.shape[1] // 2  # elements of a thread
    return gl.inline_asm_elementwise(
        rescale_rows_ptx(N), in_place_constraints(N), [x, factors], dtype=gl.float32, is_pure=True, pack=N
    )


@gluon.constexpr_function
def zero_rows_ptx(number):
    """Return PTX that zeroes those of ``number`` elements of two rows that have a factor of 0, if the warp has any."""
    zeros = " ".join(f"@{('first', 'second')[i // 2 % 2]} mov.f32 ${i}, 0.0;" for i in range(number))
    return (
        f"{{ .reg .pred first, second, any; setp.eq.f32 first, ${2 * number}, 0.0; "
        f"setp.eq.f32 second, ${2 * number + 2}, 0.0; or.pred any, first, second; vote.sync.any.pred any, any, -1; "
        f"@!any bra.uni DONE; {zeros} DONE: }}"
    )


@gluon.jit
def zero_rows(x, factors):
    """Return the accumulator x with 0 in rows whose factor is 0. A fully masked row may hold NaN, from 0 times a NaN of v."""
    N: gl.constexpr = x.shape[1] // 2  # elements of a thread
    factors, _ = gl.broadcast(factors, x)
    return gl.inline_asm_elementwise(
        zero_rows_ptx(N), in_place_constraints(N), [x, factors], dtype=gl.float32, is_pure=True, pack=N
    )


# ------------------------------------------------------------------ the stale maximum: votes and rounding
@gluon.constexpr_function
def declare_registers_ptx(warpgroup, columns):
    """Return PTX that declares the registers of one warpgroup for the functions below: a flag and a copy of rounded P."""
    return f".reg .b32 high_{warpgroup}, p_{warpgroup}_<{columns // 4}>; mov.b32 high_{warpgroup}, 0; mov.u32 $0, 0;"


@gluon.jit
def declare_registers(p, W: gl.constexpr):
    """Declare the registers of warpgroup W (.reg), once, before `any_above` and `round_and_keep`.

    Gluon has no scalars that differ among threads, so such state lives in named PTX registers.
    """
    gl.inline_asm_elementwise(declare_registers_ptx(W, p.shape[1]), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def compare_ptx(warpgroup):
    """Return PTX that stores in the flag whether one of a thread's two elements is above its limit."""
    compare = "setp.gt.f32 some, $2, $4; setp.gt.or.f32 some, $3, $5, some;"
    return f"{{ .reg .pred some; {compare} selp.b32 high_{warpgroup}, 1, 0, some; mov.u32 $0, 0; mov.u32 $1, 0; }}"


@gluon.constexpr_function
def vote_ptx(warpgroup):
    """Return PTX whose result is not 0 if the flag of any thread of the warpgroup is set.

    A ballot follows the barrier reduction because the assembler treats the result of a ballot as uniform.
    """
    vote = f"bar.red.or.pred some, {11 + warpgroup}, 128, some; vote.sync.ballot.b32 $0, some, -1;"
    return f"{{ .reg .pred some; setp.ne.u32 some, high_{warpgroup}, 0; {vote} }}"


@gluon.jit
def any_above(x, limit, W: gl.constexpr):
    """Return a number that is not 0 if an element of x (64, 4), in `lane_sum_layout`, is above its limit."""
    gl.inline_asm_elementwise(compare_ptx(W), "=r,=r,f,f,f,f", [x, limit], dtype=gl.int32, is_pure=False, pack=2)
    return gl.inline_asm_elementwise(vote_ptx(W), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def round_and_keep_ptx(warpgroup, number, dtype):
    """Return PTX that rounds a thread's ``number`` elements of P, two to a word, and copies them to named registers."""
    words, kind = number // 2, "bf16" if dtype == gl.bfloat16 else "f16"
    pairs = ((i, words + 2 * i) for i in range(words))
    return " ".join(f"cvt.rn.{kind}x2.f32 ${i}, ${at + 1}, ${at}; mov.b32 p_{warpgroup}_{i}, ${i};" for i, at in pairs)


@gluon.constexpr_function
def round_and_keep_constraints(number):
    """Return the constraints of `round_and_keep_ptx`."""
    return ",".join(["=r"] * (number // 2) + ["f"] * number)


@gluon.jit
def round_and_keep(p, like, W: gl.constexpr):
    """Return P in the two-byte dtype of ``like``, and keep a copy in named registers for `add_rounding_excess`.

    If `add_rounding_excess` read P from the operand of the MMA, Triton would unpack it in every tile, also where the
    branch is skipped.
    """
    N: gl.constexpr = p.shape[1] // 2  # elements of a thread
    return gl.inline_asm_elementwise(
        round_and_keep_ptx(W, N, like.dtype),
        round_and_keep_constraints(N),
        [p],
        dtype=like.dtype,
        is_pure=False,
        pack=N,
    )


@gluon.constexpr_function
def add_rounding_excess_ptx(warpgroup, columns, dtype):
    """Return PTX that adds to $0 and $1, for two rows, the sums $4 and $5 of P minus the sums of rounded P.

    It does so only where a sum is above its limit, $6 or $7. Words 2 i of the rounded P are of the first row, 2 i + 1 of
    the second.
    """
    lines = ["{ .reg .pred first, second, any; .reg .b16 low, high; .reg .b32 x, sum_<4>;"]
    lines += ["setp.gt.f32 first, $4, $6; setp.gt.f32 second, $5, $7; or.pred any, first, second;"]
    lines += ["vote.sync.any.pred any, any, -1; @!any bra.uni DONE;"]
    lines += ["mov.f32 sum_0, $4; mov.f32 sum_1, $5; mov.f32 sum_2, 0.0; mov.f32 sum_3, 0.0;"]
    for i in range(columns // 4):
        p = f"p_{warpgroup}_{i}"
        if dtype == gl.bfloat16:  # cvt.f32.bf16 of both halves would take three instructions more
            halves = f"shl.b32 x, {p}, 16;", f"and.b32 x, {p}, 0xffff0000;"
        else:
            halves = f"mov.b32 {{low, high}}, {p}; cvt.f32.f16 x, low;", "cvt.f32.f16 x, high;"
        lines += [f"{half} sub.f32 sum_{i % 4}, sum_{i % 4}, x;" for half in halves]
    for row, flag in enumerate(("first", "second")):
        lines.append(f"add.f32 x, sum_{row}, sum_{row + 2}; @{flag} add.f32 ${row}, ${row}, x;")
    return " ".join(lines) + " DONE: }"


@gluon.jit
def add_rounding_excess(excess, p, sums, limit, W: gl.constexpr):
    """Return ``excess`` (64, 4) plus ``sums`` minus the sums of rounded P, where ``sums`` is above ``limit``.

    ``sums``: of exact P, by lane. Rounded P is the copy that the last `round_and_keep` kept; p gives its shape and dtype.
    A warp without such a sum skips the work.
    """
    return gl.inline_asm_elementwise(
        add_rounding_excess_ptx(W, p.shape[1], p.dtype),
        "=f,=f,0,1,f,f,f,f",
        [excess, sums, limit],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )
