"""The peak memory of each distributed function equals the formula of its docstring, to the byte, on
every rank.
"""

import pytest
import torch
import torch.distributed as dist
from held_memory import Held
from sharded import whole
from torch.utils._python_dispatch import _disable_current_modes

from canon import Layout, Mask, fast
from canon.fast.kernels.triton import launch
from canon.testing import process_groups, thread_group

pytestmark = pytest.mark.interpreted

B, H, G, D, DV = 2, 4, 2, 4, 12
KV, OUT, DQ = B * G * (D + DV), B * H * DV, B * H * D  # elements for each token
LSE = DELTA = 4 * B * H  # bytes for each token
UNEVEN = Layout([[range(0, 7)], [range(7, 12)], [range(12, 22)]], 22)


@pytest.fixture(autouse=True)
def memory_of_the_schedules_alone(monkeypatch):
    """Run no kernel, and do not count memory that the thread group holds for messages."""
    send = thread_group.ThreadGroup.send

    def send_uncounted(*arguments):
        with _disable_current_modes():
            return send(*arguments)

    monkeypatch.setattr(launch, "run", lambda *_: None)
    monkeypatch.setattr(thread_group.ThreadGroup, "send", send_uncounted)


def peaks(attend, layout, mask=None, **options):
    """Return, for each rank, the peak bytes of a forward and a backward pass of a known call,
    results included.
    """
    mask = mask or Mask.full(layout.tokens)
    tensors = whole(mask, b=B, h=H, g=G, d=D, dv=DV, dtype=torch.bfloat16)

    def program():
        rank = dist.get_rank()
        q, k, v = (layout.shard(x, rank).requires_grad_() for x in tensors[:3])
        dout, dlse = layout.shard(tensors[3], rank), layout.shard(tensors[4], rank, 2)
        for _ in range(2):
            with Held() as forward:
                out, lse = attend(q, k, v, mask, layout, return_lse=True, **options)
            with Held() as backward:
                torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
            assert not backward.sizes, (
                "memory of the backward pass waits for Python's collector of cycles"
            )
        return forward.peak, backward.peak

    return process_groups.threads(program, layout.ranks)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_the_methods_take_the_memory_of_their_table(grad_dtype):
    t, mask = 12, Mask.causal(12)
    q, k, v, dout, _ = whole(mask, b=B, h=H, g=G, d=D, dv=DV, dtype=torch.bfloat16)
    delta = lse = torch.zeros(B, H, t)
    more = {
        "split": 0,
        "head_parallel": 4 * B * H * (D + DV),
        "fused": 4 * DQ * (grad_dtype != torch.float32),
    }
    for method, scratch in more.items():
        with Held() as held:
            fast.attention_backward(
                dout, q, k, v, dout, lse, mask, delta=delta, method=method, grad_dtype=grad_dtype
            )
        assert held.peak == t * (grad_dtype.itemsize * (DQ + KV) + scratch)


@pytest.mark.parametrize(("window", "count"), [(9000, 17), (100, 1)])
def test_few_queries_hold_float32_parts_of_the_keys_that_they_see(window, count):
    mask = Mask.window(9000, window, 0).crop(queries=range(8900, 8917))
    q, k, v = (
        torch.empty(B, *x, dtype=torch.bfloat16) for x in ((17, H, D), (9000, G, D), (9000, G, DV))
    )
    for _ in range(2):  # a new call also makes the table
        with Held() as held:
            fast.attention_forward(q, k, v, mask)
    assert held.peak == 17 * (2 * OUT + LSE + count * 4 * B * H * (DV + 1))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_holds_two_blocks_each_way(ranks):
    t, layout = 12, Layout.zigzag(12 * ranks, ranks)
    keys = 2 * 2 * KV
    sums = 2 * 4 * KV
    so_far = 4 * (DQ + KV) + DELTA
    newest = 4 * (DQ + KV * (ranks > 2))
    rounded = 2 * (DQ + KV)  # the results, once the newest part has been added and K and V are free
    expected = (
        t * (keys + 2 * (4 * OUT + LSE) + 2 * OUT),
        t * (sums + so_far + max(keys + newest, rounded)),
    )
    assert peaks(fast.ring_attention, layout) == [expected] * ranks
    documents = Mask.documents(range(0, t * ranks + 1, t))  # one a rank: no part is added
    expected = (
        t * (keys + 2 * OUT + LSE),
        t * (sums + keys + 4 * KV + 2 * DQ + DELTA),
    )
    layout = Layout.contiguous(t * ranks, ranks)
    assert peaks(fast.ring_attention, layout, documents) == [expected] * ranks


