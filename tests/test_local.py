"""Attention on one rank equals the dense oracle, forward and backward, with every method, in both halves."""

import pytest
import torch
from jaxtyping import config as shape_checks

from canon import Mask, fast, reference
from canon.testing.judge import Attended, agreement, dense, oracle

HALVES = {"reference": reference, "fast": fast}
METHODS = ["fused", "split", "head_parallel"]
N = 45
MASKS = {
    "causal": Mask.causal(N),
    "full": Mask.full(N),
    "window": Mask.window(N, 7, 3),
    "documents": Mask.documents([0, 1, 1, 30, 31, N]),
    "documents in a window": Mask.documents([0, 20, N], window=(5, 0)),
    "prefix": Mask.prefix(N, 17),
    "block causal, ids in any order":
        Mask.block_causal([(7 * (i // 8)) % 5 for i in range(N)], q_valid=[i % 15 > 0 for i in range(N)]),
    "slices": Mask.ranges([(0, 20), (20, 33)], [(3, 40), (0, 9)], ["bi_causal", "causal"], queries=N, keys=N),
    "nothing": Mask([], N, N),
}  # fmt: skip


@pytest.fixture(params=HALVES)
def half(request):
    return HALVES[request.param]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr("canon.reference.tiles.TILE", 16)


@pytest.fixture
def unchecked_shapes():
    """Turn jaxtyping off, so that wrong shapes reach the function's own checks."""
    shape_checks.update("jaxtyping_disable", True)
    yield
    shape_checks.update("jaxtyping_disable", False)


def inputs(mask, b=2, h=4, g=2, d=8, dv=5, dtype=torch.float64, seed=0):
    """Return q, k, v, dout, dlse, with NaN in tokens that no visible cell uses."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(mask.queries, h, d), (mask.keys, g, d), (mask.keys, g, dv), (mask.queries, h, dv)]
    q, k, v, dout = (torch.randn(b, *shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    dlse = torch.randn(b, h, mask.queries, generator=draw, dtype=torch.float64)
    seen = mask.dense()
    for x, used in ((q, seen.any(1)), (k, seen.any(0)), (v, seen.any(0)), (dout, seen.any(1))):
        x[:, ~used] = torch.nan
    return q, k, v, dout, dlse.masked_fill(~seen.any(1), 0).to(reference_dtype(dtype))


def reference_dtype(dtype):
    return torch.promote_types(dtype, torch.float32)


def differentiate(attend, q, k, v, dout, dlse) -> Attended:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attend(q, k, v)
    torch.autograd.backward((out, lse), (dout, dlse))
    return Attended(out.detach(), lse.detach(), q.grad, k.grad, v.grad)


def assert_agrees(got, q, k, v, dout, mask, dlse, scale=None):
    verdict = agreement(
        got, oracle(q, k, v, dout, mask, scale, dlse=dlse), dense(q, k, v, dout, mask, scale, dlse=dlse)
    )
    assert verdict.agrees, str(verdict)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equals_the_dense_oracle(half, mask, method):
    q, k, v, dout, dlse = inputs(mask)
    got = differentiate(
        lambda q, k, v: half.attention(q, k, v, mask, backward=method, return_lse=True), q, k, v, dout, dlse
    )
    assert_agrees(got, q, k, v, dout, mask, dlse)
    unseen = ~mask.dense().any(1)
    assert not got.out[:, unseen].any()
    assert (got.lse[:, :, unseen] == -torch.inf).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("h", "g"), [(3, 3), (6, 3), (8, 1)])
def test_query_heads_share_their_key_head(half, h, g, method):
    mask = Mask.causal(20)
    q, k, v, dout, dlse = inputs(mask, h=h, g=g, dv=8)
    got = differentiate(lambda q, k, v: half.attention(q, k, v, backward=method, return_lse=True), q, k, v, dout, dlse)
    assert_agrees(got, q, k, v, dout, mask, dlse)


@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0])
def test_any_scale(half, scale):
    mask = Mask.causal(20)
    q, k, v, dout, dlse = inputs(mask)
    got = differentiate(lambda q, k, v: half.attention(q, k, v, scale=scale, return_lse=True), q, k, v, dout, dlse)
    assert_agrees(got, q, k, v, dout, mask, dlse, scale)


def test_packed_tensors_are_a_batch_of_one(half):
    mask = Mask.documents([0, 3, 3, 19])
    q, k, v, dout, dlse = (x[0] for x in inputs(mask, b=1))
    got = differentiate(lambda q, k, v: half.attention(q, k, v, mask, return_lse=True), q, k, v, dout, dlse)
    assert got.out.shape == (19, 4, 5)
    assert got.lse.shape == (4, 19)
    assert_agrees(got, q, k, v, dout, mask, dlse)


@pytest.mark.parametrize("method", METHODS)
def test_any_strides(half, method):
    mask = Mask.causal(20)
    q, k, v, dout, dlse = inputs(mask, d=8, dv=8)
    reorder = lambda x, *order: x.permute(*order).contiguous().permute(*torch.tensor(order).argsort().tolist())
    q, k = reorder(q, 3, 0, 2, 1), reorder(k, 2, 1, 0, 3)  # transposed in every way
    v = v[:, :, :1].expand(-1, -1, 2, -1)  # one value head for both: stride 0
    dout = torch.stack([dout, dout], -1)[..., 0]  # every other element
    got = differentiate(lambda q, k, v: half.attention(q, k, v, backward=method, return_lse=True), q, k, v, dout, dlse)
    assert_agrees(got, q, k, v, dout, mask, dlse)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (0, 5), (5, 0), (0, 0), (7, 33), (33, 7)])
def test_any_number_of_queries_and_keys(half, queries, keys):
    mask = Mask.ranges([(0, queries)], [(0, keys)], ["full"])
    q, k, v, dout, dlse = inputs(mask)
    got = differentiate(lambda q, k, v: half.attention(q, k, v, mask, return_lse=True), q, k, v, dout, dlse)
    if mask.area:
        assert_agrees(got, q, k, v, dout, mask, dlse)
    else:
        assert not got.out.any()
        assert not any(x.any() for x in (got.dq, got.dk, got.dv))
        assert (got.lse == -torch.inf).all()


def test_a_loss_on_lse_alone_has_gradients(half):
    mask = Mask.causal(20)
    q, k, v, dout, dlse = inputs(mask)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    half.attention(q, k, v, return_lse=True)[1].backward(dlse)
    assert_agrees(Attended(dq=q.grad, dk=k.grad), q, k, v, torch.zeros_like(dout), mask, dlse)
    assert not v.grad.any()


def test_parts_of_the_keys_merge_to_the_whole(half):
    mask = Mask.causal(45)
    q, k, v, dout, dlse = inputs(mask)
    whole = oracle(q, k, v, dout, mask, dlse=dlse)
    parts = [range(0, 20), range(20, 29), range(29, 45)]
    out, lse = torch.zeros_like(dout), torch.full_like(dlse, -torch.inf)
    for part in parts:
        cut = mask.crop(keys=part)
        k_part, v_part = k[:, part.start : part.stop], v[:, part.start : part.stop]
        out, lse = half.merge(out, lse, *half.attention_forward(q, k_part, v_part, cut))
    assert_agrees(Attended(out, lse), q, k, v, dout, mask, dlse)
    delta = (dout * out).sum(-1).transpose(1, 2) - dlse
    grads = []
    for part in parts:
        cut = mask.crop(keys=part)
        k_part, v_part = k[:, part.start : part.stop], v[:, part.start : part.stop]
        grads.append(half.attention_backward(dout, q, k_part, v_part, out, lse, cut, delta=delta))
    dq, dk, dv = zip(*grads, strict=True)
    got = Attended(dq=sum(dq), dk=torch.cat(dk, 1), dv=torch.cat(dv, 1))
    assert_agrees(got, q, k, v, dout, mask, dlse)
    assert (whole.dq - got.dq).abs().max() < 1e-12


def test_merge_takes_fully_masked_parts_and_any_gap(half):
    out = torch.randn(1, 5, 1, 3, dtype=torch.float64)
    other = torch.randn(1, 5, 1, 3, dtype=torch.float64)
    inf = torch.inf
    lse = torch.tensor([[[0.0, -inf, 100.0, -inf, 3.0]]], dtype=torch.float64)
    other_lse = torch.tensor([[[-inf, 2.0, -100.0, -inf, 3.0]]], dtype=torch.float64)
    other[0, 0] = torch.nan  # not visible: may hold anything
    merged, merged_lse = half.merge(out, lse, other, other_lse)
    expected = torch.stack([out[0, 0], other[0, 1], out[0, 2], torch.zeros(1, 3), (out[0, 4] + other[0, 4]) / 2])
    torch.testing.assert_close(merged[0], expected, rtol=0, atol=1e-15)
    wanted = torch.tensor([0, 2, 100, -inf, 3 + torch.tensor(2.0, dtype=torch.float64).log()], dtype=torch.float64)
    torch.testing.assert_close(merged_lse[0, 0], wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_low_precision_is_as_good_as_dense_attention_in_that_precision(half, method, dtype):
    mask = Mask.documents([0, 9, 70], window=(40, 0))
    q, k, v, dout, dlse = inputs(mask, b=1, d=24, dv=16, dtype=dtype)
    got = differentiate(
        lambda q, k, v: half.attention(q, k, v, mask, backward=method, return_lse=True), q, k, v, dout, dlse
    )
    assert got.out.dtype == got.dq.dtype == got.dv.dtype == dtype
    assert got.lse.dtype == torch.float32
    assert_agrees(got, q, k, v, dout, mask, dlse)


def test_partial_results_are_never_rounded_below_float32(half):
    mask = Mask.causal(20)
    q, k, v, dout, _ = inputs(mask, dtype=torch.bfloat16)
    out, lse = half.attention_forward(q, k, v, mask, out_dtype=torch.float32)
    assert out.dtype == lse.dtype == torch.float32
    assert not torch.equal(out, out.bfloat16().float())
    grads = half.attention_backward(dout, q, k, v, out.bfloat16(), lse, mask, grad_dtype=torch.float32)
    for grad in grads:
        assert grad.dtype == torch.float32
        assert not torch.equal(grad, grad.bfloat16().float())


@pytest.mark.parametrize("method", ["split", "head_parallel"])
def test_same_inputs_same_bits(half, method):
    mask = Mask.documents([0, 9, 70])
    q, k, v, dout, dlse = inputs(mask, dtype=torch.float32)
    runs = [
        differentiate(lambda q, k, v: half.attention(q, k, v, mask, backward=method, return_lse=True), q, k, v, dout, dlse)
        for _ in range(2)
    ]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_wrong_arguments_are_named(half, unchecked_shapes):
    x = torch.zeros(1, 6, 4, 8)
    k, n = x[:, :, :2], torch.zeros(1, 4, 6)
    calls = {
        r"3 query heads are not a multiple of 2": lambda: half.attention(x[:, :, :3], k, k),
        r"one width": lambda: half.attention(x, k[..., :4], k),
        r"share the batch": lambda: half.attention(x, k, k[:, :5]),
        r"all \(b, t, heads, width\)": lambda: half.attention(x[0], k, k),
        r"float16": lambda: half.attention(x, k.half(), k),
        r"share one dtype": lambda: half.attention(x.int(), k.int(), k.int()),
        r"mask is 5 queries x 5 keys": lambda: half.attention(x, k, k, Mask.causal(5)),
        r"as many queries as keys, got 6, 5": lambda: half.attention(x, k[:, :5], k[:, :5]),
        r"backward='fast'.*'split'": lambda: half.attention(x, k, k, backward="fast"),
        r"method='fast'.*'split'": lambda: half.attention_backward(x, x, k, k, x, n, Mask.causal(6), method="fast"),
        r"dout must be \(1, 6, 4, 8\), got \(1, 5": lambda: half.attention_backward(x[:, :5], x, k, k, x, n, Mask.causal(6)),
        r"lse must be": lambda: half.attention_backward(x, x, k, k, x, n[:, :3], Mask.causal(6)),
        r"not both": lambda: half.attention_backward(x, x, k, k, x, n, Mask.causal(6), dlse=n, delta=n),
        r"parts differ in shape": lambda: half.merge(x, n, x[:, :5], n[:, :, :5]),
    }  # fmt: skip
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo causes it
@pytest.mark.parametrize("name", ["attention", "ring_attention"])
def test_a_compiled_model_computes_the_same(name, unchecked_shapes):
    """In `fast`, attention is one opaque step for torch.compile, which does not trace its plan."""
    mask = Mask.documents([0, 3, 19])
    q, k, v, dout, _ = inputs(mask, d=16, dv=16, dtype=torch.float32)
    step = lambda q, k, v: 2 * getattr(fast, name)(q + 1, k, v, mask)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    for compiled, eager in zip(
        *(
            torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
            for attend in (torch.compile(step, backend="eager"), step)
        ),
        strict=True,
    ):
        assert torch.equal(compiled, eager)
