"""`canon check` compares the bits of calls with rank_invariant=True with those on one rank, and
prints digests that two machines can compare.
"""

import re

IGNORES_RANKS = """
from canon import reference
from canon.reference import attention, magi_attention

def strided_attention(q, k, v, mask, layout, *, rank_invariant=False, **options):
    return reference.strided_attention(q, k, v, mask, layout, rank_invariant={option}, **options)
"""
CASES = {
    "attention/documents/bfloat16",
    "attention/causal/float32",
    "strided_attention/contiguous/documents/bfloat16",
    "strided_attention/contiguous/causal/float32",
    "strided_attention/zigzag/documents/float32",
    "strided_attention/zigzag/causal/bfloat16",
    "magi_attention/planned/documents/float32",
    "magi_attention/planned/causal/bfloat16",
}


def test_digests_do_not_depend_on_ranks_or_runs(run):
    digests = []
    for ranks in (1, 2, 5):
        words = "canon.reference --tokens 400 --only rank_invariant --ranks"
        status, _, record = run(words, ranks)
        assert status == 0
        digests.append({row["case"]: row["digest"] for row in record["results"]})
    assert digests[0] == digests[1] == digests[2]
    assert digests[0].keys() == {f"{case}/rank_invariant" for case in CASES}
    by_inputs = {}
    for case, digest in digests[0].items():
        by_inputs.setdefault(tuple(case.split("/")[-3:]), set()).add(digest)
    assert len(by_inputs) == 4
    assert all(len(found) == 1 for found in by_inputs.values()), "equal bits of all functions"


def test_the_table_has_the_digests(run):
    status, printed, record = run("canon.reference --tokens 300 --only causal/*/rank_invariant")
    assert status == 0, printed.out
    found = re.findall(r"agrees, bits ([0-9a-f]{12})", printed.out)
    assert found == [row["digest"] for row in record["results"]]
    assert len(found) == 4


def test_a_module_that_ignores_the_option_disagrees(run, write_module):
    write_module("forgetful", IGNORES_RANKS.format(option="False"))
    status, _, record = run(
        "forgetful --tokens 900 --dtype float32 --ranks 3 --only zigzag/documents/*/rank_invariant"
    )
    assert status == 1
    (result,) = record["results"]
    text = "other bits than attention(..., rank_invariant=True) on one rank, in"
    assert any(fault.startswith(text) for fault in result["faults"])
