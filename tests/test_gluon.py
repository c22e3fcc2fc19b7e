"""The Hopper kernels agree with the oracle. The simulator runs their source; with --gpu, an sm_90 runs them.

A simulated run also checks the protocol. Reading a buffer before it is full and overwriting it before it is read are faults.
The simulator finds them in every order of loads and warpgroups.
"""

from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
from sharded import DEVICE, ON_HOPPER, assert_agrees, on_this_rank, whole
from triton.experimental.gluon import language as gl
from triton.runtime import driver

from canon import Band, Layout, Mask, fast
from canon.fast import backend, backward, local, prepared, ring_attention
from canon.fast.kernels.gluon import config, dq_order, launch, ptx, softmax_stats, stale_maximum, tile_scheduler
from canon.fast.kernels.gluon.config import Config
from canon.fast.kernels.gluon.tile_scheduler import TileSchedule
from canon.testing import process_groups, simulator
from canon.testing.judge import Attended, agreement, dense, oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cuda" and not ON_HOPPER, reason="this GPU is no Hopper")]
LN2 = 0.6931471805599453
METHODS = ("split", "fused", "head_parallel")
MASKS = {
    "causal": Mask.causal(300),
    "full": Mask.full(190),
    "window": Mask.window(309, 77, 4),
    "documents": Mask.documents([0, 1, 1, 133, 134, 270]),
    "documents that see all of themselves": Mask.documents([0, 129, 200], causal=False),
    "queries without keys and keys without queries": Mask.causal(140).shift(6, 3).shift(-1, 0),
    "a late rectangle": Mask.causal(260).crop(range(29, 260)),
    "blocks": Mask.block_causal([0] * 70 + [2] * 9 + [1] * 80, k_valid=[True] * 150 + [False] * 9),
    "one token": Mask.causal(1),
    "no bands": Mask([], 5, 7),
}
EMPTY = {"no queries": Mask([], 0, 7), "no keys": Mask([], 7, 0), "nothing at all": Mask([], 0, 0)}


@contextmanager
def hopper(order="random", seed=0):
    """Compute with the Hopper kernels."""
    with backend("gluon"), nullcontext() if ON_HOPPER else simulator.simulated(order=order, seed=seed):
        yield


