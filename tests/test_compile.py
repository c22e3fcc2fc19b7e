"""Every kernel compiles ahead of time for sm_80 and sm_90, spills no register and fits the device: no GPU needed."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from canon.fast.kernels.gluon.config import LONG_TABLE
from canon.testing.compile import SHARED_LIMIT, main_cases


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """One process for each target: kernels are compiled, not interpreted, whatever this session does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "canon.testing.compile", "--json", "--arch", str(request.param)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return request.param, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("compiled", [80, 90], indirect=True)
def test_kernels_compile_without_spills_and_fit_the_device(compiled):
    arch, reports = compiled
    assert len(reports) >= len(main_cases(arch))
    by_choice = lambda r: 32 if r["case"]["dtype"] in ("float32", "float64") else 0  # no tensor cores: not for speed
    wrong = [r for r in reports if r["spilled"] > by_choice(r)]
    assert not wrong, f"registers are spilled: {wrong}"
    wrong = [r for r in reports if r["shared"] > r["expected_shared"]]
    assert not wrong, f"more shared memory than config.shared_bytes says: {wrong}"
    assert all(r["shared"] <= SHARED_LIMIT[arch] for r in reports)
    wrong = [r for r in reports if r["warnings"]]
    assert not wrong, f"the assembler warns: {wrong}"
    long = [r["config"] for r in reports if r["case"]["long"]]
    assert long == [asdict(config) for config in LONG_TABLE.values() if arch == 90]
    merges = [r["updates_after_reading"] for r in reports if r["name"] == "merge_kernel"]
    assert merges == [True, True], "one warp writes the lse, in place, of rows whose old lse others are to read"
