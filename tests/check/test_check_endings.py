"""Claims about how `canon check` ends: never with 0 unless it judged a case, whatever the module
does; and in plain words.
"""

import os
import time

import pytest
import torch.distributed as dist

from canon.check.module_import import uses_kernels
from canon.testing import process_groups

BODY = "\n    return reference.attention(q, k, v, mask, **options)\n"
FUNCTION = (
    "from canon import reference\nimport os, sys\n\ndef attention(q, k, v, mask=None, "
    "**options):\n    "
)
ENDS = ["sys.exit(0)", "os._exit(0)", "os.execv('/bin/true', ['true'])"]
ONLY = " --tokens 100 --only attention/causal/float32 --runs 1"


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("place", ["at import", "inside a call"])
def test_a_module_that_ends_the_process_does_not_end_the_check_with_0(
    place, ends, run, write_module
):
    write_module(
        "ending",
        FUNCTION
        + (ends if place == "inside a call" else "pass")
        + BODY
        + ends * (place == "at import"),
    )
    status, printed, _ = run("ending" + ONLY)
    if place == "at import":
        assert status == 2
        assert printed.err.startswith("canon check: cannot import ending: it raises SystemExit")
    else:
        assert status == 1
        assert "rank 0: SystemExit" in printed.out
        assert "0 of 3 cases agree, 3 do not" in printed.out


def test_a_rank_process_that_ends_with_0_fails(run, write_module):
    write_module(
        "ending",
        FUNCTION.replace("attention(", "ring_attention(").replace("mask", "mask=None, layout")
        + "os._exit(0)\n",
    )
    line = "ending --world processes --ranks 2 --tokens 60 --runs 1 --only"
    status, printed, _ = run(line, "ring_attention/zigzag/causal/*/plain")
    assert status == 1
    assert "ended with exit code 0" in printed.out


def leave_first():
    if dist.get_rank() == 0:
        os._exit(0)


def test_a_rank_process_that_ends_with_0_does_not_keep_the_others_until_the_timeout():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 ended with exit code 0"):
        process_groups.processes(leave_first, 2, timeout=90)
    assert time.monotonic() - start < 80


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("3", "attention returned int, expected the tensors (out, lse), because return_lse=True"),
        (
            "reference.attention(q, k, v, mask)",
            "attention returned Tensor, expected the tensors (out, lse)",
        ),
    ],
)
def test_results_of_another_type_are_named(returned, sentence, run, write_module):
    write_module("other", FUNCTION + f"q = q.detach()\n    return {returned}\n")
    status, printed, _ = run("other" + ONLY)
    assert status == 1
    assert sentence in " ".join(printed.out.split())


@pytest.mark.parametrize(
    "options", [ONLY, ONLY + " --record .", " --random 1", " --bits --tokens 9 --only whole*"]
)
def test_a_record_that_cannot_be_written_is_refused_before_the_check(options, run, tmp_path):
    (tmp_path / "canon-check").touch()
    status, printed, _ = run("canon.reference" + options)
    assert status == 2
    assert printed.err.startswith("canon check: no record can be written to ")


@pytest.mark.parametrize("name", ["own.ipynb", "folder/own", ".."])
def test_a_path_instead_of_a_name_is_refused_with_a_remedy(name, run):
    status, printed, _ = run(name)
    assert status == 2
    assert printed.err.startswith(
        f"canon check: cannot import {name!r}: expected the name of a module, not a path; "
    )
    assert len(printed.err.splitlines()) == 1


def test_a_part_with_other_arguments_gets_no_remedy_of_attention(run, write_module):
    write_module("own", "def merge(outs, lses):\n    return outs\n")
    _, printed, _ = run("own --tokens 60 --only merge/documents --runs 1")
    assert "--features" not in printed.out
    assert "merge must take the arguments of canon.reference" in " ".join(printed.out.split())


@pytest.mark.parametrize("options", [[], ["--only", "rank_invariant"], ["--bits"]])
def test_a_module_without_a_judged_case_does_not_end_with_0(options, run, write_module):
    text = (
        "def attention(q, k, v, mask=None, *, rank_invariant=False, **options):\n    raise "
        "NotImplementedError('later')\n"
    )
    write_module("later", text)
    assert run("later --tokens 40", *options)[0] == 1


def test_bits_without_a_compared_row_do_not_end_with_0(run):
    status, printed, _ = run(
        "canon.reference --bits --tokens 300 --only 'whole call' --dtype float32"
    )
    assert status == 1
    assert "0 of 0 cells have equal bits." in printed.out


def test_an_exception_at_import_is_one_sentence_and_its_traceback(run, write_module):
    write_module("helping", "def half():\n    return 1 / 0\n")
    write_module("dividing", "import helping\n\nhelping.half()\n")
    status, printed, _ = run("dividing")
    assert status == 2
    first, second, third, *_ = printed.err.splitlines()
    assert first == (
        "canon check: cannot import dividing: it raises ZeroDivisionError: division by zero"
    )
    assert second.startswith("Traceback")
    assert 'dividing.py", line 3' in third
    assert 'helping.py", line 2' in printed.err
    assert "importlib" not in printed.err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def attention(q, k, v:\n    pass\n", "syntax error in broken.py, line 1: "),
        (
            "import no_such_package\n",
            "it raises ModuleNotFoundError: No module named 'no_such_package'",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(text, sentence, run, write_module):
    write_module("broken", text)
    status, printed, _ = run("broken")
    assert status == 2
    assert printed.err.startswith(f"canon check: cannot import broken: {sentence}")
    assert len(printed.err.splitlines()) == 1 or "syntax" not in sentence


def test_parts_and_foreign_parameters_are_named_with_their_remedy(run, write_module):
    text = (
        "def merge(a, b):\n    return a\n\ndef attention(q, k, v, dropout_p=0.0, "
        "causal=False):\n    return q * dropout_p\n"
    )
    write_module("foreign", text)
    status, printed, _ = run("foreign" + ONLY)
    words = " ".join(printed.out.split())
    assert status == 1
    assert "these are compared with the same functions of canon.reference: merge." in words
    assert "never dropout_p, causal (default: dropout_p=0.0, causal=False)" in words
    assert "return yours(q, k, v, causal=True)` with --features no-mask" in words
    write_module("own", FUNCTION + "pass" + BODY)
    assert "By their names" not in run("own" + ONLY)[1].out


def test_only_modules_with_kernels_mention_the_interpreter(run, write_module):
    for name, text, expected in (
        ("plain", "from canon import reference\n" + FUNCTION + "pass" + BODY, False),
        ("direct", "import triton\n" + FUNCTION + "pass" + BODY, True),
    ):
        write_module(name, text)
        status, printed, _ = run(name + ONLY)
        assert status == 0
        assert ("Triton's interpreter runs the kernels" in printed.out) == expected


def test_the_halves_are_told_apart_by_their_kernels():
    from canon import fast, reference

    assert uses_kernels(fast)
    assert not uses_kernels(reference)
