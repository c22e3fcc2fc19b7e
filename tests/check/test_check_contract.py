"""Claims about `canon check MODULE`: the template passes, limits hold, failures have a place,
Ctrl-C keeps results.
"""

import importlib
import io
import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from rich.console import Console

import canon
from canon.__main__ import main
from canon.check import cases, check_report, contract
from canon.check.cases import all_cases, covered
from canon.check.places import place
from canon.reference import Layout

pytestmark = pytest.mark.interpreted

PLAIN = """
import torch
from torch.nn.functional import scaled_dot_product_attention

def attention(q, k, v):
    assert q.ndim == 4 and q.shape[2] == k.shape[2] and k.shape[-1] == v.shape[-1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
"""
OFF = """
from canon import reference

def zigzag_attention(q, k, v, mask=None, *, sink=None, **options):
    import torch.distributed as dist
    out, lse = reference.zigzag_attention(q, k, v, mask, sink=sink, **options)
    if dist.get_rank() == 1:
        out = out * torch_ones(out)
    return out, lse

def torch_ones(out):
    factor = out.new_ones(out.shape)
    factor[..., 7, 2, :] = 1.5
    return factor
"""


def verdicts(record):
    return {result["case"]: result["verdict"] for result in record["results"]}


def test_the_template_passes_and_declines_what_it_leaves_open(run, write_module):
    status, printed, _ = run("--template")
    assert status == 0
    write_module("my_attention", printed.out)
    status, printed, record = run("my_attention --tokens 200")
    assert status == 0, printed.out
    assert {name.split("/")[0]: verdict for name, verdict in verdicts(record).items()} == {
        "attention": "agrees",
        "ring_attention": "declined",
        "zigzag_attention": "declined",
    }
    lines = [
        line
        for line in printed.out.splitlines()
        if "ring_attention" in line and "does not" not in line
    ]
    assert len([line for line in lines if "not written yet" in line]) == 1
    assert len([line for line in lines if line.startswith("│")]) == 1, "one row of the table"
    # three with a visible NaN
    assert sum(name.startswith("attention/") for name in verdicts(record)) == 14
    status, printed, _ = run("my_attention --random 20 --seed 7")
    assert status == 0, "random cases pass no option that the functions lack"


def test_help_names_the_conventions_and_every_feature(run):
    _, printed, _ = run("--help")
    assert "\n      returns dq, dk, dv\n  merge(out, lse, other_out, other_lse)\n" in printed.out
    for word in (
        "q (b, t, h, d)",
        "natural logarithm",
        "NotImplementedError declines",
        *contract.WORDS,
    ):
        assert word in " ".join(printed.out.split()), word
    for name in covered(canon.reference).tested:
        assert name in printed.out, "the help names every function with cases"


def test_features_limit_the_cases_to_what_a_module_can_do(run, write_module):
    write_module("plain_attention", PLAIN)
    status, printed, _ = run("plain_attention --tokens 200")
    assert status == 1
    assert (
        "if attention has no such argument, check the module with --features no-lse"
    ) in " ".join(printed.out.split())
    limits = "no-mask,equal-heads,equal-widths,batched"
    status, printed, record = run("plain_attention --tokens 200 --features", limits)
    assert status == 0, printed.out
    assert list(verdicts(record)) == [
        "attention/causal/float32/plain",
        "attention/causal/float32/plain/inf in dout",
    ]
    assert f"--features {limits}" in record["command"]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "words",
    [
        "documents,no-lse",
        "forward",
        "one-mask",
        "forward,no-lse,packed",
        "no-options",
        "causal,contiguous",
        "causal,finite",
        "no-mask",
        "no-mask,forward",
    ],
)
def test_the_reference_agrees_under_every_limit(words, run):
    status, printed, record = (
        run(
            "canon.reference --tokens 150 --features",
            words,
            "--only",
            "attention/*causal*",
            "--ranks",
            3,
        )
        if "documents" not in words
        else run("canon.reference --tokens 150 --features", words, "--only", "zigzag_attention")
    )
    assert status == 0, printed.out
    assert record["results"]
    tensors = {m["tensor"] for result in record["results"] for m in result["measures"]}
    assert ("lse" in tensors) == (
        words not in {"documents,no-lse", "forward,no-lse,packed", "no-mask", "no-mask,forward"}
    )
    assert ("dq" in tensors) == ("forward" not in words)


