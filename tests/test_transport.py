"""Each group chooses one transport and reports it. If copy engines fail on a rank, all ranks use NCCL, with equal results."""

import functools
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask, fast
from canon.fast import transport
from canon.testing import process_groups

CPU = torch.device("cpu")
B, G, D, DV = 2, 4, 8, 6


def inputs(tokens, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    shapes = [(G, D), (G, D), (G, DV), (G, DV)]
    return [torch.randn(B, tokens, *shape, generator=draw).to(dtype) for shape in shapes]


def train(layout, tensors, **options):
    """Return out and the gradients of one forward and backward pass of this rank."""
    rank = dist.get_rank()
    q, k, v = (layout.shard(x, rank).requires_grad_() for x in tensors[:3])
    out = fast.strided_attention(q, k, v, Mask.causal(layout.tokens), layout, **options)
    out.backward(layout.shard(tensors[3], rank))
    return out.detach(), q.grad, k.grad, v.grad


def test_the_transport_is_reported():
    assert transport.transport_report("cpu") == "none: one rank"
    assert set(process_groups.threads(lambda: transport.transport_report("cpu"), 2)) == {"threads"}


def passes_with(fault):
    """Run one pass by gloo, and one by gloo that pretends to be NCCL without copy engines; for processes."""
    layout, tensors = Layout.zigzag(10, 2), inputs(10)
    plain = train(layout, tensors, head_stride=2)
    report = transport.transport_report("cpu")
    other = dist.new_group([0, 1])
    transport.backend_of = lambda group, device: "nccl"
    if fault == "one rank cannot":
        transport.why_not_copy_engines = lambda: "CANON_COPY_ENGINE is not 1" if dist.get_rank() == 1 else ""
        transport.CopyEngines = None  # not reached
    else:
        transport.why_not_copy_engines = lambda: ""
        transport.CopyEngines = broken
    pretended = train(layout, tensors, head_stride=2, group=other)
    chosen = transport.transport_for(other, CPU)
    apart = chosen.gathers is other and chosen.reductions is not other
    same = all(torch.equal(a, b) for a, b in zip(plain, pretended, strict=True))
    return report, transport.transport_report("cpu", other), apart, same


def broken(group, device):
    raise RuntimeError("no windows here")


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ("one rank cannot", ["another rank cannot", "CANON_COPY_ENGINE is not 1"]),
        ("windows fail", ["RuntimeError: no windows here"] * 2),
    ],
)
def test_without_copy_engines_all_ranks_use_nccl_and_report_the_reason(fault, reasons):
    results = process_groups.processes(functools.partial(passes_with, fault), 2)
    assert results == [("gloo", f"nccl: {reason}", True, True) for reason in reasons]


def test_the_missing_requirement_is_named(monkeypatch):
    monkeypatch.delenv("CANON_COPY_ENGINE", raising=False)
    assert transport.why_not_copy_engines() == "CANON_COPY_ENGINE is not 1"
    monkeypatch.setenv("CANON_COPY_ENGINE", "1")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", object(), raising=False)
    assert "no zero-CTA policy" in transport.why_not_copy_engines()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(NCCL_CTA_POLICY_ZERO=2), raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert transport.why_not_copy_engines() == "NCCL 2.27.5 has no collectives by copy engines: 2.28 has"
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert transport.why_not_copy_engines() == ""


