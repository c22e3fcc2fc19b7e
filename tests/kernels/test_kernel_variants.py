"""Claims about `canon.fast.warm_up`: it compiles every kernel variant that random masks, sizes and
layouts can need.
"""

import json
import re

import pytest
import sampling
import torch
from programs import printed

from canon import __main__ as command_line
from canon.fast import warm_up
from canon.fast.ahead import compilation
from canon.fast.ahead.warm import DEFAULT

# Kernels get CPU tensors and a driver with a target but no device, so compilations are recorded and
# none is run. On a CPU "auto" is always "split": here each call draws one of the methods that
# "auto" may choose.
SETUP = """
import json, sys
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from canon import Mask, fast
from canon.fast import backward, local, half
from canon.fast.ahead import kernel_variants, warm
from canon.fast.ahead.compilation import recorded_jobs
from canon.fast.tables import key_parts
from canon.fast.kernels.cuda import kernel, launch as cuda
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.launcher import Gpu
from canon.fast.kernels.triton import config, launch
from canon.masks.plan_cache import PLANS
from canon.check import draws
from canon.testing import process_groups
from canon.check.case_runner import CaseRunner
from canon.testing.compile import SHARED_LIMIT, _target

automatic = backward.automatic
local.check_device = backward.check_device = lambda x: None
object.__setattr__(half.FAST, "check_device", lambda x: None)
key_parts.FEWEST_KEYS = 64
cuda.is_cpu = lambda device: False


def plan_for(arch):
    launch.choose = lambda kernel, q, v, describable: config.fitting(
        kernel, launch.padded(q.shape[3]), launch.padded(v.shape[3]), q.itemsize,
        SHARED_LIMIT[arch], describable and arch >= 90, arch >= 90,
    )
    cuda.capability, kernel.architecture = lambda device: divmod(arch, 10), lambda device: arch
    cuda.gpu_of = lambda device: Gpu(divmod(arch, 10), 1, SHARED_LIMIT[arch])
"""
RANDOM_CALLS = (
    SETUP
    + """
def cases(dtype, method, reduce_dtype, least_ranks, functions, softcap, invariant):
    draw, index = Random(0), 0
    while True:
        case = draws.drawn(0, index := index + 1, "model", 4, draws.Limits(functions))
        given = dict(case.options)
        usual = given.get("reduce_dtype", dtype) in (dtype, "float32", reduce_dtype)
        usual = usual and given.get("rank_invariant", False) == invariant
        several = case.ranks > 1 and "columns" not in given  # a column may have one rank
        usual = usual and case.used not in ("sum", "lse") and (several or least_ranks == 1)
        if usual and (case.variant != "plain" or method == "auto" and softcap is None):
            scale = draw.choice([case.shape.scale, -0.5, 0.0])
            options = tuple(option for option in case.options if option[0] != "softcap")
            if softcap is not None and case.function not in ("merge", "prepare"):
                options += (("softcap", softcap),)
            shape = replace(case.shape, scale=scale)
            yield replace(case, method=method, shape=shape, options=options)


def run(
    arch, backend, dtype, heads, widths, method, reduce_dtype, least_ranks, functions, softcap,
    invariant, count,
):
    draw = Random(0)
    methods = ["split", "head_parallel"][: 1 + (heads[0] > heads[1])]
    methods += ["fused"] * (backend == "gluon" and max(widths) <= 128)
    model = (tuple(heads), tuple(widths), dtype)
    draws.TABLES["model"] = draws.Table(900, 900, (), (), (), (model,), unusual=False)
    PLANS.clear()
    plan_for(arch)
    backward.automatic = automatic
    with _target(arch), fast.backend(backend), recorded_jobs() as jobs:
        shape = getattr(torch, dtype), *widths, heads, functions
        model = warm._checked_model(*shape, None, method, None, softcap, rank_invariant=invariant)
        reduced = None if reduce_dtype is None else getattr(torch, reduce_dtype)
        kernel_variants.collect(
            replace(
                model,
                ranks=tuple(range(least_ranks, 5)),
                reduce_dtype=reduced,
                over_mesh=heads[1] > 1 and not invariant,
            ),
            "cpu",
        )
        warmed, seen, kinds = set(jobs), set(), set()
        backward.automatic = lambda *_: draw.choice(methods)
        drawn = cases(dtype, method, reduce_dtype, least_ranks, functions, softcap, invariant)
        for done, case in enumerate(drawn):
            if done >= count and kinds == set(functions):
                break
            jobs.clear()
            runner = CaseRunner("canon.fast", (case,), "cpu", Path())
            process_groups.threads(runner.rehearse, case.ranks)
            seen |= set(jobs)
            kinds |= {case.function}
            if missing := set(jobs) - warmed:
                sys.exit(f"{case.draws} needs {next(iter(missing))}")
    return dict(warmed=len(warmed), seen=len(seen))


print(json.dumps([run(*model) for model in json.loads(sys.argv[1])[0]]))
"""
)
RATIOS = (
    SETUP
    + """
def variants(heads, backend, invariant):
    PLANS.clear()
    with _target(90), fast.backend(backend), recorded_jobs() as jobs:
        model = warm._checked_model(
            torch.bfloat16, 64, 64, heads, ("attention", "strided_attention"), None, "auto", 1,
            None, rank_invariant=invariant,
        )
        kernel_variants.collect(model, "cpu")
    return set(jobs)


def of_few_queries(heads):
    hopper.resident_ctas = lambda x: 132
    with _target(90), fast.backend("gluon"), recorded_jobs() as jobs:
        for tokens in (1, 5, 16, 40):
            q, k = (
                torch.zeros(1, n, x, 64, dtype=torch.bfloat16)
                for n, x in zip((tokens, 8192), heads, strict=True)
            )
            fast.attention(q, k, k, Mask.full(tokens, 8192), rank_invariant=True)
    return set(jobs)


def compared(backend, invariant, heads, fewest):
    kernel_variants.Model.fewest_heads = property(lambda model: model.heads)
    known, new = set(), []
    for each in heads:
        found = variants(each, backend, invariant)
        new.append(sorted(name for _, name, _ in found - known))
        known |= found
    kernel_variants.Model.fewest_heads = fewest
    missed = known ^ set().union(*(variants(each, backend, invariant) for each in heads))
    for each in heads if invariant else ():
        missed |= of_few_queries(each) - known
    return new, sorted(name for _, name, _ in missed)


plan_for(90)
fewest = kernel_variants.Model.fewest_heads
print(json.dumps([compared(*given, fewest) for given in json.loads(sys.argv[1])]))
"""
)
COLLECT = (
    SETUP
    + """
plan_for(90)
with _target(90), recorded_jobs() as jobs:
    model = kernel_variants.Model(torch.bfloat16, 64, 64, (2, 1), ("attention",), "gluon")
    kernel_variants.collect(model, "cpu")
"""
)
KEYS = (
    COLLECT
    + """
assert len(jobs) > 10
assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules)
kernels = {str(job.args[1]): job.args[1] for job in jobs.values()}
names = sorted(kernels, reverse=sys.argv[1] == "reversed")
print(json.dumps({name: kernels[name].cache_key for name in names}))
"""
)
# On a GPU: count the kernels that Triton compiles, before and after `warm_up`.
COUNT = """
import json, sys
from dataclasses import replace
from pathlib import Path

import torch
from triton import knobs
from canon.fast import warm_up
from canon.check import draws
from canon.testing import process_groups
from canon.check.case_runner import CaseRunner

count, dtype, heads, widths, functions, ahead = json.loads(sys.argv[1])
draws.TABLES["model"] = draws.Table(
    900, 900, (), (), (), ((tuple(heads), tuple(widths), dtype),), unusual=False
)
compiled = []
knobs.compilation.listener = lambda src, metadata, metadata_group, times, cache_hit: (
    None if cache_hit else compiled.append(src.name)
)
warmed = [
    warm_up(getattr(torch, dtype), *widths, heads=tuple(heads), functions=functions, ranks=n)
    for n in ahead
]
index = done = 0
while done < count:
    case = draws.drawn(1, index := index + 1, "model", 4, draws.Limits(functions))
    usual = not ahead or dict(case.options).get("reduce_dtype", dtype) in (dtype, "float32")
    usual = usual and not dict(case.options).get("rank_invariant")
    usual = usual and "columns" not in dict(case.options)  # a mesh has copies of its own
    usual = usual and not (
        ahead and "softcap" in dict(case.options)
    )  # each soft-cap has kernels of its own
    if case.used not in ("sum", "lse") and usual:
        runner = CaseRunner("canon.fast", (replace(case, method="auto"),), "cuda", Path())
        process_groups.threads(runner.rehearse, case.ranks)
        done += 1
torch.cuda.synchronize()
print(json.dumps(dict(warmed=warmed, compiled=compiled)))
"""
ALL = ("attention_forward", "attention_backward", "merge", *DEFAULT)
INVARIANT = ("attention", *DEFAULT[4:])  # with rank_invariant=True


