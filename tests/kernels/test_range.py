"""The range of scores, their gradients, values and the scale on both kernel backends. Outside it, a
query gets NaN.
"""

import math

import pytest
import torch
from hopper import HOPPER_ONLY, hopper
from sharded import DEVICE, all_equal

from canon import Band, Mask
from canon.fast import backend, backward, local
from canon.fast.kernels.gluon import config as hopper_config
from canon.fast.kernels.gluon.config import Config as HopperConfig
from canon.fast.kernels.triton.config import Config, forced
from canon.fast.tables.cells import Cells
from canon.route.checks import LARGEST_DS

pytestmark = [
    pytest.mark.gpu,
    # from NumPy, if the interpreter takes a maximum
    pytest.mark.filterwarnings("ignore:All-NaN slice"),
]
LOG2E = 1 / math.log(2)
BACKENDS = {
    "triton": None,
    "gluon": HopperConfig(128, 128, 3),
    "gluon, stale maximum": HopperConfig(128, 128, 3, stale_maximum=True),
    "gluon, by three": HopperConfig(192, 128, 4, 2, stale_maximum=True),
}


@pytest.fixture(
    params=[
        pytest.param(x, marks=HOPPER_ONLY if x else [], id=name) for name, x in BACKENDS.items()
    ]
)
def kernels(request):
    """Force a backend and its tiles."""
    if request.param is None:
        small = dict.fromkeys(("forward", "dq", "dkdv"), Config(32, 32, 4, 1))
        with backend("triton"), forced(**small):
            yield
    else:
        with hopper_config.forced(forward=request.param), hopper(order="late"):
            yield


def zeros(mask, dtype=torch.bfloat16):
    """Return q, k and v for a mask."""
    tokens = mask.queries, mask.keys, mask.keys
    return [torch.zeros(1, n, 1, 64, dtype=dtype, device=DEVICE) for n in tokens]


def forward(q, k, v, mask, scale=1.0):
    out, lse = (torch.full(x, 7.0, device=DEVICE) for x in (q.shape, (1, 1, q.shape[1])))
    local.forward_into(q, k, v, Cells(mask), scale, out, lse)
    return out, lse


def backward_of(q, k, v, out, lse, mask, dout=None, method="split"):
    dout = torch.ones_like(q) if dout is None else dout
    return backward.attention_backward(
        dout, q, k, v, out.to(q.dtype), lse, mask, scale=1.0, method=method
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_up_to_1e7_overflow_nothing(kernels, sign):
    """Scores are 2^23 plus 0 to 255. float32 rounds such scores by 1/2, and lse by a few times as
    much.
    """
    mask = Mask.full(140, 300)
    q, k, v = zeros(mask)
    more = torch.arange(300, device=DEVICE) % 256
    q[..., 0], q[..., 1], k[..., 0], k[..., 1] = 2.0**12, 1, sign * 2.0**11, more[:, None]
    v[..., :32], v[..., 32:] = 1, more[:, None, None] / 256
    out, lse = forward(q, k, v, mask)
    exact = torch.logsumexp((sign * 2.0**23 + more.double()), 0)
    assert (lse - exact).abs().max() <= 4
    # two roundings of P
    torch.testing.assert_close(out[..., :32], torch.ones_like(out[..., :32]), rtol=2**-7, atol=0)
    assert (out[..., 32:] > 0.9).all()
    assert (out[..., 32:] <= 1).all()
    assert all(grad.isfinite().all() for grad in backward_of(q, k, v, out, lse, mask))


@pytest.mark.parametrize("score", [2.0**25, -(2.0**25), 1e9, -1e9, 1e10, -1e10, 1e30])
def test_only_queries_with_a_score_out_of_range_get_nan(kernels, score):
    mask = Mask.full(140, 300)
    q, k, v = zeros(mask)
    q[:, 70, :, 0], q[:, 71:, :, 1], k[..., 0], k[:, 5:, :, 1] = 1, 1, score, -abs(score)
    v[..., :5] = torch.arange(300, device=DEVICE)[:, None, None] / 300
    out, lse = forward(q, k, v, mask)
    assert lse[..., 70].isnan().all()
    assert out[:, 70].isnan().all()
    expected = torch.full_like(lse, 300.0).log()  # all scores are 0
    expected[..., 71:] = math.log(5)
    torch.testing.assert_close(lse[..., :70], expected[..., :70])
    assert out[:, :70].isfinite().all()
    later = lse[..., 71:]
    if abs(score) > 2e9:
        # a tile with such low scores may come first: its P overflows on GPUs, and the row gets NaN
        later = torch.where(later.isnan(), expected[..., 71:], later)
    torch.testing.assert_close(later, expected[..., 71:])
    assert out[:, 71:].isfinite().all() or abs(score) > 2e9


def test_rows_with_very_low_scores_are_not_mistaken_for_fully_masked_rows(kernels):
    """Rows 0 to 9 see no key of the first tile. Their scores are below -3e38 in base 2,
    but finite.
    """
    mask = Mask([Band(0, 10, 150, 260, -300, 300), Band(10, 150, 0, 260, -300, 300)], 150, 260)
    q, k, v = zeros(mask)
    q[:, :10, :, 0], k[..., 0], v[:] = 2.0**64, -3.2e38 / LOG2E / 2.0**64, 1
    out, lse = forward(q, k, v, mask)
    assert lse[..., :10].isnan().all()
    assert out[:, :10].isnan().all()
    torch.testing.assert_close(out[:, 10:], torch.ones_like(out[:, 10:]))


def test_values_up_to_1e21_overflow_nothing_with_a_stale_maximum(kernels):
    """The last keys outweigh all others by 2^60. Relative to a stale maximum, their P is finite,
    but P V is not.
    """
    mask = Mask.full(192, 320)
    q, k, v = zeros(mask)
    q[..., 0], k[:, 200:, :, 0], v[:] = 1, 60 / LOG2E, 1e21
    out, _ = forward(q, k, v, mask)
    torch.testing.assert_close(out, v[:, :1].float().expand(out.shape), rtol=2**-7, atol=0)


@pytest.mark.parametrize("method", ["split", "fused"])
def test_gradients_of_scores_up_to_the_largest_float16_overflow_nothing(kernels, method):
    """Queries 1 and 3 of two documents weigh two keys equally. dS is +-65504 in the first, and
    twice as much in the second.
    """
    mask = Mask.documents([0, 2, 4])
    q, k, v = zeros(mask, torch.float16)
    dout = torch.zeros_like(q)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0], device=DEVICE)[None, :, None]
    small = 2.0**-10
    q[..., 0], k[..., 1], v[..., 0] = small, small * sign, 2 * sign
    dout[:, 1::2, :, 0], v[:, 2:] = LARGEST_DS, 2 * v[:, 2:]
    out, lse = forward(q, k, v, mask)
    dq, dk, _ = (x[0, :, 0] for x in backward_of(q, k, v, out, lse, mask, dout, method))
    assert dq[1].tolist() == [0, 2 * LARGEST_DS * small, *[0] * 62]
    assert dk[:2].tolist() == [[LARGEST_DS * small * s, *[0] * 63] for s in (1, -1)]
    assert not dq[[0, 2]].any()
    assert not dq[3].isfinite().all()
    assert not dk[2:].isfinite().all(1).any()


