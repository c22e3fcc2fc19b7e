"""Claims about `canon check`: the halves agree, faults are found, and the record and the exit
status are correct.
"""

from dataclasses import astuple

import pytest
import torch
from sampling import covering

from canon.check import cases, draws, fixed_check
from canon.check.placement import placement

pytestmark = pytest.mark.interpreted

FAULTY = """
from canon.reference import *
from canon import reference

def zigzag_attention(q, k, v, mask=None, **options):
    out, lse = reference.zigzag_attention(q, k, v, mask, **options)
    return out * {factor}, lse

def a_new_one(q):
    return q

del striped_attention
"""

LAYER = """
import torch
from canon import reference

class Layer(torch.autograd.Function):
    def forward(ctx, *tensors):
        ctx.tensors = Layer.last = tensors
        return reference.attention(*tensors)

    def backward(ctx, dout):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in {tensors}]
            grads = torch.autograd.grad(reference.attention(*leaves), leaves, dout)
        {change}
        return *grads,

def attention(q, k, v):
    return Layer.apply(q, k, v)
"""
LAYERS = {  # change: (tensors, line, what is printed)
    "none": ("ctx.tensors", "pass", "1 of 1 cases agree"),
    "the last call's tensors": ("Layer.last", "pass", "0 of 1 cases agree"),
    "dout is overwritten": ("ctx.tensors", "dout.zero_()", "attention has changed dout"),
    "a second backward pass is wrong": (
        "ctx.tensors",
        "ctx.tensors = [0 * x for x in ctx.tensors]",
        "0 of 1 cases agree",
    ),
    "gradients are lost if one is not needed": (
        "ctx.tensors",
        "grads = grads if all(ctx.needs_input_grad) else [0 * x for x in grads]",
        "0 of 1 cases agree",
    ),
}

MOVES = """
import itertools
import torch
import torch.distributed as dist
from canon import reference

earlier, calls = {{}}, itertools.count()

def group_cast(x, plan, stage, *, group=None):
    rank, received = dist.get_rank(), reference.group_cast(x, plan, stage, group=group)
    {group_cast}
    return received

def group_reduce(y, plan, stage, into, *, group=None):
    {group_reduce}
    return reference.group_reduce(y, plan, stage, into, group=group)

def dispatch(mask, ranks, **options):
    {dispatch}
    return reference.dispatch(mask, ranks, **options)
"""
STALE = "old, n = earlier.setdefault(rank, received), plan.receive_sizes(stage, rank)[0]; "
WRONG_MOVES = {  # fault: (message, function, its wrong line)
    "a token is wrong on one rank": (
        "rank 2: cast 0: 1 of ",
        "group_cast",
        "received[3] += rank == 2",
    ),
    "the tokens of one source are those of the previous cast": (
        "cast 1: ",
        "group_cast",
        STALE + "received = torch.cat([old[:n], received[n:]]) if stage else received",
    ),
    "a sum travels in bfloat16": (
        "sum is off by",
        "group_reduce",
        "y = y.bfloat16().to(y.dtype)",
    ),
    "a rank is left out": (
        "sum is worst in row ",
        "group_reduce",
        "y = y * (dist.get_rank() != 2)",
    ),
    "sums differ from run to run": (
        "run 3 gave other bits than run 2 (determ",
        "group_reduce",
        "y = y * (1 + next(calls) * 2**-22)",
    ),
    "another plan": (
        "plan: ",
        "dispatch",
        "return reference.Layout.zigzag(mask.queries, ranks)",
    ),
}