def ran(program, *arguments, **environment):
    """Run a program in a process without the interpreter, and return its output as JSON."""
    return json.loads(printed(program, json.dumps(arguments), **environment).splitlines()[-1])


# arch, backend, dtype, heads, widths, method, reduce_dtype, fewest ranks, functions, softcap
MODELS = [
    (90, "gluon", "bfloat16", (8, 2), (64, 64), "auto", "float16", 1, ALL, None),
    (90, "gluon", "bfloat16", (2, 2), (128, 64), "fused", "float64", 1, ALL, 5.0),
    (90, "triton", "bfloat16", (4, 2), (64, 64), "auto", None, 1, ALL, None),
    (80, "triton", "float32", (3, 1), (48, 32), "auto", "bfloat16", 1, ALL, 5.0),
    (80, "cuda", "bfloat16", (4, 2), (64, 64), "auto", None, 1, ALL, None),
    (90, "gluon", "bfloat16", (16, 4), (64, 64), "auto", None, 1, INVARIANT, 5.0),
    (90, "gluon", "bfloat16", (10, 2), (64, 64), "auto", None, 2, DEFAULT[1:4], 5.0),
    (90, "gluon", "bfloat16", (12, 2), (64, 64), "auto", None, 2, DEFAULT[4:5], None),
    (90, "gluon", "bfloat16", (8, 2), (64, 64), "auto", None, 2, DEFAULT[5:], None),
    (90, "gluon", "bfloat16", (4, 4), (64, 64), "auto", None, 1, ("latent_attention",), None),
    (90, "triton", "float16", (2, 2), (128, 64), "auto", None, 2, ("latent_attention",), 5.0),
]


