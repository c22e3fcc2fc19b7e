"""Claims about repeated bits in `canon check`: they are judged under PyTorch's switch for
deterministic algorithms, and both ways are judged by their errors.
"""

import threading

import pytest
import torch

from canon.testing import process_groups
from canon.testing.deterministic import deterministic

MODULE = """
import collections, itertools, threading
import torch
from canon import reference

numbers = collections.defaultdict(itertools.count)

def zigzag_attention(q, k, v, mask=None, **options):
    out, lse = reference.zigzag_attention(q, k, v, mask, **options)
    switched = torch.are_deterministic_algorithms_enabled()
    call = next(numbers[threading.get_ident()])
    return out * {factor}, lse
"""
FACTORS = {  # of out: in each call
    "other bits in each run without the switch": ("(1 if switched else 1 + call * 2**-23)", ""),
    "other bits with the switch, in each run the same": ("(1 + switched * 2**-23)", ""),
    "other bits in each run with the switch": (
        "(1 + switched * call * 2**-23)",
        "run 3 gave other bits than run 2",
    ),
    "wrong with the switch": ("(1 + switched)", "under torch.use_deterministic_algorithms: "),
    "wrong without it": ("(2 - switched)", "out"),
}
CASE = "--tokens 60 --only zigzag_attention/zigzag/causal --dtype float32"


@pytest.mark.parametrize("name", FACTORS)
def test_bits_are_judged_under_the_switch_and_errors_in_both_ways(name, run, write_module):
    factor, fault = FACTORS[name]
    write_module("sometimes", MODULE.format(factor=factor))
    status, _, record = run(f"sometimes {CASE}")
    (result,) = record["results"]
    assert status == bool(fault)
    assert result["verdict"] == ("disagrees" if fault else "agrees")
    assert result["same_bits"] == ("run 3" not in fault)
    assert not fault or any(fault in text for text in result["faults"])
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_switch_of_ranks_that_are_threads_is_on_until_the_last_one_leaves():
    barrier, seen = threading.Barrier(3), []

    def program():
        with deterministic():
            barrier.wait()
            seen.append(torch.are_deterministic_algorithms_enabled())
            barrier.wait()
        barrier.wait()
        seen.append(torch.are_deterministic_algorithms_enabled())

    process_groups.threads(program, 3)
    assert seen == [True] * 3 + [False] * 3
