"""Queries that all ranks hold attend to keys that the ranks divide: every rank returns the bits of all others."""

import functools
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from sharded import assert_agrees

from canon import Mask, fast, reference
from canon.testing import process_groups
from canon.testing.judge import Attended

HALVES = {"reference": reference, "fast": fast}
both_halves = pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
ENDS = [0, 11, 11, 30, 37]  # of the keys of four ranks; the second one has none
QUERIES = 3


def inputs(dtype=torch.float64, b=2, h=4, g=2, d=8, dv=5):
    """Return q and the keys and values of all ranks."""
    draw = torch.Generator().manual_seed(0)
    shapes = (QUERIES, h, d), (ENDS[-1], g, d), (ENDS[-1], g, dv)
    return [torch.randn(b, *shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def shard(rank, ranks):
    """Return this rank's keys as a slice: one part of ENDS for each rank, the rest for the last one."""
    ends = [*ENDS[:ranks], ENDS[-1]]
    return list(pairwise(ends))[rank]


def decode(half, tensors, mask=None, **options):
    """Return out and lse of this rank. ``mask`` is over the keys of all ranks; a list holds one for each sequence."""
    q, k, v = tensors
    start, stop = shard(dist.get_rank(), dist.get_world_size())
    if isinstance(mask, list):
        mask = [one.crop(keys=range(start, stop)) for one in mask]
    elif mask is not None:
        mask = mask.crop(keys=range(start, stop))
    own = [x.narrow(-3, start, stop - start) for x in (k, v)]
    return half.decode_attention(q, *own, mask, return_lse=True, **options)


LAST = Mask.ranges([(0, QUERIES)], [(0, ENDS[-1])], ["causal"], queries=QUERIES, keys=ENDS[-1])  # causal at the end
FULL = Mask.ranges([(0, QUERIES)], [(0, ENDS[-1])], ["full"], queries=QUERIES, keys=ENDS[-1])
SOME = Mask.ranges([(1, 2)], [(4, 14)], ["full"], queries=QUERIES, keys=ENDS[-1])  # queries 0 and 2 see no key


@both_halves
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, LAST, SOME], ids=["all keys", "causal", "few"])
def test_all_ranks_return_one_result(half, ranks, dtype, mask):
    q, k, v = tensors = inputs(dtype)
    results = process_groups.threads(lambda: decode(half, tensors, mask), ranks)
    out, lse = results[0]
    assert out.dtype == dtype
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, results[0], strict=True))
    if mask is SOME:
        assert not out[:, [0, 2]].any()
        assert (lse[:, :, [0, 2]] == -torch.inf).all()
    assert_agrees(Attended(out, lse), FULL if mask is None else mask, q, k, v, torch.zeros_like(out), None)
    whole, whole_lse = half.attention_forward(q, k, v, FULL if mask is None else mask)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-13 if dtype == torch.float64 else 2**-7)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-13 if dtype == torch.float64 else 1e-5)


def decode_by_name(name):
    return decode(HALVES[name], inputs(torch.float32), LAST)


@pytest.mark.parametrize("name", HALVES)
def test_processes_return_the_bits_of_threads(name):
    program = functools.partial(decode_by_name, name)
    results = process_groups.processes(program, 3)
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, results[0], strict=True))
    threads = process_groups.threads(program, 3)
    assert all(torch.equal(x, y) for x, y in zip(results[0], threads[0], strict=True))


@both_halves
def test_each_sequence_may_have_its_own_mask(half):
    masks, tensors = [LAST, SOME], inputs()
    out, lse = process_groups.threads(lambda: decode(half, tensors, masks), 4)[2]
    for i, mask in enumerate(masks):
        alone, alone_lse = half.attention_forward(*(x[i : i + 1] for x in tensors), mask)
        torch.testing.assert_close(out[i : i + 1], alone, rtol=0, atol=1e-13)
        torch.testing.assert_close(lse[i : i + 1], alone_lse, rtol=0, atol=1e-13)


