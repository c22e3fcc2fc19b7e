"""With rank_invariant=True, out, lse, dq, dk and dv have the bits of one rank: any ranks, layouts,
masks, dtypes and heads.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from hopper import HOPPER_ONLY, hopper
from invariant_worlds import (
    HALVES,
    HEADS,
    LAYOUTS,
    MASKS,
    N,
    attended,
    different,
    inputs,
    on_one_rank,
)
from sharded import assert_agrees
from torch.utils.checkpoint import checkpoint

from canon import Layout, Mask, fast, reference
from canon.testing import process_groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
METHODS = ("auto", "split", "head_parallel")


def worlds(ranks, masks):
    """Return one case for each pair of a number of ranks and a mask. Layouts, dtypes, heads and
    methods alternate.
    """
    cases = []
    for row, count in enumerate(ranks):
        for column, mask in enumerate(masks):
            layout = tuple(LAYOUTS)[(row + column) % 3]
            heads = tuple(HEADS)[(row // 3 + column) % 3]
            dtype, method = DTYPES[(row + 2 * column) % 3], METHODS[(row + column) // 3 % 3]
            cases.append(
                pytest.param(
                    count, mask, layout, heads, dtype, method, id=f"{count}-{mask}-{layout}"
                )
            )
    return cases


def check_world(half, ranks, mask, layout, heads, dtype, method):
    mask = MASKS[mask]
    one = on_one_rank(half, mask, heads, dtype, method)
    placed = LAYOUTS[layout](mask, ranks)
    if layout == "dispatch":
        function, options = "magi_attention", dict(keep_kv=ranks % 2 == 1)
    else:
        function, options = "strided_attention", {}
    got = attended(
        HALVES[half], function, mask, placed, inputs(mask, heads, dtype), backward=method, **options
    )
    assert not different(one, got)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("ranks", "mask", "layout", "heads", "dtype", "method"), worlds(range(1, 9), MASKS)
)
def test_reference_returns_the_bits_of_one_rank(ranks, mask, layout, heads, dtype, method):
    check_world("reference", ranks, mask, layout, heads, dtype, method)


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
def test_triton_returns_the_bits_of_one_rank(ranks, mask, layout, heads, dtype, method):
    check_world("fast", ranks, mask, layout, heads, dtype, method)


@pytest.mark.parametrize(
    ("ranks", "mask", "layout"),
    [
        pytest.param(2, "window", "zigzag", marks=HOPPER_ONLY),
        pytest.param(3, "documents", "dispatch", marks=HOPPER_ONLY),
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


both_halves = pytest.mark.parametrize("half", HALVES)


@both_halves
@pytest.mark.parametrize("heads", HEADS)
def test_the_results_are_exact(half, heads):
    mask = MASKS["both"]
    assert_agrees(
        on_one_rank(half, mask, heads, torch.float32), mask, *inputs(mask, heads, torch.float32)
    )


@both_halves
def test_head_strides_and_batches_change_no_bit(half):
    mask, layout, case = MASKS["documents"], Layout.zigzag(N, 2, 128), ("multi-head", torch.float32)
    one = on_one_rank(half, mask, *case, batch=2)
    strides = [
        dict(head_stride=2, forward_first_stride=1, backward_last_stride=1),
        dict(head_stride=2),
    ]
    for options in strides[: 2 if half == "reference" else 1]:  # the interpreter is slow
        got = attended(
            HALVES[half], "strided_attention", mask, layout, inputs(mask, *case, 2), **options
        )
        assert not different(one, got)


both_functions = pytest.mark.parametrize("function", ["strided_attention", "magi_attention"])


@both_halves
@both_functions
@pytest.mark.parametrize(("tokens", "batch"), [(0, 1), (1, 1), (130, 0)])
def test_sequences_and_batches_may_be_empty(half, function, tokens, batch):
    mask = Mask.causal(tokens)
    tensors = inputs(mask, "multi-head", torch.float32, batch)
    one = attended(HALVES[half], "attention", mask, Layout.contiguous(tokens, 1), tensors)
    assert not different(
        one, attended(HALVES[half], function, mask, Layout.zigzag(tokens, 3, 128), tensors)
    )


@both_halves
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
            layout.shard(x, rank).requires_grad_(wanted)
            for x, wanted in zip(qkv, needed, strict=True)
        )
        attend = getattr(HALVES[half], function)
        out, lse = attend(q, k, v, mask, layout, rank_invariant=True, return_lse=True)
        torch.autograd.backward((out, lse), (layout.shard(dout, rank), layout.shard(dlse, rank, 2)))
        return [None if x.grad is None else layout.unshard(x.grad) for x in (q, k, v)]

    grads = process_groups.threads(program, 2)[0]
    for grad, expected, wanted in zip(grads, one[2:], needed, strict=True):
        assert (grad is not None) == wanted
        assert grad is None or torch.equal(grad, expected)


@both_halves
def test_hidden_tokens_may_be_nan(half):
    mask = Mask.ranges(
        [(0, 100), (200, 330)], [(0, 100), (200, 330)], ["causal", "full"], queries=N, keys=N
    )
    clean = inputs(mask, "multi-head", torch.float32)
    hidden = torch.ones(N, dtype=torch.bool)
    hidden[:100], hidden[200:330] = False, False
    dirty = [x.clone() for x in clean]
    for x in dirty[:4]:
        x[:, hidden] = torch.nan
    layout = Layout.zigzag(N, 2, 128)
    one = attended(HALVES[half], "attention", mask, Layout.contiguous(N, 1), clean)
    for function in ("strided_attention", "magi_attention"):
        assert not different(one, attended(HALVES[half], function, mask, layout, dirty))


@both_halves
def test_packed_tensors_under_autocast_and_recomputation(half):
    """A checkpoint runs the forward pass twice, the second time inside the backward pass."""
    mask, layout = MASKS["documents"], Layout.zigzag(N, 2, 128)
    q, k, v, dout, _ = (x[0] for x in inputs(mask, "multi-head", torch.float32))

    def program(attend, held):
        shards = [held.shard(x, dist.get_rank(), 0).requires_grad_() for x in (q, k, v)]
        call = functools.partial(attend, mask=mask, rank_invariant=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(call, *shards, use_reentrant=False)
        assert out.dtype == torch.bfloat16
        out.backward(held.shard(dout, dist.get_rank(), 0).to(out.dtype))
        return [held.unshard(x, dim=0) for x in (out.detach(), *(x.grad for x in shards))]

    alone = functools.partial(program, HALVES[half].attention, Layout.contiguous(N, 1))
    attend = functools.partial(HALVES[half].strided_attention, layout=layout)
    (one,) = process_groups.threads(alone, 1)
    got = process_groups.threads(functools.partial(program, attend, layout), 2)[0]
    assert all(map(torch.equal, one, got))


# --- default layouts, and errors ---


@both_halves
@both_functions
def test_the_default_layout_has_whole_tiles(half, function):
    mask, layout = MASKS["causal"], Layout.contiguous(N, 2, 128)
    assert layout != Layout.contiguous(N, 2)
    tensors = inputs(mask, "multi-head", torch.float32)
    got = attended(HALVES[half], function, mask, layout, tensors, layout=None)
    assert not different(on_one_rank(half, mask, "multi-head", torch.float32), got)


def test_a_short_tile_comes_last_on_its_rank():
    """Behind it, rows would begin inside a tile."""
    layout = Layout([[range(128, 200), range(128)]], 200)
    q = torch.zeros(1, 200, 1, 16)
    with pytest.raises(ValueError, match="tokens 0:128 from its row 72 on"):
        reference.strided_attention(q, q, q, None, layout, rank_invariant=True)


@both_halves
def test_dispatch_cuts_whole_tiles(half):
    mask = Mask.documents([0, 1000, 3000])
    plan = functools.partial(HALVES[half].dispatch, mask, 4, rank_invariant=True)
    assert all(piece.start % 128 == 0 for held in plan().ranges_per_rank for piece in held)
    assert plan(chunk=256) == HALVES[half].dispatch(mask, 4, chunk=256)


@both_halves
def test_ranks_that_disagree_about_the_option_raise(half):
    def program():
        q = torch.zeros(1, 128, 1, 16)
        HALVES[half].strided_attention(q, q, q, rank_invariant=dist.get_rank() == 0)

    with pytest.raises(RuntimeError) as error:
        process_groups.threads(program, 2)
    assert "rank_invariant" in str(error.value.__cause__)
