"""`canon check --bits` shows the rows with equal bits, and names the first token and head of a row
with other bits.
"""

import json

import pytest
import torch

from canon.testing.bit_patterns import Place, distance, first_difference

pytestmark = pytest.mark.interpreted

# float64 sums rounded to float32: their bits do not depend on an order of sums.
EXACT = """
import torch
from canon import Mask, reference


def rounded(function, q, k, v, *placed):
    out, lse = function(*(x.double() for x in (q, k, v)), *placed, return_lse=True)
    return out.to(q.dtype), lse.float()


def in_another_order(q, k, v, mask):
    "Add two parts of the keys."
    middle = mask.keys // 3
    parts = []
    for keys in (range(0, middle), range(middle, mask.keys)):
        some = slice(keys.start, keys.stop)
        parts += reference.attention_forward(
            q, k[:, some], v[:, some], mask.crop(keys=keys), out_dtype=torch.float32
        )
    return reference.merge(*parts)


def attention(q, k, v, mask, *, rank_invariant=False, return_lse=False):
    out, lse = rounded(reference.attention, q, k, v, mask)
    {fault}
    return out, lse


def magi_attention(q, k, v, mask, layout, *, rank_invariant=False, return_lse=False):
    if layout.ranks == {ranks}:
        q = q * 1.001
    return rounded(reference.magi_attention, q, k, v, mask, layout)


def decode_attention(q, k, v, mask=None, *, rank_invariant=False, return_lse=False):
    return rounded(reference.decode_attention, q, k, v)
"""
LINE = "--bits --dtype float32 --ranks 3 --tokens 300"


@pytest.fixture
def check(run, write_module, tmp_path):
    """Return ``check(*words, fault, ranks)``: the status, the text and the cells that are not
    equal, of the module EXACT.
    """

    def check(*words, fault="pass", ranks=0):
        write_module("exact", EXACT.format(fault=fault, ranks=ranks))
        status, printed, _ = run(LINE, *words, "exact")
        results = json.loads((tmp_path / "canon-check" / "bits.json").read_text())["results"]
        return status, printed.out, [x for x in results if x["verdict"] != "equal"]

    return check


def test_sums_in_float64_have_equal_bits_in_all_rows(check):
    status, text, others = check()
    assert status == 0, text
    assert {(x["row"], x["verdict"]) for x in others} == {
        (f"{name}_attention, {layout}", "no option")
        for name, layouts in (
            ("strided", ("contiguous", "zigzag", "striped")),
            ("ring", ("contiguous", "zigzag")),
        )
        for layout in layouts
    }
    assert "13 of 13 cells have equal bits." in text
    assert "decoding, keys on ranks, 2 to 3 ranks" in text


@pytest.mark.parametrize(("row", "fault"), [
    ("branch of a tree, multiple_of=128", "len(mask.bands) > 3"),
    ("among documents, moved by 384", "len(mask.bands) == 3"),
    ("prefill in chunks of 17", "mask.queries == 17 and mask.keys > 200"),
])  # fmt: skip
def test_a_kernel_that_adds_in_another_order_for_one_row_is_named(check, row, fault):
    """There all sums are in float32, in two parts."""
    status, text, others = check(
        "--ranks", 1, fault=f"if {fault}: out, lse = in_another_order(q, k, v, mask)"
    )
    assert status == 1
    (cell,) = others
    assert (cell["row"], cell["verdict"]) == (row, "differs")
    assert 0 < max(cell["out"], cell["lse"]) < 1e5
    assert f"token {cell['token']}, head {cell['head']}: out {cell['out']:.3g}" in " ".join(
        text.split()
    )


def test_the_number_of_ranks_with_other_bits_is_named(check):
    status, text, others = check("--only", "magi*", ranks=3)
    assert status == 1
    assert {(x["row"], x["ranks"]) for x in others} == {
        ("magi_attention, zigzag", 3),
        ("magi_attention, planned", 3),
    }
    assert "3 ranks, token 0, head" in text
    assert "0 of 2 cells have equal bits, 2 do not." in text


def test_a_layout_without_whole_tiles_may_be_refused_and_an_error_may_not(
    run, write_module, tmp_path
):
    own = (
        "from canon import reference\n\ndef attention(q, k, v, mask, *, rank_invariant=False, "
        "return_lse=False):\n    {}\n"
    )
    body = (
        "return reference.attention(q, k, v, mask, rank_invariant=True, return_lse=True)\n\n"
        "strided_attention = "
        "reference.strided_attention"
    )
    write_module("own", own.format(body))
    status, printed, _ = run(LINE, "--only", "strided*", "own")
    assert status == 0
    assert (
        "strided_attention, striped: ValueError: strided_attention: rank_invariant=True needs "
        "pieces"
    ) in printed.out
    write_module(
        "raises", own.format("if len(q) > 1: raise ValueError('one sequence only')\n    " + body)
    )
    status, printed, _ = run(LINE, "--only", "beside*", "raises")
    assert status == 1
    assert "beside another sequence of a batch: ValueError: one sequence only" in printed.out


def test_arguments_that_do_not_fit_get_one_sentence(run, write_module):
    write_module("plain", "def attention(q, k, v, mask): return q")
    status, printed, _ = run("--bits plain")
    assert status == 2
    assert "plain has no function attention with this keyword" in printed.err


def test_canon_fast_keeps_its_bits_on_two_ranks(run):
    status, printed, _ = run("--bits --ranks 2 --tokens 140 --dtype float32 --only _attention,")
    assert status == 0, printed.out
    assert "4 of 4 cells have equal bits." in printed.out


def test_distances_are_in_units_of_the_last_place_of_the_larger_number():
    one = torch.tensor([1.0, -1.0, 0.0, torch.nan, 3.0])
    other = torch.tensor([1 + 2**-22, 1.0, 2.0**-149, 0.0, 3.0])
    assert distance(one, other).tolist() == [2, 2**24, 1, torch.inf, 0]
    out, lse = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    changed, changed_lse = out.clone(), lse.clone()
    changed[2, 0, 1], changed_lse[1, 1] = 1, -1
    assert first_difference(changed, changed_lse, out, lse) == Place(1, 1, 0, 2**23)
    assert first_difference(out, lse, out, lse) is None
    with pytest.raises(ValueError, match="lse is"):
        first_difference(out, lse, out, lse.double())
