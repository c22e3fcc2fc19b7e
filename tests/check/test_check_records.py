"""Claims about the limits of random cases, and about the records of `canon check` after Ctrl-C."""

import signal

import pytest

from canon.check import contract, draws, random_check
from canon.reference import Mask

ONE = """
import torch
from canon import reference

def attention({arguments}):
    {line}
    return reference.attention({given})
"""


def test_features_limit_random_cases(run, write_module):
    write_module(
        "plain",
        ONE.format(
            arguments="q, k, v", given="q, k, v", line="assert q.ndim == 4 and q.is_contiguous()"
        ),
    )
    status, printed, _ = run("plain --random 8")
    assert status == 1
    assert "--features no-" in printed.out
    words = "no-mask,batched,contiguous"
    status, printed, record = run("plain --random 8 --features", words)
    assert status == 0, printed.out
    assert [row[1:3] for row in record["runs"][-1]["cases"]] == [["attention", "agrees"]] * 8
    assert record["runs"][-1]["command"] == (
        f"canon check plain --features {words} --random 8 --seed 0"
    )


LIMITS = (
    "no-mask",
    "no-options",
    "documents,tree",
    "window,forward",
    "packed,no-lse",
    "full,block_causal",
    "batched,one-mask,equal-heads,equal-widths,contiguous,finite",
    "causal,no-lse,forward",
)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("words", LIMITS)
def test_the_reference_agrees_with_random_cases_under_every_limit(words, run):
    import canon.reference

    limits = random_check.limits_of(canon.reference, contract.features(words))
    for index in range(60):
        case = draws.drawn(1, index, limits=limits)
        mask = draws.evaluated(case.mask)
        masks = mask if isinstance(mask, tuple) else (mask,)
        attends = case.function in {*draws.ATTEND, *draws.REPLICATED, "prepare"}
        fits = {
            "no-mask": case.variant == "plain"
            and mask == Mask.causal(mask.queries)
            and case.shape.scale is None,
            "no-options": not case.options and case.shape.scale is None and case.method == "auto",
            "packed": case.shape.batch == 0,
            "batched": case.shape.batch > 0,
            "one-mask": len(masks) == 1,
            "equal-heads": case.shape.heads[0] == case.shape.heads[1],
            "contiguous": case.shape.strides is None,
            "equal-widths": case.shape.widths[0] == case.shape.widths[1],
            "finite": not case.planted,
            "no-lse": case.used in {"no lse", "forward, no lse"},
            "forward": case.used.startswith("forward"),
        }
        for word in words.split(","):
            assert not attends or fits.get(word, True), (word, case)
        if kinds := set(words.split(",")) & set(contract.MASKS):
            assert case.mask.split("(")[0].removeprefix("Mask.") in kinds
    status, printed, _ = run("canon.reference --random 12 --seed 1 --features", words)
    assert status == 0, printed.out


def test_a_random_check_that_judges_nothing_is_no_success(run, write_module):
    write_module(
        "declining",
        ONE.format(arguments="*given, **options", given="*given", line="raise NotImplementedError"),
    )
    status, printed, _ = run("declining --random 3")
    assert status == 1
    assert "0 of 3 cases agree, 3 declined" in printed.out


@pytest.mark.parametrize("options", [" --tokens 60 --only attention/", " --random 8 --ranks 1"])
def test_ctrl_c_ends_a_check_of_functions_on_one_rank(options, run, write_module):
    """Such cases have no collective. The module presses Ctrl-C in its third call,
    the second case.
    """
    text = "import os, signal, time\nfrom canon import reference\n\ncalls = []\n\n"
    text += "def attention(q, k, v, mask=None, **options):\n"
    text += (
        "    calls.append(1)\n    if len(calls) == 3:\n        os.kill(os.getpid(), "
        "signal.SIGINT)\n        time.sleep(1)\n"
    )
    write_module("pressing", text + "    return reference.attention(q, k, v, mask, **options)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status, _, record = run("pressing" + options)
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 130
    assert len(record["runs"][0]["cases"] if "runs" in record else record["results"]) == 2
