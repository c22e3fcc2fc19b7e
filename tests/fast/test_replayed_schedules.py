"""Repeated calls of the distributed functions replay their steps, with the bits of steps that run
as written.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from hopper import inputs
from interpreted_replay import recorded
from meshes import mesh
from sharded import all_equal, shards, whole

from canon import Layout, Mask, fast
from canon.fast import backend
from canon.fast.replay import recordings as prepared
from canon.testing import process_groups, simulated_kernels

pytestmark = pytest.mark.interpreted

N, RANKS = 25, 3
LAYOUTS = {
    "zigzag": Layout.zigzag(N, RANKS),
    "uneven": Layout([[range(14, N)], [], [range(14)]], N),
}
# scattered active queries, and steps without any
MASK = Mask.documents([0, 3, 4, 11, 12, 20, N], window=(9, 0))
small = functools.partial(whole, MASK, dv=8, dtype=torch.float32)
FUNCTIONS = {
    "ring": fast.ring_attention,
    "strided": functools.partial(fast.strided_attention, head_stride=1),
    "magi": functools.partial(fast.magi_attention, casts=2),
    "magi keeps": functools.partial(fast.magi_attention, casts=2, keep_kv=True),
    "magi in one step": functools.partial(fast.magi_attention, own_keys_first=False),
}
OF_EACH = [MASK, Mask.window(N, 12, 3)]
CASES = [
    ("ring", MASK, "zigzag", "qkv"),
    ("ring", MASK, "uneven", "q"),
    ("ring", MASK, "uneven", "k"),
    ("ring", OF_EACH, "uneven", "qkv"),
    ("strided", MASK, "uneven", "qkv"),
    ("strided", MASK, "zigzag", "v"),
    ("strided", OF_EACH, "uneven", "qkv"),
    ("magi", MASK, "zigzag", "qkv"),
    ("magi", MASK, "uneven", "q"),
    ("magi keeps", MASK, "zigzag", "qkv"),
    ("magi keeps", OF_EACH, "uneven", "qkv"),
    ("magi in one step", MASK, "zigzag", "qkv"),
]


# Tiles of 128 rows: 2 ranks see buffers with masked tiles in the middle, and masked tokens in
# visible tiles.
LONG = 800
GLUON_CASES = [
    (Mask.causal(LONG), Layout.zigzag(LONG, 2)),
    (
        Mask.documents([0, 30, 170, 200, 310, 610, LONG]),
        Layout([[range(100), range(700, LONG)], [range(100, 700)]], LONG),
    ),
]
GLUON_FUNCTIONS = FUNCTIONS | {"magi": functools.partial(fast.magi_attention, own_keys_first=True)}


def train(attend, mask, layout, wanted, tensors):
    """Return out, and the gradients of the ``wanted`` inputs. q, k and v of this rank are views of
    one tensor.
    """
    q, k, v, dout = shards(layout, tensors[:4])
    parts = torch.cat([q, k, v], 2).split([q.shape[2], k.shape[2], v.shape[2]], 2)
    leaves = [x.requires_grad_(name in wanted) for name, x in zip("qkv", parts, strict=True)]
    out = attend(*leaves, mask, layout)
    return out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout)


def assert_a_replay_has_the_bits_of_steps_as_written(ranks, several, run, *call):
    """Run ``run(*call, tensors)`` three times, the last time from recordings, and again without
    them. ``several``: the tensors of the last two times.
    """

    def program():
        times = (several[0], *several)  # the second call is recorded
        replayed = [run(*call, tensors) for tensors in times][-1]
        dist.barrier()  # no other rank looks up a plan
        reasons = {x.reason for x in recorded()}
        dist.barrier()
        prepared.REPLAYED = {}
        dist.barrier()
        return replayed, run(*call, several[1]), reasons

    for replayed, written, reasons in process_groups.threads(program, ranks):
        assert reasons - {prepared.UNSEEN} == {""}  # some steps have nothing to launch
        assert all_equal(replayed, written)


@pytest.mark.sweep
@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize(("function", "mask", "kind", "wanted"), CASES)
def test_a_repeated_call_replays_the_bits_of_its_steps_as_written(function, mask, kind, wanted):
    tensors = [small(b=2, h=2, g=1, seed=seed) for seed in (1, 2)]
    assert_a_replay_has_the_bits_of_steps_as_written(
        RANKS, tensors, train, FUNCTIONS[function], mask, LAYOUTS[kind], wanted
    )


@pytest.mark.sweep
@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("layout", [Layout.contiguous(N, 4), Layout.zigzag(N, 4)], ids=str)
def test_the_exchanges_of_a_mesh_replay_too(layout):
    tensors = [small(seed=seed) for seed in (1, 2)]
    attend = lambda *given: fast.ring_attention(*given, group=mesh(2, 2))
    assert_a_replay_has_the_bits_of_steps_as_written(4, tensors, train, attend, MASK, layout, "qkv")


@pytest.mark.sweep
@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("function", ["ring", "strided", "magi"])
@pytest.mark.parametrize(("mask", "layout"), GLUON_CASES, ids=["causal", "documents"])
def test_steps_of_the_hopper_kernels_replay_too(function, mask, layout):
    tensors = [whole(mask, h=2, d=64, dv=64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)]
    with backend("gluon"), simulated_kernels.simulated():
        assert_a_replay_has_the_bits_of_steps_as_written(
            2, tensors, train, GLUON_FUNCTIONS[function], mask, layout, "qkv"
        )


@pytest.mark.usefixtures("replays")
def test_decoding_in_order_replays_too():
    """With a mask for each sequence. The keys that no query sees are NaN."""
    masks = [Mask.causal(3, LONG), Mask.window(LONG, 200, 0).crop(queries=range(500, 503))]
    seen, ends = Mask.union(*masks), (0, 256, LONG)

    def decode(tensors):
        held = range(*[0, *ends][dist.get_rank() :][:2])
        q, k, v = tensors[0], *(x[:, held.start : held.stop] for x in tensors[1:3])
        own = [mask.crop(keys=held) for mask in masks]
        return fast.decode_attention(q, k, v, own, rank_invariant=True, return_lse=True)

    tensors = [inputs(seen, b=2, h=4, g=2, seed=seed) for seed in (1, 2)]
    with backend("gluon"), simulated_kernels.simulated():
        assert_a_replay_has_the_bits_of_steps_as_written(len(ends), tensors, decode)
