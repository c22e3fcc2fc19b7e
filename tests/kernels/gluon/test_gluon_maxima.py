"""A stale row maximum of the Hopper kernels changes neither range nor accuracy, and repeats few
tiles.
"""

import pytest
import torch
from hopper import HOPPER_ONLY, assert_exact, forward, hopper, inputs
from sharded import DEVICE, ON_HOPPER
from triton.experimental.gluon import language as gl

from canon import Mask, simulator
from canon.fast import local
from canon.fast.kernels.gluon import config, ptx, stale_maximum
from canon.fast.kernels.gluon.config import Config
from canon.fast.tables.cells import Cells

pytestmark = HOPPER_ONLY
LN2 = 0.6931471805599453


TILES = {
    "dkdv_hdim256": (256, Config(128, 64, 2)),
    "wide, stale maximum": (256, Config(128, 64, 2, stale_maximum=True)),
    "ping-pong": (128, Config(128, 128, 3)),
    "stale maximum": (128, Config(128, 128, 3, stale_maximum=True)),
    "three, stale maximum": (64, Config(192, 128, 4, 2, stale_maximum=True)),
}


every_tile = pytest.mark.parametrize(("d", "tiles"), TILES.values(), ids=TILES)


@pytest.mark.sweep
@every_tile
@pytest.mark.parametrize(
    "steps",
    [0.5, 3.0, 20.0, 200.0, -20.0],
    ids=["hardly", "slowly", "by leaps", "out of range", "falling"],
)
def test_maxima_may_grow(steps, d, tiles):
    """The maximum grows in some rows only; a warp rescales its rows together."""
    mask = Mask.full(450)
    q, k, v, dout, dlse = inputs(mask, h=1, d=d, dv=d)
    height = (
        torch.arange(450, device=DEVICE) // 64 * steps * (torch.arange(450, device=DEVICE) % 3 > 0)
    )
    q[..., 0] = torch.linspace(0, 1, 450, device=DEVICE)[None, :, None] > 0.3
    k[..., 0] = (height * d**0.5 / 1.44)[None, :, None]
    assert_exact(forward(q, k, v, mask, tiles), q, k, v, dout, dlse, mask)


@pytest.fixture
def votes(monkeypatch):
    """Record the warpgroups' votes: whether a sum outweighs its row so far, and if so, whether the
    tile must be repeated.
    """
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
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 32), (torch.float16, 16)], ids=str)
def test_a_tile_is_repeated_if_its_p_exceeds_the_range_of_the_dtype(dtype, bits, votes):
    """P of the last key is just below, or just above, the largest sum of a lane."""
    d, tiles = TILES["stale maximum"]
    mask = Mask.full(192)
    q, k, v, dout, dlse = inputs(mask, h=1, d=d, dv=d, dtype=dtype)
    q[:], k[:] = 0, 0
    outweighed, again = votes
    for more in (-0.25, 0.25):
        outweighed.clear()
        again.clear()
        q[..., 0], k[:, 191, :, 0] = d**0.5 * LN2, bits + more
        assert_exact(forward(q, k, v, mask, tiles), q, k, v, dout, dlse, mask)
        assert set(outweighed) == {0, 1}
        assert any(again) == (more > 0), more


@every_tile
def test_the_rounding_of_a_key_that_outweighs_all_others_does_not_show(d, tiles):
    """Two keys are in different tiles. P of the lighter key is rounded to 8 bits. With a stale
    maximum P of the heavier key may be rounded too. The error of its weight is then at most that of
    the lighter key."""
    mask = Mask.full(448)
    q, k, v, *_ = inputs(mask, h=1, d=d, dv=d)
    # of the second one, a power of 2
    weight = torch.linspace(-9, 9, mask.queries, device=DEVICE).bfloat16()
    q[:], k[:], v[:] = 0, 0, 0
    q[:, :, 0, 0], q[..., 1] = weight, 1
    k[..., 1], k[:, [0, 300], :, 1] = -100, 0
    k[:, 300, :, 0], v[:, 300] = 1, 1
    out = torch.empty(v.shape, device=DEVICE)
    with config.forced(forward=tiles), hopper():
        lse = torch.empty(1, 1, mask.queries, device=DEVICE)
        local.forward_into(q, k, v, Cells(mask), LN2, out, lse)
    share = torch.sigmoid(weight.double() * LN2)[None, :, None, None]
    off = (out - share).abs()
    bound = 2**-8 * torch.where(share < 0.5, share, (1 - share) * tiles.stale_maximum)
    assert (off <= bound + 1e-6).all()
    assert off.max() > 2**-12  # they do differ
