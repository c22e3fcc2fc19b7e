"""Claims about `canon.fast.warm_up`: it compiles every kernel variant that random masks, sizes and layouts can need."""

import json
import os
import subprocess
import sys

import pytest

# Kernels get CPU tensors and a driver with a target but no device, so compilations are recorded and none is run. On a CPU
# "auto" is always "split": here each call draws one of the methods that "auto" may choose.
RANDOM_CALLS = """
import json, sys
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from canon import fast
from canon.fast import backward, kernel_variants, local
from canon.fast.compilation import recorded_jobs
from canon.fast.kernels.triton import config, launch
from canon.testing import draws, process_groups
from canon.testing.case_runner import CaseRunner
from canon.testing.compile import SHARED_LIMIT, _target
from canon.testing.random_source import RandomSource

arch, count, backend, dtype, heads, widths, method, functions = json.loads(sys.argv[1])
draw = Random(0)
local.check_device = backward.check_device = lambda x: None
launch.choose = lambda kernel, d, dv, itemsize, device, describable: config.fitting(
    kernel, d, dv, itemsize, SHARED_LIMIT[arch], describable and arch >= 90, arch >= 90)
METHODS = ["split", "head_parallel"][: 1 + (heads[0] > heads[1])]
METHODS += ["fused"] * (backend == "gluon" and max(widths) <= 128)
draws.TABLES["model"] = draws.Table(900, 900, (), (), (), ((tuple(heads), tuple(widths), dtype),), unusual=False)

def cases():
    index = 0
    while True:
        case = draws.drawn(0, index := index + 1, "model", 4)
        reduced = dict(case.options).get("reduce_dtype", dtype)
        if case.function in functions and case.used not in ("sum", "lse") and reduced in (dtype, "float32") and (case.variant != "plain" or method == "auto"):
            yield replace(case, method=method)

with _target(arch), fast.backend(backend), recorded_jobs() as jobs:
    model = kernel_variants._checked_model(getattr(torch, dtype), *widths, heads, functions, None, method, None)
    kernel_variants.collect(replace(model, ranks=(2, 3, 4)), "cpu")
    warmed, seen, kinds = set(jobs), set(), set()
    backward.automatic = lambda *_: draw.choice(METHODS)
    for case, _ in zip(cases(), range(count)):
        jobs.clear()
        runner = CaseRunner("canon.fast", (case,), RandomSource(), "cpu", Path())
        process_groups.threads(runner.rehearse, case.ranks)
        seen |= set(jobs)
        kinds |= {case.function}
        if missing := set(jobs) - warmed:
            sys.exit(f"{case.draws} needs {sorted(missing)[0]}")
print(json.dumps(dict(warmed=len(warmed), seen=len(seen), kinds=sorted(kinds))))
"""
DISTRIBUTED = ("ring_attention", "zigzag_attention", "striped_attention", "strided_attention", "magi_attention")
ALL = ("attention", "attention_forward", "attention_backward", "merge", *DISTRIBUTED)


def ran(program, *arguments):
    """Run a program in a process without the interpreter, and return its output as JSON."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program, json.dumps(arguments)]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("arch", "backend", "dtype", "heads", "widths", "method"),
    [
        (90, "gluon", "bfloat16", (8, 2), (64, 64), "auto"),
        (90, "gluon", "bfloat16", (2, 2), (128, 64), "fused"),
        (90, "triton", "bfloat16", (4, 2), (64, 64), "auto"),
        (80, "triton", "float32", (3, 1), (48, 32), "auto"),
    ],
)
def test_200_random_calls_need_no_other_variant(arch, backend, dtype, heads, widths, method):
    found = ran(RANDOM_CALLS, arch, 200, backend, dtype, heads, widths, method, ALL)
    assert found["kinds"] == sorted(ALL), "the draws reach all functions"
    assert found["seen"] > 0.2 * found["warmed"], "the calls need a good part of the set"
