"""A merge in place reads each old lse before it writes the new one, even if three of four warps are
late (on a GPU).

One warp writes the lse of all rows of a CTA. If a late warp read the new lse, it would weight its
rows wrongly: out would be wrong and lse right. Without a GPU, `test_compile.py` checks that the
compiled kernel has the barrier."""

import importlib.util
from pathlib import Path

import pytest
import torch

from canon.fast import local
from canon.fast.kernels.triton import launch, merge
from canon.fast.replay import recordings as prepared

ROWS = "    rows = first + tl.arange(0, BM)\n"
BARRIER = "    tl.debug_barrier()"
LATE = '''
import triton


@triton.jit
def late(x):
    """Return x; all warps except the first return it about 0.1 ms later."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 t; .reg .pred others; mov.u32 t, %tid.x; setp.ge.u32 others, t, 32; "
        "@others nanosleep.u32 100000; mov.b32 $0, $1; }",
        "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1,
    )


@kernel('''


def late_kernel(folder: Path, barrier: bool):
    """Return a copy of the merge kernel with three of four warps late,
    with or without its barrier.
    """
    source = Path(merge.__file__).read_text()
    assert source.count(ROWS) == source.count(BARRIER) == 1
    source = source.replace(ROWS, ROWS.replace("tl.arange(0, BM)", "late(tl.arange(0, BM))"))
    assert source.count("\n@kernel(") == 1
    source = source.replace("\n@kernel(", LATE)
    if not barrier:
        source = source.replace(BARRIER, "    # tl.debug_barrier()")
    path = folder / f"merge_{'with' if barrier else 'without'}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.merge_kernel


@pytest.mark.gpus(1)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_late_warp_reads_the_old_lse_because_of_the_barrier(indexed, tmp_path, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    shape = 1, 256, 4, 128
    out, other = (torch.randn(shape, generator=draw).cuda() for _ in range(2))
    lse, other_lse = (torch.randn(1, 4, 256, generator=draw).cuda() for _ in range(2))
    expected = local.merge(out, lse, other, other_lse)  # not in place
    rows = torch.arange(256, device="cuda") if indexed else None
    for barrier in (True, False):
        monkeypatch.setattr(prepared, "REPLAYED", {})
        monkeypatch.setattr(launch, "merge_kernel", late_kernel(tmp_path, barrier))
        got = out.clone(), lse.clone()
        local.merge_into(*got, other, other_lse, rows)
        assert torch.equal(got[1], expected[1])
        assert torch.equal(got[0], expected[0]) == barrier