def test_a_search_for_variants_gives_one_key_in_any_order_and_loads_no_compiler_of_pytorch():
    """Else other processes than the one that compiled a kernel compile it again. To load PyTorch's
    compiler would take seconds before the first kernel compiles.
    """
    one, other = (json.loads(printed(KEYS, order)) for order in ("sorted", "reversed"))
    assert {"gluon", "triton"} <= {part for name in one for part in name.split(".")}
    assert one == other


def test_random_calls_need_no_other_variant():
    most, part = (200, 0.4) if sampling.ALL else (20, 0.3)
    given = [(*x, x[8] == INVARIANT, most) for x in MODELS]
    for found in ran(RANDOM_CALLS, given):
        assert found["seen"] > part * found["warmed"], "the calls need a good part of the set"


FOUR = (32, 8), (24, 6), (16, 8), (40, 8), (20, 4), (16, 16)  # at most four heads share a tile
RATIO_CASES = {  # backend, rank_invariant, ratios of heads: kernels with new variants, by ratio
    ("gluon", False, (*FOUR, (64, 8))): {6: ["forward_kernel", "dq_kernel"]},  # eight share one
    ("triton", False, (*FOUR, (64, 8), (71, 1))): {},
    ("gluon", True, ((32, 8), (24, 6), (24, 8), (40, 8), (20, 4), (142, 2), (16, 16))): {
        2: ["weights_kernel", "sums_kernel"]
    },
}


