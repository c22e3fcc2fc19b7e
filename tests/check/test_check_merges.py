"""`canon check` finds merges in 16 bits in its default table."""

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
        "narrow --tokens 280 --runs 1 --only 'ring_attention/*/*ca*' --features",
        words,
    )
    assert status == 1
    assert any(result["verdict"] == "disagrees" for result in record["results"])
