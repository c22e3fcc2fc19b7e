"""Compiled calls over a mesh ("tokens", "heads"), and an error of one rank."""

from functools import partial
from unittest import mock

import pytest
import sampling
import torch
import torch.distributed as dist
from compiled import compare, compiled_once, inputs
from meshes import mesh
from short_waits import shorten_waits

from canon import Layout, Mask, reference
from canon.reference import mesh as reference_mesh
from canon.testing import process_groups

LAYOUT = Layout.zigzag(24, 4)
CALLS = [
    ("ring_attention", {}),
    ("strided_attention", {}),
    ("magi_attention", {"own_keys_first": False}),
]


def compiled(half):
    """Compile calls over a mesh, and compare them with eager calls."""
    group, size = mesh(2, 2), LAYOUT.size(dist.get_rank())
    some = CALLS[:2] if half is reference else CALLS[2:]
    for name, options in CALLS if sampling.ALL else some:

        def model(q, k, v, mask, name=name, options=options):
            return getattr(half, name)(
                torch.sin(q), k, v, mask, LAYOUT, group=group, return_lse=True, **options
            )

        given = inputs(size), Mask.documents([0, 5, 24])
        compare(compiled_once(model, "aot_eager"), model, True, *given)
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    keep = lambda *qkv: half.magi_attention(*qkv, None, LAYOUT, group=group, keep_kv=True)
    with pytest.raises(NotImplementedError, match="over a mesh keeps no tensors"):
        compiled_once(keep, "aot_eager")(*inputs(size))


def test_a_compiled_call_returns_the_bits_of_an_eager_one(half):
    process_groups.processes(partial(compiled, half), 4, timeout=300)


def raising():
    """Rank 1 raises an error of its own inside a pass, while its row and its column wait."""
    shorten_waits()
    call = partial(reference.ring_attention, *[torch.ones(1, 6, 2, 8)] * 3, group=mesh(2, 2))
    call()
    if dist.get_rank() == 1:
        reference_mesh.to_column = mock.Mock(side_effect=ValueError("an error of one rank"))
    with pytest.raises((RuntimeError, ValueError)) as raised:
        call()
    # the others must not detect the failure from closed connections
    store = dist.distributed_c10d._get_default_store()
    store.set(f"raised {dist.get_rank()}", "")
    store.wait([f"raised {rank}" for rank in range(4)])
    return str(raised.value)


def test_an_error_of_one_rank_ends_the_messages_of_rows_and_columns():
    errors = process_groups.processes(raising, 4, timeout=30)
    assert errors[1] == "an error of one rank"
    assert all("rank 1 raised ValueError" in errors[rank] for rank in (0, 2, 3))
