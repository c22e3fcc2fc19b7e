"""What the Hopper kernels have in PTX, run by a few lines of Python: the simulator knows what it stands for, not the text."""

import re

import numpy as np
import pytest

from canon.fast.kernels.gluon.blocks import exchange
from canon.fast.kernels.gluon.forward import comparing, declaring, scaling, voting

LANES = np.arange(32)


def run(text: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The registers of a warp, here a whole warpgroup, after the instructions of ``text``: a number for each lane."""
    registers, labels = dict(operands) | {"%laneid": LANES}, set(re.findall(r"(\w+):", text))
    skipped_to = ""
    for line in re.sub(r"\w+:|[{}]", "", text).split(";"):
        operation, _, rest = line.strip().partition(" ")
        if skipped_to or not operation or operation == ".reg":
            continue
        if operation.startswith("@!"):
            predicate = registers[operation[2:]]
            assert rest.split()[0] == "bra.uni"
            assert rest.split()[1] in labels
            assert len(set(predicate)) == 1, "a branch of the whole warp"
            skipped_to = "" if predicate[0] else rest.split()[1]
            continue
        target, *names = (name.strip() for name in rest.split(","))
        x = [registers[name] if name in registers else np.full(32, float(name)) for name in names]
        match operation.split("."):
            case ["mov", _]:
                registers[target] = x[0]
            case ["and", _]:
                registers[target] = x[0].astype(int) & x[1].astype(int)
            case ["selp", _]:
                registers[target] = np.where(x[2], x[0], x[1])
            case ["setp", "ne" | "neu", _]:
                registers[target] = x[0] != x[1]
            case ["setp", "neu", "or", _]:
                registers[target] = (x[0] != x[1]) | x[2]
            case ["setp", "gt", _]:
                registers[target] = x[0] > x[1]
            case ["setp", "gt", "or", _]:
                registers[target] = (x[0] > x[1]) | x[2]
            case ["bar", "red", "or", _]:
                registers[target] = np.full(32, x[2].any())
            case ["vote", "sync", "ballot", _]:
                registers[target] = np.full(32, sum(1 << int(lane) for lane in LANES[x[0]]))
            case ["shfl", "sync", "bfly", _]:
                registers[target] = x[0][LANES ^ int(names[1])]
            case ["vote", "sync", "any", _]:
                registers[target] = np.full(32, x[0].any())
            case ["mul", _]:
                registers[target] = x[0] * x[1]
            case _:
                raise NotImplementedError(line)
    return registers


def test_four_lanes_exchange_their_words():
    word = lambda row, i, lane: 100 * lane + 10 * row + i
    before = {f"${8 + 2 * i + row}": word(row, i, LANES) for i in range(4) for row in range(2)}
    after = run(exchange(), before)
    for i in range(4):
        for row in range(2):
            np.testing.assert_array_equal(after[f"${2 * i + row}"], word(row, LANES % 4, LANES // 4 * 4 + i))


@pytest.mark.parametrize("growing", [[], [(3, 0)], [(17, 1)], [(0, 0), (31, 1)]])
def test_rows_are_scaled_if_any_of_the_warp_has_to_be(growing):
    number = 8  # elements, of rows 0 and 1 in pairs
    factors = np.ones((2, 32))
    for lane, row in growing:
        factors[row, lane] = 0.25
    x = np.arange(number * 32, dtype=float).reshape(number, 32)
    operands = {f"${i}": x[i] for i in range(number)} | {
        f"${2 * number + i}": factors[i // 2 % 2] for i in range(number)
    }
    after = run(scaling(number), operands)
    for i in range(number):
        np.testing.assert_array_equal(after[f"${i}"], x[i] * factors[i // 2 % 2])
    touched = any(after[f"${i}"] is not operands[f"${i}"] for i in range(number))
    assert touched == bool(growing), "nothing is done where nothing has to be"


@pytest.mark.parametrize("above", [[], [(5, 0)], [(31, 1)], [(0, 0), (9, 1)]])
def test_one_thread_whose_sum_is_too_large_is_heard_by_all(above):
    x, limit = np.ones((2, 32)), np.ones((2, 32))
    x[1, 7] = np.nan  # it stays, and no maximum would mend it
    for lane, row in above:
        x[row, lane] = 1.5
    registers = run(declaring(0), {}) | run(declaring(1), {})
    registers |= run(comparing(0), registers | {"$2": x[0], "$3": x[1], "$4": limit[0], "$5": limit[1]})
    assert (run(voting(0), registers)["$0"] != 0).tolist() == [bool(above)] * 32
    assert not run(voting(1), registers)["$0"].any()