def test_windows_are_reused_and_grow(monkeypatch):
    """The buffers of copy engines, with ordinary memory instead of symmetric memory."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    sizes = []

    class Windows(transport.CopyEngines):
        def __init__(self, group, device):
            transport.Transport.__init__(self, transport.COPY_ENGINE, group, device)
            self.windows = {}
            self._check_messages(device)

        def _window(self, size, group, device):
            sizes.append(size)
            return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(transport, "_choose", lambda group, device: Windows(group, device))
    small, large = (Layout.contiguous(n, 2) for n in (6, 11))

    def windowed_passes():
        report, results, counts = transport.transport_report("cpu"), [], []
        for layout in (small, small, large, small, large):
            results.append(train(layout, inputs(layout.tokens), head_stride=2, backward_first_stride=1))
            dist.barrier()
            counts.append(len(sizes))
            dist.barrier()
        return report, results, counts

    def plain_passes():
        layouts = (small, small, large, small, large)
        return [train(layout, inputs(layout.tokens), head_stride=2, backward_first_stride=1) for layout in layouts]

    windowed = process_groups.threads(windowed_passes, 2)
    monkeypatch.undo()
    for (report, results, counts), expected in zip(windowed, process_groups.threads(plain_passes, 2), strict=True):
        assert report == "nccl copy engine"
        assert counts[0] == counts[1] == 2 * (3 + 6)  # three for the check, then two each to gather, send and receive
        assert counts[2] >= counts[1]
        assert counts[2] == counts[3] == counts[4]
        for some, others in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def with_and_without_copy_engines():
    """Run the same passes by the chosen transport of these GPUs, and by plain NCCL; for processes."""
    layout, tensors = Layout.zigzag(4096, dist.get_world_size()), [x.cuda() for x in inputs(4096, torch.bfloat16)]
    options = dict(head_stride=2, backward_first_stride=1, backward_last_stride=1)
    os.environ["CANON_COPY_ENGINE"] = "1"
    chosen = train(layout, tensors, **options)
    plain = dist.new_group(range(dist.get_world_size()))
    del os.environ["CANON_COPY_ENGINE"]
    others = train(layout, tensors, **options, group=plain)
    device = torch.device("cuda", torch.cuda.current_device())
    same = all(torch.equal(a, b) for a, b in zip(chosen, others, strict=True))
    return transport.transport_report(device), transport.transport_report(device, plain), same


@pytest.mark.gpus(2)
def test_both_transports_give_the_same_bits_on_gpus():
    for chosen, plain, same in process_groups.gpus(with_and_without_copy_engines, 2):
        assert chosen.split(":")[0] in ("nccl copy engine", "nccl")
        assert plain == "nccl: CANON_COPY_ENGINE is not 1"
        assert same


def test_a_call_on_another_stream_waits_for_the_last_call(monkeypatch):
    """Streams are stand-ins: they note the streams that they wait for."""
    waits = []
    first, second = (SimpleNamespace(wait_stream=lambda other, name=name: waits.append((name, other))) for name in "ab")
    windows = transport.CopyEngines.__new__(transport.CopyEngines)
    windows.stream, windows.last_stream = SimpleNamespace(device=CPU), None
    for current, expected in (
        (first, []),
        (first, []),
        (second, [("b", first)]),
        (second, []),
        (first, [("a", second)]),
    ):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, current=current: current)
        windows._wait_for_last_call()
        assert waits == expected
        waits.clear()


def on_two_streams():
    """Run two training steps on two streams at the same time, each with its own tensors; for processes."""
    os.environ["CANON_COPY_ENGINE"] = "1"
    layout, options = Layout.zigzag(8192, dist.get_world_size()), dict(head_stride=2, backward_first_stride=1)
    both = [[(scale * x).cuda() for x in inputs(8192, torch.bfloat16)] for scale in (1, 2)]
    alone = [train(layout, tensors, **options) for tensors in both]
    torch.cuda.synchronize()
    streams, unequal = [torch.cuda.Stream() for _ in both], 0
    for step in range(20):
        found = []
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if number == step % 2:
                    torch.cuda._sleep(
                        2_000_000
                    )  # about a millisecond, so that the other stream could overtake this one
                found.append(train(layout, both[number], **options))
        torch.cuda.synchronize()
        pairs = zip(found, alone, strict=True)
        unequal += not all(torch.equal(x, y) for one, other in pairs for x, y in zip(one, other, strict=True))
    return transport.transport_report(torch.device("cuda", torch.cuda.current_device())), unequal


@pytest.mark.gpus(2)
def test_calls_on_two_streams_do_not_overwrite_the_windows_of_each_other():
    for chosen, unequal in process_groups.gpus(on_two_streams, 2):
        assert chosen.split(":")[0] in ("nccl copy engine", "nccl")
        assert unequal == 0
