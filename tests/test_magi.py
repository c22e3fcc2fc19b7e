"""Magi attention is the dense oracle for any mask and layout, moves what its plan says, and repeats its bits."""

import functools

import pytest
import sharded
import torch
import torch.distributed as dist
from sharded import assert_agrees, on_this_rank

from canon import Layout, Mask
from canon.fast import magi as fast
from canon.reference import magi as reference
from canon.reference.plan import CastPlan
from canon.testing import world
from canon.testing.judge import oracle

whole = functools.partial(sharded.whole, h=2, g=1)
HALVES = {"reference": reference, "fast": fast}


@pytest.fixture(params=HALVES)
def half(request):
    return HALVES[request.param]


def masks(n):
    """Documents of length 0, 1 and longer than a rank, a window, blocks, and the four slice types, over n tokens."""
    third = n // 3
    slices = [(0, third), (third, n), (0, third), (third, n)], [(0, third), (third, n), (third, n - 1), (0, third)]
    return {
        "documents": Mask.documents([0, 0, 1, n - 3, n - 3, n]),
        "full documents": Mask.documents([0, third, n], causal=False),
        "window": Mask.window(n, 3, 2),
        "block-causal": Mask.block_causal([(i // 3 * 5) % 7 for i in range(n)]),
        "slices": Mask.ranges(*slices, ["causal", "bi_causal", "inverse_causal", "full"], queries=n, keys=n),
    }


def planned(half, mask, ranks, chunk):
    """A balanced plan: of so few tokens a plan would rather have few to move, unless it takes computing for slow."""
    return half.dispatch(mask, ranks, chunk=chunk, cells_per_us=1, tokens_per_us=1000)


def attending(half, mask, layout, **options):
    return functools.partial(half.magi_attention, mask=mask, layout=layout, return_lse=True, **options)


def check(half, mask, layout, tensors=None, **options):
    tensors = tensors or whole(mask)
    attend = attending(half, mask, layout, **options)
    for got in world.threads(lambda: on_this_rank(attend, layout, tensors), layout.ranks):
        assert_agrees(got, mask, *tensors)


@pytest.mark.parametrize("stages", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_the_reference_equals_the_dense_oracle(ranks, stages):
    n = 29
    for mask in masks(n).values():
        check(reference, mask, planned(reference, mask, ranks, chunk=3), stages=stages, keep_kv=bool(ranks % 2))


@pytest.mark.parametrize(
    ("ranks", "stages", "name"),
    [
        (1, 1, "documents"),
        (2, 2, "slices"),
        (3, 0, "documents"),
        (4, 1, "block-causal"),
        (5, 3, "window"),
        (8, 1, "documents"),
    ],
)
def test_fast_equals_the_dense_oracle(ranks, stages, name):
    mask = masks(17)[name]
    check(fast, mask, planned(fast, mask, ranks, chunk=2), stages=stages, keep_kv=bool(stages % 2))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped", "all on one rank", "large chunks"])
def test_any_layout(half, kind):
    n, mask = 19, Mask.documents([0, 4, 19])
    layout = {
        "contiguous": lambda: Layout.contiguous(n, 3),
        "zigzag": lambda: Layout.zigzag(n, 3),
        "striped": lambda: Layout.striped(n, 3),
        "all on one rank": lambda: Layout([[], [range(4, 19), range(0, 4)], []], n),
        "large chunks": lambda: planned(half, mask, 3, chunk=1000),  # larger than the sequence
    }[kind]()
    check(half, mask, layout, stages=1)


@pytest.mark.parametrize("method", ["fused", "head_parallel"])
def test_batches_heads_in_groups_and_every_backward(half, method):
    mask = masks(13)["documents"]
    layout = planned(half, mask, 2, chunk=3)
    check(half, mask, layout, whole(mask, b=2, h=6, g=2), backward=method)


def test_default_mask_and_layout_and_packed_tensors(half):
    q, k, v, dout, _ = whole(Mask.causal(12))
    layout = Layout.contiguous(12, 3)

    def program():
        shards = [layout.shard(x[0], dist.get_rank(), 0) for x in (q, k, v)]
        return layout.unshard(half.magi_attention(*shards), dim=0)

    for got in world.threads(program, 3):
        torch.testing.assert_close(got, oracle(q, k, v, dout).out[0], rtol=0, atol=1e-12)


def test_without_a_process_group_it_is_one_rank(half):
    q, k, v, dout, _ = whole(Mask.causal(9))
    torch.testing.assert_close(half.magi_attention(q, k, v, stages=2), oracle(q, k, v, dout).out, rtol=0, atol=1e-12)


def test_keys_that_nobody_sees_may_be_nan(half):
    n = 21
    mask = Mask(Mask.documents([0, 8, n - 4], window=(3, 0)).bands, n, n)  # four tokens of padding at the end
    dirty = [x.clone() for x in whole(mask)]
    for x in dirty[:4]:
        x[:, -4:] = torch.nan
    dirty[4][:, :, -4:] = 0
    check(half, mask, planned(half, mask, 3, chunk=2), dirty, stages=1)


def test_a_refilled_cu_seqlens_is_another_mask(half):
    cu_seqlens = torch.tensor([0, 3, 15])
    for middle in (3, 11):
        cu_seqlens[1] = middle
        mask = Mask.documents(cu_seqlens)
        check(half, mask, planned(half, mask, 2, chunk=2))


def test_two_disjoint_groups_at_once(half):
    mask = Mask.documents([0, 5, 17])
    tensors = [whole(mask, seed=seed) for seed in (1, 2)]

    def program():
        groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4])]
        mine = int(dist.get_rank() > 2)
        layout = planned(half, mask, 2 + (mine == 0), chunk=2)
        return on_this_rank(attending(half, mask, layout, group=groups[mine]), layout, tensors[mine], groups[mine])

    for rank, got in enumerate(world.threads(program, 5)):
        assert_agrees(got, mask, *tensors[int(rank > 2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_stay_in_float32_and_bits_repeat(half, dtype):
    mask = Mask.documents([0, 7, 60])
    layout, tensors = planned(half, mask, 3, chunk=4), whole(mask, d=16, dv=16, dtype=dtype)
    attend = attending(half, mask, layout, stages=2)
    runs = [world.threads(lambda: on_this_rank(attend, layout, tensors), 3) for _ in range(2)]
    assert_agrees(runs[0][1], mask, *tensors)
    for first, second in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_positions_of_a_plan_turn_the_rotary_embedding(half):
    """Queries and keys that are turned by `document_positions` score by distance alone, wherever their tokens lie."""
    cu_seqlens = [0, 5, 16]
    layout = planned(half, Mask.documents(cu_seqlens), 2, chunk=2)
    for rank in range(2):
        expected = [
            token - max(start for start in cu_seqlens[:-1] if start <= token) for token in layout.positions(rank)
        ]
        assert layout.document_positions(rank, cu_seqlens).tolist() == expected


# --- what moves


@pytest.fixture
def exchanged(monkeypatch):
    """(rank, dtype, items sent to each rank) of every exchange."""
    seen, exchange = [], dist.all_to_all_single

    def counting(output, input, output_sizes, input_sizes, **options):
        width = input[:1].numel() if len(input) else 0
        seen.append((dist.get_rank(), input.dtype, [size * width for size in input_sizes]))
        assert sum(output_sizes) == len(output)
        return exchange(output, input, output_sizes, input_sizes, **options)

    monkeypatch.setattr(dist, "all_to_all_single", counting)
    return seen


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("stages", [0, 2])
def test_sends_what_the_plan_says(half, exchanged, stages, keep_kv):
    ranks, b, g, d, dv = 3, 2, 2, 8, 6
    mask = Mask.documents([0, 5, 24])
    layout = planned(half, mask, ranks, chunk=2)
    plan = half.cast_plan(mask, layout, stages=stages)
    attend = attending(half, mask, layout, stages=stages, keep_kv=keep_kv)
    results = world.threads(
        lambda: _gradients(attend, layout, whole(mask, b=b, h=4, g=g, d=d, dtype=torch.bfloat16)), ranks
    )
    assert len(results) == ranks
    items = b * g * (d + dv)
    for rank in range(ranks):
        casts = [[size * items for size in plan.send_sizes(cast, rank)] for cast in range(plan.casts)]
        back = [[size * items for size in plan.receive_sizes(cast, rank)] for cast in range(plan.casts)]
        mine = [(dtype, sizes) for who, dtype, sizes in exchanged if who == rank]
        keys = [sizes for dtype, sizes in mine if dtype == torch.bfloat16]
        assert [sizes for dtype, sizes in mine if dtype == torch.float32] == back
        assert keys == casts * (1 if keep_kv else 2)


def _gradients(attend, layout, tensors):
    """As `on_this_rank`, but nothing is sent to put the results together."""
    q, k, v = (layout.shard(x, dist.get_rank()).detach().requires_grad_() for x in tensors[:3])
    out, _ = attend(q, k, v)
    return torch.autograd.grad(out.float().sum(), (q, k, v))


def test_a_rank_with_nothing_to_send_or_receive_takes_part(half, exchanged):
    """Rank 2 has a document of its own, rank 3 no token at all."""
    mask = Mask.documents([0, 8, 12])
    layout = Layout([[range(0, 4)], [range(4, 8)], [range(8, 12)], []], 12)
    world.threads(lambda: _gradients(attending(half, mask, layout), layout, whole(mask)), 4)
    calls = {rank: sum(who == rank for who, *_ in exchanged) for rank in range(4)}
    assert calls == dict.fromkeys(range(4), 3)
    assert all(not any(sizes) for who, _, sizes in exchanged if who > 1)


def test_zigzag_moves_three_quarters_of_an_all_gather(half, exchanged):
    n, ranks = 32, 4
    mask, layout = Mask.causal(n), Layout.zigzag(n, ranks)
    world.threads(lambda: _gradients(attending(half, mask, layout), layout, whole(mask, d=8, dv=8)), ranks)
    all_gather = (ranks - 1) * n * 16
    assert sum(sum(sizes) for *_, sizes in exchanged) == 3 * 0.75 * all_gather  # keys twice, gradients once


def test_cast_and_reduce_are_transposes(half):
    """<cast x, y> = <x, reduce y>, summed over ranks; and every row arrives where the plan puts it."""
    mask, layout = Mask.documents([0, 2, 2, 23], causal=False), Layout.zigzag(23, 3)
    plan = half.cast_plan(mask, layout, stages=2)
    full = torch.randn(23, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def program():
        rank, products = dist.get_rank(), []
        x = layout.shard(full, rank, 0)
        for stage in range(plan.casts):
            received = half.group_cast(x, plan, stage)
            tokens = [token for piece in plan.received[stage][rank] for token in piece.tokens]
            assert torch.equal(received, full[tokens])
            y = torch.cos(received + rank)
            back = half.group_reduce(y, plan, stage, torch.zeros_like(x))
            products.append(torch.stack([(received * y).sum(), (x * back).sum()]))
        return torch.stack(products).sum(0)

    left, right = torch.stack(world.threads(program, 3)).sum(0)
    torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_gradients_are_added_in_rank_order(half):
    """To 1, ranks 1, 2 and 3 add 2^53, 1 and -2^53: in this order the 1 is lost, and 1 - 1 + 0 are left."""
    mask = Mask.ranges([(0, 4)], [(0, 1)], ["full"], queries=4, keys=4)  # all see the first key
    plan = half.cast_plan(mask, Layout.contiguous(4, 4))
    parts = [0.0, 2.0**53, 1.0, -(2.0**53)]

    def program():
        rank = dist.get_rank()
        y = torch.full((int(rank > 0), 1), parts[rank], dtype=torch.float64)
        return half.group_reduce(y, plan, 0, torch.ones(1, 1, dtype=torch.float64)).item()

    expected = 1.0
    for part in parts[1:]:
        expected += part
    assert world.threads(program, 4)[0] == expected


# --- when it moves


def test_casts_and_reductions_are_under_way_while_a_kernel_runs(half, monkeypatch):
    """Of rank 0: what was started, computed and waited for, in this order."""
    log, exchange = [], dist.all_to_all_single

    def note(event):
        if dist.get_rank() == 0:
            log.append(event)

    class Noted:
        def __init__(self, kind, work):
            self.kind, self.work = kind, work

        def wait(self):
            note(f"have {self.kind}")
            self.work.wait()

    def noting(output, input, *sizes, **options):
        kind = "keys" if input.dtype == torch.float32 else "gradients"
        note(f"send {kind}")
        return Noted(kind, exchange(output, input, *sizes, **options))

    def computing(name):
        compute = getattr(half, name)
        monkeypatch.setattr(half, name, lambda *args, **options: (note("compute"), compute(*args, **options))[1])

    monkeypatch.setattr(dist, "all_to_all_single", noting)
    computing("attention_forward")
    computing("attention_backward")
    mask, layout = Mask.causal(24), Layout.zigzag(24, 2)
    attend = attending(half, mask, layout, stages=2, reduce_dtype=torch.float64)
    world.threads(lambda: _gradients(attend, layout, whole(mask, dtype=torch.float32)), 2)
    both = [[event for event in log if kind in event or event == "compute"] for kind in ("keys", "gradients")]
    keys = [event for event in both[0] if event != "send keys"]
    assert keys == ["compute", "have keys", "compute", "have keys", "compute"] * 2
    for before, event in enumerate(both[0]):  # a cast has been started before the kernel that it runs under
        if event == "have keys":
            last = max(i for i in range(before) if both[0][i] == "compute")
            assert both[0][:last].count("send keys") > both[0][:before].count("have keys")
    forward, own = ["compute"] * 3, ["compute"]
    back = ["compute", "send gradients", "compute", "have gradients", "send gradients", "have gradients"]
    assert both[1] == forward + own + back


def test_a_known_call_plans_nothing_and_uploads_nothing(monkeypatch):
    mask = Mask.documents([0, 9, 24])
    layout, tensors = planned(fast, mask, 2, chunk=3), whole(mask)
    attend = attending(fast, mask, layout, stages=1)
    world.threads(lambda: _gradients(attend, layout, tensors), 2)

    def refuse(*_):
        raise AssertionError("planned again")

    for name in ("send_rows", "keys"):
        monkeypatch.setattr(CastPlan, name, refuse)
    monkeypatch.setattr("canon.fast.casts._transfers", refuse)
    world.threads(lambda: _gradients(attending(fast, Mask.documents([0, 9, 24]), layout), layout, tensors), 2)


# --- what is wrong is said


def test_errors_are_raised_on_every_rank(half):
    mask = Mask.causal(8)
    q = torch.zeros(4, 1, 8)

    def refused(call):
        with pytest.raises(ValueError) as caught:
            call()
        return str(caught.value)

    def program():
        rank = dist.get_rank()
        plan = half.cast_plan(mask, Layout.contiguous(8, 2))
        return [
            refused(lambda: half.magi_attention(q, q, q, mask, stages=-1)),
            refused(lambda: half.magi_attention(q, q, q, mask, stages=rank)),
            refused(lambda: half.magi_attention(q, q, q, mask, keep_kv=bool(rank))),
            refused(lambda: half.magi_attention(q, q, q, mask, Layout.contiguous(8, 3))),
            refused(lambda: half.group_cast(q, plan, 1)),
            refused(lambda: half.group_cast(q[1:], plan, 0)),
            refused(lambda: half.group_cast(q, half.cast_plan(mask, Layout.contiguous(8, 3)), 0)),
            refused(lambda: half.group_reduce(q[: 4 * rank], plan, 0, q[:3])),
        ]

    told = [
        "stages must be a whole number >= 0, got -1",
        "stages",
        "keep_kv",
        "the layout is for 3 ranks, the group has 2",
        "stage 1 is not one of the plan's 1 casts",
        "group_cast: x has 3 rows",
        "the plan is for 3 ranks, the group has 2",
        "into must be (4, 1, 8)",
    ]
    for messages in world.threads(program, 2):
        for expected, message in zip(told, messages, strict=True):
            assert expected in message


def run_as_processes(name):
    """The whole path over gloo, whose messages really travel; a module's function, so that it can be pickled."""
    if name == "fast":
        from canon.testing import interpreter

        interpreter.repair()
    half, mask = HALVES[name], Mask.documents([0, 1, 12, 19])
    layout = planned(half, mask, 3, chunk=2)
    return on_this_rank(attending(half, mask, layout, stages=2), layout, whole(mask))


@pytest.mark.parametrize("name", HALVES)
def test_runs_as_processes(name):
    mask = Mask.documents([0, 1, 12, 19])
    for got in world.processes(functools.partial(run_as_processes, name), 3):
        assert_agrees(got, mask, *whole(mask))
