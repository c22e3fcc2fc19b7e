"""`canon check --backend cuda`: cases that the backend does not support are declined, and the
others run.
"""

from pathlib import Path

from canon.check import cases
from canon.check.case_runner import CaseRunner
from canon.check.cases import Case, all_cases, declined_by
from canon.check.documents import Documents
from canon.check.inputs import FromDocuments
from canon.check.run_cases import run_cases


def test_other_dtypes_and_the_fused_method_are_declined():
    found = all_cases(["bfloat16", "float16", "float32"], gpu=True)
    declined = {case.name for case in found if declined_by("cuda", case)}
    attention = [
        case for case in found if case.dtype and case.function not in cases.EXCHANGES | {"merge"}
    ]
    wide = {case.name for case in attention if max(case.shape.widths) > 256}
    capped = {case.name for case in attention if case.softcap is not None}
    assert (
        declined - wide - capped
        == {case.name for case in attention if case.dtype == "float32" or case.method == "fused"}
        - wide
        - capped
    )
    assert wide | capped <= declined
    assert len(attention) - len(declined) > 20
    assert all(width % 16 == 0 for case in attention for width in case.shape.widths)
    assert {case.name for case in found if declined_by("gluon", case)} == wide
    assert not [case for case in found if declined_by(None, case)]


def test_a_declined_case_does_not_run():
    shape = cases.Shape((2, 1), (32, 32))
    fused = Case("attention", "causal", "bfloat16", shape, method="fused")
    source = FromDocuments(Documents.of([], 100))
    runner = CaseRunner("no_such_module", (fused,), source, "cpu", Path(), "cuda")
    (result,) = run_cases("threads", 1, runner)
    assert (result["verdict"], result["faults"]) == (
        "declined",
        ["the CUDA backend has no fused kernel"],
    )
