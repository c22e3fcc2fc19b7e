"""`canon check --backend cuda`: cases that the backend does not support are declined, and the
others run.
"""

from rich.console import Console

from canon.check import cases
from canon.check.case_runner import CaseRunner
from canon.check.cases import Case, all_cases, declined_by
from canon.check.run_cases import run_groups


def test_other_dtypes_and_the_fused_method_are_declined():
    found = all_cases(["bfloat16", "float16", "float32"], gpu=True)
    attention = [x for x in found if x.dtype and x.function not in cases.EXCHANGES | {"merge"}]
    wide = [x for x in attention if max(x.shape.widths) > 256]
    others = [
        x
        for x in attention
        if x in wide or x.softcap is not None or x.dtype == "float32" or x.method == "fused"
    ]
    assert [x for x in found if declined_by("cuda", x)] == others
    assert len(attention) - len(others) > 20
    assert [x for x in found if declined_by("gluon", x)] == wide
    assert not [x for x in found if declined_by(None, x)]


def test_a_declined_case_does_not_run():
    shape = cases.Shape((2, 1), (32, 32))
    fused = Case("attention", "causal", "bfloat16", shape, method="fused")
    runner = CaseRunner("no_such_module", (fused,), "cpu", backend="cuda")
    ((result,), _) = run_groups("threads", [(1, runner)], Console())
    assert (result["verdict"], result["faults"]) == (
        "declined",
        ["the CUDA backend has no fused kernel"],
    )
