"""A NaN or an infinity reaches exactly the results of the queries that see it, in the oracle and
all over the reference.
"""

import functools

import pytest
import torch
from sharded import on_this_rank, whole

from canon import Layout, Mask, reference
from canon.check.planted_values import TENSORS, plant
from canon.reference.tiles import visible_tiles
from canon.testing import process_groups
from canon.testing.judge import Attended, agreement, dense, oracle

MASK = Mask.documents([0, 9, 31, 40], window=(12, 3), causal=False)
LONG = Mask.documents([0, 100, 301, 310])  # tiles of 128 tokens on two ranks
PLANTED = [
    "nan in q",
    "inf in q",
    "nan in k",
    "-inf in k",
    "nan in v",
    "inf in v",
    "nan in dout",
    "inf in dout",
]


def planted_in(planted, mask):
    """Return q, k, v, dout and dlse of the whole sequence with a planted value."""
    tensors = whole(mask)
    plant(planted, [mask], tensors[:4])
    return tensors


def assert_exact(got, mask, q, k, v, dout, dlse, sink=None):
    answers = (answer(q, k, v, dout, mask, dlse=dlse, sink=sink) for answer in (oracle, dense))
    verdict = agreement(got, *answers)
    assert verdict.agrees, str(verdict)


@pytest.mark.parametrize("name", TENSORS)
def test_the_oracle_follows_the_mask(name):
    """Of the queries that see the token, p is NaN (q, k), or out and delta (v), or dp (dout)."""
    tensors, seen, token = planted_in(f"nan in {name}", MASK), MASK.dense(), 20
    queries = torch.arange(40) == token if name in ("q", "dout") else seen[:, token]
    keys, none = seen[queries].any(0), torch.zeros(40, dtype=torch.bool)
    expected = Attended(
        out=none if name == "dout" else queries,
        lse=queries if name in ("q", "k") else none,
        dq=queries,
        dk=keys,
        dv=none if name == "v" else keys,
    )
    for answer in (oracle, dense):
        for result, x, some in zip(
            Attended._fields, answer(*tensors[:4], MASK, dlse=tensors[4]), expected, strict=True
        ):
            x = x.transpose(1, 2)[..., None] if result == "lse" else x
            first, last = x.chunk(2, 2)  # the heads of two key heads; the last one holds the NaN
            assert first.isfinite().all(), result
            assert torch.equal(last.isnan().any(-1).any(-1)[0], some), result


@pytest.mark.sweep
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("method", ["split", "fused", "head_parallel"])
def test_on_one_rank(method, planted):
    q, k, v, dout, dlse = planted_in(planted, MASK)
    out, lse = reference.attention_forward(q, k, v, MASK)
    grads = reference.attention_backward(dout, q, k, v, out, lse, MASK, dlse=dlse, method=method)
    assert_exact(Attended(out, lse, *grads), MASK, q, k, v, dout, dlse)


@pytest.mark.sweep
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("function", ["strided_attention", "magi_attention"])
def test_where_owners_compute(function, planted):
    tensors, layout = planted_in(planted, LONG), Layout.zigzag(310, 2, 128)
    options = {"mask": LONG, "layout": layout, "rank_invariant": True, "return_lse": True}
    attend = functools.partial(getattr(reference, function), **options)
    got = process_groups.threads(lambda: on_this_rank(attend, layout, tensors), 2)[0]
    assert_exact(got, LONG, *tensors)


def test_a_sum_over_all_cells_of_a_tile_disagrees(monkeypatch):
    """The planted fault: 0 * NaN is NaN."""
    monkeypatch.setattr("canon.reference.local.over_visible", lambda weights, x, *_: weights @ x)
    with pytest.raises(AssertionError, match="out has 52 values that are not finite"):
        test_on_one_rank("split", "nan in v")


def test_scores_of_minus_infinity_alone_count_as_no_visible_key():
    q, k, v, dout, dlse = whole(MASK)
    q[:, 20], k[:, 9:24], v[:, 22] = -torch.inf, 1, torch.nan
    out, lse = reference.attention_forward(q, k, v, MASK)
    dq, _, _ = reference.attention_backward(dout, q, k, v, out, lse, MASK, dlse=dlse)
    assert (lse[..., 20] == -torch.inf).all()
    assert not out[:, 20].any()
    assert not dq[:, 20].any()


@pytest.mark.parametrize(
    ("device", "whole", "size"), [("cpu", False, 128), ("meta", False, 512), ("meta", True, 128)]
)
def test_tiles_of_the_reference_are_larger_on_a_gpu_unless_ranks_must_not_show(device, whole, size):
    tiles = visible_tiles(Mask.causal(1100), torch.device(device), whole_tiles=whole)
    assert [x.stop - x.start for x, _ in tiles] == [size] * (1100 // size) + [1100 % size]


def test_larger_tiles_compute_the_same(monkeypatch):
    q, k, v = (torch.randn(1, 1100, 2, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    results = []
    for size in (128, 512):
        monkeypatch.setattr("canon.reference.tiles.TILE", size)
        out = reference.attention(q, k, v, Mask.window(1100, 200))
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for small, large in zip(*results, strict=True):
        torch.testing.assert_close(small, large, rtol=0, atol=1e-12)
