"""Messages between ranks, and the communicators that carry them.

    schedule   fetch                                     reduce
    ring       `BlockRing`: a block from rank to rank    `BlockRing`: its gradient, one step behind
    strided    `AllGather`: K and V of some heads        `ReduceScatter`: dk and dv of these heads
    magi       `begin_cast`: K and V of needed tokens    `GroupReduce`: their dk and dv

Those of magi (`group_collectives.py`) differ in size, and allocate memory. The classes here have
two buffers: kernels read one while the other one receives. A message into a buffer starts after the
launch of all kernels that read its old content, and after the message that sent it on.

With NCCL, `wait` blocks the compute stream and not the host; gloo blocks the host. On GPUs a gather
never queues behind a reduction: each has a communicator.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from canon.fast.device import rows_for
from canon.fast.replay.recordings import replayed
from canon.masks.band import joined
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
from canon.ranks.agreement import group_state
from canon.ranks.group import backend_of, companion_of
from canon.route.call import Call

# the shape, the strides and the first element of a view
Place = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(eq=False)
class Pending:
    """Messages in flight. ``sent`` is kept until they have ended."""

    works: Sequence[Any]
    received: Sequence[Any]
    sent: Sequence[Tensor] = ()

    def wait(self) -> Sequence[Any]:
        """Make later kernels wait for the messages. Return ``received``."""
        for work in self.works:
            work.wait()
        self.works = self.sent = ()  # the works hold the sent tensors, too
        return self.received


class Blocks:
    """The places of the ranks' blocks in a flat buffer: a contiguous tensor (b, tokens, *shape) for
    each of ``shapes``.
    """

    def __init__(self, layout: Layout, batch: int, shapes: Sequence[torch.Size]):
        self.places: list[list[Place]] = []  # by rank
        self.elements: list[int] = []  # by rank
        for rank in range(layout.ranks):
            sizes = [torch.Size((batch, layout.size(rank), *shape)) for shape in shapes]
            ends = list(accumulate((size.numel() for size in sizes), initial=0))
            self.places.append(
                [(size, _strides(size), start) for size, start in zip(sizes, ends, strict=False)]
            )
            self.elements.append(ends[-1])
        self.most = max(self.elements)

    def views(self, buffer: Tensor, owner: int) -> list[Tensor]:
        return [buffer.as_strided(*place) for place in self.places[owner]]

    def zero_outside(self, buffer: Tensor, owner: int, keys: slice) -> list[Tensor]:
        """Return the tensors of a block at these keys, to be written; set others to 0."""
        views = self.views(buffer, owner)
        for x in views:
            for sequence in x:  # one at a time: `replayed` records zeros of contiguous memory only
                for rest in (sequence[: keys.start], sequence[keys.stop :]):
                    if rest.numel():
                        rest.zero_()
        return [x[:, keys] for x in views]


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(size[axis + 1 :]) for axis in range(len(size)))


class BlockRing:
    """Blocks that travel round the ring. An empty block sends no message."""

    def __init__(self, call: Call, blocks: Blocks, dtype: torch.dtype, device: torch.device):
        self.blocks, self.device = blocks, device
        self.group = dist.group.WORLD if call.group is None else call.group
        self.next, self.previous = (call.rank + 1) % call.ranks, (call.rank - 1) % call.ranks
        self.buffers = [torch.empty(blocks.most, dtype=dtype, device=device) for _ in range(2)]
        # NCCL must start a send and a receive together
        own_type = type(self.group) is dist.ProcessGroup
        self.coalesced = own_type and self.group._get_backend(device).supports_coalescing

    def hop(self, buffer: int, sent: int, received: int) -> Pending:
        """Start to send the block of rank ``sent`` from ``buffer``, and to receive that of
        ``received`` in the other one. As `dist.batch_isend_irecv`, but faster.
        """
        outgoing, incoming = self._message(buffer, sent), self._message(1 - buffer, received)
        works: list[Any] = []
        if self.coalesced and (outgoing or incoming):
            self.group._start_coalescing(self.device)
        if outgoing:
            works.append(self.group.send(outgoing, self.next, 0))
        if incoming:
            works.append(self.group.recv(incoming, self.previous, 0))
        if self.coalesced and works:
            works = [self.group._end_coalescing(self.device)]
        return Pending(works, [self.buffers[1 - buffer]])

    def _message(self, buffer: int, owner: int) -> list[Tensor]:
        elements, whole = self.blocks.elements[owner], self.buffers[buffer]
        return (
            [] if not elements else [whole] if elements == self.blocks.most else [whole[:elements]]
        )


class HeadGroup:
    """K and V (or dk and dv) of all ranks in a flat buffer, for the key ``heads`` of a step.

    A buffer is (W T, b, heads, d + dv), in rank order. T is the ``room`` of each rank, by default
    the most tokens of one. The room behind a shard is not written.
    """

    def __init__(
        self, call: Call, batch: int, heads: range, widths: Sequence[int], room: int | None = None
    ):
        self.heads, self.batch, self.widths = heads, batch, widths
        self.room = padded_tokens(call.layout) if room is None else room
        self.rank, self.ranks, self.token = call.rank, call.ranks, batch * len(heads) * sum(widths)
        self.elements = self.ranks * self.room * self.token

    def views(self, buffer: Tensor) -> list[Tensor]:
        return self._views(buffer, 0, self.ranks * self.room)

    def own(self, buffer: Tensor, tokens: int) -> list[Tensor]:
        """Return both tensors (b, tokens, heads, width) of this rank."""
        return self._views(buffer, self.rank * self.room, tokens)

    def by_rank(self, buffer: Tensor, tokens: int) -> list[Tensor]:
        """Return both tensors (b, W, tokens, heads, width): the first tokens of each rank."""
        return [x.unflatten(1, (self.ranks, self.room))[:, :, :tokens] for x in self.views(buffer)]

    def zero_outside(self, buffer: Tensor, keys: slice) -> list[Tensor]:
        """Return both tensors of these gathered ``keys``, to be written; set others to 0."""
        for rest in (
            buffer[: keys.start * self.token],
            buffer[keys.stop * self.token : self.elements],
        ):
            if rest.numel():
                rest.zero_()
        return [x[:, keys] for x in self.views(buffer)]

    def zero_behind(self, buffer: Tensor, tokens: int) -> None:
        first = self.rank * self.room
        buffer[(first + tokens) * self.token : (first + self.room) * self.token].zero_()

    def _views(self, buffer: Tensor, first: int, tokens: int) -> list[Tensor]:
        heads, stride = len(self.heads), sum(self.widths)
        strides = (heads * stride, self.token, stride, 1)
        start = int(buffer.storage_offset()) + first * self.token
        starts = accumulate(self.widths[:-1], initial=start)
        return [
            buffer.as_strided((self.batch, tokens, heads, width), strides, start)
            for width, start in zip(self.widths, starts, strict=True)
        ]


class AllGather:
    """All-gathers of K and V, key heads ``steps[i]`` in step i, into two alternating buffers."""

    def __init__(self, k: Tensor, v: Tensor, call: Call, steps: Sequence[HeadGroup]):
        self.k, self.v, self.steps = k, v, steps
        self.transport = transport_for(call.group, k.device)
        elements, slots = max(step.elements for step in steps), range(min(2, len(steps)))
        self.buffers = [torch.empty(elements, dtype=k.dtype, device=k.device) for _ in slots]

    def fetch(self, step: int) -> Pending:
        """Start to gather the heads of a step, into the buffer that `Pending.wait` returns."""
        group, buffer = self.steps[step], self.buffers[step % 2]
        first, stop = group.heads.start, group.heads.stop
        with self.transport.on_communication_stream():
            for target, source in zip(
                group.own(buffer, self.k.shape[1]), (self.k, self.v), strict=True
            ):
                target.copy_(source[:, :, first:stop])
            works = [self.transport.all_gather(buffer[: group.elements])]
        if step:
            self.transport.wait_until_started()
        return Pending(works, [buffer])


class ReduceScatter:
    """Sums over the ranks of dk and dv, the key heads ``steps[i]`` in step i.

    Kernels write the partial gradients of all ranks' keys into ``sent[i % 2]``, in reduce_dtype. At
    most one exchange is in flight, so one buffer receives.
    """

    def __init__(self, dk: Tensor, dv: Tensor, call: Call, steps: Sequence[HeadGroup]):
        self.grads, self.steps = (dk, dv), steps
        self.transport = transport_for(call.group, dk.device)
        elements = max(step.elements for step in steps)
        new = lambda: torch.empty(elements, dtype=call.reduce_dtype, device=dk.device)
        self.sent, self.received = [new() for _ in range(min(2, len(steps)))], new()

    def start(self, step: int) -> "PendingReduction":
        """Start an exchange. The one before must be finished."""
        elements = self.steps[step].elements
        work = self.transport.all_to_all(self.received[:elements], self.sent[step % 2][:elements])
        return PendingReduction(self, work, self.steps[step])


@dataclass(eq=False)
class PendingReduction:
    """An exchange of gradients in flight."""

    reduction: ReduceScatter
    work: Any
    group: HeadGroup

    def wait(self) -> None:
        received, transport = self.reduction.received, self.reduction.transport
        with transport.on_communication_stream(after_compute=False):
            self.work.wait()
            replayed(_sum_parts, (received, *self.reduction.grads), self.group, kind=self.group)
        transport.join()


def _sum_parts(received: Tensor, dk: Tensor, dv: Tensor, group: HeadGroup) -> None:
    for grad, part in zip((dk, dv), group.by_rank(received, dk.shape[1]), strict=True):
        rows_for(part).sum_ranks(part, grad[:, :, group.heads.start : group.heads.stop])


@cached_plan
def padded_tokens(layout: Layout) -> int:
    """Return T, the most tokens that a rank holds."""
    return max(map(layout.size, range(layout.ranks)))


@cached_plan
def gathered_mask(layout: Layout, mask: Mask, rank: int) -> Mask:
    """Return the mask between the queries of ``rank`` and a gathered buffer."""
    room = padded_tokens(layout)
    if room * layout.ranks == layout.tokens:
        return layout.local_mask(mask, rank, range(layout.ranks))
    bands = [
        band.shift(0, r * room)
        for r in range(layout.ranks)
        for band in layout.local_mask(mask, rank, r).bands
    ]
    return Mask.of_disjoint(joined(bands), layout.size(rank), layout.ranks * room)


class Transport:
    """The communicators and the communication stream of one group. ``gathers`` is the group itself;
    ``reductions``, on NCCL, another communicator.
    """

    def __init__(self, group, device: torch.device):
        self._group = ref(group)  # the group may be destroyed first
        self._reductions = None
        if (backend := backend_of(group, device)) == "nccl":
            state, name = group_state(group), f"reductions {device.type}"
            self._reductions = companion_of(group, state.liveness.store, name, backend)
            state.aborted.append(self._reductions)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        # `wait_until_started` fills it to pass time
        self._delay = torch.zeros(1, dtype=torch.float32, device=device)

    @property
    def gathers(self):
        return self._group()

    @property
    def reductions(self):
        return self._reductions or self._group()

    def all_gather(self, buffer: Tensor) -> dist.Work:
        elements = buffer.numel() // self.ranks
        own = buffer.narrow(0, self.rank * elements, elements)
        # the name before torch 2.12
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(buffer, own, group=self.gathers, async_op=True)

    def all_to_all(self, received: Tensor, sent: Tensor, *sizes: list[int]) -> dist.Work:
        """Start to send part r of ``sent`` to rank r, and to receive its part for this rank.

        ``sizes``: the elements received from each rank, then those sent; by default equal parts."""
        return dist.all_to_all_single(received, sent, *sizes, group=self.reductions, async_op=True)

    def on_communication_stream(self, after_compute: bool = True) -> AbstractContextManager:
        if self.stream is None:
            return nullcontext()
        if after_compute:
            self._wait(self.stream, torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def wait_until_started(self) -> None:
        """Make later kernels, which fill all SMs, wait for the communication stream and usually
        start after its messages.
        """
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                # 2 us, in which messages start on their streams, if these are free
                self._delay.zero_()
            self.join()

    def join(self) -> None:
        if self.stream is not None:
            self._wait(torch.cuda.current_stream(self.stream.device), self.stream)

    def _wait(self, waiting: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        # `Stream.wait_stream` makes a new event each time
        self._event.record(other)
        waiting.wait_event(self._event)


def transport_for(group, device: torch.device) -> Transport:
    """Return the transport of this group on this device. A collective in the first call."""
    transports = group_state(group).transports
    if device not in transports:  # no lock: only this rank's thread uses its group
        with torch.inference_mode(False):  # `_delay` is permanent, and training writes to it later
            transports[device] = Transport(dist.group.WORLD if group is None else group, device)
    return transports[device]
