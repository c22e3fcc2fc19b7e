"""Inputs and runs of the Hopper kernels for tests. The simulator runs their source; with --gpu, an
sm_90 runs them.

A simulated run also checks the protocol. Reading a buffer before it is full and overwriting it
before it is read are faults. The simulator finds them in every order of loads and warpgroups.
"""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from sharded import DEVICE, ON_HOPPER

from canon import Band, Mask, fast
from canon.fast import backend, backward, local
from canon.fast.kernels import launcher
from canon.fast.kernels.gluon import config, launch
from canon.fast.kernels.gluon.tile_scheduler import tile_schedule
from canon.fast.tables.cells import Cells, in_place
from canon.fast.tables.device_plans import uploaded
from canon.masks.plan_cache import PLANS
from canon.testing import simulated_kernels
from canon.testing.judge import Attended, agreement, dense, oracle

HOPPER_ONLY = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not ON_HOPPER, reason="this GPU is no Hopper"),
]
METHODS = ("split", "fused", "head_parallel")
FEW = {  # masks of few queries over 700 keys
    "one query": Mask.full(1, 700),
    "causal": Mask.causal(17, 700),
    "window": Mask.window(700, 300, 3).crop(queries=range(660, 700)),
    "documents": Mask.documents([0, 1, 65, 66, 300, 470, 700]).crop(queries=range(280, 330)),
    "a gap that no query sees": Mask(
        [Band(0, 3, 130, 140), Band(0, 2, 150, 500), Band(2, 3, 600, 700)], 5, 700
    ),
    "no bands": Mask([], 4, 700),
}
FEW_SHAPES = [  # query heads, key heads, d, dv, dtype
    (4, 1, 64, 64, torch.bfloat16),
    (6, 2, 128, 128, torch.bfloat16),
    (2, 2, 64, 64, torch.float16),
    (4, 2, 256, 256, torch.float16),
    (2, 1, 192, 128, torch.bfloat16),
    (3, 3, 40, 24, torch.bfloat16),
]
SHORT = {  # masks of at most 52 tokens
    "causal": Mask.causal(52),
    "window": Mask.window(52, 9, 4),
    "documents": Mask.documents([0, 1, 1, 33, 34, 52]),
    "prefix": Mask.prefix(52, 19),
    "blocks": Mask.block_causal([i // 13 for i in range(52)]),
    "full, more keys than queries": Mask.full(35, 52),
    "queries without keys and keys without queries": Mask.causal(40).shift(6, 3).shift(-1, 0),
    "a late rectangle": Mask.causal(52).crop(range(29, 52)),
    "one token": Mask.causal(1),
    "no bands": Mask([], 5, 7),
}
EMPTY = {"no queries": Mask([], 0, 7), "no keys": Mask([], 7, 0), "nothing at all": Mask([], 0, 0)}


@contextmanager
def hopper(order="random", seed=0):
    """Compute with the Hopper kernels."""
    with (
        backend("gluon"),
        nullcontext() if ON_HOPPER else simulated_kernels.simulated(order=order, seed=seed),
    ):
        yield


def in_order(mask):
    """Return the cells whose tiles of keys are visited in order."""
    return Cells(mask, in_place(mask))


def bands_of(spans, band):
    """Return the bands of a span whose own band is ``band``; none if it is full."""
    first, stop, *_ = band
    if stop < 0:  # a chain
        return [span[2:] for span in spans[first : first - stop]]
    return [band] if stop else []


def new_schedule(cells, traversal, device):
    """Return the tile schedule, not from the cache of plans."""
    return uploaded(tile_schedule.__wrapped__(cells, traversal), device)


def inputs(mask, b=1, h=2, g=1, d=64, dv=64, dtype=torch.bfloat16, seed=0):
    """Return q, k, v, dout, dlse, with NaN in queries without visible keys and in keys that no
    query sees.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = [(mask.queries, h, d), (mask.keys, g, d), (mask.keys, g, dv), (mask.queries, h, dv)]
    q, k, v, dout = (
        torch.randn(b, *shape, generator=draw).to(dtype).to(DEVICE) for shape in shapes
    )
    dlse = (
        torch.randn(b, h, mask.queries, generator=draw)
        .to(torch.promote_types(dtype, torch.float32))
        .to(DEVICE)
    )
    seen = mask.dense().to(DEVICE)
    for x, used in ((q, seen.any(1)), (k, seen.any(0)), (v, seen.any(0)), (dout, seen.any(1))):
        x[:, ~used] = torch.nan
    return q, k, v, dout, dlse


def captured(program):
    """Return a CUDA graph of ``program()``, and its results there."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        program()
    torch.cuda.synchronize()
    # NCCL's watchdog queries events meanwhile
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        return graph, program()


def growing(growth, dtype=torch.bfloat16):
    """Return a mask of 9 queries, and q, k and v with scores that grow along the 700 keys."""
    mask = Mask.causal(9, 700)
    q, k, v, *_ = inputs(mask, h=4, g=2, dtype=dtype)
    q[..., 0] = torch.linspace(0, 1, 9, device=DEVICE)[None, :, None]
    k[..., 0] = (torch.arange(700, device=DEVICE) // 64 * growth)[None, :, None]
    return mask, q, k, v


def both_passes(q, k, v, dout, dlse, mask, scale=None, method="split"):
    """Return the results of both passes on the kernels that surround the call."""
    out, lse = local.attention_forward(q, k, v, mask, scale=scale)
    grads = backward.attention_backward(
        dout, q, k, v, out, lse, mask, scale=scale, dlse=dlse, method=method
    )
    return Attended(out, lse, *grads)


def attend(*given, **more):
    """Return the results of `both_passes` on the Hopper kernels. ``order`` and ``seed``: those of
    `hopper`.
    """
    how = {name: more.pop(name) for name in ("order", "seed") if name in more}
    with hopper(**how):
        return both_passes(*given, **more)


def attend_in_order(q, k, v, mask, **options):
    """Return out and lse of a call with ``rank_invariant=True`` on the Hopper kernels."""
    with hopper(), torch.no_grad():
        return fast.attention(q, k, v, mask, rank_invariant=True, return_lse=True, **options)


@contextmanager
def noted(monkeypatch, module, name, of_result):
    """Yield a list to which each call of a function of ``module`` adds ``of_result(result)``."""
    found, function = [], getattr(module, name)
    PLANS.clear()  # a recording of an equal call would replay it

    def noting(*given):
        result = function(*given)
        found.append(of_result(result))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(module, name, noting)
        yield found


def plant(monkeypatch, module, name, right, wrong):
    """Replace a text in the source of a kernel function of ``module``, which the simulator runs."""
    function = copy.copy(getattr(module, name))
    source = "".join(function.raw_src)
    assert right in source
    function.raw_src = [source.replace(right, wrong)]
    monkeypatch.setattr(module, name, function)


def plan_for_hopper(monkeypatch, sms):
    """Plan for a Hopper GPU with so many SMs, for which the CPU stands, and drop its launches."""
    automatic = backward.automatic
    monkeypatch.setattr(launcher, "_launch", lambda *_: None)
    monkeypatch.setattr(launch, "check_runs", lambda _: None)
    monkeypatch.setattr(launch, "SIMULATED_SMS", sms)
    monkeypatch.setattr(backward, "automatic", lambda *given: automatic(*given, sms))


def not_finite(value, start=0):
    """Return a mask of 5 queries over 700 keys, q, k and v: 128 keys have scores of ``value``."""
    mask = Mask.causal(5, 700)
    q, k, v, *_ = inputs(mask, g=2)
    q[..., 0], k[:, start : start + 128, :, 0] = 1, value
    return mask, q, k, v


def forward(q, k, v, mask, tiles, **how):
    """Return out and lse of the Hopper forward with this configuration."""
    with config.forced(forward=tiles), hopper(**how):
        return Attended(*local.attention_forward(q, k, v, mask))


def assert_methods(run, arguments, mask, scale=None, methods=METHODS):
    """Fail unless the judge accepts ``run(*arguments, mask, scale, method)`` for each method."""
    for method in methods:
        assert_exact(run(*arguments, mask, scale, method), *arguments, mask, scale)


def assert_exact(got, q, k, v, dout, dlse, mask, scale=None):
    """Fail unless the judge accepts ``got``."""
    exact, honest = (f(q, k, v, dout, mask, scale, dlse=dlse) for f in (oracle, dense))
    verdict = agreement(got, exact, honest)
    assert verdict.agrees, str(verdict)