def test_a_failure_names_token_rank_and_head(run, write_module):
    write_module("off_attention", OFF)
    status, printed, record = run(
        "off_attention --tokens 200 --only zigzag_attention/zigzag/documents"
    )
    assert status == 1
    result, _with_sink = record["results"]
    tokens = sum(record["documents"].values())
    token = int(Layout.zigzag(tokens, 4).positions(1)[7])
    (line,) = [fault for fault in result["faults"] if fault.startswith("out is worst")]
    assert line.startswith(
        f"out is worst at token {token}, head 2, which rank 1 holds in row 7: off by"
    )
    assert f"token {token}, head 2, which rank 1" in " ".join(printed.out.split())


SCALED = """
from canon import reference

def attention(q, k, v, mask=None, **options):
    {line}
    return reference.attention(q, k, v, mask, **options)
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("k.register_hook(lambda dk: 8 * dk)", "dk is 8.00 times the expected"),
        ("v = 1e9 * v", "out is 1.00e+09 times the expected"),
    ],
)
def test_factors_are_named_and_large_ratios_have_a_short_form(line, message, run, write_module):
    write_module("scaled", SCALED.format(line=line))
    _, printed, record = run("scaled --tokens 200 --only attention/causal/float32 --runs 1")
    assert message in record["results"][0]["faults"][0]
    assert message in printed.out
    row = next(line for line in printed.out.splitlines() if line.startswith("│"))
    assert len(row.split("│")[5].strip()) <= 5


def test_wrong_moves_and_sums_name_rank_and_token(run, write_module):
    text = """
import torch.distributed as dist
from canon import reference

def group_cast(x, plan, stage, *, group=None):
    received = reference.group_cast(x, plan, stage, group=group)
    if dist.get_rank() == 2:
        received[3] += 1
    return received

def group_reduce(y, plan, stage, into, *, group=None):
    total = reference.group_reduce(y, plan, stage, into, group=group)
    if dist.get_rank() == 1:
        total[5, ..., 1, :] += 1
    return total
"""
    write_module("moved", text)
    _, _, record = run("moved --tokens 200 --only 'group_*/striped/documents/*one_cast'")
    cast, reduced = (result["faults"] for result in record["results"])
    assert cast[0].startswith("rank 2: cast 0: 1 of ")
    tokens = sum(record["documents"].values())
    assert "the first is row 3, token " in cast[0]
    assert (
        "rank 1: sum is worst in row 5, token "
        f"{int(Layout.striped(tokens, 4).positions(1)[5])}, head 1"
    ) in reduced


def test_places_of_lse_and_of_values_that_are_not_finite():
    layout = Layout.striped(6, 2)
    exact = torch.zeros(2, 3, 6)
    got = exact.clone()
    got[1, 2, 5] = torch.nan
    assert place("lse", got, exact, layout).startswith(
        "lse is worst at token 5 of sequence 1, head 2, which rank 1 holds in row 2"
    )
    # the errors of token 5 (NaN) and token 2 are both infinite; the first is reported
    exact[1, 0, 2] = -torch.inf
    assert "tokens 2, 5" in place("lse", got, exact, layout)


def test_the_same_nan_in_two_runs_counts_as_the_same_bits(run, write_module):
    text = (
        "from canon import reference\n\ndef merge(*parts):\n    out, lse = "
        "reference.merge(*parts)\n"
    )
    text += "    return out * float('nan'), lse\n"
    write_module("not_a_number", text)
    _, _, record = run("not_a_number --tokens 150 --only merge/documents")
    (result,) = record["results"]
    assert result["faults"][0].startswith("out is worst at token 0"), (
        "the place stands before the norms"
    )
    assert result["faults"][1].startswith("out has ")
    assert (result["measures"][0]["tensor"], result["measures"][0]["ratio"]) == ("out", "inf"), (
        "the worst measure"
    )
    assert not any("other bits" in fault for fault in result["faults"])


UNGUARDED = """
import torch

