"""The transport of a process group: its communicators, and one more stream.

On GPUs gathers and reductions have a communicator each, so that a gather never queues behind a reduction. A group whose
ranks are not in ascending order has one for both. On the communication stream, kernels copy and sum the data of messages
while attention kernels run. paper/copy_engines.md explains why messages do not use copy engines.
"""

from contextlib import AbstractContextManager, nullcontext
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from canon.runtime.agreement import group_state
from canon.runtime.group import backend_of, new_group_of


class Transport:
    """The communicators and the communication stream of one group. Its methods that send are collective.

    ``gathers`` is the group itself. ``reductions`` is another communicator on NCCL, else the group, too.
    """

    def __init__(self, group, device: torch.device):
        self._group = ref(group)  # the group may be destroyed first
        self._reductions = _second_communicator(group, device)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._delay = torch.zeros(1, device=device)  # `wait_until_started` fills it to pass time

    @property
    def gathers(self):
        """Return the communicator of gathers."""
        return self._group()

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


def transport_for(group, device: torch.device) -> Transport:
    """Return the transport of this group on this device. ``group=None``: all ranks. A collective in the first call."""
    transports = group_state(group).transports
    if device not in transports:  # no lock: only this rank's thread uses its group
        with torch.inference_mode(False):  # `_delay` is permanent, and training writes to it later
            transports[device] = Transport(dist.group.WORLD if group is None else group, device)
    return transports[device]


def _second_communicator(group, device: torch.device):
    """Return another communicator of the same ranks in the same order, or None. A collective of these ranks only."""
    ranks = dist.get_process_group_ranks(group)
    if backend_of(group, device) != "nccl" or ranks != sorted(ranks):  # a new group sorts its ranks
        return None
    communicator = new_group_of(group, "nccl")
    group_state(group).aborted.append(communicator)
    return communicator