@pytest.mark.parametrize(("head_stride", "buffers"), [(1, 2), (2, 1)])
def test_strided_attention_holds_two_groups_of_heads(head_stride, buffers):
    buffer = UNEVEN.ranks * 10 * KV * head_stride // G  # 10 tokens are the most of a rank
    for rank, got in enumerate(peaks(fast.strided_attention, UNEVEN, head_stride=head_stride)):
        t = UNEVEN.size(rank)
        results = t * 2 * (DQ + KV)
        assert got == (
            2 * buffers * buffer + t * (2 * OUT + LSE),
            2 * buffers * buffer + 4 * (buffers + 1) * buffer + results + t * DELTA,
        )


def casts_of(rank, casts, own_keys_first):
    """Return the tokens received and sent at each step, with zeros for the first step and after the
    last one.
    """
    plan = fast.cast_plan(
        Mask.full(UNEVEN.tokens), UNEVEN, casts=casts, own_keys_first=own_keys_first
    )
    sizes = plan.receive_sizes, plan.send_sizes
    return ([0, *(sum(size(cast, rank)) for cast in range(plan.casts)), 0] for size in sizes)


sent_in_both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@sent_in_both_dtypes
@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("casts", [1, 3, 4])
def test_magi_attention_holds_two_casts(casts, keep_kv, dtype):
    steps, item = range(casts + 1), dtype.itemsize
    options = dict(casts=casts, own_keys_first=True, keep_kv=keep_kv, reduce_dtype=dtype)
    for rank, got in enumerate(peaks(fast.magi_attention, UNEVEN, **options)):
        t, (r, s), forward, backward, leaving = (
            UNEVEN.size(rank),
            casts_of(rank, casts, True),
            [],
            [],
            0,
        )
        for i in steps:
            keys = s[i + 1] + (sum(r[: i + 2]) if keep_kv else r[i] + r[i + 1])
            last = 2 * OUT * (i == casts)  # the result
            forward.append(2 * KV * keys + t * ((1 + (i > 0)) * (4 * OUT + LSE) + last))
        for place, i in enumerate([*steps[1:], 0] if keep_kv else steps):
            # kept keys belong to the forward pass
            keys = 0 if keep_kv else s[i + 1] + r[i] + r[i + 1]
            own = 4 * KV * t * ((place > 0) + (i == 0))
            computed = own + item * KV * (r[i] + leaving)
            leaving = r[i] + s[i]
            sent = 4 * KV * t + item * KV * leaving
            backward.append(
                2 * KV * keys + max(computed, sent) + t * ((1 + (place > 0)) * 4 * DQ + DELTA)
            )
        assert got == (max(forward), max(backward))


@sent_in_both_dtypes
def test_magi_attention_in_one_step_holds_one_buffer_and_no_float32_result(dtype):
    for rank, got in enumerate(
        peaks(fast.magi_attention, UNEVEN, own_keys_first=False, reduce_dtype=dtype)
    ):
        t, ((_, r, _), (_, s, _)) = UNEVEN.size(rank), casts_of(rank, 1, False)
        keys = 2 * KV * (t + r)
        forward = keys + max(2 * KV * s, t * (2 * OUT + LSE))
        going_back = dtype.itemsize * KV * (s + r * (dtype != torch.float32))
        backward = keys + 4 * KV * (t + r) + going_back + t * (2 * DQ + DELTA)
        assert got == (forward, backward)
