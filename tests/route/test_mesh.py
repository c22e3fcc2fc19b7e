"""Over a mesh ("tokens", "heads") every schedule returns the results of one rank, and all ranks of
rows and columns compare their arguments.
"""

import functools
from itertools import product

import pytest
import torch
import torch.distributed as dist
from meshes import (
    FIELDS,
    HALVES,
    LAYOUTS,
    MASKS,
    MESHES,
    SCHEDULES,
    alone,
    mesh,
    over_mesh,
    sequence,
)
from sharded import close, on_this_rank
from torch.utils.flop_counter import FlopCounterMode

from canon import Layout, Mask, fast, reference
from canon.masks.rows import united
from canon.ranks import group as group_module
from canon.reference import mesh as reference_mesh
from canon.testing import process_groups
from canon.testing.thread_group import ThreadGroup

ATOL = 1e-12


def agree(half, rows, heads, cases):
    group = mesh(rows, heads)
    for number, (schedule, mask) in enumerate(cases):
        if schedule == "strided, ring" and heads == 4:
            continue  # its stride needs two key heads
        layout = tuple(LAYOUTS.values())[number % len(LAYOUTS)]
        layout = layout(MASKS[mask].queries, rows, heads)
        options = {"softcap": 2.0} if mask == "window" else {}
        got = over_mesh(half, schedule, MASKS[mask], layout, group, **options)
        for name, mine, theirs in zip(FIELDS, got, alone(MASKS[mask], **options), strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=0, atol=1e-6 if name == "largest" else ATOL,
                msg=lambda text, at=(schedule, mask, name): f"{at}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("rows", "heads"), MESHES)
def test_every_schedule_returns_the_results_of_one_rank(half, rows, heads):
    cases = list(product(SCHEDULES, MASKS))
    process_groups.threads(functools.partial(agree, half, rows, heads, cases), rows * heads)


def agree_over_gloo(rows, heads):
    cases = list(zip(SCHEDULES, MASKS, strict=False))
    for half in HALVES:
        agree(half, rows, heads, cases)


@pytest.mark.parametrize(("rows", "heads"), [(2, 2), (1, 2)])
def test_processes_over_gloo_return_the_results_of_one_rank(rows, heads):
    process_groups.processes(functools.partial(agree_over_gloo, rows, heads), rows * heads)


# --- other inputs


def other_inputs(half):
    """Compare a mask for each sequence, packed tensors, bfloat16 and decoding with one rank."""
    module, group, rank = HALVES[half], mesh(2, 2), dist.get_rank()
    (q, k, v, dout, _), sink = sequence(MASKS["causal"])
    layout = Layout.zigzag(37, 4)
    masks = [MASKS["documents"], MASKS["full"]]
    given = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]
    out = module.magi_attention(*given, masks, layout, group=group, sink=sink)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = reference.attention(*whole, masks, sink=sink)
    out.backward(layout.shard(dout, rank))
    expected.backward(dout)
    of_rank = [layout.shard(x, rank) for x in (expected, *(x.grad for x in whole))]
    close([out, *(x.grad for x in given)], of_rank, ATOL)
    packed = module.ring_attention(
        *(layout.shard(x[1], rank, 0) for x in (q, k, v)), masks[0], layout, group=group
    )
    close([packed], [layout.shard(reference.attention(q[1], k[1], v[1], masks[0]), rank, 0)], ATOL)
    keys = [layout.shard(x, rank) for x in (k, v)]
    decoded = module.decode_attention(q[:, :3], *keys, group=group)
    close([decoded], [reference.attention(q[:, :3], k, v, Mask.full(3, 37))], ATOL)
    assert layout.unshard(layout.shard(q, rank), group).equal(q)
    other = Layout.contiguous(37, 4)
    moved = layout.redistribute(layout.shard(q, rank), other, group=group)
    assert moved.equal(other.shard(q, rank))


