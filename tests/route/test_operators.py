"""Claims about the operators canon::...: torch's own checks pass, and dispatch modes can save
a call.
"""

from functools import partial

import pytest
import sampling
import torch
import torch.distributed as dist
from compiled import inputs
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from canon import Layout, Mask, reference
from canon.route import operators
from canon.route.algorithm import DECLARATIONS
from canon.testing import process_groups

MASK = Mask.documents([0, 5, 24])
COMMON = dict(scale=None, softcap=2.0, reduce_dtype=None, backward="auto", return_max_logits=True)
OPTIONS = {
    "attention": [
        dict(scale=0.3, backward="split", return_max_logits=True),
        dict(scale=0.3, softcap=2.0, backward="split", rank_invariant=True),
    ],
    "ring_attention": [COMMON],
    "zigzag_attention": [COMMON],
    "striped_attention": [COMMON],
    "latent_attention": [COMMON],
    "strided_attention": [
        dict(COMMON, head_stride=2, forward_first_stride=1),
        COMMON,
        dict(COMMON, rank_invariant=True, head_stride=1),
    ],
    "magi_attention": [
        COMMON,
        dict(COMMON, casts=2, own_keys_first=True),
        dict(COMMON, own_keys_first=False, keep_kv=True),
        dict(COMMON, rank_invariant=True),
        dict(COMMON, rank_invariant=True, casts=1, own_keys_first=False, keep_kv=True),
    ],
}


def tensors_of(function):
    """Return the tensors of a function, with a batch axis. Latents have the axis of one head."""
    if function != "latent_attention":
        return inputs()
    q, k, v = inputs()
    return (
        q,
        *(x.detach()[:, :, :1].requires_grad_() for x in (k, v)),
        q.new_ones(4 * (4 + 8), 16).requires_grad_(),
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", [f"{name} {place}" for name in OPTIONS for place in range(len(OPTIONS[name]))]
)
def test_opcheck_accepts_every_operator(half, case):
    name, (function, place) = half.__name__.removeprefix("canon."), case.split()
    operator, given = getattr(torch.ops.canon, function).default, OPTIONS[function][int(place)]
    layout, has_layout = Layout.contiguous(24, 1), function != "attention"
    tensors = tensors_of(function)
    options = [*DECLARATIONS[function].with_defaults(given).values()]
    # the group, and needs_grad
    options += [] if function == "attention" else ["", [True] * len(tensors)]
    torch.library.opcheck(
        operator, (*tensors, MASK, True, layout, has_layout, name, None, *options)
    )
    if place != "0" and not sampling.ALL:
        return
    packed = [x.detach()[0].requires_grad_() if x.ndim == 4 else x for x in tensors]
    torch.library.opcheck(operator, (*packed, MASK, False, layout, False, name, None, *options))


def test_opcheck_leaves_no_operator_out():
    assert {name for name in DECLARATIONS if hasattr(reference, name)} == OPTIONS.keys()


@pytest.mark.parametrize("shape", [(), (16,), (1, 16, 5)])
def test_a_traced_weight_without_rows_is_named(shape):
    """The shapes of the results depend on it. Other errors raise on every rank when the operator
    runs.
    """
    tensors = (torch.zeros(x) for x in ((1, 4, 2, 6), (1, 4, 1, 5), (1, 4, 1, 2), shape))
    with pytest.raises(
        ValueError, match="up_weight .rows, rank., got q .1, 4, 2, 6., latent .1, 4, 1, 5."
    ):
        operators._fake_forward(DECLARATIONS["latent_attention"], *tensors)


def test_cuda_graphs_of_inductor_leave_every_operator_out():
    names = [name for function in OPTIONS for name in (function, f"{function}_backward")]
    for name in names:
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.canon, name).default.tags


@pytest.mark.parametrize("function", ["ring_attention", "magi_attention"])
def test_a_traced_call_takes_an_empty_shard_and_names_a_wrong_layout(half, function, own_errors):
    x, attend = torch.zeros(1, 0, 2, 8, requires_grad=True), getattr(half, function)
    with FlopCounterMode(display=False):
        attend(x, x.clone(), x.clone()).sum().backward()
        assert x.grad.shape == x.shape
        with pytest.raises(TypeError, match="layout must be a canon.Layout"):
            attend(x, x, x, layout="zigzag")


# --- selective checkpoints

SAVED = [getattr(torch.ops.canon, function).default for function in OPTIONS]


def save_attention(_, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


KINDS = {
    "nothing": None,
    "reentrant": {"use_reentrant": True},
    "full": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_attention),
    },
}


@pytest.mark.parametrize("function", ["ring_attention", "strided_attention", "magi_attention"])
def test_a_saved_operator_sends_no_messages_again(half, function, sent):
    def program(kind):
        attend = getattr(half, function)
        layer = lambda q, k, v: torch.sin(attend(torch.sin(q), k, v, MASK, Layout.zigzag(24, 2)))
        leaves = inputs(12, seed=dist.get_rank())
        out = layer(*leaves) if KINDS[kind] is None else checkpoint(layer, *leaves, **KINDS[kind])
        out.square().sum().backward()
        return [x.grad for x in leaves]

    def backward(kind):
        """Return the gradients of both ranks, and the number of messages."""
        sent.clear()
        return process_groups.threads(partial(program, kind), 2), len(sent)

    backward("nothing")  # the first call of a group exchanges more
    expected, messages = backward("nothing")
    counts = {}
    for kind in KINDS:
        found, counts[kind] = backward(kind)
        for mine, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, mine, theirs))
    assert counts["selective"] == messages
    assert counts["full"] == counts["reentrant"] > messages, "the forward pass runs again"
