"""Latent attention sends latents alone, differentiates all inputs, and reads no hidden token."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from sharded import close, gradients, shards
from torch.utils.flop_counter import FlopCounterMode

from canon import Layout, Mask, fast, reference
from canon.testing import process_groups
from canon.testing.latent_judge import keys_of

H, NOPE, ROPE, DV, RANK = 4, 6, 3, 5, 7


def whole(tokens, b=2, dtype=torch.float64, seed=0):
    """Return q, latent, k_rope, up_weight and dout of the whole sequence, equal on every rank."""
    draw = torch.Generator().manual_seed(seed)
    of_tokens = (H, NOPE + ROPE), (RANK,), (ROPE,), (H, DV)
    shapes = [(b, tokens, *x) for x in of_tokens]
    shapes.insert(3, (H * (NOPE + DV), RANK))
    return [torch.randn(x, generator=draw, dtype=torch.float64).to(dtype) for x in shapes]


def both_passes(half, mask, layout, tensors):
    """Return out and all gradients of the whole sequence, from this rank's shards. Add up_weight's
    over the ranks.
    """
    *tokens, weight, dout = tensors
    *mine, dout = shards(layout, (*tokens, dout))
    attend = partial(half.latent_attention, mask=mask, layout=layout)
    *results, dweight = gradients(attend, (*mine, weight), dout)
    dist.all_reduce(dweight)
    return [*map(layout.unshard, results), dweight]


@pytest.mark.parametrize(("reduce_dtype", "size"), [(None, 4), (torch.bfloat16, 2)])
def test_ranks_exchange_latents_and_their_gradients_alone(half, reduce_dtype, size, sent):
    """A rank sends both twice in each pass, and their gradients twice: in float32 by default."""
    layout, tensors = Layout.contiguous(6, 3), whole(6, 1, torch.float16)

    def program():
        leaves = [x.requires_grad_() for x in shards(layout, tensors[:3])]
        half.latent_attention(
            *leaves, tensors[3], None, layout, reduce_dtype=reduce_dtype
        ).sum().backward()

    process_groups.threads(program, 3)
    digest = 8  # bytes that compare the call, in each pass
    # two hops of two tokens
    assert sum(x for x in sent if x != digest) == 2 * 2 * (RANK + ROPE) * (2 + 2 + size)


@pytest.mark.usefixtures("unwritten_is_nan")
def test_hidden_tokens_may_hold_nan(half):
    """They change nothing, in the gradient of up_weight neither: it sums over all tokens."""
    mask = Mask.ranges([(0, 23)], [(2, 15)], ["full"], queries=23, keys=23)
    layout, tensors = Layout.zigzag(23, 2), whole(23)
    expected = process_groups.threads(partial(both_passes, reference, mask, layout, tensors), 2)[0]
    for x in tensors[1:3]:
        x[:, :2] = x[:, 15:] = torch.nan
    close(process_groups.threads(partial(both_passes, half, mask, layout, tensors), 2)[0], expected)


@pytest.mark.parametrize("needed", [{"q"}, {"up_weight"}, {"k_rope"}, {"latent", "q"}])
def test_only_the_needed_gradients_are_returned(half, needed):
    *tensors, dout = whole(9, 1)
    leaves = [x.clone().requires_grad_() for x in tensors]
    reference.latent_attention(*leaves).backward(dout)
    names = ("q", "latent", "k_rope", "up_weight")
    given = {name: x.requires_grad_(name in needed) for name, x in zip(names, tensors, strict=True)}
    half.latent_attention(**given).backward(dout)
    for (name, x), full in zip(given.items(), leaves, strict=True):
        assert (x.grad is None) == (name not in needed)
        if name in needed:
            close([x.grad], [full.grad])


def test_the_largest_scores_are_those_of_attention_after_projection(half):
    layout = Layout.striped(9, 2)
    q, latent, k_rope, weight, _ = whole(9)
    k, v = keys_of(latent.unsqueeze(2), k_rope.unsqueeze(2), weight, H, NOPE + ROPE)
    _, largest = reference.attention(q, k, v, return_max_logits=True)

    def program():
        mine = shards(layout, (q, latent, k_rope))
        return half.latent_attention(*mine, weight, None, layout, return_max_logits=True)[1]

    for found in process_groups.threads(program, 2):
        torch.testing.assert_close(found, largest, rtol=1e-6, atol=0)


def test_a_repeated_call_replays_its_kernels(replays):
    layout = Layout([[range(9)], [range(9, 12)]], 12)
    run = lambda half, seed: both_passes(half, Mask.causal(12), layout, whole(12, 1, seed=seed))
    runs = lambda: [run(fast, 0), run(fast, 1), run(reference, 1)]
    close(*process_groups.threads(runs, 2)[0][1:])
    assert len(replays()) > 4
    assert not any(replays())


def test_flops_count_visible_cells_and_projected_tokens(half):
    mask, (*leaves, dout) = Mask.causal(8), whole(8)
    with FlopCounterMode(display=False) as counter:
        half.latent_attention(*(x.requires_grad_() for x in leaves), mask).backward(dout)
    d, cells, projection = NOPE + ROPE, 2 * H * mask.area, 2 * 2 * 8 * leaves[3].numel()
    assert counter.get_total_flops() == 2 * cells * (4 * d + 3 * DV) + 4 * projection


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
def test_the_check_finds_a_planted_fault(fault, verdicts_of):
    message, method = FAULTS[fault]
    options = "--tokens 60 --ranks 2 --dtype float32 --only latent_attention/*/documents"
    found, printed = verdicts_of(FAULTY, {"fault": method}, options)
    assert found == {"latent_attention": "disagrees" if message else "agrees"}
    assert message in printed


@pytest.mark.parametrize("fault", ["no fault", "up_weight's gradient of one step"])
def test_the_check_allows_for_the_rounding_of_parts_that_cancel(fault, verdicts_of, tmp_path):
    """The last ranks have a dout of the other sign: the sum of dup_weight is smaller than its
    parts, which each rank has rounded to bfloat16.
    """
    message, method = FAULTS[fault]
    for name, tokens in ("a", 30), ("b", 1), ("c", 100):
        (tmp_path / "documents").mkdir(exist_ok=True)
        (tmp_path / "documents" / name).write_bytes(bytes(range(tokens)) * 4)
    options = "--documents documents --ranks 4 --dtype bfloat16 --only latent_attention/*/full"
    found, printed = verdicts_of(FAULTY, {"fault": method}, options)
    assert found == {"latent_attention": "disagrees" if message else "agrees"}
    assert message in printed
