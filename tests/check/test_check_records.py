"""Claims about the records of `canon check`: they are continued with the same code only, and each
module has its own.
"""

import signal
import sys

import pytest

from canon.check import contract, draws, random_check, sources
from canon.reference import Mask

FILES = {  # a module `mine`, packages on other paths, and what they import
    "folder/mine.py": "import helper\n\ndef attention():\n    from sibling.deep import run\n",
    "folder/helper.py": "import second",
    "folder/second.py": "from importlib import import_module\nimport_module('late.one')",
    "folder/neighbour.py": "read at run time",
    "folder/pack/__init__.py": "",
    "folder/pack/inner/attention.py": "from ..common import x",
    "folder/pack/common.py": "x = 1",
    "folder/unrelated/code.py": "",
    "elsewhere/sibling/__init__.py": "",
    "elsewhere/sibling/deep.py": "",
    "elsewhere/sibling/kernel.cu": "",
    "elsewhere/late/one.py": "",
    "elsewhere/alone.py": "",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in ("elsewhere", "folder"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    return tmp_path


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("mine", "folder/mine.py"),
        ("mine", "folder/helper.py"),
        ("mine", "folder/second.py"),
        ("mine", "folder/neighbour.py"),
        ("mine", "elsewhere/sibling/deep.py"),
        ("mine", "elsewhere/sibling/kernel.cu"),
        ("mine", "elsewhere/late/one.py"),
        ("pack", "folder/pack/common.py"),
        ("pack.inner.attention", "folder/pack/common.py"),
        ("pack.inner.attention", "folder/pack/inner/attention.py"),
    ],
)
def test_the_digest_changes_with_all_code_that_a_module_runs(module, file, files):
    before = sources.digest(module)
    assert sources.digest(module) == before
    (files / file).write_text("changed")
    assert sources.digest(module) != before


def test_the_digest_does_not_change_with_other_files(files):
    before = sources.digest("mine")
    for name in (
        "folder/record.json",
        "folder/notes.txt",
        "elsewhere/alone.py",
        "folder/unrelated/code.py",
    ):
        (files / name).write_text("changed")
    assert sources.digest("mine") == before


def test_the_digest_changes_with_the_version_of_an_installed_package(files, monkeypatch):
    installed = files / "site-packages"
    (installed / "rented").mkdir(parents=True)
    (installed / "rented/__init__.py").write_text("")
    (installed / "rented-1.dist-info").mkdir()
    (installed / "rented-1.dist-info/METADATA").write_text("Name: rented\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(installed))
    (files / "folder/mine.py").write_text("import rented")
    digests = []
    for content in ("a", "a", "b"):
        (installed / "rented-1.dist-info/RECORD").write_text(
            f"rented/__init__.py,sha256={content},1\n"
        )
        digests.append(sources.digest("mine"))
    assert digests[0] == digests[1] != digests[2]


HELPED = "import factors\nfrom canon import reference\n\n\ndef {name}(*given, **options):\n"
HELPED += "    out = reference.{name}(*given, **options)\n"
HELPED += (
    "    return tuple(factors.FACTOR * x for x in out) if isinstance(out, tuple) else "
    "factors.FACTOR * out\n"
)


@pytest.mark.parametrize("random", [False, True])
def test_a_fault_in_what_a_module_imports_is_found_when_the_check_resumes(
    random, run, write_module
):
    line = "helped " + ("--random 6" if random else "--tokens 100 --only attention_forward/")
    for factor, expected in ((1, 0), (2, 1)):
        write_module("factors", f"FACTOR = {factor}")
        write_module("helped", HELPED.format(name="attention_forward"))
        sys.path_importer_cache.clear()
        status, printed, _ = run(line + " --resume" * (factor == 2 and not random))
        assert status == expected, printed.out
        assert "taken from the record" not in printed.out
    assert random or "0 of 6 cases are taken from canon-check/record.json, because" in " ".join(
        printed.out.split()
    )


def test_the_output_says_how_many_cases_come_from_the_record(run):
    line = "canon.reference --tokens 60 --only merge"
    run(line)
    status, printed, _ = run(line + " --resume")
    assert status == 0
    assert "3 of 3 cases are taken from canon-check/record.json" in printed.out
    assert "3 of 3 cases agree, 3 taken from the record." in printed.out


def test_a_random_check_starts_afresh_with_a_flag_and_with_other_options(run):
    for more, taken in (
        ("", False),
        ("", True),
        (" --fresh", False),
        (" --world processes", False),
    ):
        status, printed, record = run("canon.reference --random 4 --seed 5" + more)
        assert status == 0
        assert ("taken from the record" in printed.out) == taken, more
    assert [len(one["cases"]) for one in record["runs"]] == [4, 4]
    machine = {**record["runs"][0]["machine"], "torch": "another version"}
    other = random_check._run_of(record, {**record["runs"][0], "machine": machine})
    assert other["cases"] == [], "another version of torch"


ONE = """
import torch
from canon import reference

def attention({arguments}):
    {line}
    return reference.attention({given})
"""


def test_random_cases_are_those_of_functions_and_options_that_a_module_has(run, write_module):
    arguments = "q, k, v, mask=None, *, scale=None, backward='auto', return_lse=False"
    given = "q, k, v, mask, scale=scale, backward=backward, return_lse=return_lse"
    write_module("one", ONE.format(arguments=arguments, given=given, line="pass"))
    status, printed, record = run("one --random 12")
    assert status == 0, printed.out
    assert [row[1:3] for row in record["runs"][0]["cases"]] == [["attention", "agrees"]] * 12
    own = [draws.drawn(0, index) for index in range(12)]
    assert any(case.function != "attention" for case in own), (
        "without limits, other functions have cases"
    )


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
        f"canon check plain --random 8 --seed 0 --features {words}"
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


@pytest.mark.parametrize("words", LIMITS)
def test_the_reference_agrees_with_random_cases_under_every_limit(words, run):
    import canon.reference

    limits = random_check._limits(canon.reference, contract.features(words))
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
    write_module("foreign", "def own(q):\n    return q\n")
    status, printed, _ = run("foreign --random 3")
    assert status == 2
    assert "foreign has none of the functions Layout, attention, " in printed.err


def test_each_module_has_its_own_record_of_random_cases(run, write_module, tmp_path):
    write_module(
        "one", ONE.format(arguments="*given, **options", given="*given, **options", line="pass")
    )
    for module in ("one", "canon.reference", "one"):
        status, printed, record = run(module, "--random", 2)
        assert status == 0, printed.out + printed.err
        assert record["module"] == module
    status, printed, _ = run(
        "one --random 2 --record", tmp_path / "canon-check" / "random.canon.reference.json"
    )
    assert status == 2
    assert (
        "is a record of canon.reference, not of canon check --random with one; name a new file "
        "with --record"
    ) in printed.err


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
