"""Over a mesh ("tokens", "heads") every schedule returns the results of one rank, and all ranks of
rows and columns compare their arguments.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from meshes import FIELDS, MASKS, alone, mesh, over_mesh, sequence
from sharded import close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from canon import Layout, Mask, fast, reference
from canon.testing import process_groups
from canon.testing.thread_group import ThreadGroup

MESHES = [(2, 2), (2, 4), (3, 2), (1, 4), (4, 1)]
SCHEDULES = "ring", "zigzag", "striped", "strided", "magi", "magi keeps"
LAYOUTS = [
    lambda n, rows, heads: Layout.zigzag(n, rows).divided(heads),
    lambda n, rows, heads: Layout.zigzag(n, rows * heads),
    lambda n, rows, heads: Layout(
        [[range(n // 2, n)], *[[]] * (rows * heads - 2), [range(n // 2)]], n
    ),
]


def cases_of(place):
    """Return pairs of a schedule and a mask. Each mesh has other pairs."""
    masks = [*MASKS]
    return [*zip(SCHEDULES, masks[place:] + masks[:place], strict=True)]


def agree(half, rows, heads, cases, first=0):
    group = mesh(rows, heads)
    for number, (schedule, name) in enumerate(cases, first):
        mask = MASKS[name]
        layout = LAYOUTS[number % len(LAYOUTS)](mask.queries, rows, heads)
        options = {"softcap": 2.0} if name == "window" else {}
        got = over_mesh(half, schedule, mask, layout, group, **options)
        for field, *both in zip(FIELDS, got, alone(mask, **options), strict=True):
            at, atol = f"{schedule}, {name}, {field}: ", 1e-6 if field == "largest" else 1e-12
            torch.testing.assert_close(*both, rtol=0, atol=atol, msg=at.__add__)


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize(("rows", "heads"), MESHES)
def test_every_schedule_returns_the_results_of_one_rank(half, rows, heads):
    place = MESHES.index((rows, heads))
    program = partial(agree, half, rows, heads, cases_of(place), first=place)
    process_groups.threads(program, rows * heads)


def test_processes_over_gloo_return_the_results_of_one_rank(half):
    program = partial(agree, half, 2, 2, cases_of(0))
    process_groups.processes(program, 4)


def other_inputs(half):
    """Compare a mask for each sequence, a checkpoint, packed tensors and decoding with one rank."""
    group, layout = mesh(2, 2), Layout.zigzag(37, 4)
    (*qkv, dout, _), sink = sequence(MASKS["causal"])
    masks, shard = [MASKS["documents"], MASKS["full"]], lambda x: layout.shard(x, dist.get_rank())
    given, whole = ([f(x).clone().requires_grad_() for x in qkv] for f in (shard, torch.clone))
    attend = partial(half.magi_attention, group=group, sink=sink)
    out = checkpoint(attend, *given, masks, layout, use_reentrant=False)
    expected = reference.attention(*whole, masks, sink=sink)
    torch.autograd.backward((out, expected), (shard(dout), dout))
    close([out, *(x.grad for x in given)], map(shard, (expected, *(x.grad for x in whole))))
    packed = half.ring_attention(*(shard(x)[1] for x in qkv), masks[0], layout, group=group)
    close([packed], [shard(reference.attention(*qkv, masks[0]))[1]])
    q, k, v = qkv
    decoded = half.decode_attention(q[:, :3], shard(k), shard(v), group=group)
    close([decoded], [reference.attention(q[:, :3], k, v, Mask.full(3, 37))])


def test_batches_of_masks_checkpoints_packed_tensors_and_decoding(half):
    process_groups.threads(partial(other_inputs, half), 4)


def one_call(part, rank, half=reference, mask=MASKS["causal"]):
    """Compare a call over a part of the ranks with one rank."""
    tensors, layout = sequence(MASKS["causal"])[0][:3], Layout.zigzag(37, 4)
    mine = [layout.shard(x, rank) for x in tensors]
    out = half.strided_attention(*mine, mask, layout, group=part)
    close([layout.unshard(out, part)], [reference.attention(*tensors, mask)])


def test_a_slice_of_a_larger_mesh_is_a_mesh(half):
    """Both slices make calls, then one alone."""

    def program():
        names = ("dp", "tokens", "heads")
        part = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)["tokens", "heads"]
        for name in ("causal", "tree")[dist.get_rank() // 4 :]:
            one_call(part, dist.get_rank() % 4, half, MASKS[name])

    process_groups.threads(program, 8)


# --- what is compared and refused


def refusals():
    layout = Layout.contiguous(8, 6)
    q, *kv = (torch.ones(1, layout.size(dist.get_rank()), heads, 8) for heads in (16, 4, 4))
    latents = q, kv[0][:, :, 0], kv[0][:, :, 0, :2], torch.ones(224, 8)
    few, by_column = mesh(3, 2), [[0, 3], [1, 4], [2, 5]]
    call = lambda half=reference, group=few, **options: half.strided_attention(
        q, *kv, None, layout, group=group, **options
    )
    expected = "expected one, or 'tokens', 'heads' in this order"
    largest = "3 ranks of a row cannot share 4 key heads: pass a mesh of 3 x 2 ranks"
    for message, refused in {
        largest: lambda: [call(half, mesh(2, 3)) for half in (reference, fast)],
        f"'heads', 'tokens', {expected}": lambda: call(group=mesh(3, 2, ("heads", "tokens"))),
        f"'dp', 'cp', {expected}": lambda: call(group=mesh(3, 2, ("dp", "cp"))),
        f"'tokens', 'heads', {expected}: pass mesh\\[\"tokens\", \"heads\"\\]": lambda: call(
            group=dist.init_device_mesh("cpu", (1, 3, 2), mesh_dim_names=("dp", "tokens", "heads"))
        ),
        "must ascend row after row, got .*: make it by init_device_mesh": lambda: call(
            group=dist.DeviceMesh("cpu", by_column, mesh_dim_names=("tokens", "heads"))
        ),
        "latent travel together": lambda: fast.latent_attention(*latents, None, layout, group=few),
        "head_stride": lambda: call(head_stride=4),
        # the last proposal is that of `test_rank_invariant_bits_are_those_of_one_rank`
        r"128\)\.divided\(2\) or dispatch\(mask, 3, rank_invariant=True\)\.divided\(2\)$": lambda: (
            call(rank_invariant=True)
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            refused()


def test_wrong_meshes_raise_one_sentence_on_every_rank():
    process_groups.threads(refusals, 6)


def wrong_on_rank_1():
    """Return the error of this rank in a second call, to which one rank passes another mesh."""
    tensors, layout = [torch.ones(1, 2, 4, 8)] * 3, Layout.contiguous(8, 4)
    groups = mesh(2, 2), mesh(2, 2, ("dp", "cp"))
    reference.ring_attention(*tensors, layout=layout, group=groups[0])
    with pytest.raises((ValueError, RuntimeError)) as raised:
        fast.ring_attention(*tensors, layout=layout, group=groups[dist.get_rank() == 1])
    return str(raised.value)


def test_a_wrong_mesh_of_one_rank_raises_on_the_others():
    for rank, error in enumerate(process_groups.processes(wrong_on_rank_1, 4, timeout=60)):
        assert "ring_attention: group is a DeviceMesh with dimensions 'dp', 'cp'" in error
        assert ("rank 1 raised ValueError" in error) == (rank != 1)


DIFFERENT = {  # which ranks pass another mask or another mesh
    "a row": (lambda rank: rank > 1, Mask.full(8), (2, 2), "mask: rank"),
    "a mesh": (lambda rank: rank == 1, Mask.causal(8), (1, 4), "ranks that share the heads: rank"),
}


@pytest.mark.parametrize("part", DIFFERENT)
def test_another_argument_raises_on_all_ranks_of_the_mesh(half, part):
    differs, mask, shape, message = DIFFERENT[part]

    def program():
        groups, tensors = {x: mesh(*x) for x in ((2, 2), shape)}, [torch.ones(1, 2, 4, 8)] * 3
        call = partial(half.ring_attention, *tensors, layout=Layout.contiguous(8, 4))
        given = (mask, shape) if differs(dist.get_rank()) else (Mask.causal(8), (2, 2))
        with pytest.raises(ValueError, match=message):
            call(given[0], group=groups[given[1]])
        call(Mask.causal(8), group=groups[2, 2])

    process_groups.threads(program, 4)


# --- bytes, bits, FLOPs


def test_bytes_are_those_of_the_formulas(half, exchanged, monkeypatch):
    rows, heads, t, (h, g, both) = 2, 4, 8, (16, 4, 14)
    hops, send = [], ThreadGroup.send

    def counted(group, tensors, *rest):
        hops.append(tensors[0].nbytes if group.global_rank == 0 else 0)
        return send(group, tensors, *rest)

    monkeypatch.setattr(ThreadGroup, "send", counted)
    mask = Mask.causal(rows * heads * t)
    layout = Layout.zigzag(mask.queries, rows).divided(heads)
    given = sequence(mask, b=1, dv=6, dtype=torch.float32)
    program = lambda: over_mesh(half, "ring", mask, layout, mesh(rows, heads), given)
    process_groups.threads(program, rows * heads)
    inside = [x[2].nbytes for x in exchanged if x[0] == 0]
    assert len(inside) == (10 if half is reference else 4)
    # both passes: out, lse, q, k, v and their gradients; all but the part of the own column leaves
    # v of 24 bytes to 16 bytes; out and lse of 112 bytes to 16 elements
    padding = 0 if half is reference else 2 * heads * t * (8 + 16)
    assert sum(inside) == 2 * t * 4 * ((h + g) * both + h) + padding
    assert sum(hops) == 3 * (rows - 1) * t * g * both * 4  # K, V twice; dk, dv once


def bits(half, schedule, rows, heads):
    mask, magi = Mask.documents([0, 100, 300, 390]), schedule == "magi, one step"
    plan = (
        fast.dispatch(mask, rows, rank_invariant=True)
        if magi
        else Layout.contiguous(390, rows, 128)
    )
    options = {"rank_invariant": True} | ({"keep_kv": True} if magi else {})

    def program():
        torch.set_num_threads(1)
        given = sequence(mask, h=4, g=2, dtype=torch.bfloat16)
        return over_mesh(
            half, schedule, mask, plan.divided(heads), mesh(rows, heads), given, **options
        )[:5]

    return process_groups.threads(program, rows * heads)[0]


@pytest.mark.parametrize("schedule", ["strided", "magi, one step"])
def test_rank_invariant_bits_are_those_of_one_rank(half, schedule):
    one = bits(half, schedule, 1, 1)
    for shape in ((2, 1), (3, 1), (1, 2), (3, 2)):
        assert all(map(torch.equal, bits(half, schedule, *shape), one)), shape


def test_operators_return_the_same_and_count_the_flops_of_one_rank(half):
    mask, layout = MASKS["documents"], Layout.zigzag(37, 4)

    def program():
        with FlopCounterMode(display=False) as counter:
            got = over_mesh(half, "magi", mask, layout, mesh(2, 2))
        close(got[:-1], alone(mask)[:-1])
        return counter.get_total_flops()

    cells, d, both = mask.area * 2 * 16, 8, 14
    assert sum(process_groups.threads(program, 4)) == cells * (6 * both + 2 * d)