def inputs(mask, b=1, h=2, g=1, d=64, dv=64, dtype=torch.bfloat16, seed=0):
    """Return q, k, v, dout, dlse, with NaN in queries without visible keys and in keys that no query sees."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(mask.queries, h, d), (mask.keys, g, d), (mask.keys, g, dv), (mask.queries, h, dv)]
    q, k, v, dout = (torch.randn(b, *shape, generator=draw).to(dtype).to(DEVICE) for shape in shapes)
    dlse = torch.randn(b, h, mask.queries, generator=draw).to(DEVICE)
    seen = mask.dense().to(DEVICE)
    for x, used in ((q, seen.any(1)), (k, seen.any(0)), (v, seen.any(0)), (dout, seen.any(1))):
        x[:, ~used] = torch.nan
    return q, k, v, dout, dlse


def attend(q, k, v, dout, dlse, mask, scale=None, method="split", **how) -> Attended:
    with hopper(**how):
        out, lse = local.attention_forward(q, k, v, mask, scale=scale)
        grads = backward.attention_backward(dout, q, k, v, out, lse, mask, scale=scale, dlse=dlse, method=method)
    return Attended(out, lse, *grads)


def assert_exact(got, q, k, v, dout, dlse, mask, scale=None):
    exact, honest = (f(q, k, v, dout, mask, scale, dlse=dlse) for f in (oracle, dense))
    verdict = agreement(got, exact, honest)
    assert verdict.agrees, str(verdict)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_method_equals_the_oracle(mask, method):
    arguments = inputs(mask, h=4, g=2)
    assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


@pytest.mark.parametrize("order", ["late", "early", "random"])
@pytest.mark.parametrize(
    ("d", "dv"), [(64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (42, 24), (20, 130), (8, 5)]
)
def test_head_widths(d, dv, order):
    mask = Mask.documents([0, 70, 290])
    arguments = inputs(mask, d=d, dv=dv, h=2, g=2)
    for method in METHODS if max(d, dv) <= 128 else ("split", "head_parallel"):
        assert_exact(attend(*arguments, mask, method=method, order=order, seed=d), *arguments, mask)


@pytest.mark.parametrize(("h", "g"), [(8, 1), (6, 2), (3, 3)])
def test_the_heads_of_a_group_are_summed(h, g):
    mask = Mask.causal(150)
    arguments = inputs(mask, b=2, h=h, g=g, dtype=torch.float16)
    for method in METHODS:
        assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


def test_heads_of_a_group_share_tiles_where_documents_are_short():
    ends = list(range(0, 301, 30))
    mask = Mask.documents(ends)
    assert launch.packing(mask, 128, 128, 8) == 8  # tiles of 16 tokens and 8 heads
    assert launch.packing(Mask.causal(4096), 128, 128, 8) == 1
    arguments = inputs(mask, b=2, h=8, g=1)
    assert_exact(attend(*arguments, mask), *arguments, mask)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-3, 2.5])
def test_any_scale(scale):
    mask = Mask.window(140, 39, 4)
    arguments = inputs(mask)
    for method in METHODS:
        assert_exact(attend(*arguments, mask, scale, method), *arguments, mask, scale)


TILES = {
    "dkdv_hdim256": (256, Config(128, 64, 2)),
    "wide, optimistic": (256, Config(128, 64, 2, turns=True, optimistic=True)),
    "in turns": (128, Config(128, 128, 3, turns=True)),
    "optimistic": (128, Config(128, 128, 3, turns=True, optimistic=True)),
    "three, optimistic": (64, Config(192, 128, 4, 2, turns=True, optimistic=True)),
}


@pytest.mark.parametrize(("d", "tiles"), TILES.values(), ids=TILES)
@pytest.mark.parametrize(
    "steps", [0.5, 3.0, 20.0, 200.0, -20.0], ids=["hardly", "slowly", "by leaps", "out of range", "falling"]
)
def test_maxima_may_grow(steps, d, tiles):
    """The maximum grows in some rows only; a warp rescales its rows together."""
    mask = Mask.full(450)
    q, k, v, dout, dlse = inputs(mask, h=1, d=d, dv=d)
    height = torch.arange(450, device=DEVICE) // 64 * steps * (torch.arange(450, device=DEVICE) % 3 > 0)
    q[..., 0] = torch.linspace(0, 1, 450, device=DEVICE)[None, :, None] > 0.3
    k[..., 0] = (height * d**0.5 / 1.44)[None, :, None]
    with config.forced(forward=tiles), hopper():
        out, lse = local.attention_forward(q, k, v, mask)
    assert_exact(Attended(out, lse), q, k, v, dout, dlse, mask)


@pytest.mark.parametrize(("d", "tiles"), TILES.values(), ids=TILES)
@pytest.mark.parametrize("score", [-400, 400])
def test_rows_may_be_masked_in_their_first_tile_and_have_large_scores_later(score, d, tiles):
    """Rows 0 to 9 see no key of the first visited tile. Relative to a maximum of 0 their exponentials are 0, or infinite."""
    mask = Mask([Band(0, 10, 150, 260, -300, 300), Band(10, 150, 0, 260, -300, 300)], 150, 260)
    q, k, v, dout, dlse = inputs(mask, h=1, d=d, dv=d)
    q[..., 0], k[..., 0] = d**0.5, score
    with config.forced(forward=tiles), hopper():
        out, lse = local.attention_forward(q, k, v, mask)
    assert_exact(Attended(out, lse), q, k, v, dout, dlse, mask)


@pytest.mark.parametrize(("d", "tiles"), TILES.values(), ids=TILES)
def test_the_bits_of_a_row_do_not_depend_on_the_maxima_of_its_neighbours(d, tiles):
    mask = Mask.full(450)
    q, k, v, *_ = inputs(mask, h=1, d=d, dv=d)
    k[..., 0] = torch.arange(450, device=DEVICE)[None, :, None] // 64
    alone, following = torch.arange(450, device=DEVICE) % 3 > 0, torch.tensor([0.0, 30.0], device=DEVICE)
    results = []
    for slope in following:
        q[..., 0] = torch.where(alone, 0, slope)[None, :, None]
        with config.forced(forward=tiles), hopper():
            results.append(local.attention_forward(q, k, v, mask))
    (out, lse), (again, lse_again) = results
    assert torch.equal(out[:, alone], again[:, alone])
    assert torch.equal(lse[..., alone], lse_again[..., alone])
    assert not torch.equal(out, again)


@pytest.fixture
def votes(monkeypatch):
    """Record the warpgroups' votes: whether a sum outweighs its row so far, and if so, whether the tile must be repeated."""
    outweighed, again = [], []
    most = {stale_maximum.largest_sum(dtype) for dtype in (gl.bfloat16, gl.float16)}

    def count(seen, limit, warpgroup):
        vote = simulator.language.any_above(seen, limit, warpgroup)
        second = set(limit.data.unique().tolist()) <= most
        (again if second else outweighed).append(int(vote.data))
        return vote

    monkeypatch.setitem(simulator._stand_ins, id(ptx.any_above), (ptx.any_above, count))
    return outweighed, again