def test_a_second_ratio_of_heads_needs_no_other_variant():
    """Only the heads of a tile are a constant of Gluon kernels: a power of two."""
    found = ran(RATIOS, *RATIO_CASES)
    for (_, _, ratios), others, (new, missed) in zip(
        RATIO_CASES, RATIO_CASES.values(), found, strict=True
    ):
        assert len({*new[0]}) > 5
        for place in range(1, len(ratios)):
            assert {*new[place]} == {*others.get(place, [])}, ratios[place]
        assert not missed, "the fewest heads have all variants"


@pytest.mark.gpus(1)
@pytest.mark.parametrize(
    ("dtype", "heads", "widths"), [("bfloat16", (8, 2), (64, 64)), ("float32", (2, 1), (64, 32))]
)
def test_after_warm_up_200_steps_with_random_masks_compile_nothing(dtype, heads, widths, tmp_path):
    model = dtype, heads, widths, ALL
    cold = ran(COUNT, 5, *model, [], TRITON_CACHE_DIR=str(tmp_path / "cold"))
    assert cold["compiled"], "without warm_up, calls compile"
    warm = ran(COUNT, 200, *model, [1, 2, 3, 4, 4], TRITON_CACHE_DIR=str(tmp_path / "warm"))
    assert warm["warmed"][0] > 20
    assert warm["warmed"][-1] == 0, "a second call finds the stamp of the first"
    assert not warm["compiled"]


@pytest.mark.gpus(1)
def test_after_first_calls_200_steps_with_random_masks_compile_nothing(tmp_path):
    model, settings = ("bfloat16", (8, 2), (64, 64), DEFAULT), {"CANON_COMPILE_AHEAD": "1"}
    found = ran(COUNT, 200, *model, [], TRITON_CACHE_DIR=str(tmp_path), **settings)
    assert not found["compiled"], "first calls compile in other processes"


# ---------------------------------------------------------------------- arguments
@pytest.fixture
def outcome(monkeypatch):
    """Pretend that there is a GPU, and that the process ends with the outcome in the list."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compilation, "compile_ahead", lambda *_, **options: found[0])
    return found


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.int8,), {}, "dtype must be one of"),
        (
            (torch.bfloat16, 100),
            {},
            "d must be a positive multiple of 16 (others compile when used), got 100",
        ),
        ((), {"heads": (8, 3)}, "the first a multiple of the second"),
        ((), {"functions": ("attention", "softmax")}, "functions must be some of ['attention"),
        (
            (),
            {"functions": "latent_attention"},
            "a key head for each query head, so heads must be (32, 32)",
        ),
        ((), {"backward": "none"}, "backward='none': expected one of"),
        ((), {"processes": 0}, "processes must be at least 1"),
    ],
)
def test_a_bad_argument_is_named(arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        warm_up(*arguments, **options)


def test_a_failed_compilation_raises_and_a_complete_one_is_counted(outcome):
    outcome[:] = [compilation.Outcome(7, 1, 8, "ValueError: no such instruction")]
    with pytest.raises(
        RuntimeError, match="compiled 7 of 8 kernel variants: ValueError: no such instruction"
    ):
        warm_up()
    outcome[:] = [compilation.Outcome(8, 0, 8)]
    assert warm_up() == 8


def test_a_machine_without_a_gpu_has_nothing_to_compile(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert warm_up() == 0
    assert "there is nothing to compile" in capsys.readouterr().out
    assert command_line.main(["warm", "--widths", "128/64", "--heads", "32/8"]) == 1, (
        "a script that warms a host must notice"
    )
    assert "there is nothing to compile" in capsys.readouterr().out
