"""Few queries over keys on several ranks with rank_invariant=True: sums travel, and give the bits
of one rank.
"""

import pytest
import torch
import torch.distributed as dist
from hopper import (
    FEW,
    FEW_SHAPES,
    HOPPER_ONLY,
    attend_in_order,
    growing,
    hopper,
    inputs,
    not_finite,
    noted,
)
from invariant_worlds import decoded, same_bits
from sharded import DEVICE

from canon import Band, Mask, fast
from canon.faces import public_decode
from canon.fast import decode_in_order
from canon.fast.kernels.gluon import few_queries_plan, launch
from canon.testing import process_groups

pytestmark = HOPPER_ONLY
N = 700
NOTED = decode_in_order, "decode_in_order", lambda result: result is not None
ENDS = {
    "two ranks": (384, N),
    "a short shard first": (128, 640, N),
    "ranks without keys": (0, 256, 256, N, N),
}


@pytest.fixture(autouse=True)
def _several_sms(monkeypatch):
    monkeypatch.setattr(launch, "SIMULATED_SMS", 40)


def assert_bits_of_one_rank(monkeypatch, ends, q, k, v, mask, **options):
    """Fail unless all ranks return the bits of `attention`. Return whether sums travelled."""
    expected = attend_in_order(q, k, v, mask, **options)
    with noted(monkeypatch, *NOTED) as found, hopper():
        results = decoded(fast, ends, q, k, v, mask, rank_invariant=True, **options)
    assert len(found) == len(ends)
    assert len(set(found)) == 1
    assert all(same_bits(result, expected) for result in results)
    return found[0]


@pytest.mark.sweep
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("name", FEW)
def test_sums_that_travel_give_the_bits_of_one_rank(monkeypatch, name, ends):
    """Keys that no query sees are NaN."""
    q, k, v, *_ = inputs(FEW[name], 1, 4, 2)
    assert assert_bits_of_one_rank(monkeypatch, ends, q, k, v, FEW[name])


@pytest.mark.parametrize("shape", FEW_SHAPES, ids=str)
def test_widths_and_dtypes(monkeypatch, shape):
    mask = FEW["causal"]
    q, k, v, *_ = inputs(mask, 1, *shape)
    assert assert_bits_of_one_rank(monkeypatch, ENDS["a short shard first"], q, k, v, mask)


def test_sinks_softcaps_scales_packs_and_a_mask_for_each_sequence(monkeypatch):
    mask, ends = FEW["causal"], ENDS["two ranks"]
    q, k, v, *_ = inputs(mask, 2, 4, 2)
    options = dict(softcap=5.0, sink=torch.randn(4, device=DEVICE), scale=-0.2)
    assert assert_bits_of_one_rank(monkeypatch, ends, q, k, v, mask, **options)
    masks = [mask, FEW["window"].crop(queries=range(17))]
    assert assert_bits_of_one_rank(monkeypatch, ends, q, k, v, masks, **options)
    assert assert_bits_of_one_rank(monkeypatch, ends, q[0], k[0], v[0], mask)


@pytest.mark.parametrize(("growth", "travel"), [(6.0, None), (40.0, False), (-40.0, True)])
def test_where_a_maximum_would_rise_the_keys_travel(monkeypatch, growth, travel):
    mask, q, k, v = growing(growth)
    found = assert_bits_of_one_rank(monkeypatch, ENDS["a short shard first"], q, k, v, mask)
    assert travel is None or found == travel


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("start", [0, 384])
def test_where_scores_are_not_finite_the_keys_travel(monkeypatch, value, start):
    mask, q, k, v = not_finite(value, start)
    found = assert_bits_of_one_rank(monkeypatch, ENDS["two ranks"], q, k, v, mask)
    assert found == (value == -torch.inf and start > 0)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_where_values_are_not_finite_the_keys_travel(monkeypatch, value):
    """0 times NaN reaches other rows of a tile of queries, whose size depends on the keys of a
    rank.
    """
    mask = Mask([Band(0, 2, 11, 62), Band(4, 6, 236, 247), Band(16, 17, 105, 168)], 17, N)
    q, k, v, *_ = inputs(mask, h=4, g=2)
    v[:, 240] = value
    assert not assert_bits_of_one_rank(monkeypatch, ENDS["two ranks"], q, k, v, mask)


@pytest.mark.parametrize("growth", [0.0, 40.0])
def test_ranks_may_have_one_mask_or_one_for_each_sequence(monkeypatch, growth):
    """The second sequence ends with the keys of rank 0. With growing scores the keys travel."""
    q, k, v, *_ = inputs(Mask.full(2, N), 2, 4, 2)
    k[..., 0] = (torch.arange(N, device=DEVICE) // 64 * growth)[None, :, None]
    q[..., 0] = 1.0
    expected = attend_in_order(q, k, v, [Mask.full(2, N), Mask([Band(0, 2, 0, 384)], 2, N)])

    def program():
        held, masks = [
            (slice(0, 384), None),
            (slice(384, N), [Mask.full(2, N - 384), Mask([], 2, N - 384)]),
        ][dist.get_rank()]
        return fast.decode_attention(
            q, k[:, held], v[:, held], masks, rank_invariant=True, return_lse=True
        )

    with noted(monkeypatch, *NOTED) as found, hopper():
        results = process_groups.threads(program, 2)
    assert found == [growth == 0.0] * 2
    assert all(same_bits(result, expected) for result in results)


def test_only_few_queries_on_hopper_kernels():
    def chosen(queries, key_heads=2):
        q, k = (
            torch.empty(1, n, heads, 64, dtype=torch.bfloat16)
            for n, heads in ((queries, 8), (0, key_heads))
        )
        return decode_in_order.in_order(q, k, k)

    with hopper():
        assert chosen(64) is decode_in_order.decode_in_order
        most = few_queries_plan.MOST_QUERIES
        others = chosen(64, key_heads=1), chosen(0), chosen(most + 1, key_heads=8)
    assert {*others, chosen(64)} == {public_decode.keys_travel}
