"""Latent attention equals dense attention after projection, sends latents alone, and differentiates
all inputs.
"""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from canon import Layout, Mask, fast, reference
from canon.faces.latent_arguments import hidden_keys
from canon.testing import process_groups
from canon.testing.judge import agreement
from canon.testing.latent_judge import AttendedLatent, keys_of, latent_oracle, latent_orders

H, NOPE, ROPE, DV, RANK = 4, 6, 3, 5, 7
N = 23
MASKS = {
    "causal": Mask.causal(N),
    "packed": Mask.documents([0, 4, 5, N]),
    "window": Mask.window(N, 4, 2),
    "tree": Mask.tree([-1, 0, 0, -1], [5, 6, 7, 3], [0, 5, 11, 20]),
}
UNEVEN = {  # by number of ranks
    1: Layout.contiguous(N, 1),
    2: Layout([[range(0, 20)], [range(20, N)]], N),
    4: Layout([[range(3, 9), range(0, 2)], [], [range(9, N)], [range(2, 3)]], N),
}


def whole(tokens=N, b=2, dtype=torch.float64, seed=0):
    """Return q, latent, k_rope, up_weight, dout and dlse of the whole sequence, equal on every
    rank.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = (
        (b, tokens, H, NOPE + ROPE),
        (b, tokens, RANK),
        (b, tokens, ROPE),
        (H * (NOPE + DV), RANK),
        (b, tokens, H, DV),
    )
    tensors = [
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes
    ]
    return *tensors, torch.randn(b, H, tokens, generator=draw, dtype=torch.float64)


def shards(half, mask, layout, tensors, **options):
    """Return out, lse and all gradients of the whole sequence, from this rank's shards. Add
    up_weight's over the ranks.
    """
    rank = dist.get_rank() if layout.ranks > 1 else 0
    *tokens, weight, dout, dlse = tensors
    leaves = [
        *(layout.shard(x, rank).detach().requires_grad_() for x in tokens),
        weight.detach().requires_grad_(),
    ]
    out, lse = half.latent_attention(*leaves, mask, layout, return_lse=True, **options)
    dout, dlse = layout.shard(dout, rank), layout.shard(dlse.to(lse.dtype), rank, 2)
    *grads, dweight = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    if layout.ranks > 1:
        dist.all_reduce(dweight)
    full = [layout.unshard(x.detach(), dim=2 if x is lse else 1) for x in (out, lse, *grads)]
    return AttendedLatent(*full[:3], *(x.unsqueeze(2) for x in full[3:]), dweight)


def judged(mask, tensors):
    """Return the results of the oracle, and honest ones."""
    q, latent, k_rope, weight, dout, dlse = tensors
    arguments = q, latent.unsqueeze(2), k_rope.unsqueeze(2), weight, dout, mask, None, dlse
    return latent_oracle(*arguments), latent_orders(*arguments)


@cache
def expected(mask):
    return judged(mask, whole())


def assert_agrees(half, mask, layout):
    """Fail unless the judge accepts the results of all ranks: 1e-12 in float64."""
    got, *_ = process_groups.threads(partial(shards, half, mask, layout, whole()), layout.ranks)
    verdict = agreement(got, *expected(mask))
    assert verdict.agrees, str(verdict)


@pytest.mark.parametrize("name", MASKS)
def test_the_reference_equals_the_oracle_on_uneven_and_empty_shards(name):
    for layout in (*UNEVEN.values(), Layout.zigzag(N, 2), Layout.striped(N, 4)):
        assert_agrees(reference, MASKS[name], layout)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("packed", UNEVEN[4]), ("window", Layout.zigzag(N, 2)), ("causal", UNEVEN[1])],
)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_the_kernels_equal_the_oracle(name, layout):
    assert_agrees(fast, MASKS[name], layout)


@pytest.mark.parametrize(("reduce_dtype", "size"), [(None, 4), (torch.bfloat16, 2)])
def test_ranks_exchange_latents_and_their_gradients_alone(half, reduce_dtype, size, sent):
    """A rank sends both twice in each pass, and their gradients twice: in float32 by default."""
    layout, tensors = Layout.contiguous(6, 3), whole(6, 1, torch.float16)

    def program():
        leaves = [layout.shard(x, dist.get_rank()).detach().requires_grad_() for x in tensors[:3]]
        half.latent_attention(
            *leaves, tensors[3], None, layout, reduce_dtype=reduce_dtype
        ).sum().backward()

    process_groups.threads(program, 3)
    digest = 8  # bytes that compare the call, in each pass
    # two hops of two tokens
    assert sum(x for x in sent if x != digest) == 2 * 2 * (RANK + ROPE) * (2 + 2 + size)


def test_hidden_tokens_may_hold_nan(half):
    """They change nothing, in the gradient of up_weight neither: it sums over all tokens."""
    mask = Mask.ranges([(0, N)], [(2, 15)], ["full"], queries=N, keys=N)
    layout = Layout.zigzag(N, 2)
    assert hidden_keys(mask) == (range(0, 2), range(15, N))
    tensors = whole()
    expected = process_groups.threads(partial(shards, reference, mask, layout, tensors), 2)[0]
    for x in tensors[1:3]:
        x[:, :2] = x[:, 15:] = torch.nan
    found = process_groups.threads(partial(shards, half, mask, layout, tensors), 2)[0]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("needed", [{"q"}, {"up_weight"}, {"k_rope"}, {"latent", "q"}])
def test_only_the_needed_gradients_are_returned(half, needed):
    names, tensors, mask = ("q", "latent", "k_rope", "up_weight"), whole(9, 1), Mask.causal(9)
    expected, _ = judged(mask, (*tensors[:5], torch.zeros(1, H, 9, dtype=torch.float64)))
    leaves = {
        name: x.requires_grad_(name in needed) for name, x in zip(names, tensors, strict=False)
    }
    half.latent_attention(**leaves, mask=mask).backward(tensors[4])
    for (name, x), true in zip(leaves.items(), expected[2:6], strict=True):
        assert (x.grad is None) == (name not in needed)
        if name in needed:
            torch.testing.assert_close(x.grad, true.view(x.shape), rtol=0, atol=1e-12)


def test_autocast_casts_all_inputs(half):
    narrow = [x.float() for x in whole(9)[:4]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert half.latent_attention(*narrow).dtype == torch.bfloat16


def test_softcap_and_the_largest_scores_are_those_of_attention_after_projection(half):
    tokens = 9
    layout = Layout.striped(9, 2)
    options = dict(softcap=0.7, return_lse=True, return_max_logits=True)
    q, latent, k_rope, weight, *_ = whole(tokens)
    k, v = keys_of(latent.unsqueeze(2), k_rope.unsqueeze(2), weight, H, NOPE + ROPE)
    out, lse, largest = reference.attention(q, k, v, Mask.causal(tokens), **options)

    def program():
        rank = dist.get_rank()
        mine = (layout.shard(x, rank) for x in (q, latent, k_rope))
        return half.latent_attention(*mine, weight, Mask.causal(tokens), layout, **options)

    for rank, found in enumerate(process_groups.threads(program, 2)):
        expected = layout.shard(out, rank), layout.shard(lse, rank, 2), largest
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_a_repeated_call_replays_its_kernels(replays):
    layout = Layout([[range(9)], [range(9, 12)]], 12)
    run = lambda half, seed: shards(half, Mask.causal(12), layout, whole(12, 1, seed=seed))
    _, found, exact = process_groups.threads(
        lambda: [run(fast, 0), run(fast, 1), run(reference, 1)], 2
    )[0]
    for mine, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert len(replays()) > 4
    assert not any(replays())


def test_flops_count_visible_cells_and_projected_tokens(half):
    mask, (q, latent, k_rope, weight, dout, _) = Mask.causal(8), whole(8)
    leaves = [x.requires_grad_() for x in (q, latent, k_rope, weight)]
    with FlopCounterMode(display=False) as counter:
        half.latent_attention(*leaves, mask).backward(dout)
    d, cells, projection = NOPE + ROPE, 2 * H * mask.area, 2 * 2 * 8 * weight.numel()
    assert (
        counter.get_total_flops()
        == 2 * cells * (4 * d + 3 * DV - DV) + 2 * cells * DV + 4 * projection
    )


# --- planted faults that `canon check` must find

FAULTY = """
import torch
from canon.faces import public_latent
from canon.reference import latent as page
from canon.reference.local import under_sink
from canon.reference.ring import ring_backward, ring_forward
from canon.route.algorithm import Algorithm, Side

