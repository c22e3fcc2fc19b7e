"""The CUDA kernels on a CPU: g++ compiles the .cu files, and fibers stand for threads. See
cuda_emulation.
"""

import functools
import shutil
from dataclasses import replace
from math import gcd

import hopper
import pytest
import torch
from cuda_emulation import KERNELS, emulated
from hopper import SHORT

from canon import Mask
from canon.fast import backward, local
from canon.fast.kernels.cuda import launch
from canon.fast.kernels.cuda.config import Config, shared_bytes
from canon.fast.kernels.launcher import Gpu
from canon.fast.tables.cells import Cells
from canon.testing.judge import Attended, agreement, oracle, orders

if shutil.which("g++") is None:
    pytest.skip("the emulation needs g++", allow_module_level=True)

BF16, F16 = torch.bfloat16, torch.float16
SMALL = dict.fromkeys(("forward", "dq", "dkdv"), Config(32, 16, 2))  # 16 rows for each warp
TALL = dict.fromkeys(("forward", "dq", "dkdv"), Config(64, 32, 2))  # 32 rows for each warp
# two warps share 16 rows
SHARED = SMALL | dict.fromkeys(("dq", "dkdv"), Config(32, 32, 4, parts=2))
ONE_BUFFER = SHARED | {"dkdv": Config(32, 32, 4, parts=2, exchanges=1)}  # of P and dS
inputs = functools.partial(hopper.inputs, d=16, dv=16)


def verdict(configs, mask, scale=None, arguments=None, options=None, **sizes):
    """``configs``: by kernel, or the shared memory of a GPU,
    for the configurations of its table.
    """
    q, k, v, dout, dlse = arguments or inputs(mask, **sizes)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    got = attend(configs, q, k, v, dout, dlse, mask, scale, **(options or {}))
    exact, honest = (f(q, k, v, dout, mask, scale, dlse=dlse) for f in (oracle, orders))
    return agreement(got, exact, honest)


def attend(
    configs, q, k, v, dout, dlse, mask, scale, method="split", result=None, empty=torch.empty, **how
):
    """Return the results of both passes, in tensors that ``empty`` makes from a shape and a
    dtype.
    """

    def choose(kernel, d, dv, gpu):
        config = configs[kernel]
        return replace(config, shared_bytes=shared_bytes(kernel, config, d, dv))

    how |= {"choose": choose} if isinstance(configs, dict) else {"gpu": Gpu((8, 0), 108, configs)}
    new = lambda x, width: empty((*x.shape[:3], width), dtype=result or q.dtype).fill_(torch.nan)
    out = new(q, v.shape[-1])
    dq = new(q, q.shape[-1])
    dk = new(k, q.shape[-1])
    dv = new(v, v.shape[-1])
    lse = torch.full_like(dlse.transpose(1, 2), torch.nan).transpose(1, 2)  # written by a copy
    with emulated(**how):
        local.forward_into(q, k, v, Cells(mask), scale, out, lse)
        queries = backward.QueryInputs(dout, q, lse, backward.make_delta(dout, out, lse, dlse))
        backward.backward_into(queries, k, v, Cells(mask), scale, method, dq, dk, dv)
    return Attended(out, lse, dq, dk, dv)


def assert_exact(configs, mask, scale=None, arguments=None, options=None, **sizes):
    found = verdict(configs, mask, scale, arguments, options, **sizes)
    assert found.agrees, str(found)


every_config = pytest.mark.parametrize(
    "configs", [SMALL, TALL, SHARED, ONE_BUFFER], ids=["small", "tall", "shared", "one buffer"]
)


@pytest.mark.sweep
@every_config
@pytest.mark.parametrize("mask", SHORT.values(), ids=SHORT)
def test_every_mask_equals_the_oracle(mask, configs):
    assert_exact(configs, mask)


@pytest.mark.parametrize(
    ("h", "g", "method", "l2_heads"),
    [(8, 1, "split", 1), (6, 2, "split", 6), (4, 2, "head_parallel", 2), (3, 3, "split", 3)],
)
def test_heads_of_a_group_are_summed(h, g, method, l2_heads, monkeypatch):
    monkeypatch.setattr(launch, "heads_in_l2", lambda heads, *_: gcd(heads, l2_heads))
    assert_exact(SMALL, Mask.causal(40), b=2, h=h, g=g, options={"method": method})


