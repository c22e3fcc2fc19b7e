"""The kernels of a backward pass."""

import pytest
from hopper import inputs

from canon import Mask, fast
from canon.fast.kernels.gluon import launch as gluon
from canon.fast.kernels.gluon import softmax_stats
from canon.fast.kernels.triton import launch as triton
from canon.fast.replay import recordings as prepared
from canon.testing import simulated_kernels

pytestmark = pytest.mark.interpreted

MASK = Mask.documents([0, 20, 70])


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
@pytest.mark.parametrize("attend", [fast.attention, fast.ring_attention])
def test_a_backward_pass_launches_few_kernels_of_the_backend_of_its_forward_pass(
    launched, name, method, kernels, attend
):
    *leaves, dout, _ = inputs(MASK, h=4, g=2)
    leaves = [x.requires_grad_() for x in leaves]
    with simulated_kernels.simulated():
        with fast.backend(name):
            out = attend(*leaves, MASK, backward=method)
        launched.clear()
        out.backward(dout)
    assert launched == [STATISTICS[name], *kernels]