@pytest.mark.skipif(ON_HOPPER, reason="simulated votes are counted")
@pytest.mark.parametrize("tiles", ["optimistic", "three, optimistic"])
def test_under_a_causal_mask_sums_seldom_outweigh_their_rows(tiles, votes):
    """Full tiles come first, so each row has many keys before its partial tiles. One key of these does not outweigh them."""
    d, tiles = TILES[tiles]
    q, k, v, *_ = inputs(mask := Mask.causal(1000), h=1, d=d, dv=d)
    with config.forced(forward=tiles), hopper():
        local.attention_forward(q, k, v, mask)
    outweighed, again = votes
    assert len(outweighed) > 50
    assert sum(outweighed) <= 1
    assert sum(again) == 0


@pytest.mark.parametrize("tiles", ["optimistic", "three, optimistic", "wide, optimistic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nats", [1, 3, 6])
def test_scores_of_high_variance_repeat_no_tile(nats, dtype, tiles, votes):
    """Rows are peaked: often a key outweighs all keys before it. Float16 has a smaller range, so it repeats some tiles."""
    d, tiles = TILES[tiles]
    q, k, v, dout, dlse = inputs(mask := Mask.causal(600), h=1, d=d, dv=d, dtype=dtype)
    q *= nats
    with config.forced(forward=tiles), hopper():
        out, lse = local.attention_forward(q, k, v, mask)
    assert_exact(Attended(out, lse), q, k, v, dout, dlse, mask)
    if not ON_HOPPER:
        outweighed, again = votes
        assert len(outweighed) > 15
        assert any(outweighed) == (nats > 1)
        narrow = dtype == torch.float16 and nats > 3
        assert sum(again) <= (len(outweighed) // 5 if narrow else 0)


@pytest.mark.parametrize(("dtype", "keys"), [(torch.float16, 1700), (torch.bfloat16, 10000)], ids=str)
def test_sums_that_double_from_tile_to_tile_stay_finite(dtype, keys):
    """Scores rise by 15 or 90 nats, but no key outweighs its row. Only the range of P and its sums limits a stale maximum."""
    d, tiles = TILES["optimistic"]
    mask = Mask([Band(0, 64, 0, keys)], 64, keys)
    q, k, v, dout, dlse = inputs(mask, h=1, d=d, dv=d, dtype=dtype)
    q *= 0.01
    q[..., 0], k[..., 0] = d**0.5, torch.arange(keys, device=DEVICE)[None, :, None] // 128 * 1.15
    with config.forced(forward=tiles), hopper():
        out, lse = local.attention_forward(q, k, v, mask)
    assert_exact(Attended(out, lse), q, k, v, dout, dlse, mask)


@pytest.mark.skipif(ON_HOPPER, reason="simulated votes are counted")
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 32), (torch.float16, 16)], ids=str)
def test_a_tile_is_repeated_if_its_p_exceeds_the_range_of_the_dtype(dtype, bits, votes):
    """P of the last key is just below, or just above, the largest sum of a lane."""
    d, tiles = TILES["optimistic"]
    mask = Mask.full(192)
    q, k, v, dout, dlse = inputs(mask, h=1, d=d, dv=d, dtype=dtype)
    q[:], k[:] = 0, 0
    outweighed, again = votes
    for more in (-0.25, 0.25):
        outweighed.clear()
        again.clear()
        q[..., 0], k[:, 191, :, 0] = d**0.5 * LN2, bits + more
        with config.forced(forward=tiles), hopper():
            out, lse = local.attention_forward(q, k, v, mask)
        assert_exact(Attended(out, lse), q, k, v, dout, dlse, mask)
        assert set(outweighed) == {0, 1}
        assert any(again) == (more > 0), more


