"""`canon check` compares the bits of calls with rank_invariant=True, and prints digests that two
machines can compare.
"""

import re

from canon import fast, reference
from canon.check import rank_digests

IGNORES_RANKS = """
from canon import reference
from canon.reference import attention, magi_attention

def strided_attention(q, k, v, mask, layout, *, rank_invariant=False, **options):
    return reference.strided_attention(q, k, v, mask, layout, rank_invariant={option}, **options)
"""


def test_digests_do_not_depend_on_ranks_or_runs(run):
    lines = []
    for ranks in (1, 2, 5):
        words = "canon.reference --tokens 400 --only rank_invariant --ranks"
        status, printed, _ = run(words, ranks)
        assert status == 0
        lines.append(re.findall(r"^rank_invariant/(\S+ [0-9a-f]{12}): equal", printed.out, re.M))
    assert lines[0] == lines[1] == lines[2]
    assert [line.split()[0] for line in lines[0]] == ["documents/bfloat16", "causal/float32"]


def test_a_check_reports_the_digests(run):
    status, printed, record = run("canon.reference --tokens 300 --only rank_invariant/causal")
    assert status == 0, printed.out
    (result,) = record["rank_invariance"]
    assert result["faults"] == []
    assert f"{result['inputs']} {result['digest']}: equal bits in 10 of 10 calls" in printed.out
    assert result["calls"][0] == "attention (1 rank)"
    assert "strided_attention (zigzag, 4 ranks)" in result["calls"]
    assert "magi_attention (dispatch, 3 ranks)" in result["calls"]


def test_a_module_that_ignores_the_option_disagrees(run, write_module):
    write_module("forgetful", IGNORES_RANKS.format(option="False"))
    status, printed, _ = run(
        "forgetful --tokens 900 --dtype float32 --ranks 3 --only rank_invariant"
    )
    assert status == 1
    assert (
        "strided_attention (zigzag, 3 ranks) and attention (1 rank) have other bits in"
    ) in printed.out
    assert "magi_attention (" not in printed.out, "it agrees"


def test_functions_without_the_option_are_left_out(run, write_module):
    assert [
        rank_digests.has_option(reference, name) for name in ("ring_attention", "merge", "nothing")
    ] == [False] * 3
    for half in (reference, fast):
        assert all(
            rank_digests.has_option(half, name)
            for name in ("attention", "strided_attention", "magi_attention")
        )
    own = "def zigzag_attention(*x, **y):\n    return reference.zigzag_attention(*x, **y)\n"
    write_module("old", f"from canon import reference\n\n{own}")
    status, printed, _ = run("old --only rank_invariant")
    assert status == 2
    assert "no case matches 'rank_invariant'" in printed.err
    status, _, record = run("old --tokens 200 --only zigzag_attention/zigzag/causal")
    assert (status, record["rank_invariance"]) == (0, [])