def merge(out, lse, other_out, other_lse):
    whole = torch.logaddexp(lse, other_lse)
    weights = (torch.exp(x - whole).nan_to_num().mT[..., None] for x in (lse, other_lse))
    return sum(weight * part for weight, part in zip(weights, ({parts}), strict=True)), whole
"""


def test_a_merge_that_multiplies_nan_by_a_weight_of_0_disagrees(run, write_module):
    for name, parts, expected in (
        ("unguarded", "out, other_out", 1),
        ("guarded", "out.nan_to_num(), other_out.nan_to_num()", 0),
    ):
        write_module(name, UNGUARDED.format(parts=parts))
        status, _, record = run(name, "--tokens", 150, "--only", "merge/", "--features", "finite")
        assert status == expected
        assert len(set(verdicts(record).values())) == 1


def test_the_most_specific_fault_is_printed_in_full_and_the_others_keep_their_reason():
    waits = "no rank can continue: " + "; ".join(
        f"rank {rank} waits in a receive from rank {rank - 1}" for rank in range(9)
    )
    texts = {
        "shapes": ["rank 1: RuntimeError: the sizes differ"],
        "norms": ["out is worst at token 3", "out is off by 1.00e+00 in the l2 norm"],
        "deadlock": [waits],
        "arguments": [
            "rank 0: ValueError: the ranks disagree:\n  mask: rank 0: causal; rank 1: full"
        ],
    }
    results = [
        {"case": case, "verdict": "failed", "faults": faults} for case, faults in texts.items()
    ]
    console = Console(file=io.StringIO(), width=100)
    check_report.faults(results, console)
    printed = " ".join(console.file.getvalue().split())
    for line in (
        "norms: out is worst at token 3 (and 1 more in the record)",
        f"deadlock: {waits}",
        "arguments: rank 0: ValueError: the ranks disagree: mask: rank 0: causal; rank 1: full",
    ):
        assert line in printed


def test_a_fault_begins_with_the_tensors_that_are_wrong_and_right():
    measures = [
        {"tensor": tensor, "norm": norm, "ratio": ratio}
        for tensor, norm, ratio in (
            ("out", "l2", "0.1"), ("out", "max", "7"), ("lse", "l2", "0.5"), ("dq", "l2", "nan")
        )
    ]  # fmt: skip
    result = {"case": "one", "verdict": "disagrees", "measures": measures}
    console = Console(file=io.StringIO(), width=100)
    check_report.faults([result | {"faults": ["out is worst at token 3"]}], console)
    assert console.file.getvalue() == ("one: wrong: out, dq; right: lse; out is worst at token 3\n")


def test_keywords_that_are_not_named_are_no_parameters(write_module):
    write_module("with_options", "def ring_attention(q, k, v, mask=None, **options): ...")
    module = importlib.import_module("with_options")
    optional = [
        case
        for case in all_cases(["float64"], False)
        if case.function == "ring_attention"
        and set(dict(case.options)) & {"sink", "softcap", "columns"}
    ]
    assert optional
    assert not any(cases.accepts(module, case) for case in optional)


def test_ctrl_c_keeps_the_finished_cases(tmp_path):
    words = [sys.executable, "-m", "canon", "check", "canon.reference", "--tokens", "200"]
    # a test run in the background ignores SIGINT
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # if it aborts, which happened on a busy machine
    shows_stacks = os.environ | {"PYTHONFAULTHANDLER": "1"}
    child = subprocess.Popen(words, cwd=tmp_path, preexec_fn=listen, env=shows_stacks, **pipes)
    for line in child.stderr or ():
        if line.startswith("3/"):
            break
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in out + err
    assert "cases have run." in " ".join(out.split())
    record = json.loads((tmp_path / "canon-check" / "record.json").read_text())
    assert 3 <= len(record["results"]) < 40


def test_every_case_has_its_own_name():
    names = [case.name for case in all_cases(list(cases.DTYPES), gpu=False)]
    assert len(names) == len(set(names))
    assert main(["check", "canon.reference", "--list", "--features", "no-mask"]) == 0
