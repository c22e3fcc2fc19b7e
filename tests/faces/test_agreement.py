"""Both halves agree with the oracle where the shapes of the table of `canon check` do not reach.

`make check` runs the table on `canon.fast`, and `test_check` on the reference. `canon check
--random` draws further cases. The kernel backends have tests of their own, with tiles and shapes
that are awkward for them.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from sharded import CALLS, assert_agrees, attending, layout_of, on_this_rank, whole

from canon import Layout, Mask, fast, reference
from canon.check import cases
from canon.testing import process_groups
from canon.testing.judge import Attended, oracle

# one rank is empty
UNEVEN = Layout([[range(20, 31)], [], [range(0, 3), range(7, 20)], [range(3, 7)]], 31)
# a rank sees a part of the keys before its own
BLOCKS = Mask.block_causal([(2 * (i // 6)) % 7 for i in range(31)])
METHODS = ("fused", "split", "head_parallel")
every_call = pytest.mark.parametrize("call", CALLS)
# Every method with one call of each schedule, and one method with each other call.
WITH_METHODS = [
    (call, method)
    for place, call in enumerate(CALLS)
    for method in (METHODS if call in ("ring", "strided", "magi") else METHODS[place % 3 :][:1])
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let the reference compute short sequences in several tiles, too."""
    monkeypatch.setattr("canon.reference.tiles.TILE", 16)


def test_every_public_function_has_a_case():
    for half in (reference, fast):
        found = cases.covered(half)
        assert found.imported == found.absent == found.untried == []


# --- shards


def check(half, call, mask, layout, **options):
    tensors = whole(mask, b=2)
    attend = attending(half, call, mask, layout, **options)
    for got in process_groups.threads(lambda: on_this_rank(attend, layout, tensors), layout.ranks):
        assert_agrees(got, mask, *tensors)


@pytest.mark.filterwarnings("ignore:.*fused.* adds to dq in any order")
@pytest.mark.parametrize(("call", "method"), WITH_METHODS)
def test_shards_may_be_uneven_or_empty_with_every_backward(half, call, method, unwritten_is_nan):
    check(half, call, BLOCKS, layout_of(call, 31, 4, UNEVEN), backward=method)


@every_call
def test_more_ranks_than_tokens(half, call, unwritten_is_nan):
    for layout in {
        layout_of(call, 3, 5, make(3, 5))
        for make in (Layout.contiguous, Layout.zigzag, Layout.striped)
    }:
        check(half, call, Mask.documents([0, 1, 3]), layout)


@every_call
def test_packed_tensors_and_the_default_mask_and_layout(half, call, empty_cache):
    q, k, v, dout, _ = whole(Mask.causal(12))
    layout = layout_of(call, 12, 3, Layout.contiguous(12, 3))
    attend = functools.partial(getattr(half, CALLS[call][0]), **CALLS[call][1])

    def program():
        return layout.unshard(
            attend(*(layout.shard(x[0], dist.get_rank(), 0) for x in (q, k, v))), dim=0
        )

    expected = oracle(q, k, v, dout).out
    for got in process_groups.threads(program, 3):
        torch.testing.assert_close(got, expected[0], rtol=0, atol=1e-12)
    # without a process group
    torch.testing.assert_close(attend(q, k, v), expected, rtol=0, atol=1e-12)


@every_call
def test_gradients_are_sent_in_reduce_dtype(half, call):
    """Three of four ranks add 256, 1/3 and -256 to dv of one key: bfloat16 loses the third, float32
    keeps it.
    """
    layout = layout_of(call, 4, 4, Layout.contiguous(4, 4))
    # all queries see the first key alone
    mask = Mask.ranges([(0, 4)], [(0, 1)], ["full"], queries=4, keys=4)
    parts = torch.tensor([0.0, 256.0, 1 / 3, -256.0])

    def program(reduce_dtype):
        q, k = torch.zeros(2, 1, 1, 2, 16)
        v = torch.zeros(1, 1, 2, 16, requires_grad=True)
        out, _ = attending(half, call, mask, layout, reduce_dtype=reduce_dtype)(q, k, v)
        out.backward(parts[dist.get_rank()].expand_as(out))
        return v.grad[0, 0, 0, 0].item()

    exact, rounded = (
        process_groups.threads(lambda x=x: program(x), 4)[0] for x in (None, torch.bfloat16)
    )
    assert abs(exact - 1 / 3) <= 2**-16  # one rounding at 256, where float32 steps by 2**-15
    assert abs(rounded - 1 / 3) > 2**-11  # of 1/3 on its way, or of the sum


MASK = Mask.documents([0, 1, 12, 19])


def every_call_of(name):
    """Run every call on the ranks of a gloo group. A function of the module, so that it can be
    pickled.
    """
    half, found = {"reference": reference, "fast": fast}[name], {}
    for call in CALLS:
        layout = layout_of(
            call, 19, 3, reference.dispatch(MASK, 3, chunk=2, cells_per_us=1, tokens_per_us=1000)
        )
        found[call] = on_this_rank(attending(half, call, MASK, layout), layout, whole(MASK))
    return found


@pytest.mark.parametrize("name", ["reference", "fast"])
def test_ranks_may_be_processes(name):
    for found in process_groups.processes(functools.partial(every_call_of, name), 3):
        assert found.keys() == CALLS.keys()
        for got in found.values():
            assert_agrees(got, MASK, *whole(MASK))


# --- one rank


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (0, 5), (5, 0), (0, 0), (7, 33), (33, 7)])
def test_any_number_of_queries_and_keys(half, queries, keys):
    from hopper import inputs  # ranks that are processes do not interpret its kernels

    mask = Mask.full(queries, keys)
    tensors = inputs(mask, b=2, h=4, g=2, d=8, dv=5, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out, lse = half.attention(*leaves, mask, return_lse=True)
    grads = torch.autograd.grad((out, lse), leaves, tensors[3:])
    if mask.area:
        assert_agrees(Attended(out.detach(), lse.detach(), *grads), mask, *tensors)
    else:
        assert not any(x.any() for x in (out, *grads))
        assert (lse == -torch.inf).all()