@pytest.mark.parametrize(("d", "tiles"), TILES.values(), ids=TILES)
def test_the_rounding_of_a_key_that_outweighs_all_others_does_not_show(d, tiles):
    """Two keys are in different tiles. P of the lighter key is rounded to 8 bits. With a stale maximum P of the heavier key may
    be rounded too. The error of its weight is then at most that of the lighter key."""
    mask = Mask.full(448)
    q, k, v, *_ = inputs(mask, h=1, d=d, dv=d)
    weight = torch.linspace(-9, 9, mask.queries, device=DEVICE).bfloat16()  # of the second one, a power of 2
    q[:], k[:], v[:] = 0, 0, 0
    q[:, :, 0, 0], q[..., 1] = weight, 1
    k[..., 1], k[:, [0, 300], :, 1] = -100, 0
    k[:, 300, :, 0], v[:, 300] = 1, 1
    out = torch.empty(v.shape, device=DEVICE)
    with config.forced(forward=tiles), hopper():
        local.forward_into(q, k, v, mask, LN2, out, torch.empty(1, 1, mask.queries, device=DEVICE))
    share = torch.sigmoid(weight.double() * LN2)[None, :, None, None]
    off = (out - share).abs()
    bound = 2**-8 * torch.where(share < 0.5, share, (1 - share) * tiles.optimistic)
    assert (off <= bound + 1e-6).all()
    assert off.max() > 2**-12  # they do differ


def test_an_empty_batch():
    mask = Mask.causal(5)
    for method in METHODS:
        got = attend(*inputs(mask, b=0), mask, method=method)
        assert [x.shape[0] for x in got] == [0] * 5


@pytest.mark.parametrize("mask", EMPTY.values(), ids=EMPTY)
def test_empty_inputs(mask):
    arguments = inputs(mask)
    for method in METHODS:
        got = attend(*arguments, mask, method=method)
        assert not any(x.any() for x in (got.out, got.dq, got.dk, got.dv))
        assert got.lse.isneginf().all()


# --- tensors that TMA cannot load or kernels cannot write, and uninitialised memory ---


def test_any_strides_and_any_alignment():
    mask = Mask.causal(140)
    q, k, v, dout, dlse = inputs(mask, b=2, h=4, g=2, d=40, dv=24)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view(q.shape).copy_(q)  # 2 bytes off
    heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    backwards = v.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)  # the width is not the last in memory
    same = dout[:, :1].expand_as(dout)  # stride 0
    arguments = odd, heads_first, backwards, same, dlse
    for method in METHODS:
        assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


def test_results_may_be_written_anywhere():
    mask = Mask.documents([0, 30, 140])
    q, k, v, dout, dlse = inputs(mask, b=2)
    expected = attend(q, k, v, dout, dlse, mask)

    def room(x):
        return torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype, device=DEVICE)[..., ::2]

    out, lse, dq, dk, dv = map(room, (expected.out, expected.lse, expected.dq, expected.dk, expected.dv))
    with hopper():
        local.forward_into(q, k, v, mask, 0.125, out, lse)
        delta = backward.make_delta(dout, out, lse, dlse)
        queries = backward.QueryInputs(dout, q, lse, delta)
        backward.begin_backward(queries, k, v, mask, 0.125, "split", dq, dk, dv)()
    for name, made in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, dq, dk, dv), strict=True):
        assert torch.equal(made, getattr(expected, name)), name


