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
        "attention/cancelling/bfloat16/plain",
        "attention/causal/float32/plain/inf in dout",
    ]
    assert f"--features {limits}" in record["command"]


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
    off = torch.tensor([0.0, 0.0, 1.0])
    assert place("dsink", off, 0 * off, None) == "dsink is worst at head 2"
    off = off[:, None]
    assert place("dup_weight", off, 0 * off, None) == "dup_weight is worst in row 2 of 3"


def test_the_most_specific_fault_is_printed_in_full_and_the_others_keep_their_reason():
    waits = "no rank can continue: " + "rank 1 waits in a receive from rank 0; " * 9
    disagree = "rank 0: ValueError: the ranks disagree:\n  mask: causal or full"
    texts = {"norms": ["out is worst at token 3", "out is off"], "waits": [waits]}
    texts["arguments"] = [disagree]
    ratios = ("out", "0.1"), ("out", "7"), ("lse", "0.5"), ("dq", "nan")
    measures = [{"tensor": tensor, "ratio": ratio} for tensor, ratio in ratios]
    results = [
        {"case": case, "verdict": "failed", "faults": faults} for case, faults in texts.items()
    ]
    console = Console(file=io.StringIO(), width=100)
    check_report.faults([results[0] | {"measures": measures}, *results[1:]], console)
    printed = " ".join(console.file.getvalue().split())
    for line in (
        "norms: wrong: out, dq; right: lse; out is worst at token 3 (and 1 more in the record)",
        f"waits: {waits}",
        f"arguments: {' '.join(disagree.split())}",
    ):
        assert line in printed


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
    words = [sys.executable, "-m", "canon", "check", "canon.reference", "--tokens", "60"]
    # a test run in the background ignores SIGINT
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # if it aborts, which happened on a busy machine
    shows_stacks = os.environ | {"PYTHONFAULTHANDLER": "1"}
    child = subprocess.Popen(words, cwd=tmp_path, preexec_fn=listen, env=shows_stacks, **pipes)
    for _ in range(60):  # beyond the parts that the forks have begun
        child.stderr.readline()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in out + err
    assert "cases have run." in " ".join(out.split())
    record = json.loads((tmp_path / "canon-check" / "record.json").read_text())
    assert 0 < len(record["results"]) < 150


def test_every_case_has_its_own_name():
    names = [case.name for case in all_cases(list(cases.DTYPES), gpu=False)]
    assert len(names) == len(set(names))
    assert main(["check", "canon.reference", "--list", "--features", "no-mask"]) == 0
