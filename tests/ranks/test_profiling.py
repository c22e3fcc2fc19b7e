"""FlopCounterMode counts the visible cells of the operators, and torch.profiler shows functions and
steps by name.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from compiled import inputs
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from canon import Layout, Mask
from canon.testing import process_groups
from canon.training import linear_sequence_loss, sequence_loss

MASK, LAYOUT = Mask.documents([0, 5, 24]), Layout([[range(7)], [range(7, 24)]], 24)
B, H, D, DV = 2, 4, 16, 12  # of `inputs`
CELLS = B * H * int(MASK.dense().sum())


def flops(program):
    """Return the FLOPs of each operator of Canon, by name. All other operators must have none."""
    with FlopCounterMode(display=False) as counter:
        program()
    counts = counter.get_flop_counts().get("Global", {})
    assert all("canon" in str(operator) for operator in counts)
    return Counter(
        {str(operator).removeprefix("canon."): count for operator, count in counts.items()}
    )


@pytest.mark.parametrize(
    "needs_grad", [(True, True, True), (True, False, False), (False, True, False)]
)
def test_flops_are_those_of_the_visible_cells_and_the_needed_gradients(half, needs_grad):
    leaves = [
        x.detach().requires_grad_(needed) for x, needed in zip(inputs(), needs_grad, strict=True)
    ]
    both = D + DV
    backward = both + D * needs_grad[0] + both * any(needs_grad[1:])
    for tensors in (
        leaves,
        [x.detach()[:1].squeeze(0).requires_grad_(x.requires_grad) for x in leaves],
    ):
        found = flops(lambda given=tensors: half.attention(*given, MASK).sum().backward())
        cells = CELLS if tensors is leaves else CELLS // B
        assert found == {"attention": 2 * cells * both, "attention_backward": 2 * cells * backward}
    causal = flops(lambda: half.attention(*leaves))
    assert causal["attention"] == 2 * B * H * 24 * 25 // 2 * both


def names(program):
    """Return the names that begin with "canon" in a trace of ``program``, with their numbers."""
    with profile() as measured:
        program()
    return Counter(
        event.name for event in (measured.events() or ()) if event.name.startswith("canon")
    )


def test_a_trace_names_passes_and_steps(half):
    calls = {
        "ring_attention": ({}, 2),
        "strided_attention": ({"head_stride": 1}, 2),
        "magi_attention": ({"casts": 1, "own_keys_first": True}, 2),
    }

    def program(function, options):
        leaves = inputs(LAYOUT.size(dist.get_rank()))
        run = lambda: getattr(half, function)(*leaves, MASK, LAYOUT, **options).sum().backward()
        run()
        dist.barrier()
        found = names(run) if dist.get_rank() == 0 else run()
        dist.barrier()
        return found

    for function, (options, steps) in calls.items():
        found = process_groups.threads(lambda: program(function, options), 2)[0]
        expected = {f"canon.{function} (forward)": 1, f"canon.{function} (backward)": 1}
        assert found == expected | {f"canon step {step}": 2 for step in range(steps)}


def test_a_trace_names_public_functions(half):
    q, k, v = inputs()
    layout, labels = Layout.contiguous(24, 1), torch.zeros(2, 24, dtype=torch.int64)

    def program():
        out, lse = half.attention_forward(q.detach(), k.detach(), v.detach(), MASK)
        half.merge(out, lse, out, lse)
        half.decode_attention(q.detach(), k.detach(), v.detach())
        half.attention(q, k, v, MASK)
        half.dispatch(MASK, 2)
        half.cast_plan(MASK, LAYOUT)
        layout.redistribute(layout.unshard(q), layout)
        sequence_loss(q[:, :, 0], labels)
        linear_sequence_loss(q[:, :, 0], k[0, :, 0], labels)

    expected = {
        "attention_forward",
        "merge",
        "decode_attention",
        "attention (forward)",
        "dispatch",
        "cast_plan",
        "unsharded",
        "redistributed",
        "sequence_loss",
        "linear_sequence_loss",
    }
    assert {f"canon.{name}" for name in expected} <= names(program).keys()