class Faulty(page.Projection):
    {fault}

def forward(call, q, latent, k_rope, weight):
    return ring_forward(call, q, latent, k_rope, read=Faulty(call, weight).keys)

def backward(call, needs_grad, dout, dlse, q, latent, k_rope, weight, out, lse):
    projected = Faulty(call, weight)
    of_keys = projected.keys, projected.gradients
    grads = ring_backward(call, needs_grad[:3], dout, dlse, q, latent, k_rope, out, lse, *of_keys)
    return *grads, projected.dup_weight.to(q.dtype)

latent_attention = public_latent.latent_attention(
    Algorithm(Side("faulty", under_sink), public_latent.LATENT, forward, backward)
)
"""
FAULTS = {  # fault: (a tensor that is off, the wrong method)
    "no fault": ("", "pass"),
    "the latent of another owner": ("out is off by", """
    def keys(self, mask, k, v):
        self.first = getattr(self, "first", k)
        own = self.first[:, : k.shape[1]]
        return super().keys(mask, torch.cat([own, k[:, own.shape[1] :]], 1), v)"""),
    "k_rope's gradient of one head": ("dk_rope is off by", """
    def gradients(self, dk, dv):
        dk[:, :, 1:, self.sizes.nope :] = 0
        return super().gradients(dk, dv)"""),
    "gradients that travel in bfloat16": ("dlatent is off by", """
    def gradients(self, dk, dv):
        return [x.bfloat16().to(x.dtype) for x in super().gradients(dk, dv)]"""),
    "up_weight's gradient of all steps but the last": ("dup_weight is off by", """
    def gradients(self, dk, dv):
        self.dup_weight.zero_()
        return super().gradients(dk, dv)"""),
    "up_weight's gradient of one step": ("dup_weight is off by", """
    def gradients(self, dk, dv):
        before, self.steps = self.dup_weight.clone(), getattr(self, "steps", 0) + 1
        grads = super().gradients(dk, dv)
        self.dup_weight = before if self.steps == 2 else self.dup_weight
        return grads"""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_a_planted_fault(fault, run, write_module):
    message, method = FAULTS[fault]
    write_module("faulty_latents", FAULTY.format(fault=method))
    line = "faulty_latents --tokens 60 --ranks 2 --dtype float32 --only"
    status, printed, _ = run(line, "latent_attention/*/documents")
    assert status == bool(message), printed.out
    assert message in printed.out
    assert "the reference itself" not in printed.out