@pytest.mark.parametrize("half", HALVES)
def test_batches_of_masks_packed_tensors_and_decoding(half):
    process_groups.threads(functools.partial(other_inputs, half), 4)


def slices(half):
    """Call on both slices of a larger mesh, then on one of them alone."""
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tokens", "heads"))
    part, which = mesh["tokens", "heads"], dist.get_rank() // 4
    (q, k, v, *_), _ = sequence(MASKS["causal"])
    layout = Layout.zigzag(37, 4)
    for mask in (MASKS["causal"], MASKS["tree"])[which:]:
        mine = [layout.shard(x, dist.get_rank() % 4) for x in (q, k, v)]
        out = HALVES[half].strided_attention(*mine, mask, layout, group=part)
        close([layout.unshard(out, part)], [reference.attention(q, k, v, mask)], ATOL)


@pytest.mark.parametrize("half", HALVES)
def test_a_slice_of_a_larger_mesh_is_a_mesh(half):
    process_groups.threads(functools.partial(slices, half), 8)


def some_ranks():
    """Call over a mesh of the last four of five processes, whose ranks count tokens first."""
    part = dist.DeviceMesh("cpu", [[1, 3], [2, 4]], mesh_dim_names=("tokens", "heads"))
    (q, k, v, *_), _ = sequence(MASKS["causal"])
    layout = Layout.zigzag(37, 4)
    if dist.get_rank() == 0:
        return
    rank = (1, 3, 2, 4).index(dist.get_rank())
    for half in (reference, fast):
        out = half.magi_attention(
            *(layout.shard(x, rank) for x in (q, k, v)), None, layout, group=part
        )
        close([layout.unshard(out, part)], [reference.attention(q, k, v)], ATOL)


def test_a_mesh_of_some_processes_in_another_order():
    process_groups.processes(some_ranks, 5)


# --- what is compared and refused


def refusals():
    layout, errors = Layout.contiguous(8, 6), {}
    size = layout.size(dist.get_rank())
    q, k, v = (torch.ones(1, size, heads, 8) for heads in (16, 4, 4))
    latent = q, torch.ones(1, size, 8), torch.ones(1, size, 2), torch.ones(224, 8)
    groups = {
        "heads": mesh(2, 3),
        "order": mesh(3, 2, ("heads", "tokens")),
        "names": mesh(3, 2, ("dp", "cp")),
        "descending": dist.DeviceMesh(
            "cpu", [[5, 4, 3], [2, 1, 0]], mesh_dim_names=("tokens", "heads")
        ),
    }
    calls = {
        name: lambda group=group: reference.ring_attention(q, k, v, None, layout, group=group)
        for name, group in groups.items()
    }
    calls["heads, fast"] = lambda: fast.magi_attention(q, k, v, None, layout, group=groups["heads"])
    calls["latent"] = lambda: fast.latent_attention(*latent, None, layout, group=groups["heads"])
    calls["a stride"] = lambda: reference.strided_attention(
        q, k, v, None, layout, head_stride=4, group=mesh(3, 2)
    )
    calls["tiles"] = lambda: reference.strided_attention(
        q, k, v, None, layout, rank_invariant=True, group=mesh(3, 2)
    )
    for name, call in calls.items():
        with pytest.raises(ValueError) as raised:
            call()
        errors[name] = str(raised.value)
    return errors


def test_wrong_meshes_raise_one_sentence_on_every_rank():
    for errors in process_groups.threads(refusals, 6):
        largest = "3 ranks of a row cannot share 4 key heads: pass a mesh of 3 x 2 ranks"
        for name in ("heads", "heads, fast"):
            assert largest in errors[name]
        for name, dims in (("order", "'heads', 'tokens'"), ("names", "'dp', 'cp'")):
            assert f"dimensions {dims}, expected one, or 'tokens', 'heads'" in errors[name]
        assert "must ascend in its rows and columns" in errors["descending"]
        assert "the heads of a latent travel together" in errors["latent"]
        assert "head_stride" in errors["a stride"]
        assert "multiples of 128" in errors["tiles"]


