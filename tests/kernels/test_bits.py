"""The contract of bits: with rank_invariant=True, out and lse of a query depend on its keys and
their places alone.

The kernels have the tiles of GPUs.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hopper import HOPPER_ONLY, hopper, plant
from hopper import inputs as hopper_inputs
from invariant_worlds import same_bits
from sharded import DEVICE, ON_HOPPER

from canon import Band, Mask, fast, trees
from canon.fast.kernels.gluon import stale_maximum
from canon.fast.kernels.triton.config import HOPPER, Config, forced

N = 300
CAUSAL = Mask.causal(N)
CHUNKS = (290, 291), (150, 250)  # queries
IN_TWO_BANDS = Mask([Band(0, N, 0, 70, None, 0), Band(70, N, 70, N, None, 0)], N, N)
KINDS = {
    "triton-64-bfloat16": ("triton", 64, torch.bfloat16, HOPPER["forward"][64][0]),
    "triton-128-float16": ("triton", 128, torch.float16, HOPPER["forward"][128][0]),
    # a GPU has 16 x 16: slow here
    "triton-256-float32": ("triton", 256, torch.float32, Config(64, 32)),
    "gluon-64-float16": ("gluon", 64, torch.float16, None),
    "gluon-128-bfloat16": ("gluon", 128, torch.bfloat16, None),
    "gluon-256-bfloat16": ("gluon", 256, torch.bfloat16, None),
}


@contextmanager
def kernels(kind):
    """Compute with the kernels of a kind, in the tiles of a GPU."""
    backend, _, _, config = KINDS[kind]
    if backend == "gluon":
        with hopper(order="early"):
            yield
    else:
        config = replace(config, tma=False)  # the interpreter has no descriptors
        with fast.backend("triton"), forced(forward=config, dq=config, dkdv=config):
            yield


def inputs(kind, n=N, h=2, seed=0):
    _, d, dtype, _ = KINDS[kind]
    return [2 * x for x in hopper_inputs(Mask.full(n), 1, h, 1, d, d, dtype, seed)[:3]]


def attended(q, k, v, mask, **options):
    return fast.attention(q, k, v, mask, rank_invariant=True, return_lse=True, **options)


def rows(result, start, stop):
    out, lse = result
    return out[:, start:stop], lse[..., start:stop]


def chunk(tensors, start, stop):
    """Return the result of prefill: queries start:stop over the keys up to stop."""
    q, k, v = tensors
    return attended(q[:, start:stop], k[:, :stop], v[:, :stop], Mask.causal(stop - start, stop))


def surrounded(tensors, before, after):
    """Return the sequence between two other documents, and their mask."""
    n = tensors[0].shape[1]
    mixed = [
        torch.randn(1, before + n + after, *x.shape[2:], dtype=x.dtype, device=x.device)
        for x in tensors
    ]
    for place, x in zip(mixed, tensors, strict=True):
        place[:, before : before + n] = x
    return mixed, Mask.documents([0, 37, before, before + n, before + n + after])


# ---------------------------------------------------------------------- the contract
ALL = [pytest.param(kind, marks=HOPPER_ONLY if kind.startswith("gluon") else []) for kind in KINDS]


@pytest.mark.parametrize("kind", ALL)
def test_the_bits_of_a_query_depend_on_its_keys_alone(kind):
    tensors = q, k, v = inputs(kind)
    with kernels(kind):
        whole = attended(*tensors, CAUSAL)
        for place in CHUNKS:
            assert same_bits(rows(whole, *place), chunk(tensors, *place)), place
        mixed, mask = surrounded(tensors, 128, 40)
        twice = [torch.cat([x, x]).repeat_interleave(2, 2) for x in mixed]
        out, lse = attended(*twice, mask)
        among = rows((out[1:, :, ::2], lse[1:, ::2]), 128, 128 + N)
        assert same_bits(whole, among), "among other documents, in another batch, with more heads"
        assert same_bits(whole, attended(q, k, v, IN_TWO_BANDS)), "the same keys in two bands"


one_of_each_backend = pytest.mark.parametrize("kind", [ALL[0], ALL[4]])


@one_of_each_backend
def test_a_window_or_a_hole_in_the_keys_changes_no_bit_of_a_chunk(kind):
    q, k, v = inputs(kind)
    # attention to the first tokens and a window
    mask = Mask([Band(0, N, 0, 20), Band(0, N, 20, N, -60, 0)], N, N)
    with kernels(kind):
        whole = attended(q, k, v, mask)
        for start, stop in CHUNKS:
            part = attended(q[:, start:stop], k, v, mask.crop(queries=range(start, stop)))
            assert same_bits(rows(whole, start, stop), part)


# ---------------------------------------------------------------------- trees
@one_of_each_backend
def test_branches_of_a_tree_have_the_bits_and_query_gradients_of_their_sequences(kind):
    """Gradients of keys of a leaf equal those of its sequence alone; those of the trunk add all
    branches, in a fixed order.
    """
    trunk, leaves = [1] * 130, ([2] * 100, [3] * 20)
    tree = trees.pack([trunk + leaf for leaf in leaves], multiple_of=128)
    # a row for each token and depth: equal prefixes have equal rows
    row = (tree.position_ids + 17 * tree.token_ids) % 512
    q, k, v = (x[:, row] for x in inputs(kind, n=512, seed=3))
    with kernels(kind):
        packed = gradients(q, k, v, tree.mask)
        assert same_bits(packed, gradients(q, k, v, tree.mask))
        for path, leaf in zip(tree.paths, leaves, strict=True):
            held = torch.cat(
                [torch.arange(tree.starts[x], tree.starts[x] + tree.lengths[x]) for x in path]
            )
            alone = gradients(*(x[:, held] for x in (q, k, v)), Mask.causal(len(held)))
            own = len(held) - len(leaf)
            mine = [x[:, held] for x in packed]
            assert same_bits(mine[:3], alone[:3]), "out, lse and dq"
            for x, y in zip(mine[3:], alone[3:], strict=True):
                assert same_bits([x[:, own:]], [y[:, own:]]), "dk and dv of the leaf"
                assert not same_bits([x[:, :128]], [y[:, :128]]), "the trunk has more gradients"


def gradients(q, k, v, mask):
    """Return out, lse (b, t, h), dq, dk and dv."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attended(*leaves, mask)
    dout = torch.cos(torch.arange(out[0, 0].numel(), device=DEVICE)).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, dout.view(out.shape[2:]).expand(out.shape))
    return out.detach(), lse.detach().transpose(1, 2), *grads


one_of_gluon = pytest.mark.parametrize("kind", [ALL[4]])


@one_of_gluon
def test_the_first_tile_of_a_row_may_not_depend_on_the_work_tile(kind, monkeypatch):
    """A document that begins in a later tile of its work tile starts in `repeat_tile`, another one
    in `step`.

    The fault is planted in the source that the simulator runs: a GPU would run the compiled kernel
    again.
    """
    tensors = [x[:, :200] for x in inputs(kind)]
    mixed, mask = surrounded(tensors, 128, 0)
    moved = mask.crop(queries=range(100, 328))
    with kernels(kind):
        expected = attended(*tensors, Mask.causal(200))
        together = lambda: rows(attended(mixed[0][:, 100:], *mixed[1:], moved), 28, 228)
        assert same_bits(expected, together())
        if ON_HOPPER:
            return
        plant(monkeypatch, stale_maximum, "repeat_tile", "wg.c.KEY_ORDER", "False")
        assert not same_bits(expected, together())
