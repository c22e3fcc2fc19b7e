"""Transports: how the ranks of a group exchange gathered keys and scattered gradients. Each group chooses one, once.

    name                where                                     cost to attention kernels
    "nccl copy engine"  one host, NCCL >= 2.28, torch >= 2.11     none: copy engines move the bytes
    "nccl"              other GPUs                                SMs
    "gloo", "threads"   CPU ranks                                 -
    "none"              one rank                                  -

On GPUs gathers and reductions have a communicator each, so that a gather never queues behind a reduction. A group whose
ranks are not in ascending order has one for both. One more stream, the communication stream, copies and sums the data of
messages while attention kernels run.

The copy engines serve a group with NCCL's zero-CTA policy, on buffers in symmetric windows. Windows are allocated once, grow
to the largest call and serve all calls of the group; other transports allocate in each call. Before copy engines are
chosen, a small gather and a small exchange must arrive complete. If anything fails on any rank, all ranks use plain NCCL,
and `transport_report` gives the reason.

Copy engines need ``CANON_COPY_ENGINE=1`` in the environment of every rank. A torch process has one backend of symmetric
memory; this choice makes it NCCL's, so the owner of the process must opt in. paper/copy_engines.md has the measured effect.
The results do not depend on the transport: all move the same bytes, and none adds. NCCL silently uses SMs again if its copy
engines cannot reach a peer; a profile shows this.

Source: NCCL user guide, NCCL_CTA_POLICY_ZERO and window registration (NVIDIA, 2025).
"""

import hashlib
import os
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from canon.runtime.agreement import group_state
from canon.runtime.group import Group, backend_of, new_group_of, place_in

COPY_ENGINE = "nccl copy engine"


