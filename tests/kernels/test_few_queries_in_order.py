"""Few queries with rank_invariant=True: two kernels that give the bits of the whole forward, and
their tables.
"""

import pytest
import torch
from hopper import (
    FEW,
    FEW_SHAPES,
    HOPPER_ONLY,
    assert_exact,
    attend_in_order,
    growing,
    hopper,
    in_order,
    inputs,
    not_finite,
    noted,
)
from invariant_worlds import same_bits
from sharded import DEVICE, all_equal

from canon import Band, Mask, fast
from canon.fast.kernels.gluon import few_queries_launch, few_queries_plan, launch
from canon.fast.kernels.gluon.config import Config
from canon.fast.kernels.gluon.few_queries_plan import is_few, tokens_of_tile
from canon.fast.tables.cells import Cells, Places
from canon.testing.judge import Attended

pytestmark = HOPPER_ONLY
N = 700
NOTED = few_queries_launch, "forward_of_few", lambda counter: bool(counter[1])
CONFIG = Config(128, 128, 3, stale_maximum=True)
MASKS = FEW | {
    "64 queries": Mask.causal(64, N),
    "tree": Mask.tree([-1, 0, 1, 0, 0], [300, 200, 60, 40, 100]).crop(queries=range(660, N)),
    "bands that share a tile": Mask(
        [
            Band(0, 4, 0, 300),
            Band(4, 9, 300, N, -N, N),
            Band(4, 9, 0, 20),
            Band(9, 20, 0, N, -30, 40),
        ],
        25,
        N,
    ),
}


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Take the kernels for few queries wherever they are possible; the simulated GPU has several
    SMs.
    """
    monkeypatch.setattr(few_queries_plan, "FEWEST_VISITS", 1)
    monkeypatch.setattr(launch, "SIMULATED_SMS", 40)


def assert_bits_of_the_whole_forward(monkeypatch, q, k, v, mask, **options):
    """Fail unless the kernels for few queries ran and gave the bits of `forward`. Return whether
    they were repeated.
    """
    with noted(monkeypatch, *NOTED) as repeated:
        got = attend_in_order(q, k, v, mask, **options)
    assert repeated
    with monkeypatch.context() as patch:
        patch.setattr(few_queries_launch, "few_queries", lambda *_: None)
        expected = attend_in_order(q, k, v, mask, **options)
    assert same_bits(got, expected)
    return any(repeated)


@pytest.mark.sweep
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_few_queries_have_the_bits_of_the_whole_forward(monkeypatch, name, shape):
    """Keys that no query sees are NaN. Two sequences, as heads."""
    mask = MASKS[name]
    q, k, v, dout, dlse = inputs(mask, 2, *shape)
    if not mask.bands:
        with noted(monkeypatch, *NOTED) as repeated:
            out, lse = attend_in_order(q, k, v, mask)
        assert not repeated
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        return
    assert not assert_bits_of_the_whole_forward(monkeypatch, q, k, v, mask)
    assert_exact(Attended(*attend_in_order(q, k, v, mask)), q, k, v, dout, dlse, mask)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("growth", "repeats"), [(0.0, False), (6.0, None), (40.0, True), (-40.0, False)]
)
def test_scores_may_grow_or_fall(monkeypatch, dtype, growth, repeats):
    """Where later scores are so large that the first maximum does not do, the whole forward repeats
    the call.
    """
    mask, q, k, v = growing(growth, dtype)
    repeated = assert_bits_of_the_whole_forward(monkeypatch, q, k, v, mask)
    assert repeats is None or repeated == repeats


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_scores_that_are_not_finite_are_left_to_the_whole_forward(monkeypatch, value):
    """A row whose first visible tile has only -inf has no maximum there."""
    mask, q, k, v = not_finite(value)
    assert assert_bits_of_the_whole_forward(monkeypatch, q, k, v, mask)


def test_softcap_sink_strides_and_masks_by_sequence(monkeypatch):
    mask = Mask.causal(3, N)
    q, k, v, *_ = inputs(mask, 2, 4, 2)
    k = torch.cat([k, k], -1)[..., :64]
    assert_bits_of_the_whole_forward(
        monkeypatch, q, k, v, mask, softcap=5.0, sink=torch.randn(4, device=DEVICE)
    )
    assert_bits_of_the_whole_forward(
        monkeypatch, q, k, v, [mask, MASKS["causal"].crop(queries=range(4, 7))]
    )
    with hopper(), torch.no_grad():
        got = fast.decode_attention(q, k, v, mask, rank_invariant=True, return_lse=True)
    assert all_equal(got, attend_in_order(q, k, v, mask))


# ------------------------------------------------------------------ tables
def test_queries_that_see_different_keys_do_not_share_a_tile():
    apart = Mask([Band(i, i + 1, 1000 * i, 1000 * i + 1000) for i in range(8)], 8, 8000)
    assert tokens_of_tile(in_order(apart), 4, 128) == 1
    assert tokens_of_tile(in_order(Mask.full(8, 8000)), 4, 128) == 8


def test_only_whole_sequences_with_few_queries_and_many_keys_qualify(monkeypatch):
    monkeypatch.setattr(few_queries_plan, "FEWEST_VISITS", 16)
    assert is_few(in_order(Mask.causal(64, 2048)), 128)
    assert not is_few(in_order(Mask.causal(65, 2048)), 128)
    assert not is_few(in_order(Mask.causal(64, 2047)), 128)
    assert not is_few(Cells(Mask.causal(64, 2048)), 128)
    moved = Places(((0, range(64)),), ((0, range(2048, 4096)),), 64, 2048)
    assert not is_few(Cells(Mask.causal(64, 4096), moved), 128)
    q, k = torch.empty(1, 1, 8, 64), torch.empty(1, 1 << 20, 8, 64)
    mask = in_order(Mask.causal(1, 1 << 20))
    assert few_queries_launch.few_queries(q, k, mask, CONFIG, work_tiles=8, ctas=132)
    assert few_queries_launch.few_queries(q, k, mask, CONFIG, work_tiles=100, ctas=132) is None
    q, mask = torch.empty(1, 64, 8, 64), in_order(Mask.causal(64, 1 << 20))
    # 1 GB of weights
    assert few_queries_launch.few_queries(q, k, mask, CONFIG, work_tiles=8, ctas=132) is None
