"""`canon check` finds merges in 16 bits, and a wrong scale, in its default table."""

import pytest

# The functions of the reference, but merged results of steps have the dtype of q.
NARROW = """
import threading
from functools import partial
from canon import reference
from canon.reference import decode, magi, ring

narrow = threading.local()


def rounding(merged, *parts):
    out, lse = merged(*parts)
    return out.to(getattr(narrow, "dtype", out.dtype)).to(out.dtype), lse


for home in (ring, magi, decode):
    home.merged = partial(rounding, home.merged)


def narrowed(name, q, *given, **options):
    narrow.dtype = q.dtype
    try:
        return getattr(reference, name)(q, *given, **options)
    finally:
        del narrow.dtype


ring_attention, zigzag_attention, striped_attention, magi_attention, decode_attention = (
    partial(narrowed, f"{name}_attention")
    for name in ("ring", "zigzag", "striped", "magi", "decode")
)
"""
SCALED = """
from canon import reference

def attention(q, k, v, mask=None, {parameter}return_lse=False):
    {line}
    return reference.attention(q, k, v, mask, return_lse=return_lse{passed})
"""


@pytest.fixture
def narrow(write_module, monkeypatch):
    from canon.reference import decode, magi, ring

    for home in (ring, magi, decode):
        # the module replaces them: undo it afterwards
        monkeypatch.setattr(home, "merged", home.merged)
    write_module("narrow", NARROW)


@pytest.mark.parametrize("ranks", [3, 4])
def test_merging_in_16_bits_disagrees_in_every_function_that_merges(ranks, run, narrow):
    status, printed, record = run("narrow --ranks", ranks, "--runs", 1, "--only", "*cancelling*")
    wrong = {
        result["case"].split("/")[0]
        for result in record["results"]
        if result["verdict"] == "disagrees"
    }
    assert status == 1
    assert wrong == {
        f"{name}_attention" for name in ("ring", "zigzag", "striped", "magi", "decode")
    }
    assert "the reference itself" not in printed.out


@pytest.mark.parametrize("words", ["no-mask", "causal,no-options", "packed,forward"])
def test_limits_keep_a_case_that_shows_merging_in_16_bits(words, run, narrow):
    status, _, record = run(
        "narrow --tokens 560 --runs 1 --only 'ring_attention/*/*ca*' --features",
        words,
    )
    assert status == 1
    assert any(result["verdict"] == "disagrees" for result in record["results"])


def test_a_module_without_options_but_with_a_scale_is_tested_with_one(run, write_module):
    options = " --tokens 150 --runs 1 --only attention/block_causal/* --features no-options,finite"
    for name, parameter, line, passed, expected in (
        ("ignoring", "scale=None, ", "pass", "", 1),
        ("scaling", "scale=None, ", "pass", ", scale=scale", 0),
        ("without", "", "pass", "", 0),
    ):
        write_module(name, SCALED.format(parameter=parameter, line=line, passed=passed))
        assert run(name + options)[0] == expected, name
