"""With rank_invariant=True, out, lse, dq, dk and dv have the bits of one rank: any ranks, layouts,
masks, dtypes and heads.
"""

import pytest
import torch
import torch.distributed as dist
from hopper import HOPPER_ONLY, hopper
from invariant_worlds import (
    LAYOUTS,
    MASKS,
    N,
    attended,
    different,
    inputs,
    on_one_rank,
    same_bits,
)
from sharded import assert_agrees, shards, whole

from canon import Layout, Mask, fast, reference
from canon.testing import process_groups
from canon.testing.judge import Attended

both_functions = pytest.mark.parametrize("function", ["strided_attention", "magi_attention"])


@pytest.mark.parametrize(
    ("ranks", "mask", "layout", "heads", "dtype", "method"),
    [
        (1, "causal", "dispatch", "grouped", torch.float32, "split"),
        (2, "window", "zigzag", "grouped", torch.bfloat16, "head_parallel"),
        (3, "documents", "dispatch", "multi-head", torch.bfloat16, "auto"),
        (4, "both", "zigzag", "one key head", torch.float16, "split"),
        (5, "causal", "zigzag", "one key head", torch.bfloat16, "head_parallel"),
        (6, "full", "contiguous", "multi-head", torch.float32, "split"),
        (7, "both", "dispatch", "grouped", torch.float32, "head_parallel"),
        (8, "documents", "contiguous", "one key head", torch.float16, "auto"),
    ],
)
def test_ranks_return_the_bits_of_one_rank(half, ranks, mask, layout, heads, dtype, method):
    mask = MASKS[mask]
    function = "magi_attention" if layout == "dispatch" else "strided_attention"
    one = on_one_rank(half, mask, heads, dtype, method)
    placed, tensors = LAYOUTS[layout](mask, ranks), inputs(mask, heads, dtype)
    assert not different(one, attended(half, function, mask, placed, tensors, backward=method))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("d", "dv"), [(1, 1), (1, 16), (16, 1)])
def test_a_head_of_width_1_has_its_bits_alone_and_among_others(half, dtype, d, dv):
    """A CPU's BLAS adds a product of one head and one column in another order than several."""
    mask, first = MASKS["causal"], slice(0, 1)
    tensors = whole(mask, h=2, g=2, d=d, dv=dv, dtype=dtype)
    held = LAYOUTS["contiguous"](mask, 2)
    one = attended(half, "attention", mask, Layout.contiguous(N, 1), tensors)
    options = {"head_stride": 2, "forward_first_stride": 1}
    got = attended(half, "strided_attention", mask, held, tensors, **options)
    assert not different(one, got)
    alone = (*(x[:, :, first] for x in tensors[:4]), tensors[4][:, first])
    got = attended(half, "attention", mask, Layout.contiguous(N, 1), alone)
    of_first = Attended(*(x[:, first] if x.ndim == 3 else x[:, :, first] for x in one))
    assert not different(of_first, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 5, 6, 7, 9, 11])
def test_a_query_has_its_bits_at_any_row_of_a_tile(half, dtype, width):
    """A CPU's BLAS adds a row of such a width in an order that depends on its place."""
    tokens = 2 * 128
    q, k, v, *_ = whole(Mask.causal(tokens), h=2, g=1, d=width, dv=width, dtype=dtype)

    def attended_from(start):
        mask, options = Mask.causal(tokens - start, tokens), dict(return_lse=True)
        return half.attention(q[:, start:], k, v, mask, rank_invariant=True, **options)

    out, lse = attended_from(0)
    for start in (1, 130, tokens - 1):
        assert same_bits(attended_from(start), (out[:, start:], lse[:, :, start:]))


def test_the_strides_of_dout_leave_the_bits_of_gradients(half):
    """PyTorch adds a strided axis in another order than a contiguous one."""
    *qkv, dout, _ = inputs(MASKS["causal"], "grouped", torch.float32)
    qkv = [x.clone().requires_grad_() for x in qkv]
    out = half.attention(*qkv, rank_invariant=True)
    differentiate = lambda dout: torch.autograd.grad(out, qkv, dout, retain_graph=True)
    assert same_bits(differentiate(dout), differentiate(dout.mT.contiguous().mT))


@pytest.mark.parametrize(
    ("ranks", "mask", "layout"),
    [
        pytest.param(*case, marks=HOPPER_ONLY)
        for case in ((2, "window", "zigzag"), (3, "documents", "dispatch"))
    ],
)
@pytest.mark.interpreted
def test_gluon_returns_the_bits_of_one_rank(ranks, mask, layout):
    mask = MASKS[mask]
    tensors = inputs(mask, "grouped", torch.bfloat16)
    function = "magi_attention" if layout == "dispatch" else "strided_attention"
    with hopper(order="early"):
        one = attended(fast, "attention", mask, Layout.contiguous(N, 1), tensors)
        got = attended(fast, function, mask, LAYOUTS[layout](mask, ranks), tensors)
    assert not different(one, got)
    assert_agrees(got, mask, *tensors)


@both_functions
@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, True), (False, False, True)]
)
def test_gradients_that_are_needed_do_not_depend_on_the_others(half, function, needed):
    mask = MASKS["documents"]
    one = on_one_rank(half, mask, "multi-head", torch.float32)
    layout = LAYOUTS["contiguous"](mask, 2)

    def program():
        rank = dist.get_rank()
        *qkv, dout, dlse = inputs(mask, "multi-head", torch.float32)
        q, k, v = (
            x.requires_grad_(wanted) for x, wanted in zip(shards(layout, qkv), needed, strict=True)
        )
        attend = getattr(half, function)
        out, lse = attend(q, k, v, mask, layout, rank_invariant=True, return_lse=True)
        torch.autograd.backward((out, lse), (layout.shard(dout, rank), layout.shard(dlse, rank, 2)))
        return [None if x.grad is None else layout.unshard(x.grad) for x in (q, k, v)]

    grads = process_groups.threads(program, 2)[0]
    for grad, expected, wanted in zip(grads, one[2:], needed, strict=True):
        assert (grad is not None) == wanted
        assert grad is None or torch.equal(grad, expected)


@both_functions
def test_the_default_layout_has_whole_tiles(half, function):
    mask, layout = MASKS["causal"], Layout.contiguous(N, 2, 128)
    assert layout != Layout.contiguous(N, 2)
    tensors = inputs(mask, "multi-head", torch.float32)
    got = attended(half, function, mask, layout, tensors, layout=None)
    assert not different(on_one_rank(half, mask, "multi-head", torch.float32), got)


def test_a_short_tile_comes_last_on_its_rank():
    """Behind it, rows would begin inside a tile."""
    layout = Layout([[range(128, 200), range(128)]], 200)
    q = torch.zeros(1, 200, 1, 16)
    with pytest.raises(ValueError, match=r"holds range\(0, 128\) from its token 72 on"):
        reference.strided_attention(q, q, q, None, layout, rank_invariant=True)
