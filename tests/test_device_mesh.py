"""A DeviceMesh of one dimension is a group of every distributed function. Other meshes and DTensors raise on every rank."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from canon import Layout, Mask, fast, reference
from canon.fast.transport import transport_report
from canon.testing import process_groups

HALVES = {"reference": reference, "fast": fast}
MASK = Mask.documents([0, 5, 16])
LAYOUTS = {"zigzag_attention": Layout.zigzag, "striped_attention": Layout.striped}
FUNCTIONS = ("ring_attention", "zigzag_attention", "striped_attention", "strided_attention", "magi_attention")


def two_by_two():
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))


def inputs(seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 16, heads, 16, generator=draw) for heads in (4, 2, 2)]


def gradients(attend, leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def call_on_slices(name):
    """Compare every function on both slices of a mesh with attention of the whole sequence and with the process group."""
    half, mesh = HALVES[name], two_by_two()
    for dim in ("dp", "cp") if half is reference else ("dp",):  # the interpreter is slow
        part = mesh[dim]
        rank, whole = part.get_local_rank(), inputs(mesh[{"dp": "cp", "cp": "dp"}[dim]].get_local_rank())
        expected = gradients(lambda q, k, v: reference.attention(q, k, v, MASK), whole)
        for function in FUNCTIONS:
            layout = LAYOUTS.get(function, Layout.contiguous)(16, 2)
            mine = [layout.shard(x, rank) for x in whole]
            attend = functools.partial(getattr(half, function), mask=MASK)
            found = gradients(functools.partial(attend, group=part), mine)
            for ours, full in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, layout.shard(full, rank), msg=lambda text: f"{function}: {text}")
            same = gradients(functools.partial(attend, group=part.get_group()), mine)
            assert all(map(torch.equal, found, same))


@pytest.mark.parametrize("name", HALVES)
def test_every_function_accepts_a_slice_of_a_mesh(name):
    process_groups.processes(functools.partial(call_on_slices, name), 4)


def move_on_slices():
    mesh = two_by_two()
    part, layout = mesh["cp"], Layout.zigzag(16, 2)
    rank, x = part.get_local_rank(), inputs(0)[0][0]
    mine = layout.shard(x, rank, dim=0)
    assert layout.unshard(mine, part, dim=0).equal(x)
    assert transport_report("cpu", part) == "gloo"
    for half in HALVES.values():
        plan = half.cast_plan(MASK, layout)
        received = half.group_cast(mine, plan, 0, group=part)
        assert received.equal(half.group_cast(mine, plan, 0, group=part.get_group()))
        total = half.group_reduce(received, plan, 0, torch.zeros_like(mine), group=part)
        rows = plan.send_rows(0, rank)
        assert total.equal(torch.zeros_like(mine).index_add_(0, rows, mine[rows]))


def test_collectives_of_plans_and_layouts_accept_a_slice_of_a_mesh():
    process_groups.processes(move_on_slices, 4)


def refuse():
    """Call with wrong groups and tensors on every rank. Return the errors."""
    mesh = two_by_two()
    nameless, half_of_ranks = dist.init_device_mesh("cpu", (2, 2)), dist.DeviceMesh("cpu", [0, 1])
    q, k, v = (x[:, :4] for x in inputs(0))
    layout, errors = Layout.contiguous(8, 2), {}
    calls = {
        "two dimensions": lambda: reference.ring_attention(q, k, v, group=mesh),
        "two dimensions, fast": lambda: fast.magi_attention(q, k, v, group=mesh),
        "two dimensions, unshard": lambda: layout.unshard(q, mesh),
        "without names": lambda: reference.strided_attention(q, k, v, group=nameless, head_stride=1),
        "a DTensor": lambda: fast.strided_attention(
            q, DTensor.from_local(k, mesh["cp"], [Replicate()]), v, group=mesh["cp"], head_stride=1
        ),
        "a DTensor on one rank": lambda: reference.magi_attention(
            q, k, DTensor.from_local(v, mesh["cp"], [Replicate()]) if dist.get_rank() % 2 else v, group=mesh["cp"]
        ),
        "a member": lambda: layout.unshard(q, half_of_ranks),
    }
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def test_other_meshes_and_dtensors_raise_on_every_rank_with_a_remedy():
    for rank, errors in enumerate(process_groups.processes(refuse, 4)):
        for name in ("two dimensions", "two dimensions, fast", "two dimensions, unshard"):
            assert "group is a DeviceMesh with dimensions 'dp', 'cp', expected one" in errors[name]
            assert 'for example mesh["cp"]' in errors[name]
        assert "2 dimensions without names" in errors["without names"]
        assert "give mesh_dim_names to init_device_mesh" in errors["without names"]
        assert errors["a DTensor"].startswith("TypeError: k is a DTensor: pass k.to_local()")
        assert "v is a DTensor: pass v.to_local()" in errors["a DTensor on one rank"]
        assert errors.get("a member", "") == (
            ""
            if rank < 2
            else f"ValueError: unshard: rank {rank} is not a member of the mesh: call it on the members only"
        )