def disagreeing(half, differs):
    """Return the error of each rank when some pass another mask, then a call that is right."""
    group, layout, rank = mesh(2, 2), Layout.contiguous(8, 4), dist.get_rank()
    q, k, v = (torch.ones(1, 2, heads, 8) for heads in (4, 2, 2))
    mask = Mask.full(8) if differs(rank) else Mask.causal(8)
    with pytest.raises(ValueError, match="the ranks disagree") as raised:
        HALVES[half].ring_attention(q, k, v, mask, layout, group=group)
    HALVES[half].ring_attention(q, k, v, Mask.causal(8), layout, group=group)
    return str(raised.value)


PARTS = {
    "column": lambda rank: rank % 2 == 1,
    "row": lambda rank: rank > 1,
    "rank": lambda r: r == 1,
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("part", PARTS)
def test_another_mask_raises_on_all_ranks_of_the_mesh(half, part):
    for error in process_groups.threads(functools.partial(disagreeing, half, PARTS[part]), 4):
        assert "mask: rank" in error


def test_another_mesh_of_the_same_ranks_raises_on_all_of_them():
    def program():
        shape = (4, 2) if dist.get_rank() % 2 else (2, 4)
        groups = {x: mesh(*x) for x in ((4, 2), (2, 4))}
        q = torch.ones(1, 1, 4, 8)
        with pytest.raises(ValueError, match="ranks that share the heads: rank"):
            reference.ring_attention(q, q, q, Mask.causal(8), group=groups[shape])

    process_groups.threads(program, 8)


# --- planted faults


@pytest.mark.parametrize("fault", ["swapped rows", "unsorted pieces", "a sink of one column"])
def test_a_planted_fault_is_found(fault, monkeypatch):
    if fault == "swapped rows":
        exchange = reference_mesh.all_to_all
        planted = lambda *given: exchange(*given).flip(0)
        monkeypatch.setattr(reference_mesh, "all_to_all", planted)
    elif fault == "unsorted pieces":
        monkeypatch.setattr(reference_mesh, "order_of_row", lambda *given: ())
    else:
        send = reference_mesh.to_tokens
        lost = lambda call, x: send(call, x * (call.rank % 2) if x.shape[-1] == 1 else x)
        monkeypatch.setattr(reference_mesh, "to_tokens", lost)
    program = functools.partial(agree, "reference", 2, 2, [("zigzag", "causal")])
    with pytest.raises(RuntimeError, match="Tensor-likes are not close"):
        process_groups.threads(program, 4)


# --- bytes, bands, bits


@pytest.mark.parametrize("half", HALVES)
def test_bytes_are_those_of_the_formulas(half, exchanged, monkeypatch):
    rows, heads, t, (h, g, d, dv) = 2, 4, 8, (16, 4, 8, 8)
    sends, send = [], ThreadGroup.send
    counted = lambda group, tensors, *rest: (
        sends.append((group.global_rank, tensors[0].nbytes)),
        send(group, tensors, *rest),
    )[1]
    monkeypatch.setattr(ThreadGroup, "send", counted)
    mask = Mask.causal(rows * heads * t)
    layout = Layout.zigzag(mask.queries, rows).divided(heads)
    tensors = sequence(mask, b=1, dv=dv, dtype=torch.float32)[0]

    def program():
        group, rank = mesh(rows, heads), dist.get_rank()
        q, k, v = (layout.shard(x, rank).requires_grad_() for x in tensors[:3])
        out = HALVES[half].ring_attention(q, k, v, mask, layout, group=group)
        dist.barrier()
        forward = len(exchanged), len(sends)
        dist.barrier()
        out.sum().backward()
        return forward

    (first, hops), *_ = process_groups.threads(program, rows * heads)
    e, kv = 4, g * (d + dv)
    of_exchange = (1 - 1 / heads) * t * (h * (d + dv) * e + kv * e + h * 4)
    for messages, number in ((exchanged[:first], (2, 5)), (exchanged[first:], (2, 5))):
        mine = [x[2].nbytes for x in messages if x[0] == 0]
        assert len(mine) == number[half == "reference"]
        assert sum(mine) * (1 - 1 / heads) == of_exchange
    between = lambda sent: sum(nbytes for rank, nbytes in sent if rank == 0)
    assert between(sends[:hops]) == (rows - 1) * t * kv * e  # (1 - 1 / T) S kv / H
    assert between(sends[hops:]) == 2 * (rows - 1) * t * kv * e


def test_zigzag_over_8_x_8_ranks_has_one_band_a_hop():
    tokens = 131_072
    rows = united(Layout.zigzag(tokens, 64), 8)
    for whole in (Layout.zigzag(tokens, 8), united(Layout.zigzag(tokens, 8).divided(8), 8)):
        assert all(rows.positions(row).equal(whole.positions(row)) for row in range(8))
    mask = Mask.causal(tokens)
    assert [len(rows.local_mask(mask, 0, owner).bands) for owner in range(1, 8)] == [1] * 7
    assert len(rows.local_mask(mask, 7, 0).bands) == 1


def bits(half, call, options, rows, heads):
    mask = Mask.documents([0, 100, 300, 390])
    plan = (
        fast.dispatch
        if call == "magi_attention"
        else lambda mask, rows, **_: Layout.contiguous(390, rows, 128)
    )
    layout = plan(mask, rows, rank_invariant=True).divided(heads)
    (*tensors, dlse), _ = sequence(mask, h=4, g=2, dtype=torch.bfloat16)

    def program():
        torch.set_num_threads(1)
        group = mesh(rows, heads) if rows * heads > 1 else None
        attend = functools.partial(
            getattr(HALVES[half], call), mask=mask, layout=layout, group=group,
            rank_invariant=True, return_lse=True, **options,
        )  # fmt: skip
        return on_this_rank(attend, layout, (*tensors, dlse))

    return process_groups.threads(program, rows * heads)[0]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("call", "options"), [("strided_attention", {}), ("magi_attention", {"keep_kv": True})]
)
def test_rank_invariant_bits_are_those_of_one_rank(half, call, options):
    one = bits(half, call, options, 1, 1)
    for rows, heads in ((2, 1), (3, 1), (1, 2), (3, 2)):
        got = bits(half, call, options, rows, heads)
        assert all(map(torch.equal, got, one)), (rows, heads)


# --- operators


def counted(half):
    """Return the results of a call whose operator runs, and its FLOPs on this rank."""
    group, layout = mesh(2, 2), Layout.zigzag(37, 4)
    with FlopCounterMode(display=False) as counter:
        got = over_mesh(half, "magi", MASKS["documents"], layout, group)
    return got, counter.get_total_flops()


@pytest.mark.parametrize("half", HALVES)
def test_operators_return_the_same_and_count_the_flops_of_one_rank(half):
    results = process_groups.threads(functools.partial(counted, half), 4)
    for got, _ in results:
        close(got[:-1], alone(MASKS["documents"])[:-1], ATOL)
    area, b, h, d, dv = MASKS["documents"].area, 2, 16, 8, 6
    assert sum(flops for _, flops in results) == area * b * h * (6 * (d + dv) + 2 * d)


def test_a_mesh_ends_with_its_groups():
    def program():
        part = mesh(2, 2)
        found = group_module.mesh_of("a test", part)
        assert found is group_module.mesh_of("a test", part)
        assert found.everyone is dist.group.WORLD
        dist.barrier()
        dist.destroy_process_group(found.column)
        with pytest.raises(ValueError, match="the process group has ended"):
            _ = found.column

    process_groups.threads(program, 4)