@pytest.mark.parametrize("scale", [1e-50, -1e-50, -0.0])
def test_a_scale_that_float32_rounds_to_0_is_0(kernels, scale):
    mask = Mask.causal(40)
    q, k, v = (torch.randn(1, 40, 1, 64, device=DEVICE).bfloat16() for _ in range(3))
    out, lse = forward(q, k, v, mask, scale)
    assert all_equal((out, lse), forward(q, k, v, mask, 0.0))
    assert (lse - torch.arange(1, 41, device=DEVICE).log()).abs().max() < 1e-5


def test_float64_has_its_own_range():
    mask = Mask.full(20)
    q, k, v = zeros(mask, torch.float64)
    more = torch.arange(20.0, dtype=torch.float64, device=DEVICE)
    q[..., 0], k[..., 0], v[..., 0] = 1e5, 1e5 + more[:, None] * 1e-5, 1
    with backend("triton"), forced(forward=Config(16, 16, 4, 1)):
        out, lse = local.attention_forward(q, k, v, mask, scale=1.0)
    assert (lse - torch.logsumexp(1e10 + more, 0)).abs().max() < 1e-4
    torch.testing.assert_close(out[..., 0], torch.ones_like(out[..., 0]), rtol=1e-5, atol=0)


def test_sums_are_rescaled_by_the_maxima_of_their_p():
    """Scores near 2^20 grow from tile to tile. The interpreter rounds score times scale; a GPU does
    not.
    """
    scale, mask = 1.1, Mask.full(16, 128)
    q, k, v = zeros(mask, torch.float32)
    more = torch.arange(128, device=DEVICE) / 8
    q[..., 0], q[..., 1], k[..., 0], k[..., 1] = 2.0**10, 1, 2.0**10, more[:, None]
    v[:, :, 0, 0] = more
    with backend("triton"), forced(forward=Config(16, 16, 4, 1)):
        out, _ = forward(q, k, v, mask, scale)
    log2 = (2.0**20 + more.double()) * torch.tensor(scale * LOG2E).item()
    log2 = log2.float().double() if DEVICE == "cpu" else log2
    expected = torch.softmax(log2 * math.log(2), 0) @ more.double()
    torch.testing.assert_close(out[0, :, 0, 0].double(), expected.expand(16), rtol=1e-5, atol=0)
