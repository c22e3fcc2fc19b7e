"""The numbers of kernels of a backward pass and of operators of a ring, and the bits of the kernels
that were joined.
"""

from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from hopper import inputs
from sharded import DEVICE, whole
from torch.utils._python_dispatch import TorchDispatchMode

from canon import Layout, Mask, fast
from canon.fast import backward, local
from canon.fast.device import backend
from canon.fast.kernels.gluon import launch as gluon
from canon.fast.kernels.gluon import softmax_stats
from canon.fast.kernels.triton import launch as triton
from canon.fast.replay import recordings as prepared
from canon.testing import process_groups, simulated_kernels

pytestmark = pytest.mark.interpreted

MASK = Mask.documents([0, 20, 70])


@contextmanager
def using(name):
    """Force a kernel backend; simulate Gluon kernels on a CPU."""
    simulated = name == "gluon" and DEVICE == "cpu"
    with backend(name), simulated_kernels.simulated() if simulated else nullcontext():
        yield


@pytest.fixture
def launched(monkeypatch):
    """The names of the launched kernels."""
    monkeypatch.setattr(prepared, "REPLAYED", {})  # a replay does not call the launch functions
    names = []
    for module in (triton, gluon, softmax_stats):
        launch = module.launch
        monkeypatch.setattr(
            module,
            "launch",
            lambda kernel, *a, launch=launch, **o: (
                names.append(kernel.__name__),
                launch(kernel, *a, **o),
            ),
        )
    return names


STATISTICS = {"triton": "delta_kernel", "gluon": "delta_stats_kernel"}


@pytest.mark.parametrize("name", ["triton", "gluon"])
@pytest.mark.parametrize(
    ("method", "kernels"),
    [
        ("split", ["dkdv_kernel", "dq_kernel"]),
        ("fused", ["dkdv_kernel", "sum_heads_kernel"]),  # the last one casts dq
        ("head_parallel", ["dkdv_kernel", "sum_heads_kernel", "dq_kernel"]),
    ],
)
def test_a_backward_pass_launches_three_kernels_and_head_parallel_four(
    launched, name, method, kernels
):
    q, k, v, dout, dlse = inputs(MASK, h=4, g=2)
    with using(name):
        out, lse = local.attention_forward(q, k, v, MASK)
        launched.clear()
        backward.attention_backward(dout, q, k, v, out, lse, MASK, dlse=dlse, method=method)
    assert launched == [STATISTICS[name], *kernels]


class Operators(TorchDispatchMode):
    """The operators that copy, cast or add tensors inside the block. ``copy_`` of one axis is a
    message between threads.
    """

    NAMES = "aten::copy_", "aten::_foreach_copy_", "aten::_to_copy", "aten::clone"

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func._schema.name
        if (name in self.NAMES and getattr(args[0], "ndim", 4) == 4) or name == "aten::add":
            self.count[name.removeprefix("aten::")] += 1
        return result


@pytest.mark.parametrize(
    ("mask", "casts"),
    [(Mask.causal(48), 1), (Mask.documents([0, 16, 32, 48]), 0)],
    ids=["causal", "a document a rank"],
)
def test_the_backward_of_a_ring_copies_keys_once_and_casts_dq_only_after_additions(
    mask, casts, monkeypatch
):
    monkeypatch.setattr(triton, "run", lambda *_: None)  # the interpreter copies, too

    def program():
        layout = Layout.contiguous(48, 3)
        q, k, v, dout = (
            layout.shard(x, dist.get_rank())
            for x in whole(mask, d=16, dv=16, dtype=torch.bfloat16)[:4]
        )
        leaves, counts = [x.requires_grad_() for x in (q, k, v)], Operators()
        out = fast.ring_attention(*leaves, mask, layout)
        with counts:
            torch.autograd.grad(out, leaves, dout)
        return counts.count

    last = process_groups.threads(program, 3)[2]
    assert last == Counter(_foreach_copy_=1, _to_copy=casts, add=1)