@pytest.mark.parametrize(
    ("d", "dv", "shared_memory", "dtype"),
    [(48, 48, 99, F16), (64, 80, 227, BF16), (128, 64, 163, BF16), (144, 256, 227, F16)],
)
def test_widths_with_the_configurations_of_a_gpu(d, dv, shared_memory, dtype):
    options = {"result": torch.float32 if dtype == torch.float16 else None}
    assert_exact(
        shared_memory << 10, Mask.causal(70), h=1, d=d, dv=dv, dtype=dtype, options=options
    )


@pytest.mark.parametrize("width", [64, 128, 256])
def test_main_configurations_with_several_tiles(width):
    """A full span, two partial spans and a short last tile."""
    assert_exact(227 << 10, Mask.window(290, 200, 0), h=1, d=width, dv=width)


@every_config
def test_the_order_of_warps_does_not_matter(configs):
    assert_exact(configs, Mask.causal(150), h=1, options={"backwards": True})


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
def test_results_may_have_any_alignment_and_strides(dtype):
    """Elements of 4 and 2 bytes, at multiples of 4 and 2 bytes; others are written by a copy."""
    odd = lambda shape, dtype: torch.empty(*shape[:-1], shape[-1] + 1, dtype=dtype)[..., 1:]
    turned = lambda shape, dtype: torch.empty(*shape[:-2], *shape[:-3:-1], dtype=dtype).mT
    for empty in (odd, turned):
        assert_exact(SMALL, SHORT["prefix"], options={"empty": empty, "result": dtype})


def test_large_scores_give_nan_and_not_a_wrong_number():
    mask = Mask.full(16)
    q, k, v, dout, dlse = inputs(mask, h=1)
    q[0, 3] = 2.0**66
    k.fill_(2.0**66)
    lse = attend(SMALL, q, k, v, dout, dlse, mask, 1.0).lse
    assert lse[0, 0, 3].isnan()


FAULTS = {  # the lines of a fault: right, wrong
    "no barrier before a stage is used": (
        "        cta_barrier();\n        const Visit",
        "        const Visit",
    ),
    "a stage is used before it has arrived": (
        "wait_for_copies<STAGES - 2>();",
        "wait_for_copies<STAGES - 1>();",
    ),
    "the next stage is loaded into the wrong buffer": (
        "stage == 0 ? STAGES - 1 : stage - 1",
        "stage",
    ),
    "invisible keys are not hidden": ("hide(", "(void)sizeof("),
    "no barrier after the exchange": ("wait_for_parts(", "(void)sizeof("),
}


RACES = {  # faults that need not change a result: file, right, wrong
    "the ring of visits is too short": ("work_tile.cuh", "SLOTS = STAGES + 1", "SLOTS = STAGES"),
    "ds is written over p that others read": (
        "dkdv.cu",
        "if constexpr (EXCHANGES == 1) group_barrier(warp);",
        "",
    ),
    "lanes read what others stage without a barrier": ("tensor.cuh", "warp_barrier();", ""),
}


def is_found(sources, backwards):
    """Return whether the kernels in this folder give a wrong result, or a fault."""
    try:
        return not verdict(
            SHARED, Mask.causal(100), h=1, options={"sources": sources, "backwards": backwards}
        ).agrees
    except RuntimeError as fault:
        return bool(fault.args)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, tmp_path):
    sources = tmp_path / "cuda"
    shutil.copytree(KERNELS, sources)
    for path in sources.glob("*.cu"):
        path.write_text(path.read_text().replace(*FAULTS[fault]))
    assert is_found(sources, False) or is_found(sources, True)


@pytest.mark.parametrize("fault", RACES)
def test_planted_races_are_found(fault, tmp_path):
    sources = tmp_path / "cuda"
    shutil.copytree(KERNELS, sources)
    name, right, wrong = RACES[fault]
    text = (sources / name).read_text()
    assert right in text
    (sources / name).write_text(text.replace(right, wrong))
    with pytest.raises(RuntimeError, match="without a barrier between"):
        verdict(ONE_BUFFER, Mask.causal(100), h=1, options={"sources": sources})


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale):
    assert_exact(SMALL, SHORT["window"], scale)