def written(folder, lengths):
    """Write a document of each length, and return their folder."""
    folder.mkdir()
    for number, length in enumerate(lengths):
        text = f"document {number}, of {length} bytes. " * (length // 20 + 1)
        (folder / f"{number}.txt").write_text(text[:length])
    return folder


@pytest.fixture
def documents(tmp_path):
    """Write documents with lengths that reveal off-by-one errors."""
    return written(tmp_path / "documents", (1, 2, 137, 541, 89))


def verdicts(record):
    """Return one verdict for each function: these tests change a whole function, so all its cases
    have one verdict.
    """
    return {result["case"].split("/")[0]: result["verdict"] for result in record["results"]}


def test_the_reference_agrees_with_itself(run, tmp_path, monkeypatch):
    of_case = lambda case: {case.function + case.dtype, *case.name.split("/")}
    some = lambda *given: covering(cases.all_cases(*given), of_case)
    monkeypatch.setattr(fixed_check, "all_cases", some)
    documents = written(tmp_path / "documents", (1, 30, 9, 31))
    status, printed, record = run("canon.reference --ranks 3 --documents", documents)
    assert status == 0
    assert "cases agree." in printed.out
    tried = {result["case"].split("/")[0] for result in record["results"]}
    assert tried == set(draws.WEIGHTS)
    assert record["untried"] == [], "no public function without a case"
    assert all(
        result["verdict"] == "agrees" and result["same_bits"] for result in record["results"]
    )
    for dtype in ("float32", "bfloat16", "float64"):
        assert any(f"/{dtype}" in result["case"] for result in record["results"])
    assert record["command"].startswith("canon check canon.reference --ranks 3")
    assert record["machine"]["torch"] == torch.__version__


def test_the_hopper_kernels_agree_where_they_are_simulated(run, documents):
    line = "--backend gluon --ranks 2 --tokens 230 --only 'zigzag_attention/*/documents'"
    status, printed, record = run(line + " --documents", documents)
    assert status == 0, printed.out
    assert "simulated" in record["world"]
    assert "--backend gluon" in record["command"]
    assert [result["case"].split("/")[3:] for result in record["results"]] == [
        ["float16"],
        ["float16", "sink"],
    ]


def test_a_faulty_module_disagrees(run, write_module):
    write_module("faulty_attention", FAULTY.format(factor=1.01))
    status, printed, record = run("faulty_attention --tokens 200 --only zigzag")
    assert status == 1
    assert verdicts(record) == {"zigzag_attention": "disagrees"}
    assert "out is off by" in printed.out
    words = " ".join(printed.out.split())
    assert "does not have them: striped_attention" in words
    assert "imports them from canon: attention, attention_backward" in words
    assert "out is 1.01 times the expected" in words
    assert "a_new_one" in record["untried"]


def test_a_module_that_raises_on_one_rank_fails_that_case_alone(run, write_module):
    assertion = (
        "    import torch.distributed as dist\n    assert dist.get_rank() != 2, 'no rank two'\n"
    )
    text = FAULTY.format(factor=1).replace("    out, lse", f"{assertion}    out, lse", 1)
    write_module("raising_attention", text)
    status, printed, record = run("raising_attention --tokens 200 --only zigzag/documents")
    assert status == 1
    assert verdicts(record) == {"zigzag_attention": "failed"}
    assert "rank 2: AssertionError: no rank two" in printed.out


def test_more_runs_find_rare_faults(run, write_module):
    """Every rank doubles its out in its fifth run."""
    text = FAULTY.format(factor="next(numbers[threading.get_ident()])")
    text += "\nimport collections, itertools, threading\n"
    text += (
        "numbers = collections.defaultdict(lambda: itertools.chain([1, 1, 1, 1, 2], "
        "itertools.repeat(1)))\n"
    )
    for name, runs, expected in (("often_enough", 4, 0), ("once_more", 6, 1)):
        write_module(name, text)
        line = "--tokens 200 --only zigzag_attention/zigzag/documents --dtype float32 --runs"
        status, printed, record = run(f"{name} {line}", runs)
        assert status == expected
        assert f"--runs {runs}" in record["command"]
    assert "rank 3: run 5 gave other bits than run 2 (determ" in printed.out
    assert "run 6" not in printed.out


@pytest.mark.parametrize("change", LAYERS)
def test_a_function_is_checked_as_a_layer_of_a_model(change, run, write_module):
    tensors, line, text = LAYERS[change]
    write_module("layer", LAYER.format(tensors=tensors, change=line))
    _, printed, _ = run("layer --tokens 200 --dtype float32 --only attention/causal/*plain")
    assert text in printed.out


@pytest.mark.parametrize("fault", WRONG_MOVES)
def test_wrong_moves_plans_and_sums_disagree(fault, verdicts_of):
    message, function, line = WRONG_MOVES[fault]
    found, printed = verdicts_of(MOVES, {function: line}, "--tokens 200 --dtype float32")
    assert {name for name, verdict in found.items() if verdict != "agrees"} == {function}
    assert message in printed


def test_processes_agree_too(run):
    status, printed, _ = run(
        "canon.reference --world processes --ranks 2 --tokens 200 --only zigzag/causal",
    )
    assert status == 0, printed


def test_the_ranks_run_on_gpus_unless_kernels_are_interpreted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, ranks, expected in (
        (1, None, ("threads", "cuda", 4)),
        (8, None, ("gpus", "cuda", 8)),
        (8, 3, ("gpus", "cuda", 3)),
        (8, 9, ("threads", "cuda", 9)),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.delenv("TRITON_INTERPRET")
        assert astuple(placement("auto", ranks)) == expected
        assert astuple(placement("processes", ranks))[:2] == ("processes", "cpu")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert astuple(placement("auto", ranks)) == ("threads", "cpu", ranks or 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no.such.module", "cannot import no.such.module"),
        ("canon.reference --only nothing", "no case matches 'nothing'"),
        ("canon.reference --ranks 0", "argument --ranks: must be at least 1, got 0"),
        ("canon.reference --documents missing.txt", "no such file or folder: missing.txt"),
        ("canon.testing.record", "has none of the functions"),
        ("canon.testing.record --random 3", "has none of the functions attention, "),
        ("canon.reference --backend gluon", "canon.reference has no backends"),
        ("canon.reference --world gpus --ranks 99", "a GPU for each rank: 99 ranks"),
        ("--backend cuda", "--backend cuda needs a GPU"),
        ("canon.reference --features causal,fast", "--features fast: expected one or more of"),
        ("canon.reference --features batched,packed", "expected one of them"),
        ("canon.reference --features no-mask,full", "allows causal only"),
        ("--random 1 --ranks 9", "--ranks from 1 to 8"),
        (
            "--random 2 --only 'no such mask'",
            "no function or mask of these cases has 'no such mask",
        ),
        ("--random 1 --dtype float32 --list", "leave --dtype, --list out"),
        ("canon.reference --seed 3", "--seed and --first need --random N"),
        ("--bits --list --seed 3", "leave --seed, --list out"),
        ("--bits --only nothing canon.reference", "no row matches 'nothing'"),
    ],
)
def test_invalid_arguments_are_errors(run, line, message):
    status, printed, _ = run(line)
    assert status == 2
    assert message in printed.err