class Transport:
    """The transport of one group: two communicators, the communication stream, and buffers. All calls are collective.

    ``gathers`` and ``reductions`` are the group itself by default.
    """

    def __init__(self, name: str, group, device: torch.device, gathers=None, reductions=None, reason: str = ""):
        self.name, self.reason = name, reason
        self._group = ref(group)  # the group may be destroyed first
        self._gathers, self._reductions = gathers, reductions
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._delay = torch.zeros(1, device=device)  # `wait_until_started` fills it to pass time

    @property
    def gathers(self):
        """Return the communicator of gathers."""
        return self._gathers or self._group()

    @property
    def reductions(self):
        """Return the communicator of reductions."""
        return self._reductions or self._group()

    def all_gather(self, buffer: Tensor) -> dist.Work:
        """Start to fill a flat buffer with equal parts of all ranks. This rank has written its own part."""
        elements = buffer.numel() // self.ranks
        own = buffer.narrow(0, self.rank * elements, elements)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.12
        return gather(buffer, own, group=self.gathers, async_op=True)

    def all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work:
        """Start to send the r-th equal part of ``sent`` to rank r, and to receive its part for this rank."""
        return dist.all_to_all_single(received, sent, group=self.reductions, async_op=True)

    def empty(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat buffer for the messages of one call. ``name`` identifies it among the buffers of the call."""
        return torch.empty(elements, dtype=dtype, device=device)

    def on_communication_stream(self, after_compute: bool = True) -> AbstractContextManager:
        """Launch the block's work on the communication stream, with ``after_compute`` after the compute stream's work."""
        if self.stream is None:
            return nullcontext()
        if after_compute:
            self._wait(self.stream, torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def wait_until_started(self) -> None:
        """Make later kernels wait for the communication stream, and start after the messages launched from it."""
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                self._delay.zero_()  # takes 2 us; meanwhile the messages start on streams of their own
            self.join()

    def join(self) -> None:
        """Make later kernels wait for the communication stream."""
        if self.stream is not None:
            self._wait(torch.cuda.current_stream(self.stream.device), self.stream)

    def _wait(self, waiting: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Make a stream wait for the work of another one so far, as `Stream.wait_stream` does with a new event each time."""
        self._event.record(other)
        waiting.wait_event(self._event)


class CopyEngines(Transport):
    """NCCL by copy engines, on permanent symmetric windows. Construction raises if any part of this fails."""

    def __init__(self, group, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        self.symmetric_memory = symmetric_memory
        if symmetric_memory.get_backend(device) != "NCCL":
            symmetric_memory.set_backend("NCCL")  # raises if the process has used another one
        gathers, reductions = (_new_communicator(group, zero_cta=True) for _ in range(2))
        for communicator in (gathers, reductions):
            dist.all_reduce(torch.zeros(1, device=device), group=communicator)  # creates it: windows need it to exist
        super().__init__(COPY_ENGINE, group, device, gathers, reductions)
        self.windows: dict[str, Tensor] = {}
        self.last_stream: torch.cuda.Stream | None = None  # of the last call that used the windows
        self._check_messages(device)

    def empty(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        needed = elements * dtype.itemsize
        self._wait_for_last_call()
        window = self.windows.get(name)
        if window is None or window.numel() < needed:  # true on all ranks or none: their sizes are equal
            torch.cuda.synchronize(device)
            group = self.gathers if name.startswith("gather") else self.reductions
            with torch.inference_mode(False):
                self.windows[name] = window = self._window(-(-needed // 4096) * 4096, group, device)
        return window[:needed].view(dtype)

    def _wait_for_last_call(self) -> None:
        """Make a call on another stream wait until the last call has read the windows, which they share."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        if self.last_stream is not None and self.last_stream != current:
            current.wait_stream(self.last_stream)
        self.last_stream = current

    def _window(self, size: int, group, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(self.symmetric_memory.get_mem_pool(device)):
            window = torch.empty(size, dtype=torch.uint8, device=device)
        self.symmetric_memory.rendezvous(window, group=group.group_name)
        return window

    def _check_messages(self, device: torch.device) -> None:
        """Raise RuntimeError unless a small gather and a small exchange arrive complete."""
        rank, ranks = dist.get_rank(self.gathers), dist.get_world_size(self.gathers)
        expected = torch.arange(ranks, dtype=torch.float32, device=device).repeat_interleave(1024)
        gathered, sent, received = (
            self.empty(name, 1024 * ranks, torch.float32, device) for name in ("gather try", "send try", "receive try")
        )
        gathered.view(ranks, -1)[rank] = rank
        sent.fill_(rank)
        for work in (self.all_gather(gathered), self.all_to_all(received, sent)):
            work.wait()
        if not (torch.equal(gathered, expected) and torch.equal(received, expected)):
            raise RuntimeError("a message through symmetric windows arrived incomplete")
        self.windows.clear()


def transport_for(group, device: torch.device) -> Transport:
    """Return the transport of this group on this device. ``group=None``: all ranks. A collective in the first call."""
    transports = group_state(group).transports
    if device not in transports:  # no lock: only this rank's thread uses its group
        with torch.inference_mode(False):  # buffers are permanent, and training may write to them later
            transports[device] = _choose(dist.group.WORLD if group is None else group, device)
    return transports[device]


def transport_report(device: torch.device | str, group: Group = None) -> str:
    """Return the name of the group's transport, and the reason if it is not copy engines. A collective in the first call."""
    device = torch.device(device)
    group, _, ranks = place_in("transport_report", group)
    if ranks == 1:
        return "none: one rank"
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    chosen = transport_for(group, device)
    return f"{chosen.name}: {chosen.reason}" if chosen.reason else chosen.name


def _choose(group, device: torch.device) -> Transport:
    backend = backend_of(group, device)
    if backend != "nccl":
        return Transport(backend, group, device)
    reason = _reason_of_any(why_not_copy_engines(), group, device)
    if not reason and not _one_host(group, device):
        reason = "the ranks are on several hosts"
    if not reason:
        try:
            transport, reason = CopyEngines(group, device), ""
        except Exception as error:
            transport, reason = None, f"{type(error).__name__}: {error}"
        reason = _reason_of_any(reason, group, device)
        if transport and not reason:
            return transport
    reductions = _new_communicator(group) if _is_ascending(group) else None
    return Transport(backend, group, device, reductions=reductions, reason=reason)


def why_not_copy_engines() -> str:
    """Return the reason why this rank cannot use copy engines, or "". Not a collective."""
    if os.environ.get("CANON_COPY_ENGINE") != "1":
        return "CANON_COPY_ENGINE is not 1"
    if not hasattr(_nccl_group(), "NCCL_CTA_POLICY_ZERO"):
        return f"torch {torch.__version__} offers no zero-CTA policy"
    if nccl.version() < (2, 28):
        return f"NCCL {'.'.join(map(str, nccl.version()))} has no collectives by copy engines: 2.28 has"
    return ""


def _one_host(group, device: torch.device) -> bool:
    """Return whether all ranks have the same host name. A collective."""
    digest = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7], "big")
    least = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    low, high = least.tolist()
    return low == -high


def _nccl_group() -> Any:
    return getattr(dist, "ProcessGroupNCCL", None)  # None where torch is built without NCCL


def _reason_of_any(reason: str, group, device: torch.device) -> str:
    """Return "" if no rank has a reason, else this rank's or "another rank cannot". A collective."""
    fine = torch.tensor([int(not reason)], device=device)
    dist.all_reduce(fine, dist.ReduceOp.MIN, group=group)
    return "" if fine.item() else reason or "another rank cannot"


def _new_communicator(group, zero_cta: bool = False):
    """Return another communicator of the same ranks in the same order. A collective of these ranks only.

    Raises NotImplementedError if their order is not ascending, because a new group sorts its ranks.
    """
    if not _is_ascending(group):
        raise NotImplementedError("the ranks of the group are not in ascending order, but a new group sorts its ranks")
    options = None
    backend = "nccl" if "nccl" in dist.get_backend_config(group) else dist.get_backend(group)
    if zero_cta:
        options = _nccl_group().Options()
        options.config.cta_policy = _nccl_group().NCCL_CTA_POLICY_ZERO
    communicator = new_group_of(group, backend, options)
    group_state(group).aborted.append(communicator)
    return communicator


def _is_ascending(group) -> bool:
    ranks = dist.get_process_group_ranks(group)
    return ranks == sorted(ranks)
