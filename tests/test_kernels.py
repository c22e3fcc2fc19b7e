"""The Triton kernels, small tiles, interpreted or, with --gpu, on a GPU: every claim that the readable half cannot make.

That `canon.fast` is attention at all is shown beside the reference in test_local.py. Here: tile sizes, loads by pointer
and by descriptor, strides, unwritten outputs, repetition bit by bit.
"""

import pytest
import torch
from sharded import DEVICE

from canon import Layout, Mask
from canon.fast import backward, local
from canon.fast.device import backend
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.triton import config, launch
from canon.fast.kernels.triton.config import Config, forced
from canon.testing.judge import Attended, agreement, dense, oracle

pytestmark = pytest.mark.gpu
METHODS = ("split", "fused", "head_parallel")
KERNELS = ("forward", "dq", "dkdv", "fused")
N = 52


def tiles(rows, columns, **options):
    """Force one tile size on all kernels."""
    return forced(**dict.fromkeys(KERNELS, Config(rows, columns, 4, 1, **options)))


@pytest.fixture(autouse=True)
def small_tiles():
    with tiles(32, 16):
        yield


def inputs(mask, b=1, h=2, g=1, d=16, dv=16, dtype=torch.float64, seed=0):
    """q, k, v, dout, dlse; NaN in queries that see nothing and in keys that nobody sees."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(mask.queries, h, d), (mask.keys, g, d), (mask.keys, g, dv), (mask.queries, h, dv)]
    q, k, v, dout = (torch.randn(b, *shape, generator=draw).to(dtype).to(DEVICE) for shape in shapes)
    dlse = torch.randn(b, h, mask.queries, generator=draw).to(torch.promote_types(dtype, torch.float32)).to(DEVICE)
    seen = mask.dense().to(DEVICE)
    for x, used in ((q, seen.any(1)), (k, seen.any(0)), (v, seen.any(0)), (dout, seen.any(1))):
        x[:, ~used] = torch.nan
    return q, k, v, dout, dlse


def attend(q, k, v, dout, dlse, mask, scale=None, method="split") -> Attended:
    out, lse = local.attention_forward(q, k, v, mask, scale=scale)
    grads = backward.attention_backward(dout, q, k, v, out, lse, mask, scale=scale, dlse=dlse, method=method)
    return Attended(out, lse, *grads)


def assert_exact(got, q, k, v, dout, dlse, mask, scale=None):
    verdict = agreement(
        got, oracle(q, k, v, dout, mask, scale, dlse=dlse), dense(q, k, v, dout, mask, scale, dlse=dlse)
    )
    assert verdict.agrees, str(verdict)


MASKS = {
    "causal": Mask.causal(N),
    "window": Mask.window(N, 9, 4),
    "documents": Mask.documents([0, 1, 1, 33, 34, N]),
    "queries without keys and keys without queries": Mask.causal(N - 12).shift(6, 3).shift(-1, 0),
    "a late rectangle": Mask.causal(N).crop(range(29, N)),
    "one token": Mask.causal(1),
    "no bands": Mask([], 5, 7),
}
EMPTY = {"no queries": Mask([], 0, 7), "no keys": Mask([], 7, 0), "nothing at all": Mask([], 0, 0)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_method_equals_the_oracle(mask, method):
    arguments = inputs(mask, h=4, g=2)
    assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 64), (64, 16), (64, 64)])
def test_the_tile_size_does_not_matter(rows, columns):
    mask = Mask.documents([0, 20, 25, N], window=(17, 0))
    arguments = inputs(mask)
    with tiles(rows, columns):
        for method in METHODS:
            assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


@pytest.mark.parametrize("partial_columns", [16, 32])
def test_partial_tiles_may_be_smaller_than_full_ones(partial_columns):
    mask = Mask.documents([0, 90, 110], window=(70, 3))
    arguments = inputs(mask)
    with tiles(16, 32, partial_columns=partial_columns, tma=True):
        for method in METHODS:
            assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


@pytest.mark.parametrize(
    ("d", "dv"), [(16, 16), (24, 24), (40, 40), (80, 80), (64, 32), (32, 64), (8, 5), (192, 128), (256, 256)]
)
def test_head_widths(d, dv):
    mask = Mask.causal(20)
    arguments = inputs(mask, d=d, dv=dv, h=2, g=2)
    with tiles(16, 16):  # float64 and 256 wide: larger ones do not fit into an H200
        for method in METHODS:
            assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


@pytest.mark.parametrize(("h", "g"), [(8, 1), (6, 2), (3, 3)])
def test_the_heads_of_a_group_are_summed(h, g):
    mask = Mask.causal(20)
    arguments = inputs(mask, b=2, h=h, g=g)
    for method in METHODS:
        assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-3, 2.5])
def test_any_scale(scale):
    mask = Mask.window(24, 9, 4)
    arguments = inputs(mask)
    for method in METHODS:
        assert_exact(attend(*arguments, mask, scale, method), *arguments, mask, scale)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_passes_the_judge(dtype, method):
    mask = Mask.documents([0, 20, N])
    arguments = inputs(mask, h=4, g=2, d=32, dv=32, dtype=dtype)
    assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


@pytest.mark.parametrize("name", ["forward", "dq", "dkdv", "fused"])
def test_descriptors_load_what_pointers_load(name):
    mask = Mask.documents([0, 20, N])
    arguments = inputs(mask, h=4, g=2, d=32, dv=32, dtype=torch.bfloat16)
    method = "fused" if name == "fused" else "split"
    by_pointer = attend(*arguments, mask, method=method)
    with forced(**{name: Config(32, 16, 4, 1, tma=True)}):
        by_descriptor = attend(*arguments, mask, method=method)
    assert_exact(by_descriptor, *arguments, mask)
    if name != "fused" or DEVICE == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(by_pointer, by_descriptor, strict=True))


def test_dk_and_dv_may_be_made_one_after_the_other():
    mask = Mask.causal(N)
    arguments = inputs(mask, h=4, g=2)
    with forced(dkdv=Config(32, 16, 4, 1, apart=True)):
        assert_exact(attend(*arguments, mask), *arguments, mask)


def strided(x, how):
    """The same numbers behind other strides."""
    if how == "heads before tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "width first":
        return x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    if how == "part of a wider tensor":
        return torch.cat([x, x.new_full(x.shape, torch.nan)], 2)[:, :, : x.shape[2]]
    if how == "a misaligned pointer":
        flat = x.new_full((x.numel() + 1,), torch.nan)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    raise AssertionError(how)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    "how", ["heads before tokens", "width first", "part of a wider tensor", "a misaligned pointer"]
)
def test_any_strides(how, tma):
    mask = Mask.causal(20)
    *tensors, dlse = inputs(mask, b=2, h=2, g=2)
    arguments = *(strided(x, how) for x in tensors), dlse.transpose(1, 2).contiguous().transpose(1, 2)
    with tiles(16, 16, tma=tma):
        for method in METHODS:
            assert_exact(attend(*arguments, mask, method=method), *tensors, dlse, mask)


def test_expanded_tensors():
    mask = Mask.causal(20)
    q, k, v, dout, dlse = inputs(mask, b=2, h=2, g=2)
    k, v = (x[:1, :, :1].expand(2, -1, 2, -1) for x in (k, v))
    dout = dout[:, :1, :, :1].expand(dout.shape)
    with tiles(16, 16, tma=True):
        for method in METHODS:
            arguments = q, k, v, dout, dlse
            assert_exact(attend(*arguments, mask, method=method), *arguments, mask)


def test_packed_tensors_come_back_packed():
    mask = Mask.documents([0, 7, 20])
    q, k, v, dout, dlse = inputs(mask, h=4, g=2)
    got = attend(*(x.squeeze(0) for x in (q, k, v, dout, dlse)), mask)
    want = attend(q, k, v, dout, dlse, mask)
    assert all(torch.equal(a, b.squeeze(0)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("mask", [*MASKS.values(), *EMPTY.values()], ids=[*MASKS, *EMPTY])
def test_every_output_is_written(mask, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(_shape(shape), torch.nan, **options))
    q, k, v, dout, dlse = inputs(mask, h=2, g=1)
    for method in METHODS:
        got = attend(q, k, v, dout, dlse, mask, method=method)
        assert all(x.isfinite().all() for x in (got.out, got.dq, got.dk, got.dv))
        assert not got.lse.isnan().any()


def _shape(shape):
    return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape


def test_what_no_query_sees_may_be_anything():
    mask = Mask.documents([0, 18, 40]).shift(5, 5).shift(-2, -2)
    finite = [x.nan_to_num(0.0) for x in inputs(mask)]
    seen = mask.dense().to(DEVICE)
    for value in (torch.nan, torch.inf):
        arguments = [x.clone() for x in finite]
        for x, used in zip(arguments, (seen.any(1), seen.any(0), seen.any(0), seen.any(1)), strict=False):
            x[:, ~used] = value
        for method in METHODS:
            got, want = (attend(*x, mask, method=method) for x in (arguments, finite))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_seen_key_of_nan_is_not_hidden():
    mask = Mask.causal(20)
    q, k, v, *_ = inputs(mask)
    k[:, 10] = torch.nan
    out, lse = local.attention_forward(q, k, v, mask)
    assert out[:, 10:].isnan().all()
    assert lse[..., 10:].isnan().all()
    assert out[:, :10].isfinite().all()


@pytest.mark.parametrize("method", ["split", "head_parallel"])
def test_the_same_bits_again(method):
    mask = Mask.documents([0, 20, N])
    arguments = inputs(mask, h=8, g=2, dtype=torch.float32)
    first, second = (attend(*arguments, mask, method=method) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_partial_results_come_in_float32():
    mask = Mask.causal(20)
    q, k, v, dout, dlse = inputs(mask, h=2, g=1, dtype=torch.float16)
    wide, lse = local.attention_forward(q, k, v, mask, out_dtype=torch.float32)
    narrow, _ = local.attention_forward(q, k, v, mask)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.half(), narrow)
    assert not torch.equal(wide, narrow.float())
    for method in METHODS:
        call = dout, q, k, v, narrow, lse, mask
        wide_grads = backward.attention_backward(*call, dlse=dlse, method=method, grad_dtype=torch.float32)
        narrow_grads = backward.attention_backward(*call, dlse=dlse, method=method)
        assert all(torch.equal(a.half(), b) for a, b in zip(wide_grads, narrow_grads, strict=True)) or DEVICE == "cuda"


def test_parts_merge_in_place_whatever_blind_parts_hold():
    mask = Mask.causal(N)
    q, k, v, *_ = inputs(mask, h=2, g=1)
    whole = local.attention_forward(q, k, v, mask)
    parts = [
        local.attention_forward(q, k[:, a:b], v[:, a:b], mask.crop(keys=range(a, b)))
        for a, b in ((20, 40), (40, N), (0, 20))
    ]
    for out, lse in parts:
        out.masked_fill_((lse == -torch.inf).transpose(1, 2)[..., None], torch.nan)
    out, lse = parts[0]
    apart = local.merge(*local.merge(*parts[0], *parts[1]), *parts[2])
    local.merge_into(out, lse, *parts[1])
    local.merge_into(out, lse, *parts[2])
    for got in (apart, (out, lse)):
        torch.testing.assert_close(got[0], whole[0], rtol=1e-12, atol=1e-13)  # a few roundings of float64
        torch.testing.assert_close(got[1], whole[1], rtol=1e-12, atol=1e-13)


def test_two_blind_parts_merge_to_nothing():
    blind = torch.full((1, 3, 2, 8), torch.nan), torch.full((1, 2, 3), -torch.inf)
    out, lse = local.merge(*(x.to(DEVICE) for x in (*blind, *blind)))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


# --- choosing ---


def test_auto_makes_an_owner_of_every_query_head_where_processors_would_idle():
    def chosen(b, t, h, g, mask=None):
        q, k = (torch.empty(b, t, heads, 64, device="meta") for heads in (h, g))
        return backward.automatic(q, k, k, mask or Mask.causal(t), 132)

    assert chosen(1, 16384, 32, 8) == "split"  # 1024 tiles of keys and key heads
    assert chosen(2, 1024, 8, 1) == "head_parallel"  # 16
    assert chosen(2, 1024, 8, 8) == "split"  # nothing is shared
    one_long = Mask.documents([0, 8192, *range(8200, 16384, 8)])  # many tiles, but the long ones are few
    assert chosen(1, 16384, 8, 1, one_long) == "head_parallel"
    assert chosen(1, 16384, 8, 1, Mask.documents(range(0, 16385, 8))) == "split"


def test_auto_adds_in_order_where_that_costs_little_on_hopper(monkeypatch):
    def chosen(b, t, h, g, d, dv=64):
        q, k, v = (torch.empty(b, t, *shape, device="meta") for shape in ((h, d), (g, d), (g, dv)))
        return backward.automatic(q, k, v, Mask.causal(t), 132)

    assert chosen(1, 16384, 32, 32, 64) == "split", "Triton's kernel adds in any order"
    monkeypatch.setattr(backward, "kernels_for", lambda q, v: hopper)
    assert chosen(1, 16384, 32, 32, 64) == "fused"
    assert chosen(0, 16384, 32, 32, 64) == "split", "nothing to do"
    assert chosen(1, 16384, 32, 8, 40) == "fused"
    assert chosen(1, 16384, 32, 32, 64, 128) == chosen(4, 8192, 16, 16, 128) == "fused"
    assert chosen(1, 16384, 16, 16, 256) == "split", "too wide"
    assert chosen(1, 1024, 32, 32, 64) == "split", "every tile of keys would wait as long as it works"
    assert chosen(8, 2048, 32, 8, 128) == "split", "tiles of keys visit too few"
    assert chosen(64, 2048, 32, 32, 64) == "fused", "enough where heads are narrow"
    assert chosen(128, 1024, 32, 32, 64) == "split"
    q, k = (torch.empty(1, 65536, heads, 128, device="meta") for heads in (64, 8))
    packed = Mask.documents([*range(0, 65536, 4096), 65536])
    assert backward.automatic(q, k, k, packed, 132) == "split", "and so they do in packed documents"
    assert chosen(2, 1024, 8, 1, 64) == "head_parallel"
    assert chosen(1, 16384, 8, 2, 128) == chosen(4, 4096, 32, 8, 128) == "fused", "pairs of tiles wait little"
    assert chosen(1, 65536, 8, 2, 128) == "fused"
    q, k = (torch.empty(1, t, heads, 128, device="meta") for t, heads in ((4096, 32), (16384, 8)))
    shard = Layout.zigzag(16384, 4).local_mask(Mask.causal(16384), 0, range(4))
    assert backward.automatic(q, k, k, shard, 132) == "split", (
        "gradients of others' keys are to leave before dq is made"
    )


def test_fused_is_refused_where_the_same_bits_are_asked_for(deterministic):
    mask = Mask.causal(64)
    q, k, v = (torch.randn(1, 64, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    for method in ("auto", "split", "head_parallel"):
        local.attention(q, k, v, mask, backward=method).sum().backward()
    with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
        local.attention(q, k, v, mask, backward="fused").sum().backward()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="adds to dq in any order"):
        local.attention(q, k, v, mask, backward="fused").sum().backward()


def test_a_destination_too_wide_for_32_bits_is_refused():
    q, k, v, _, _ = inputs(Mask.causal(1))
    out = torch.empty(1, device=DEVICE, dtype=q.dtype).as_strided((1, 1, 2, 16), (0, 1 << 23, 0, 0))
    with pytest.raises(ValueError, match="too wide"):
        local.forward_into(q, k, v, Mask.causal(1), 1.0, out, torch.empty(1, 2, 1, dtype=q.dtype, device=DEVICE))


def test_parts_of_query_heads_are_capped_key_by_key(monkeypatch):
    mask = Mask.window(N, 30, 2)
    arguments = inputs(mask, b=2, h=4, g=2)
    expected = attend(*arguments, mask, method="head_parallel")
    monkeypatch.setattr(backward, "PARTIAL_BYTES", 2 * 4 * 32 * 8 * 20)  # of 20 keys
    got = attend(*arguments, mask, method="head_parallel")
    assert torch.equal(got.dq, expected.dq)
    assert_exact(got, *arguments, mask)


@pytest.mark.parametrize("name", ["cuda"])
def test_a_family_that_does_not_exist_yet_raises_on_entry(name):
    with pytest.raises(NotImplementedError, match=name), backend(name):
        pass


def test_backends_are_named():
    with pytest.raises(ValueError, match="'triton', 'gluon', 'cuda'"), backend("tritn"):
        pass
    with backend("triton"):
        local.attention_forward(*inputs(Mask.causal(3))[:3], Mask.causal(3))


def test_configurations_that_do_not_fit_are_passed_over(monkeypatch):
    monkeypatch.setattr(config, "_forced", {})
    sizes = []
    for limit in (232448, 166912, 101376):  # sm_90, sm_80, sm_86 and sm_89
        chosen = [
            config.fitting(name, d, d, 2, limit, False, limit > 200000) for name in KERNELS for d in (64, 128, 256)
        ]
        sizes.append(sum(c.rows * c.columns for c in chosen))
    assert sizes == sorted(sizes, reverse=True)


def test_too_little_shared_memory_names_need_and_limit():
    with pytest.raises(ValueError, match=r"needs at least \d+ bytes.*this device has 1000"):
        config.fitting("dkdv", 128, 128, 2, 1000, False, False)


def test_heads_run_side_by_side_as_the_cache_allows():
    assert launch.heads_in_l2(64, 8, 1 << 20) == 64
    assert launch.heads_in_l2(64, 8, 16 << 20) == 16
    assert launch.heads_in_l2(64, 8, 1 << 30) == 8
