"""Launches of the CUDA kernels without a GPU: copies of views, and errors with a remedy."""

import pytest
import torch

from canon import Mask
from canon.fast.kernels.cuda import launch
from canon.fast.kernels.launcher import Gpu, meta_stands_for
from canon.fast.tables.cells import Cells

A100 = Gpu((8, 0), 108, 166912)
BF16 = torch.bfloat16
MASK = Mask.prefix(40, 7)
CELLS = Cells(MASK)


@pytest.fixture
def launched(monkeypatch):
    """An sm_80 for CPU tensors, on which nothing runs: the arguments of the launches."""
    found = []

    def keep(kernel, ctas, device, arguments, *, variant):
        found.append(arguments)

    monkeypatch.setattr(launch, "launch", keep)
    monkeypatch.setattr(launch, "is_cpu", lambda device: False)
    monkeypatch.setattr(launch, "capability", lambda device: A100.capability)
    monkeypatch.setattr(launch, "gpu_of", lambda device: A100)
    return found


def inputs(t=40, s=40, h=4, g=2, d=64, dv=32, dtype=BF16, b=2, device=None):
    sizes = [(t, h, d), (s, g, d), (s, g, dv), (t, h, dv)]
    return [torch.zeros(b, *size, dtype=dtype, device=device) for size in sizes]


def test_views_that_cannot_be_read_by_16_bytes_are_copied():
    packed = torch.zeros(2, 40, 8, 96, dtype=BF16)
    for view in (packed[:, :, :4, 8:72], packed[:, :, 4:6, :64], packed[:, ::2, 6:, 64:]):
        assert launch.loadable(view) is view
    q, _, v, _ = inputs()
    shifted = torch.zeros(q.numel() + 1, dtype=BF16)[1:].view(q.shape)
    odd = torch.zeros(2, 40, 2, 65, dtype=BF16)[..., :64]
    expanded = q[:, :, :1].expand(q.shape)
    for view in (shifted, odd, expanded, v.transpose(1, 3).contiguous().transpose(1, 3)):
        copy = launch.loadable(view)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert copy is not view


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=torch.float32), "support bfloat16 and float16, not torch.float32"),
        (dict(d=72), "multiples of 16 from 16 to 256, got 72 and 32"),
        (dict(dv=272), "multiples of 16 from 16 to 256"),
    ],
)
def test_unsupported_inputs_name_the_remedy(launched, change, message):
    q, k, v, out = inputs(**change)
    with pytest.raises(ValueError, match=f'{message}.*: use backend."triton'):
        launch.forward(q, k, v, CELLS, 0.5, out, torch.empty(2, 4, 40))


def test_the_fused_method_names_the_others():
    with pytest.raises(ValueError, match='use backward="split", "head_parallel" or "auto"'):
        launch.dkdv(*inputs(), (), CELLS, 0.5, None, None, dq=torch.zeros(1))


@pytest.mark.parametrize(
    ("gpu", "message"),
    [(A100._replace(capability=(7, 5)), r"need an sm_80 or later.*\(7, 5\)"), (None, "on a GPU")],
)
def test_other_devices_name_the_remedy(gpu, message):
    with meta_stands_for(gpu), pytest.raises(ValueError, match=f"{message}.*triton"):
        launch.check(inputs(device="meta")[0])


def test_without_work_nothing_is_launched(launched):
    q, k, v, out = inputs(b=0)
    launch.forward(q, k, v, CELLS, 0.5, out, torch.empty(0, 4, 40))
    q, k, v, out = inputs(t=0)
    launch.forward(q, k, v, Cells(Mask.full(0, 40)), 0.5, out, torch.empty(2, 4, 0))
    assert not launched