def test_partial_results_come_in_float32():
    mask = Mask.causal(140)
    q, k, v, dout, dlse = inputs(mask)
    with hopper():
        out, lse = local.attention_forward(q, k, v, mask, out_dtype=torch.float32)
        grads = backward.attention_backward(dout, q, k, v, out, lse, mask, dlse=dlse, grad_dtype=torch.float32)
    exact = oracle(q, k, v, dout, mask, dlse=dlse)
    assert all(x.dtype == torch.float32 for x in (out, *grads))
    rounded = ((exact.out.to(torch.bfloat16) - exact.out).norm() / exact.out.norm()).item()
    assert ((out - exact.out).norm() / exact.out.norm()).item() < 2 * rounded
    whole, _ = local.merge(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf))
    assert torch.equal(whole, out)


# --- order ---


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bits_whatever_the_interleaving(method):
    mask = Mask.documents([0, 200, 330])
    arguments = inputs(mask, h=4, g=2, d=128, dv=128)
    first = attend(*arguments, mask, method=method, order="late", seed=1)
    for order, seed in (("early", 2), ("random", 3)):
        again = attend(*arguments, mask, method=method, order=order, seed=seed)
        for name in ("out", "lse", "dk", "dv", *(["dq"] if method != "fused" else [])):
            assert torch.equal(getattr(first, name), getattr(again, name)), name


@pytest.mark.parametrize("d", [64, 80], ids=["all columns in turns", "halves"])
@pytest.mark.parametrize(
    "mask",
    [Mask.causal(450), Mask.window(450, 100, 7), Mask.documents([0, 140, 141, 450]), Mask.full(300).shift(0, 50)],
    ids=repr,
)
def test_what_is_added_in_order_has_the_same_bits_however_many_add(mask, d, deterministic, monkeypatch):
    arguments = inputs(mask, b=2, h=4, g=2, d=d, dv=64)
    first = attend(*arguments, mask, method="fused")
    assert_exact(first, *arguments, mask)
    for processors, order, seed in ((1, "early", 1), (3, "random", 2), (7, "late", 3), (7, "random", 4)):
        monkeypatch.setattr(launch, "SIMULATED_SMS", processors)
        again = attend(*arguments, mask, method="fused", order=order, seed=seed)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), (processors, order)


@pytest.mark.parametrize("some", [1, 2, 3])
def test_short_tiles_and_long_ones_by_turns_add_in_the_order_of_the_list(some, deterministic, monkeypatch):
    """The list of so many programs of a head at a time, done by as many as there are, fewer or more."""
    mask = Mask.causal(900)  # of 8 tiles
    arguments = inputs(mask, h=4, g=2, d=128, dv=64)
    monkeypatch.setattr(dq_order, "SMS", 2 * some)
    monkeypatch.setattr(dq_order, "DRIFTING", (0.0, 0.0))  # so both heads stand side by side
    monkeypatch.setattr(launch, "tile_schedule", tile_scheduler.tile_schedule.__wrapped__)  # not from the cache
    first = attend(*arguments, mask, method="fused")
    assert_exact(first, *arguments, mask)
    for processors, order, seed in ((1, "early", 1), (3, "random", 2), (11, "late", 3)):
        monkeypatch.setattr(launch, "SIMULATED_SMS", processors)
        again = attend(*arguments, mask, method="fused", order=order, seed=seed)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), (processors, order)


@pytest.mark.skipif(ON_HOPPER, reason="a GPU finds room for all programs when it likes")
def test_nobody_waits_for_a_program_that_has_not_begun(deterministic, monkeypatch):
    """Another kernel may hold processors: the programs that have begun must come to their ends without the others."""
    take_turns = simulator.take_turns

    def some_first(programs, *how):
        assert len(programs) in (1, 5)
        for some in (programs[3:], programs[:3]):
            take_turns(some, *how)

    mask = Mask.causal(600)
    arguments = inputs(mask, h=2, g=1, dv=64)
    first = attend(*arguments, mask, method="fused")
    monkeypatch.setattr(launch, "SIMULATED_SMS", 5)
    monkeypatch.setattr(simulator, "take_turns", some_first)
    again = attend(*arguments, mask, method="fused", order="random", seed=1)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_ping_pong_scheduling_changes_no_bit():
    mask = Mask.causal(300)
    arguments = inputs(mask, d=128, dv=128)
    expected = attend(*arguments, mask).out
    with config.forced(forward=Config(128, 128, 3)):  # without
        assert torch.equal(attend(*arguments, mask).out, expected)


