"""Launches of the Hopper kernels: copies, work tiles, row statistics, configurations and errors."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hopper import HOPPER_ONLY, assert_exact, attend, both_passes, inputs
from sharded import DEVICE, ON_HOPPER

from canon import Band, Mask
from canon.bench import peers
from canon.fast import backend
from canon.fast.kernels.gluon import config, launch, softmax_stats
from canon.fast.kernels.gluon.config import Config
from canon.fast.kernels.gluon.tile_scheduler import ALL_SETS, LAST_SETS
from canon.testing import simulated_kernels

pytestmark = HOPPER_ONLY


# --- loads and work tiles ---


@pytest.mark.skipif(ON_HOPPER, reason="the simulator has three SMs")
def test_more_tiles_than_a_kernel_can_count_raise(monkeypatch):
    mask = Mask.causal(300)
    arguments = inputs(mask, h=4)
    assert_exact(attend(*arguments, mask), *arguments, mask)
    # a head has 1 + 2 + 3 tiles of scores, or twice as many
    monkeypatch.setattr(launch, "MOST_VISITS", 5)
    with pytest.raises(
        ValueError,
        match="visits .* tiles of scores, more than 5 for each SM: split the heads over calls",
    ):
        attend(*arguments, mask)


@pytest.mark.parametrize(
    ("method", "ordered", "sets"),
    [("split", False, ALL_SETS), ("fused", False, LAST_SETS), ("fused", True, 0)],
    ids=["without dq", "any order", "ordered"],
)
def test_short_work_tiles_come_last_unless_dq_is_ordered(method, ordered, sets, monkeypatch):
    mask, seen = Mask.causal(300), []
    schedule = launch.tile_schedule
    monkeypatch.setattr(
        launch, "tile_schedule", lambda m, t, device: seen.append(t) or schedule(m, t, device)
    )
    with peers.deterministic() if ordered else nullcontext():
        attend(*inputs(mask), mask, method=method)
    assert [t.even_ends for t in seen if t.transposed] == [sets]


def test_a_tensor_is_copied_if_tiles_load_its_masked_tokens(monkeypatch):
    mask = Mask([Band(0, 128, 0, 100), Band(200, 256, 900, 1000)], 256, 1200)
    copied, states_of, room = [], launch.token_states, launch.empty_for_tma
    monkeypatch.setattr(
        launch, "token_states", lambda *which: copied.append(which[1]) or states_of(*which)
    )
    monkeypatch.setattr(launch, "empty_for_tma", lambda x: room(x).fill_(torch.nan))
    arguments = inputs(mask)
    before = [x.clone() for x in arguments]
    assert_exact(attend(*arguments, mask), *arguments, mask)
    assert copied == [True, True], (
        "v for the forward pass, k for dq: a tile has keys that no query sees"
    )
    assert all(torch.equal(x.isnan(), y.isnan()) for x, y in zip(arguments, before, strict=True)), (
        "inputs stay"
    )


def test_row_statistics_are_padded_and_fully_masked_rows_weigh_nothing():
    lse = torch.randn(2, 3, 7, device=DEVICE)
    lse[0, 1, 2] = -torch.inf
    delta = torch.randn(2, 7, 3, device=DEVICE).transpose(1, 2)
    made = softmax_stats.row_statistics(lse, delta)
    assert made.shape == (2, 3, 2, 8)
    torch.testing.assert_close(
        made[:, :, 0, :7], torch.where(lse.isinf(), 1e30, lse * launch.portable.LOG2E)
    )
    assert torch.equal(made[:, :, 1, :7], -delta)
    assert not made[..., 7].any()


# --- choice of configuration, and errors ---


PLAIN = Config(128, 64, 2, plain=True)
REFUSED = [  # sizes, method, configuration of the forward, and a part of the error
    ({"dtype": torch.float32}, "split", None, "bfloat16 and float16"),
    ({"d": 264, "dv": 64}, "split", None, "264"),
    ({"d": 256, "dv": 64}, "fused", None, "fused"),
    ({}, "split", Config(128, 64, 1), "at least 2 stages"),
    ({}, "split", Config(256, 64, 2), "needs .* rows"),
    ({}, "split", replace(PLAIN, stale_maximum=True), "no switches"),
    ({}, "split", Config(128, 128, 9), r"needs \d+ bytes.*232448"),
]


@pytest.mark.parametrize(("sizes", "method", "tiles", "message"), REFUSED)
def test_unsupported_inputs_and_configurations_raise(sizes, method, tiles, message):
    mask = Mask.causal(9)
    with (
        config.forced(**({"forward": tiles} if tiles else {})),
        pytest.raises(ValueError, match=message),
    ):
        attend(*inputs(mask, **sizes), mask, method=method)


def test_long_rows_have_their_own_tiles():
    def chosen(d, mask, heads=4):
        seen = launch.tiles_seen(mask, heads, 132)
        tiles = config.choose("forward", d, d, seen)[0]
        return tiles.rows, tiles.stale_maximum

    masks = [Mask.window(1 << 17, 128 * tiles, 0) for tiles in (2, 5, 8)]
    assert [chosen(64, mask) for mask in masks] == [(128, False), (128, True), (192, True)]
    assert [chosen(128, mask) for mask in masks] == [(128, False), (128, False), (128, True)]
    assert [chosen(256, mask) for mask in masks] == [(128, False), (128, True), (128, True)]
    # with at most one tile of queries for each SM, rows must be four times as long
    few_queries = Mask.full(128, 20 * 128)
    assert [chosen(128, few_queries, heads)[1] for heads in (132, 133)] == [False, True]


@pytest.mark.skipif(ON_HOPPER, reason="counts MMAs in the simulator")
@pytest.mark.parametrize(("padded", "dv", "needed"), [(256, 128, 192), (128, 128, 96)])
def test_scores_contract_three_quarters_of_the_padded_width_if_that_suffices(padded, dv, needed):
    mask, operations = Mask.full(128), {}
    for d in (padded, needed + 8, needed, needed - 8):
        log = []
        with backend("gluon"), simulated_kernels.simulated(log=log):
            both_passes(*inputs(mask, h=1, d=d, dv=dv), mask)
        operations[d] = Counter()
        for event in log:
            operations[d][event.kernel] += (event.kind == "wgmma") * event.size
    for kernel in operations[needed]:
        counts = [of_width[kernel] for of_width in operations.values()]
        assert counts[0] == counts[1] == counts[2] + 2 * 128**2 * (padded - needed), kernel
        assert counts[2] == counts[3]