@both_halves
def test_packed_queries_and_autocast(half):
    q, k, v = (x[0].float() for x in inputs())

    def program():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return decode(half, (q, k, v), LAST)

    out, lse = process_groups.threads(program, 2)[1]
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (out.shape, lse.shape) == ((QUERIES, 4, 5), (4, QUERIES))
    cast = process_groups.threads(lambda: decode(half, (q.bfloat16(), k.bfloat16(), v.bfloat16()), LAST), 2)
    assert torch.equal(out, cast[0][0])


@both_halves
@pytest.mark.parametrize("shape", [(0, QUERIES), (2, 0)], ids=["no sequence", "no query"])
def test_no_queries(half, shape):
    q, k, v = inputs()
    given = [x[: shape[0]] for x in (q[:, : shape[1]], k, v)]
    for out, lse in process_groups.threads(lambda: decode(half, given), 2):
        assert (out.shape, lse.shape) == ((*shape, 4, 5), (shape[0], 4, shape[1]))


@both_halves
def test_the_result_is_not_differentiable(half):
    tensors = [x.requires_grad_() for x in inputs()]
    for out, lse in process_groups.threads(lambda: decode(half, tensors), 2):
        assert not out.requires_grad
        assert not lse.requires_grad


@both_halves
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: dict(q=q[:, :2]), "shape of q"),
        (lambda q, k, v: dict(scale=0.5), "scale"),
        (lambda q, k, v: dict(k=k[:, :, :1], v=v[:, :, :1]), "heads and width of k"),
        (lambda q, k, v: dict(v=v[..., :3]), "heads and width of v"),
        (lambda q, k, v: dict(q=q.float(), k=k.float(), v=v.float()), "dtype"),
        (lambda q, k, v: dict(mask=Mask.causal(5)), "mask is 5 queries x 5 keys, q holds 3 tokens and k 37"),
        (lambda q, k, v: dict(sink=torch.zeros(4).double()), "sink"),
        (lambda q, k, v: dict(sink=torch.zeros(3).double()), "a logit for each query head"),
        (lambda q, k, v: dict(mask=[LAST]), "mask holds 1 Masks for a batch of 2"),
        (lambda q, k, v: dict(mask="causal"), "mask must be a canon.Mask"),
    ],
)
def test_ranks_that_differ_raise_on_every_rank(half, change, message, own_errors):
    def program():
        q, k, v = inputs()
        given = dict(q=q, k=k, v=v, mask=None) | (change(q, k, v) if dist.get_rank() == 1 else {})
        with pytest.raises((ValueError, TypeError), match=message):
            half.decode_attention(**given)

    process_groups.threads(program, 3)


@both_halves
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sink_is_applied_once_after_the_keys_of_all_ranks(half, dtype):
    sink = torch.tensor([0.5, -1.0, 3.0, -torch.inf], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    tensors = inputs(dtype)
    results = process_groups.threads(lambda: decode(half, tensors, SOME, sink=sink.requires_grad_()), 4)
    out, lse = results[0]
    assert not out.requires_grad
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, results[0], strict=True))
    plain, plain_lse = (x.double() for x in half.attention_forward(*tensors, SOME))
    weight = torch.sigmoid(plain_lse.masked_fill(plain_lse == -torch.inf, 0) - sink[:, None]).transpose(1, 2)[..., None]
    torch.testing.assert_close(out.double(), weight * plain, rtol=0, atol=1e-13 if dtype == torch.float64 else 2**-7)
    torch.testing.assert_close(lse.double(), plain_lse, rtol=0, atol=1e-13 if dtype == torch.float64 else 1e-5)


@both_halves
def test_without_torch_distributed_one_rank_has_all_keys(half):
    q, k, v = inputs()
    assert torch.equal(half.decode_attention(q, k, v), half.attention_forward(q, k, v, FULL)[0])