@pytest.mark.parametrize(
    "shared",
    [
        Config(192, 64, 3, 2),
        Config(192, 64, 3, 2, turns=True),
        Config(192, 128, 4, 2, turns=True),
        Config(192, 128, 4, 2, turns=True, optimistic=True),
    ],
    ids=repr,
)
def test_three_warpgroups_may_share_a_tile(shared):
    mask = Mask.documents([0, 31, 420])
    arguments = inputs(mask, b=2, h=4, g=1)
    with config.forced(forward=shared):
        for order in ("late", "early"):
            assert_exact(attend(*arguments, mask, order=order), *arguments, mask)


# --- on several ranks ---


@pytest.mark.skipif(ON_HOPPER, reason="canon check --backend gluon runs them there")
@pytest.mark.parametrize("name", ["zigzag_attention", "strided_attention", "magi_attention"])
def test_every_schedule_runs_on_them(name):
    mask = Mask.documents([0, 5, 90, 161])
    layout = Layout.zigzag(161, 3)
    tensors = whole(mask, d=64, dv=64, dtype=torch.bfloat16)
    extra = {} if name == "zigzag_attention" else {"layout": layout}

    def run():
        def attend(q, k, v):
            with backend("gluon"):
                return getattr(fast, name)(q, k, v, mask, return_lse=True, **extra)

        return on_this_rank(attend, layout, tensors)

    with simulator.simulated(order="random"):
        for got in process_groups.threads(run, 3):
            assert_agrees(got, mask, *tensors)


# --- loads and work tiles ---


@pytest.mark.parametrize("method", METHODS)
def test_what_no_tile_loads_is_not_copied(method, monkeypatch):
    """In a causal zigzag layout no query of a rank sees some pieces of keys in the middle. These may be NaN."""
    mask = Layout.zigzag(1024, 4).local_mask(Mask.causal(1024), 2, range(4))
    arguments = inputs(mask, h=4, g=2)
    assert arguments[1][:, 128:256].isnan().all()
    monkeypatch.setattr(launch, "unseen_tokens", None)  # it selects the tokens to zero in a copy
    assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


def test_a_tensor_is_copied_if_tiles_load_its_masked_tokens(monkeypatch):
    mask = Mask([Band(0, 128, 0, 100), Band(200, 256, 0, 128)], 256, 256)
    copied, unseen = [], launch.unseen_tokens
    monkeypatch.setattr(launch, "unseen_tokens", lambda *which: copied.append(which[1]) or unseen(*which))
    arguments = inputs(mask)
    assert_exact(attend(*arguments, mask), *arguments, mask)
    assert copied == [False, False], "q and dout, for dq: a tile of 128 queries has some that see nothing"


def test_a_counter_is_made_for_each_launch_that_claims():
    plan, q = (
        TileSchedule(torch.zeros(8, dtype=torch.int32, device=DEVICE), 3, (), (False, False)),
        torch.empty(0, device=DEVICE),
    )
    many = plan._replace(work_tiles=1 + launch.resident_ctas(q))
    assert launch.queue(plan, q)[1] is plan.work  # not read
    first, second = (launch.queue(many, q)[1] for _ in range(2))
    assert first.tolist() == second.tolist() == [0]
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.skipif(ON_HOPPER, reason="the simulator logs which CTA did what")
def test_ctas_share_the_work_tiles():
    mask, log = Mask.causal(300), []
    q, k, v, _, _ = inputs(mask, h=4)
    with backend("gluon"), simulator.simulated("random", 1, log):
        local.attention_forward(q, k, v, mask)
    done = Counter(event.program[0] for event in log if event.kind == "wgmma")
    assert sorted(done) == [0, 1, 2]
    assert min(done.values()) > 0.15 * sum(done.values())


