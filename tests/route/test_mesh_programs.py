"""Programs over a mesh ("tokens", "heads"): compiled, checkpointed, prepared and replayed calls,
and lost ranks.
"""

import functools
import os
import pickle
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compiled import assert_same, compiled_once, inputs, results
from meshes import HALVES, mesh
from sharded import on_this_rank, whole
from short_waits import shorten_waits
from torch.utils.checkpoint import checkpoint

from canon import Layout, Mask, fast, reference
from canon.fast.replay import recordings
from canon.masks.plan_cache import PLANS, PlanCache
from canon.reference import mesh as reference_mesh
from canon.testing import process_groups

TOKENS = 24
MASKS = [Mask.documents([0, 5, TOKENS]), Mask.documents([0, 7, 9, TOKENS])]
LAYOUT = Layout.zigzag(TOKENS, 4)
CALLS = [
    ("ring_attention", {}),
    ("strided_attention", {}),
    ("magi_attention", {"own_keys_first": False}),
]


def compiled(half):
    """Compile calls over a mesh, and compare them with eager calls."""
    group = mesh(2, 2)
    for name, options in CALLS if half == "reference" else CALLS[2:]:

        def model(q, k, v, mask, name=name, options=options):
            return getattr(HALVES[half], name)(
                torch.sin(q), k, v, mask, LAYOUT, group=group, return_lse=True, **options
            )

        once = compiled_once(model, "aot_eager")
        for mask in MASKS:
            given = inputs(LAYOUT.size(dist.get_rank())), mask
            assert_same(results(once, *given), results(model, *given), exact=True)
    keeping = compiled_once(
        lambda q, k, v: HALVES[half].magi_attention(
            q, k, v, None, LAYOUT, group=group, keep_kv=True
        ),
        "aot_eager",
    )
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    with pytest.raises(NotImplementedError, match="over a mesh keeps no tensors"):
        keeping(*inputs(6))


@pytest.mark.parametrize("half", HALVES)
def test_a_compiled_call_returns_the_bits_of_an_eager_one(half):
    process_groups.processes(functools.partial(compiled, half), 4, timeout=300)


def checkpointed(half, layout, tensors):
    """Return the results of a call, and of the same call inside a checkpoint."""
    attend = functools.partial(
        HALVES[half].strided_attention, mask=MASKS[1], layout=layout, group=mesh(2, 2),
        return_lse=True,
    )  # fmt: skip
    again = functools.partial(checkpoint, attend, use_reentrant=False)
    return [on_this_rank(call, layout, tensors) for call in (attend, again)]


@pytest.mark.parametrize("half", HALVES)
def test_a_checkpointed_call_has_the_same_bits(half):
    tensors = whole(MASKS[1])
    program = functools.partial(checkpointed, half, LAYOUT, tensors)
    for plain, again in process_groups.threads(program, 4):
        assert all(map(torch.equal, plain, again))


# --- plans


def attended(half, function, options, layout):
    attend = functools.partial(
        getattr(HALVES[half], function), mask=MASKS[0], layout=layout, **options
    )
    run = lambda: on_this_rank(
        functools.partial(attend, group=mesh(2, 2), return_lse=True), layout, whole(MASKS[0])
    )
    return process_groups.threads(run, 4)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("function", "options"), CALLS)
def test_prepared_plans_serve_a_call_over_a_mesh(half, function, options, monkeypatch):
    missed, get = set(), PlanCache.get

    def noting(cache, key):
        if (found := get(cache, key)) is None and hasattr(key[0], "__wrapped__"):
            on_device = isinstance(key[1][-1], torch.device)  # made from the plan on the host
            missed.update(() if on_device else {key[0].__name__})
        return found

    expected = attended(half, function, options, LAYOUT)
    shapes = {"heads": (4, 2), "widths": (8, 6), "dtype": torch.float64, "device": "cpu"}
    PLANS.clear()
    plans = [
        HALVES[half].prepare(
            function, MASKS[0], LAYOUT, rank=rank, mesh_heads=2, **shapes, **options
        )
        for rank in range(4)
    ]
    PLANS.clear()
    for plan in pickle.loads(pickle.dumps(plans)):
        plan.load()
    monkeypatch.setattr(PlanCache, "get", noting)
    got = attended(half, function, options, LAYOUT)
    assert all(
        torch.equal(x, y)
        for a, b in zip(got, expected, strict=True)
        for x, y in zip(a, b, strict=True)
    )
    assert missed <= {"row_indices"}  # a range


