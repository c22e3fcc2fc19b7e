"""The inline PTX of the Hopper kernels does what its docstrings say, on a warp that a few lines of
Python emulate.

The simulator replaces these functions as a whole, so it never runs the text of the PTX.
"""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.experimental.gluon import language as gl

import canon.fast.kernels as kernels
from canon.fast.kernels.gluon.ptx import (
    add_rounding_excess_ptx,
    capped_weights_ptx,
    compare_ptx,
    declare_registers_ptx,
    keep_between_ptx,
    rescale_rows_ptx,
    round_and_keep_ptx,
    tanh_ptx,
    transpose_words_ptx,
    vote_ptx,
    zero_rows_ptx,
)

LANES = np.arange(32)


def halves(x, kind):
    """Return x rounded to two bytes, as bits."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    return (
        torch.from_numpy(x.astype(np.float32))
        .to(dtype)
        .view(torch.int16)
        .numpy()
        .view(np.uint16)
        .astype(np.uint32)
    )


def bits_from(first, width):
    """Return words with ``width`` bits from bit ``first`` on. Both are unsigned, and clamped."""
    first, width = (number.astype(np.int64) & 0xFFFFFFFF for number in (first, width))
    ends = np.minimum(np.stack([first, first + width]), 32).astype(np.uint64)
    ones = (np.uint64(1) << ends) - np.uint64(1)
    return (ones[1] & ~ones[0]).astype(np.uint32)


OPERATIONS = {  # without the type. Those in float32 read the bits of a word as a float
    "mov": lambda x: x,
    "and": lambda x, y: x.astype(np.uint32) & y.astype(np.uint32),
    "shl": lambda x, y: x << y.astype(np.uint32),
    "shr": np.right_shift,
    "mad.lo": lambda x, y, z: x * y + z,
    "bmsk.clamp": bits_from,
    "max": np.maximum,
    "min": np.minimum,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma.rn": lambda x, y, z: x * y + z,
    "abs": np.abs,
    "neg": np.negative,
    "copysign": lambda sign, x: np.copysign(x, sign),
    "ex2.approx.ftz": np.exp2,
    "rcp.approx.ftz": np.reciprocal,
    "or": np.logical_or,
    "selp": lambda x, y, chosen: np.where(chosen, x, y),
    "setp.eq": np.equal,
    "setp.ne": np.not_equal,
    "setp.neu": np.not_equal,
    "setp.gt": np.greater,
    "setp.lt": np.less,
    "setp.neu.or": lambda x, y, other: (x != y) | other,
    "setp.gt.or": lambda x, y, other: (x > y) | other,
    "bar.red.or": lambda barrier, threads, x: np.full(32, x.any()),
    "vote.sync.any": lambda x, lanes: np.full(32, x.any()),
    "vote.sync.ballot": lambda x, lanes: np.full(32, (x << LANES).sum()),
    "shfl.sync.bfly": lambda x, apart, *_: x[LANES ^ apart],
    "cvt.rn.bf16x2": lambda high, low: halves(high, "bf16") << 16 | halves(low, "bf16"),
    "cvt.rn.f16x2": lambda high, low: halves(high, "f16") << 16 | halves(low, "f16"),
    "cvt.f32": lambda x: x.astype(np.uint16).view(np.float16).astype(np.float32),
}


def run(text, operands):
    """Return the registers of a warp after the instructions of ``text``, an array over lanes. A
    warpgroup is one warp here.
    """
    registers, skipped_to = operands | {"%laneid": LANES}, ""
    for line in re.sub(r"[{}]", "", text).split(";"):
        label, _, line = line.rpartition(":")
        skipped_to = "" if label.strip() == skipped_to else skipped_to
        operation, _, rest = line.strip().partition(" ")
        if skipped_to or not operation or operation == ".reg":
            continue
        kept = np.full(32, True)
        if operation.startswith("@"):
            kept = registers[operation[1:].removeprefix("!")] ^ operation.startswith("@!")
            operation, _, rest = rest.partition(" ")
        if operation == "bra.uni":
            assert len(set(kept)) == 1, "a branch of the whole warp"
            skipped_to = rest if kept[0] else ""
            continue
        target, *names = (name.strip() for name in rest.split(","))
        if operation == "mov.b32" and len(names) == 2:  # a word's two halves
            word = registers[names[1]]
            registers[target], registers[names[0]] = word & 0xFFFF, word >> 16
            continue
        x = [registers[y] if y in registers else literal(y) for y in names]
        name, _, kind = operation.rpartition(".")
        if kind == "f32":
            x = [y.view(np.float32) if y.dtype == np.uint32 else y for y in x]
        made = OPERATIONS[name](*x)
        registers[target] = made if kept.all() else np.where(kept, made, registers[target])
    return registers


def literal(name):
    """Return a literal operand for each lane."""
    if name.startswith("0f"):
        return np.full(32, int(name[2:], 16), np.uint32).view(np.float32)
    return np.full(32, ast.literal_eval(name))


def numbered(first, values):
    """Name the values $first, $first + 1 and so on."""
    return {f"${first + i}": value for i, value in enumerate(values)}


def elements(number, registers):
    return np.stack([registers[f"${i}"] for i in range(number)])


def touched(operands, after, number):
    """Return whether an instruction has written to one of the first operands."""
    return any(after[f"${i}"] is not operands[f"${i}"] for i in range(number))


def rows_of(number):
    """Return the row, 0 or 1, of each element of a thread: they alternate in pairs."""
    return np.arange(number) // 2 % 2


def at(places, value):
    """Return ones in two rows, and ``value`` in these (lane, row)."""
    made = np.ones((2, 32))
    for lane, row in places:
        made[row, lane] = value
    return made


def test_four_lanes_exchange_their_words():
    word = lambda i, lane: 100 * lane + 10 * (i % 2) + i // 2
    after = run(transpose_words_ptx(), numbered(8, [word(i, LANES) for i in range(8)]))
    for i in range(8):
        expected = word(LANES % 4 * 2 + i % 2, LANES // 4 * 4 + i // 2)
        np.testing.assert_array_equal(after[f"${i}"], expected)


@pytest.mark.parametrize("hidden", [-np.inf, 0.0])
@pytest.mark.parametrize("columns", [32, 64, 128])
def test_columns_outside_the_bounds_of_a_row_are_hidden(columns, hidden):
    number, row = columns // 2, rows_of(columns // 2)
    draw = np.random.default_rng(0)
    j = np.arange(number)[:, None] // 4 * 8 + LANES % 4 * 2 + np.arange(number)[:, None] % 2
    for _ in range(40):
        x = np.where(draw.random((number, 32)) < 0.3, np.nan, 1.0)
        near = draw.choice([1, 1, 1000], (2, 2, 32))
        left, right = draw.integers(-20, columns + 20, (2, 2, 32)) * near
        operands = numbered(0, [*x, *[0] * number, *left[row], *right[row]])
        after = run(keep_between_ptx(number, hidden), operands)
        expected = np.where((left[row] <= j) & (j < right[row]), x, hidden)
        np.testing.assert_array_equal(elements(number, after), expected)


@pytest.mark.parametrize(("ptx", "factor"), [(rescale_rows_ptx, 0.25), (zero_rows_ptx, 0.0)])
@pytest.mark.parametrize("rows", [[], [(4, 0)], [(17, 1)], [(0, 0), (31, 1)]])
def test_a_warp_rescales_its_rows_if_any_factor_is_not_1_and_a_factor_of_0_removes_nan(
    rows, ptx, factor
):
    factors = at(rows, factor)[rows_of(8)]
    x = np.arange(8 * 32, dtype=float).reshape(8, 32)
    given = np.where(factors == 0, np.nan, x)
    operands = numbered(0, [*given, *[0] * 8, *factors])
    after = run(ptx(8), operands)
    np.testing.assert_array_equal(elements(8, after), x * factors)
    assert touched(operands, after, 8) == bool(rows), "a warp without such rows skips the work"


@pytest.mark.parametrize("above", [[], [(5, 0)], [(31, 1)], [(0, 0), (9, 1)]])
def test_the_vote_reaches_all_threads(above):
    limit = np.array([np.full(32, 1.0), np.full(32, 4.0)])
    x = at(above, 1.5) * limit
    x[1, 7] = np.nan  # not above the limit: repeating the tile would not remove it
    registers = run(declare_registers_ptx(0, 128), {}) | run(declare_registers_ptx(1, 128), {})
    registers |= run(compare_ptx(0), registers | numbered(2, [*x, *limit]))
    assert (run(vote_ptx(0), registers)["$0"] != 0).tolist() == [bool(above)] * 32
    assert not run(vote_ptx(1), registers)["$0"].any()


@pytest.mark.parametrize(
    ("dtype", "kind", "rounded"),
    [(gl.bfloat16, "bf16", torch.bfloat16), (gl.float16, "f16", torch.float16)],
    ids=["bf16", "f16"],
)
@pytest.mark.parametrize("above", [[], [(5, 0)], [(31, 1)], [(0, 0), (0, 1), (9, 1)]])
def test_rounding_excess_is_added_where_sums_are_above_their_limit(above, dtype, kind, rounded):
    number, row = 64, rows_of(64)
    p = np.random.default_rng(0).exponential(size=(number, 32)).astype(np.float32)
    registers = run(round_and_keep_ptx(1, number, dtype), numbered(number // 2, p))
    expected = halves(p, kind)
    words = expected[1::2] << 16 | expected[::2]
    np.testing.assert_array_equal(elements(number // 2, registers), words)

    sums, excess = np.stack([p[row == r].sum(0) for r in (0, 1)]), np.full((2, 32), 0.125)
    limit = sums * at(above, 0.99).astype(np.float32)  # a sum equal to its limit is not above it
    operands = numbered(0, [*excess, 0, 0, *sums, *limit])
    after = run(add_rounding_excess_ptx(1, 2 * number, dtype), registers | operands)
    rest = torch.from_numpy(p).to(rounded).double().numpy()
    more = np.where(limit < sums, sums - [rest[row == r].sum(0) for r in (0, 1)], 0)
    np.testing.assert_allclose(elements(2, after), excess + more, atol=1e-4)
    assert (abs(more[limit < sums]) > 1e-3).all() or kind == "f16", "rounding changes the sums"
    assert touched(operands, after, 2) == bool(above), "a warp without such rows skips the work"


def test_tanh_and_the_weights_of_capped_scores():
    values = [0.0, 1e-30, 1e-6, 1e-3, 0.01, 0.3, 0.5499, 0.5501, 1.0, 3.0, 9.0, 40.0, 1e6, np.inf]
    x = np.array([*values, 0.1, 0.7, *(-x for x in values), -0.1, -0.7])
    lse = np.linspace(-3, 5, 32)
    t = run(f"{{ {tanh_ptx('$1')} mov.f32 $0, t; }}", {"$1": x})["$0"]
    np.testing.assert_allclose(t, np.tanh(x), rtol=1e-7)
    found = run(capped_weights_ptx(7.25), {"$2": x, "$3": lse})
    p = np.exp2(7.25 * np.tanh(x) - lse)
    np.testing.assert_allclose(found["$0"], p, rtol=1e-6)
    slope = 1 / np.cosh(np.clip(x, -300, 300)) ** 2
    np.testing.assert_allclose(found["$1"], p * slope, rtol=1e-6, atol=1e-250)


def formatted_arguments(source):
    """Return the line of each call in ``source`` that passes an f-string to a compiled function."""
    return [
        call.lineno
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        and "jit" in map(last_name, function.decorator_list)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        for given in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(given, ast.JoinedStr)
    ]


def last_name(decorator):
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    return ast.unparse(decorator).rpartition(".")[2]


def test_no_compiled_function_gets_an_f_string():
    """Triton 3.6 compiles no such call, later versions do. `gl.inline_asm_elementwise` and other
    functions of Triton take one in all versions.
    """
    found = {
        str(path): lines
        for path in sorted(Path(kernels.__path__[0]).rglob("*.py"))
        if (lines := formatted_arguments(path.read_text()))
    }
    assert found == {}
    assert formatted_arguments('@gluon.jit\ndef f(ID):\n    run_ptx(f"bar.sync {ID};")') == [3]
