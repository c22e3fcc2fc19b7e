"""Few queries over many keys are computed in parts of the keys: results, bits and rule."""

import functools

import hopper
import pytest
import torch
from hopper import FEW, assert_exact
from sharded import DEVICE, all_equal

from canon import Band, Mask, fast
from canon.fast import device, local
from canon.fast.kernels.triton import parts
from canon.fast.kernels.triton.config import Config, forced
from canon.fast.tables import key_parts
from canon.fast.tables.key_parts import part_table
from canon.masks.plan_cache import PLANS
from canon.testing.judge import Attended

pytestmark = pytest.mark.gpu
N = 700
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
inputs = functools.partial(hopper.inputs, b=2, d=16, dv=16)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """Cut all calls at keys 128, 256, 512 and 1,024, so that parts have three sizes."""
    monkeypatch.setattr(key_parts, "PART", 128)
    monkeypatch.setattr(key_parts, "SHORT", 2)
    monkeypatch.setattr(key_parts, "FEWEST_KEYS", 1)
    PLANS.clear()
    yield
    PLANS.clear()


def attended(q, k, v, mask, **options):
    return local.attention(q, k, v, mask, return_lse=True, **options)


MASKS = FEW | {
    "128 queries": Mask.causal(128, 400),
    "blocks": Mask.block_causal([i // 13 for i in range(N)]).crop(queries=range(500, 600)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_parts_give_the_results_of_the_oracle(mask, heads):
    """Unseen tokens hold NaN."""
    for dtype in DTYPES if heads == (6, 2) else DTYPES[:1]:
        arguments = inputs(mask, h=heads[0], g=heads[1], dtype=dtype)
        out, lse = attended(*arguments[:3], mask)
        assert torch.equal(lse.isneginf(), ~mask.dense().any(1).to(DEVICE).expand(lse.shape))
        assert_exact(Attended(out, lse), *arguments, mask)


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (40, 24), (192, 128), (256, 256)])
def test_widths_scales_and_strides(d, dv):
    mask = MASKS["causal"]
    q, k, v, dout, dlse = inputs(mask, h=4, g=2, d=d, dv=dv, dtype=torch.bfloat16)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for scale in (0.2, -0.1, 0.0):
        got = Attended(
            *local.attention_forward(*transposed, mask, scale=scale, out_dtype=torch.float32)
        )
        assert_exact(got, q, k, v, dout, dlse, mask, scale)


def test_parts_begin_at_the_positions_that_the_page_names(monkeypatch):
    monkeypatch.undo()
    begins = [*range(0, 8192, 512), *range(8192, 16384, 1024), *range(16384, 40000, 2048)]
    for first, last in ((0, 40000), (600, 8200), (20000, 20064)):
        mask = Mask([Band(0, 1, first, last)], 1, 40000)
        work = part_table.__wrapped__(mask, 4, 64, key_parts.PART).work
        cut = [first // 64 * 64, *(x for x in begins if first < x < last), -(-last // 64) * 64]
        assert work[:, 1].tolist() == cut[:-1]
        assert work[:, 2].tolist() == cut[1:]


# ---------------------------------------------------------------------- bits
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_bits_of_a_query_do_not_depend_on_the_other_queries(dtype):
    """Of the last ones, in another batch."""
    q, k, v, *_ = inputs(Mask.causal(128, N), h=4, g=2, d=64, dv=64, dtype=dtype)
    out, lse = local.attention_forward(q, k, v, Mask.causal(128, N))
    for queries in (1, 17, 100):
        few = local.attention_forward(q[:1, -queries:], k[:1], v[:1], Mask.causal(queries, N))
        assert all_equal(few, (out[:1, -queries:], lse[:1, :, -queries:]))


def test_bits_of_a_query_depend_on_the_keys_that_it_sees_and_not_on_bands():
    """Query 0 sees keys 5 to 399 in one band, and in three of many that meet inside a tile."""
    others = [Band(1, 20, 0, N), Band(20, 40, 600, N, -2, 600)]
    cut = [Band(0, 1, 5, 100), Band(0, 1, 100, 257), Band(0, 1, 257, 400)]
    q, k, v, *_ = inputs(Mask.full(40, N), h=4, g=2, d=64, dv=64)
    one = local.attention_forward(q[:, :1], k, v, Mask([Band(0, 1, 5, 400)], 1, N))
    out, lse = local.attention_forward(q, k, v, Mask([*cut, *others], 40, N))
    assert all_equal((out[:, :1], lse[..., :1]), one)


def test_unseen_and_misaligned_keys_keep_the_bits():
    """They select other loads: with descriptors, or with pointers that leave out the keys that no
    query sees.
    """
    q, k, v, *_ = inputs(Mask.full(3, 640), h=4, g=2, d=64, dv=64)
    misaligned = torch.cat([k.new_zeros(1), k.reshape(-1)])[1:].view(k.shape)
    longer = [torch.cat([x, torch.full_like(x[:, :10], torch.nan)], 1) for x in (k, v)]
    with forced(parts=Config(64, 64, 4, 3, tma=True)):
        one = local.attention_forward(q, k, v, Mask.full(3, 640))
        for keys, values, stop in ((misaligned, v, 640), (*longer, 650)):
            mask = Mask([Band(0, 3, 0, 640)], 3, stop)
            assert all_equal(local.attention_forward(q, keys, values, mask), one)


# ---------------------------------------------------------------------- range
def test_a_part_below_the_range_has_no_weight_and_a_query_beyond_it_is_nan():
    q, k, v = (torch.ones(1, n, 1, 16, device=DEVICE) for n in (4, 256, 256))
    k[:, :128], k[:, 128:], v[:, 128:] = (
        -4e6,
        0,
        2,
    )  # scores of -6.4e7 in the first part, 0 in the second
    mask = Mask([Band(0, 2, 0, 256), Band(2, 3, 0, 128), Band(3, 4, 128, 256)], 4, 256)
    out, lse = local.attention_forward(q, k, v, mask)
    assert all_equal((out[:, :1], lse[..., :1]), (out[:, 3:], lse[..., 3:]))
    assert out[:, 2].isnan().all()
    assert lse[..., 2].isnan().all()
    out, lse = local.attention_forward(q, -k, v, mask)
    assert out[:, :3].isnan().all()
    assert lse[..., :3].isnan().all()
    assert out[:, 3].isfinite().all()


# ---------------------------------------------------------------------- rule, preparation
@pytest.fixture
def calls(monkeypatch):
    """The launches in parts."""
    found, forward = [], parts.forward_in_parts
    monkeypatch.setattr(
        parts, "forward_in_parts", lambda *x: (found.append(x[3].mask), forward(*x))
    )
    return found


def test_the_rule(calls, monkeypatch):
    monkeypatch.undo()
    few = Mask.causal(128, 4096)
    assert key_parts.has_parts(few)
    assert not any(
        map(
            key_parts.has_parts, (Mask.causal(129, 4096), Mask.causal(128, 4095), Mask([], 0, 4096))
        )
    )
    q = torch.empty(1, 128, 2, 16, device=DEVICE)
    assert local.forward_for(q, q, few) is parts.forward_in_parts
    for name in ("gluon", "cuda"):
        with device.backend(name):
            assert local.forward_for(q, q, few) is device.kernels_for(q, q).forward


def test_three_functions_use_parts_and_rank_invariant_does_not(calls):
    mask = MASKS["causal"]
    q, k, v, *_ = inputs(mask, h=4, g=2, dtype=torch.float32)
    for function in (fast.attention, fast.attention_forward, fast.decode_attention):
        PLANS.clear()  # a replayed pass calls nothing
        function(q, k, v, mask)
    fast.attention(q, k, v, [mask, Mask.full(17, N)], sink=torch.zeros(4, device=DEVICE))
    assert calls == [mask, mask, mask, Mask.concat([mask, Mask.full(17, N)])]
    attended(q, k, v, mask, rank_invariant=True)
    assert len(calls) == 4


def test_a_prepared_call_makes_no_table():
    mask = MASKS["documents"]
    tensors = inputs(mask, h=4, g=2, dtype=torch.float32)[:3]
    shapes = dict(batch=2, heads=(4, 2), widths=(16, 16), dtype=torch.float32, requires_grad=False)
    fast.prepare("attention", mask, device=DEVICE, **shapes).load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_parts, "visible_words", None)
        attended(*tensors, mask)