def test_prepare_refuses_a_mesh_that_does_not_divide_the_ranks():
    with pytest.raises(ValueError, match="mesh_heads=3 does not divide the 4 ranks"):
        reference.prepare(
            "ring_attention", MASKS[0], LAYOUT, rank=0, mesh_heads=3, heads=(3, 3), widths=(8, 8)
        )


def replays_exchanges(layout, several):
    """Train twice, the second time from recordings, and again without them."""
    group = mesh(2, 2)

    def train(tensors):
        q, k, v, dout = (layout.shard(x, dist.get_rank()).requires_grad_() for x in tensors[:4])
        out = fast.ring_attention(q, k, v, MASKS[0], layout, group=group)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    replayed = [train(tensors) for tensors in several][1]
    plans: Any = PLANS.plans
    passes = [
        (key[0].__name__, plan.reason)
        for key, (plan, _) in list(plans.items())
        if isinstance(plan, recordings.PreparedPass)
    ]
    dist.barrier()
    recordings.REPLAYED = {}
    dist.barrier()
    return replayed, train(several[1]), passes


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize(
    "layout", [Layout.contiguous(TOKENS, 4), LAYOUT], ids=["in order", "zigzag"]
)
def test_the_copies_of_an_exchange_are_replayed(layout):
    several = [whole(MASKS[0], b=2, d=8, dv=8, dtype=torch.float32, seed=seed) for seed in (1, 2)]
    program = functools.partial(replays_exchanges, layout, several)
    for replayed, written, passes in process_groups.threads(program, 4):
        exchanges = {"_divide_heads", "_order_tokens", "_reorder_tokens", "_join_heads"}
        assert exchanges <= {name for name, _ in passes}
        assert all(not reason for name, reason in passes if name in exchanges)
        assert all(map(torch.equal, replayed, written))


# --- lost ranks


def leaving(folder):
    """Rank 3 ends before the second call. The others write their error."""
    shorten_waits()
    group = mesh(2, 2)
    q, k, v = (torch.ones(1, 6, heads, 8) for heads in (4, 2, 2))
    reference.ring_attention(q, k, v, group=group)
    if dist.get_rank() == 3:
        os._exit(0)
    with pytest.raises(RuntimeError) as raised:
        reference.ring_attention(q, k, v, group=group)
    (folder / str(dist.get_rank())).write_text(str(raised.value))
    os._exit(1)


def test_ranks_of_the_mesh_name_a_missing_rank(tmp_path):
    with pytest.raises(RuntimeError, match="exit code"):
        process_groups.processes(functools.partial(leaving, tmp_path), 4)
    errors = [path.read_text() for path in tmp_path.iterdir()]
    assert len(errors) == 3
    assert all("rank 3 is missing" in error for error in errors)


def raising(folder):
    """Rank 1 raises an error of its own inside a pass, while its row and its column wait."""
    shorten_waits()
    group = mesh(2, 2)
    q, k, v = (torch.ones(1, 6, heads, 8) for heads in (4, 2, 2))
    reference.ring_attention(q, k, v, group=group)
    if dist.get_rank() == 1:
        reference_mesh.to_column = mock.Mock(side_effect=ValueError("an error of one rank"))
    try:
        reference.ring_attention(q, k, v, group=group)
    except (RuntimeError, ValueError) as error:
        (folder / str(dist.get_rank())).write_text(str(error))
    time.sleep(5)  # the others must not detect the failure from closed connections


def test_an_error_of_one_rank_ends_the_messages_of_rows_and_columns(tmp_path):
    process_groups.processes(functools.partial(raising, tmp_path), 4, timeout=30)
    errors = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert errors[1] == "an error of one rank"
    assert all("rank 1 raised ValueError" in errors[rank] for rank in (0, 2, 3))
