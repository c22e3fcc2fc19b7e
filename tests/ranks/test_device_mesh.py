"""A DeviceMesh of one dimension is a group of every distributed function. Other meshes and DTensors
raise on every rank.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from sharded import all_equal, assert_agrees, attending, on_this_rank, whole
from torch.distributed.tensor import DTensor, Replicate

from canon import Layout, Mask, fast, reference
from canon.ranks import group
from canon.testing import process_groups

MASK = Mask.documents([0, 5, 16])


def two_by_two():
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))


def call_on_slices(half):
    """Compare calls on both slices of a mesh with one rank and with the process group."""
    mesh = two_by_two()
    for dim, other in (("dp", "cp"), ("cp", "dp")):
        tensors, part = whole(MASK, seed=mesh[other].get_local_rank()), mesh[dim]
        for call in ("ring", "strided", "magi"):
            layout = Layout.contiguous(16, 2)
            found, same = (
                on_this_rank(
                    attending(half, call, MASK, layout, group=group),
                    layout,
                    tensors,
                    part.get_group(),
                )
                for group in (part, part.get_group())
            )
            assert_agrees(found, MASK, *tensors)
            assert all_equal(found, same)
    move_on_slices(half, mesh["cp"])


def move_on_slices(half, part):
    layout = Layout.zigzag(16, 2)
    rank, x = part.get_local_rank(), whole(MASK)[0][0]
    mine = layout.shard(x, rank, dim=0)
    assert layout.unshard(mine, part, dim=0).equal(x)
    plan = half.cast_plan(MASK, layout)
    received = half.group_cast(mine, plan, 0, group=part)
    assert received.equal(half.group_cast(mine, plan, 0, group=part.get_group()))
    total = half.group_reduce(received, plan, 0, torch.zeros_like(mine), group=part)
    rows = plan.send_rows(0, rank)
    assert total.equal(torch.zeros_like(mine).index_add_(0, rows, mine[rows]))


def test_every_function_accepts_a_slice_of_a_mesh(half):
    process_groups.processes(partial(call_on_slices, half), 4)


def refuse():
    mesh, rank = two_by_two(), dist.get_rank()
    nameless, half_of_ranks = dist.init_device_mesh("cpu", (2, 2)), dist.DeviceMesh("cpu", [0, 1])
    q, k, v = (x[:, :4] for x in whole(MASK)[:3])
    part, layout = mesh["cp"], Layout.contiguous(8, 2)
    of_mesh = lambda x: DTensor.from_local(x, part, [Replicate()])
    strided = partial(fast.strided_attention, head_stride=1)
    one = "dimensions 'dp', 'cp', expected one.*for example mesh.\"cp\""
    plain = "plain tensor, got DTensor: pass x.to_local"
    for call, message in (
        (lambda: reference.ring_attention(q, k, v, group=mesh), one),
        (lambda: layout.unshard(q, mesh), one),
        (lambda: strided(q, k, v, group=nameless), "give mesh_dim_names to init_device_mesh"),
        (lambda: strided(q, of_mesh(k), v, group=part), "^k is a DTensor: pass k.to_local"),
        (
            lambda: reference.magi_attention(q, k, of_mesh(v) if rank % 2 else v, group=part),
            "v is a DTensor: pass v.to_local",
        ),
        (lambda: layout.shard(of_mesh(q), 0), plain),
        (lambda: layout.unshard(of_mesh(q), part), plain),
        (lambda: layout.shard_batch({"input_ids": of_mesh(q)}, 0), "'input_ids' must be a plain"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    outside = f"unshard: rank {rank} is not a member of the mesh: call it on the members only"
    with nullcontext() if rank < 2 else pytest.raises(ValueError, match=outside):
        layout.unshard(q, half_of_ranks)


def test_other_meshes_and_dtensors_raise_on_every_rank_with_a_remedy():
    process_groups.processes(refuse, 4)


def test_a_process_of_torchrun_without_a_group_warns_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    group._warn_of_one_rank.cache_clear()
    x = torch.ones(1, 4, 2, 8)
    with pytest.warns(
        UserWarning, match="WORLD_SIZE is 2, but torch.distributed is not initialised"
    ) as warned:
        reference.ring_attention(reference.ring_attention(x, x, x), x, x)
    assert len(warned) == 1
