"""All inline PTX of the Hopper kernels, and operations of Triton that Gluon lacks.
tests/kernels/gluon/test_ptx.py runs ``*_ptx`` on an emulated warp.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from canon.fast.kernels.triton.blocks import TANH


@gluon.jit
def run_ptx(PTX: gl.constexpr):
    """Run PTX without operands and result; `gl.inline_asm_elementwise` must return one."""
    TEXT: gl.constexpr = PTX + " mov.u32 $0, 0;"
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# ------------------------------------------------------------------ TMA reductions
@builtin
def tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    """Start global[coordinates] += shared memory by TMA."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def wait_for_reductions():
    """Wait until this warp's TMA reductions are complete in global memory, with a proxy fence (PTX
    ISA, Async Proxy). The barrier orders all lanes after the issuing one.
    """
    run_ptx("cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff;")


# ------------------------------------------------------------------ memory order between CTAs
@gluon.jit
def load_acquire(pointer):
    """Load an int32 with acquire semantics (PTX ISA, 8.8 and 8.9.5)."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];",
        "=r,l",
        [pointer.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_release(pointer, number):
    """Store an int32 from one lane, after all lanes by the barrier of `wait_for_reductions`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; elect.sync _|one, 0xffffffff; @one st.release.gpu.global.s32 [$1], $2; "
        "mov.u32 $0, 0; }",
        "=r,l,r",
        [pointer.to(gl.int64), number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def back_off():
    """Sleep for at most 64 ns, so that polling leaves memory bandwidth."""
    run_ptx("nanosleep.u32 32;")


@gluon.jit
def fence_async_global():
    """Order later TMA operations (async proxy) behind `load_acquire` (generic; PTX ISA, 8.9.5)."""
    run_ptx("fence.proxy.async.global;")


@gluon.jit
def named_barrier(KIND: gl.constexpr, ID: gl.constexpr):
    """Run bar.sync or bar.arrive for two warpgroups. Triton itself uses the IDs below 8."""
    gl.inline_asm_elementwise(
        f"bar.{KIND} {ID}, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ping_pong_wait(WARPGROUP: gl.constexpr):
    """Wait until the previous warpgroup calls `ping_pong_arrive`."""
    named_barrier("sync", 8 + WARPGROUP)


@gluon.jit
def ping_pong_arrive(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Let the next warpgroup issue its MMAs."""
    named_barrier("arrive", 8 + (WARPGROUP + 1) % WARPGROUPS)


# ------------------------------------------------------------------ operations with a fixed place
@gluon.jit
def broadcast_rows(x, like):
    """Return x in every row of a block. Only volatile moves stay before the next MMA."""
    x, _ = gl.broadcast(gl.expand_dims(x, 0), like)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
    )


@gluon.jit
def keep_where_nonzero(x, p):
    """Return x, and 0 where p is 0. The assembler would hoist a plain select out of its branch."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred keep; setp.neu.f32 keep, $2, 0.0; selp.f32 $0, $1, 0.0, keep; }",
        "=f,0,f",
        [x, p],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


# ------------------------------------------------------------------ masks
@gluon.constexpr_function
def keep_between_ptx(number, value):
    """Return the PTX of `keep_between` for ``number`` elements of two rows.

    A lane holds columns 8 i + c + e of a row, with e = 0 and 1, and c = 2 (lane % 4): bit 2 i + e
    of a word. Row after row, the assembler copies 7 bits to predicates at a time (R2P), with
    another register. Narrow tiles have none left, and alternate rows."""
    hidden = "0fFF800000" if value < 0.0 else "0f00000000"
    lines = [
        "{ .reg .pred keep; .reg .b32 c, bit, end, rest, word_<2>; mov.u32 c, %laneid; and.b32 c, "
        "c, 3; shl.b32 c, c, 1;"
    ]
    for row in (0, 1):
        for bound, at in ((f"word_{row}", 2 * number + 2 * row), ("end", 3 * number + 2 * row)):
            lines.append(
                f"sub.s32 {bound}, ${at}, c; max.s32 {bound}, {bound}, 0; and.b32 rest, {bound}, 7;"
            )
            lines.append(
                f"min.s32 rest, rest, 2; shr.s32 {bound}, {bound}, 3; mad.lo.s32 "
                f"{bound}, {bound}, 2, rest;"
            )
        lines.append(f"max.s32 end, end, word_{row}; sub.s32 end, end, word_{row};")
        lines.append(f"bmsk.clamp.b32 word_{row}, word_{row}, end;")
    rows = number == 64
    for at in range(number):
        row, i = (at // (number // 2), at % (number // 2)) if rows else (at % 2, at // 2)
        x = 4 * (i // 2) + 2 * row + i % 2
        lines.append(
            f"and.b32 bit, word_{row}, {1 << i:#x}; setp.ne.s32 keep, bit, 0; selp.f32 ${x}, "
            f"${x}, {hidden}, keep;"
        )
    return " ".join(lines) + " }"


@gluon.constexpr_function
def in_place_constraints(number, kind, others):
    """Return constraints of results, inputs in place, and ``others`` of a kind."""
    return ",".join(["=f"] * number + [str(i) for i in range(number)] + [kind] * others)


@gluon.jit
def keep_between(x, left, right, HIDDEN: gl.constexpr):
    """Return x (at most 128 columns) with HIDDEN, 0 or -inf, except in columns left <= j <
    right.
    """
    N: gl.constexpr = x.shape[1] // 2  # elements of a thread
    left, _ = gl.broadcast(left, x)
    right, _ = gl.broadcast(right, x)
    return gl.inline_asm_elementwise(
        keep_between_ptx(N, HIDDEN),
        in_place_constraints(N, "r", 2 * N),
        [x, left, right],
        dtype=gl.float32,
        is_pure=True,
        pack=N,
    )


# ------------------------------------------------------------------ soft-caps
@gluon.constexpr_function
def tanh_ptx(x):
    """Return PTX of t = tanh(x) and, with y, the derivative 4 e y^2 (`blocks.tanh`), by element: an
    interleaved tile would spill registers.
    """
    polynomial = "".join(f" fma.rn.f32 t, t, y, {number};" for number in TANH[-2::-1])
    small = (
        f"mul.f32 y, {x}, {x}; mov.f32 t, {TANH[-1]};{polynomial} mul.f32 y, y, {x}; "
        f"fma.rn.f32 t, t, y, {x};"
    )
    e = (
        f"abs.f32 z, {x}; setp.lt.f32 near, z, 0.55; mul.f32 e, z, -2.8853900817779268; "
        "ex2.approx.ftz.f32 e, e;"
    )
    large = (
        "add.f32 y, e, 1.0; rcp.approx.ftz.f32 y, y; sub.f32 z, 1.0, e; mul.f32 z, z, y; "
        f"copysign.f32 z, {x}, z;"
    )
    return f".reg .f32 y, z, t, e; .reg .pred near; {small} {e} {large} selp.f32 t, t, z, near;"


@gluon.jit
def tanh(x):
    """Return tanh(x), float32, with a relative error below 4e-7."""
    return gl.inline_asm_elementwise(
        f"{{ {tanh_ptx('$1')} mov.f32 $0, t; }}",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def capped_weights_ptx(limit):
    """Return the PTX of `capped_weights`."""
    p = f"neg.f32 z, $3; fma.rn.f32 z, t, {limit:.9e}, z; ex2.approx.ftz.f32 $0, z;"
    slope = "mul.f32 y, y, y; mul.f32 e, e, y; mul.f32 e, e, 4.0; mul.f32 $1, e, $0;"
    return f"{{ {tanh_ptx('$2')} {p} {slope} }}"


@gluon.jit
def capped_weights(x, lse, LIMIT: gl.constexpr):
    """Return p = 2^(LIMIT tanh(x) - lse), and p times the derivative of tanh."""
    lse, _ = gl.broadcast(lse, x)
    return gl.inline_asm_elementwise(
        capped_weights_ptx(LIMIT),
        "=&f,=&f,f,f",
        [x, lse],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


# ------------------------------------------------------------------ transpose within a quad
@gluon.constexpr_function
def transpose_words_ptx():
    """Return PTX that makes word i of lane j of a quad word j of lane i, in two rows."""
    lines = [
        "{ .reg .pred odd, high; .reg .b32 bits, mine, theirs; mov.u32 bits, %laneid; "
        "and.b32 mine, bits, 1;"
    ]
    lines += ["setp.ne.u32 odd, mine, 0; and.b32 mine, bits, 2; setp.ne.u32 high, mine, 0;"]
    lines += [f"mov.b32 ${i}, ${8 + i};" for i in range(8)]
    # The upper of two lanes swaps its lower word for the other lane's upper word.
    for apart, upper in ((1, "odd"), (2, "high")):
        for row, word in ((row, word) for row in (0, 1) for word in range(4) if not word & apart):
            low, high = f"${2 * word + row}", f"${2 * (word | apart) + row}"
            lines.append(
                f"selp.b32 mine, {low}, {high}, {upper}; shfl.sync.bfly.b32 theirs, "
                f"mine, {apart}, 31, -1;"
            )
            lines.append(
                f"selp.b32 {low}, theirs, {low}, {upper}; selp.b32 {high}, {high}, theirs, {upper};"
            )
    return " ".join(lines) + " }"


@gluon.jit
def transpose_words(x):
    """Return x (two bytes) with pairs 8 i + 2 j and 8 j + 2 i of every 32 columns swapped."""
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
def rescale_rows_ptx(number):
    """Return the PTX of `rescale_rows`. A warp whose factors are all 1 skips it."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * number + i};" for i in range(number))
    return (
        f"{{ .reg .pred some, any; setp.neu.f32 some, ${2 * number}, 1.0; "
        f"setp.neu.or.f32 some, ${2 * number + 2}, 1.0, some; vote.sync.any.pred any, some, -1; "
        f"@!any bra.uni DONE; {products} DONE: }}"
    )


@gluon.jit
def rescale_rows(x, factors):
    """Return the accumulator x times ``factors`` (its shape, equal within a row)."""
    N: gl.constexpr = x.shape[1] // 2
    return gl.inline_asm_elementwise(
        rescale_rows_ptx(N),
        in_place_constraints(N, "f", N),
        [x, factors],
        dtype=gl.float32,
        is_pure=True,
        pack=N,
    )


@gluon.constexpr_function
def zero_rows_ptx(number):
    """Return the PTX of `zero_rows`."""
    zeros = " ".join(
        (f"@{('first', 'second')[i // 2 % 2]} mov.f32 ${i}, 0.0;") for i in range(number)
    )
    return (
        f"{{ .reg .pred first, second, any; setp.eq.f32 first, ${2 * number}, 0.0; "
        f"setp.eq.f32 second, ${2 * number + 2}, 0.0; or.pred any, first, second; "
        "vote.sync.any.pred any, any, -1; "
        f"@!any bra.uni DONE; {zeros} DONE: }}"
    )


@gluon.jit
def zero_rows(x, factors):
    """Return x with 0 in rows whose factor is 0: a fully masked row may hold NaN."""
    N: gl.constexpr = x.shape[1] // 2
    factors, _ = gl.broadcast(factors, x)
    return gl.inline_asm_elementwise(
        zero_rows_ptx(N),
        in_place_constraints(N, "f", N),
        [x, factors],
        dtype=gl.float32,
        is_pure=True,
        pack=N,
    )


# ------------------------------------------------------------------ the stale maximum
@gluon.constexpr_function
def declare_registers_ptx(warpgroup, columns):
    """Return the PTX of `declare_registers`."""
    names = f"high_{warpgroup}, p_{warpgroup}_<{columns // 4}>"
    return f".reg .b32 {names}; mov.b32 high_{warpgroup}, 0;"


@gluon.jit
def declare_registers(p, W: gl.constexpr):
    """Declare a warpgroup's flag and copy of rounded P: Gluon has no scalars by thread."""
    run_ptx(declare_registers_ptx(W, p.shape[1]))


@gluon.constexpr_function
def compare_ptx(warpgroup):
    """Return PTX that sets the flag if one of two elements exceeds its limit."""
    compare = "setp.gt.f32 some, $2, $4; setp.gt.or.f32 some, $3, $5, some;"
    choose = f"selp.b32 high_{warpgroup}, 1, 0, some;"
    return f"{{ .reg .pred some; {compare} {choose} mov.u32 $0, 0; mov.u32 $1, 0; }}"


@gluon.constexpr_function
def vote_ptx(warpgroup):
    """Return PTX that is not 0 if any flag of the warpgroup is set."""
    vote = f"bar.red.or.pred some, {11 + warpgroup}, 128, some; vote.sync.ballot.b32 $0, some, -1;"
    return f"{{ .reg .pred some; setp.ne.u32 some, high_{warpgroup}, 0; {vote} }}"


@gluon.jit
def any_above(x, limit, W: gl.constexpr):
    """Return not 0 if an element of x (64, 4) is above its limit."""
    gl.inline_asm_elementwise(
        compare_ptx(W), "=r,=r,f,f,f,f", [x, limit], dtype=gl.int32, is_pure=False, pack=2
    )
    return gl.inline_asm_elementwise(vote_ptx(W), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def round_and_keep_ptx(warpgroup, number, dtype):
    """Return the PTX of `round_and_keep`."""
    words, kind = number // 2, "bf16" if dtype == gl.bfloat16 else "f16"
    pairs = ((i, words + 2 * i) for i in range(words))
    return " ".join(
        (f"cvt.rn.{kind}x2.f32 ${i}, ${at + 1}, ${at}; mov.b32 p_{warpgroup}_{i}, ${i};")
        for i, at in pairs
    )


@gluon.constexpr_function
def round_and_keep_constraints(number):
    """Return its constraints."""
    return ",".join(["=r"] * (number // 2) + ["f"] * number)


@gluon.jit
def round_and_keep(p, like, W: gl.constexpr):
    """Return P in the dtype of ``like``, and keep a copy for `add_rounding_excess`: Triton would
    unpack P from the operand in every tile.
    """
    N: gl.constexpr = p.shape[1] // 2
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
    """Return PTX that adds to $0 and $1, for two rows, the sums $4 and $5 minus those of rounded P,
    where above $6 or $7.
    """
    lines = ["{ .reg .pred first, second, any; .reg .b16 low, high; .reg .b32 x, sum_<4>;"]
    lines += ["setp.gt.f32 first, $4, $6; setp.gt.f32 second, $5, $7; or.pred any, first, second;"]
    lines += ["vote.sync.any.pred any, any, -1; @!any bra.uni DONE;"]
    lines += ["mov.f32 sum_0, $4; mov.f32 sum_1, $5; mov.f32 sum_2, 0.0; mov.f32 sum_3, 0.0;"]
    for i in range(columns // 4):
        p = f"p_{warpgroup}_{i}"
        if dtype == gl.bfloat16:  # cvt.f32.bf16 would take three instructions more
            halves = f"shl.b32 x, {p}, 16;", f"and.b32 x, {p}, 0xffff0000;"
        else:
            halves = f"mov.b32 {{low, high}}, {p}; cvt.f32.f16 x, low;", "cvt.f32.f16 x, high;"
        lines += [f"{half} sub.f32 sum_{i % 4}, sum_{i % 4}, x;" for half in halves]
    for row, flag in enumerate(("first", "second")):
        lines.append(f"add.f32 x, sum_{row}, sum_{row + 2}; @{flag} add.f32 ${row}, ${row}, x;")
    return " ".join(lines) + " DONE: }"


@gluon.jit
def add_rounding_excess(excess, p, sums, limit, W: gl.constexpr):
    """Return ``excess`` (64, 4) plus ``sums`` by lane minus those of the kept P, where ``sums`` >
    ``limit``.
    """
    return gl.inline_asm_elementwise(
        add_rounding_excess_ptx(W, p.shape[1], p.dtype),
        "=f,=f,0,1,f,f,f,f",
        [excess, sums, limit],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )
