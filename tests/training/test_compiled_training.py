"""Claims about compiled models under DDP and FSDP2: their gradients are the means of the ranks'
eager gradients.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from canon import Layout, Mask, reference
from canon.testing import process_groups
from canon.training import linear_sequence_loss, sequence_loss

TOKENS = 24
STEPS = ([0, 7], [0, 5, 9], [0, 3, 12])


class Block(nn.Module):
    def __init__(self, function, **options):
        super().__init__()
        self.qkv, self.out, self.attend = (
            nn.Linear(32, 8 * 16),
            nn.Linear(64, 32),
            partial(function, **options),
        )

    def forward(self, x, mask, layout):
        q, k, v = self.qkv(x).unflatten(-1, (8, 16)).split([4, 2, 2], dim=2)
        return x + self.out(self.attend(q, k, v, mask, layout).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # equal parameters on all ranks
        functions = (
            reference.ring_attention,
            reference.strided_attention,
            partial(reference.magi_attention, own_keys_first=False),
        )
        self.blocks = nn.ModuleList(map(Block, functions))

    def forward(self, x, mask, layout):
        for block in self.blocks:
            x = block(x, mask, layout)
        return x


def gradients(model):
    """Return the gradients of every parameter for three packs with different documents."""
    found = []
    for ends in STEPS:
        mask = Mask.documents([*ends, TOKENS])
        layout = reference.dispatch(mask, dist.get_world_size(), chunk=4)
        draw = torch.Generator().manual_seed(len(found))
        x = layout.shard(torch.randn(2, TOKENS, 32, generator=draw), dist.get_rank())
        model.zero_grad()
        model(x, mask, layout).square().sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        found.append([x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for x in grads])
    return found


def ddp():
    return torch.compile(nn.parallel.DistributedDataParallel(Model()), backend="aot_eager")


def inside_ddp():
    return nn.parallel.DistributedDataParallel(
        torch.compile(Model(), backend="aot_eager", fullgraph=True)
    )


def fsdp():
    model = Model()
    for block in model.blocks:
        fully_shard(block)
        block.compile(backend="aot_eager", fullgraph=True)
    fully_shard(model)
    return model


def program(wrap):
    expected = gradients(Model())
    for grads in expected:
        for x in grads:
            dist.all_reduce(x)
            x /= dist.get_world_size()
    for mine, theirs in zip(gradients(wrap()), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("wrap", [ddp, inside_ddp, fsdp])
def test_compiled_models_train_with_a_new_mask_in_each_step(wrap):
    process_groups.processes(partial(program, wrap), 2, timeout=200)


def collectives():
    """Compile a program with all collectives besides attention,
    and compare it with the eager one.
    """
    rank, x = dist.get_rank(), torch.randn(1, 12, 5, requires_grad=True)
    layout, to = Layout.contiguous(TOKENS, 2), Layout.zigzag(TOKENS, 2)
    labels, weight = torch.arange(12)[None] % 5, torch.randn(7, 5, requires_grad=True)

    def step(x):
        x = torch.sin(layout.redistribute(torch.sin(x), to))
        loss = sequence_loss(torch.cos(x), labels) + linear_sequence_loss(
            torch.sin(x), weight, labels, softcap=3.0
        )
        return (layout.unshard(x) * (1 + rank)).sum() + 2 * loss

    expected = step(x)
    found = torch.compile(step, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, (x, weight)) for loss in (found, expected))
    )
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="canon does not trace redistributed: compile without"
    ):
        torch.compile(step, backend="aot_eager", fullgraph=True)(x)


def test_collectives_break_the_graph_of_a_compiled_program():
    process_groups.processes(collectives, 2, timeout=200)
