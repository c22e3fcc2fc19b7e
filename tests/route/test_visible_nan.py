"""A NaN or an infinity reaches exactly the results of the queries that see it, in the oracle and
in the reference.
"""

import pytest
import torch
from sharded import close, whole

from canon import Mask, reference
from canon.check.planted_values import TENSORS, VALUES, plant
from canon.reference.tiles import visible_tiles
from canon.testing.judge import Attended, agreement, dense, oracle

MASK = Mask.documents([0, 9, 31, 40], window=(12, 3), causal=False)


def planted_in(planted, mask):
    """Return q, k, v, dout and dlse of the whole sequence with a planted value."""
    tensors = whole(mask)
    plant(planted, [mask], tensors[:4])
    return tensors


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
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("method", ["split", "fused", "head_parallel"])
def test_the_reference_follows_the_oracle(method, value, name):
    q, k, v, dout, dlse = planted_in(f"{value} in {name}", MASK)
    out, lse = reference.attention_forward(q, k, v, MASK)
    grads = reference.attention_backward(dout, q, k, v, out, lse, MASK, dlse=dlse, method=method)
    answers = (answer(q, k, v, dout, MASK, dlse=dlse) for answer in (oracle, dense))
    verdict = agreement(Attended(out, lse, *grads), *answers)
    assert verdict.agrees, str(verdict)


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
    close(*results)