def test_row_statistics_are_padded_and_fully_masked_rows_weigh_nothing():
    lse = torch.randn(2, 3, 7, device=DEVICE)
    lse[0, 1, 2] = -torch.inf
    delta = torch.randn(2, 7, 3, device=DEVICE).transpose(1, 2)
    made = softmax_stats.row_statistics(lse, delta)
    assert made.shape == (2, 3, 2, 8)
    torch.testing.assert_close(made[:, :, 0, :7], torch.where(lse.isinf(), 1e30, lse * launch.LOG2E))
    assert torch.equal(made[:, :, 1, :7], -delta)
    assert not made[..., 7].any()


# --- choice of configuration, and errors ---


def test_the_backward_pass_uses_the_backend_of_the_forward_pass(monkeypatch):
    monkeypatch.setattr(prepared, "REPLAYED", ())  # a replay does not call the launch functions
    calls = []
    run = launch.run
    monkeypatch.setattr(launch, "run", lambda kernel, *a, **o: (calls.append(kernel.__name__), run(kernel, *a, **o)))
    mask = Mask.causal(9)
    q, k, v, dout, _ = inputs(mask)
    for x in (q, k, v):
        x.requires_grad_()
    for attend_to in (
        lambda: local.attention(q, k, v, mask),
        lambda: ring_attention(q, k, v, mask, Layout.contiguous(9, 1)),
    ):
        calls.clear()
        with hopper():
            out = attend_to()
        assert calls == ["forward_kernel"]
        with nullcontext() if ON_HOPPER else simulator.simulated():  # but not backend("gluon")
            out.backward(dout)
        assert calls == ["forward_kernel", "dkdv_kernel", "dq_kernel"]


@pytest.mark.parametrize(
    ("changes", "method", "message"),
    [
        ({"dtype": torch.float32}, "split", "bfloat16 and float16"),
        ({"d": 264, "dv": 64}, "split", "264"),
        ({"d": 256, "dv": 64}, "fused", "fused"),
    ],
)
def test_unsupported_inputs_raise(changes, method, message):
    mask = Mask.causal(9)
    with pytest.raises(ValueError, match=message):
        attend(*inputs(mask, **changes), mask, method=method)


@pytest.mark.parametrize("wrong", [Config(128, 64, 1), Config(64, 64, 2), Config(256, 64, 2)])
def test_configurations_that_would_hang_raise(wrong):
    mask = Mask.causal(9)
    with config.forced(forward=wrong), pytest.raises(ValueError, match="at least 2 stages"):
        attend(*inputs(mask), mask)


@pytest.mark.skipif(ON_HOPPER, reason="here they run")
def test_the_error_on_a_cpu_names_the_simulator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    mask = Mask.causal(9)
    with backend("gluon"), pytest.raises(RuntimeError, match="simulator"):
        local.attention_forward(*inputs(mask)[:3], mask)


def test_too_much_shared_memory_raises_with_numbers():
    mask = Mask.causal(9)
    with config.forced(forward=Config(128, 128, 9)), pytest.raises(ValueError, match=r"needs \d+ bytes.*232448"):
        attend(*inputs(mask), mask)


def test_long_rows_have_their_own_tiles():
    seen = [launch.tiles_seen(Mask.causal(n), 4, 3) for n in (0, 127, 2047, 8191)]
    assert seen == [0, 0.5, 8, 32]
    assert launch.tiles_seen(Mask.documents(range(0, 8193, 16)), 4, 3) < 0.1, (
        "tiles visit many, but each row sees few keys"
    )
    few_queries = Mask.full(8192).crop(range(128))
    assert [launch.tiles_seen(few_queries, heads, 132) for heads in (132, 133)] == [16, 64]
    chosen = [config.choose("forward", d, d, seen)[0] for d in (64, 128, 256) for seen in (1, 2, 4, 8)]
    of_64, of_128, of_256 = ([(c.rows, c.optimistic) for c in chosen[i : i + 4]] for i in (0, 4, 8))
    assert of_64 == [(128, False), (128, False), (128, True), (192, True)]
    assert of_128 == [(128, False), (128, False), (128, False), (128, True)]
    assert of_256 == [(128, False), (128, False), (128, True), (128, True)]
