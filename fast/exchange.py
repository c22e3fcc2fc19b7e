"""Messages between ranks through two reused buffers: blocks round a ring, all-gathers, reduce-scatters.

    schedule    fetch                                         reduce
    ring        `BlockRing`: one block from rank to rank      `BlockRing`: its gradient, one step behind
    strided     `AllGather`: K and V of some heads            `ReduceScatter`: dk and dv of these heads
    magi        `GroupCast`: K and V of the needed tokens     `GroupReduce`: their dk and dv

`GroupCast` and `GroupReduce` are in `group_collectives.py`. The other classes are here and have two buffers: kernels read one
while the other one receives. Group casts differ in size, so each one allocates its own memory.

A message starts before the kernel that overlaps with it. With NCCL, `wait` blocks the compute stream and not the host; gloo
blocks the host. Two buffers are enough: a message starts after the launch of every kernel that reads its receiving buffer,
and the transport waits for these kernels.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from canon.fast.kernels.triton.sum_ranks import sum_ranks
from canon.fast.transport import transport_for
from canon.reference.band import joined
from canon.reference.call import Call
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan_cache import cached_plan


class Hop:
    """A ring step in flight. ``block`` holds the received tensors after `wait`."""

    def __init__(self, operations: list[dist.P2POp], block: list[Tensor]):
        self.requests, self.block = dist.batch_isend_irecv(operations) if operations else [], block

    def wait(self) -> list[Tensor]:
        """Make later kernels wait for the block, and return it."""
        for request in self.requests:  # includes the send, after which the sending buffer is free
            request.wait()
        return self.block


class BlockRing:
    """Blocks that travel round the ring. A block has one tensor (b, tokens, *shape) for each of ``shapes``.

    Each rank owns one block, with the tokens that the layout gives to that rank.

    Memory: 2 buffers (1 for one rank), each of b * (most tokens of a rank) * (sum of prod(shape)) elements.
    Traffic: one message of the block's size for each hop, none for an empty block.
    """

    def __init__(self, call: Call, batch: int, shapes: tuple[tuple[int, ...], ...], like: Tensor, dtype: torch.dtype):
        self.call, self.batch, self.shapes = call, batch, shapes
        self.sizes = [call.layout.size(rank) for rank in range(call.ranks)]
        elements = batch * max(self.sizes) * sum(map(prod, shapes))
        self.buffers = [like.new_empty(elements, dtype=dtype) for _ in range(2 if call.ranks > 1 else 1)]

    def block(self, buffer: int, owner: int) -> list[Tensor]:
        """Return the tensors of ``owner``'s block as views of a buffer."""
        tokens, start, views = self.sizes[owner], 0, []
        for shape in self.shapes:
            view = self.buffers[buffer][start : start + self.batch * tokens * prod(shape)]
            views.append(view.view(self.batch, tokens, *shape))
            start += view.numel()
        return views

    def hop(self, buffer: int, sent: int, received: int) -> Hop:
        """Start to send the block of rank ``sent`` to the next rank, and to receive that of ``received``.

        ``buffer`` holds the sent block; the other buffer receives.
        """
        call = self.call
        group = dist.group.WORLD if call.group is None else call.group
        operations = []
        for kind, owner, place, direction in ((dist.isend, sent, buffer, 1), (dist.irecv, received, 1 - buffer, -1)):
            elements = self.batch * self.sizes[owner] * sum(map(prod, self.shapes))
            peer = dist.get_global_rank(group, (call.rank + direction) % call.ranks)
            if elements:
                operations.append(dist.P2POp(kind, self.buffers[place][:elements], peer, call.group))
        return Hop(operations, self.block(1 - buffer, received))


class PendingKeys:
    """K and V of a step, with their messages in flight."""

    def __init__(self, works: Sequence[dist.Work], keys: Sequence[Tensor]):
        self.works, self.keys = works, keys

    def wait(self) -> Sequence[Tensor]:
        """Make later kernels wait for the messages, and return K and V."""
        for work in self.works:
            work.wait()
        self.works = ()  # they hold the sent tensors
        return self.keys


class AllGather:
    """All-gathers of K and V, the key heads ``steps[i]`` in step i, into two buffers that alternate.

    A gathered buffer is in rank order, tokens outermost. Each rank has room for T tokens, the most that a rank holds; the
    room behind a smaller shard is not written. K and V are views of it with one stride from token to token:

        packed      (W T, b, heads, d + dv)                            one message for K and V
        separate    (W T, b, heads, d), then (W T, b, heads, dv)       two messages

    Memory: 2 (1 for a single step) x W T b (most heads of a step) (d + dv) elements of the inputs' dtype.
    Traffic: in each step a rank receives (W - 1) T b (heads) (d + dv) elements.
    """

    def __init__(self, k: Tensor, v: Tensor, call: Call, steps: Sequence[range], pack_first: bool):
        self.k, self.v, self.call, self.steps, self.pack_first = k, v, call, steps, pack_first
        self.transport = transport_for(call.group, k.device)
        elements = _elements(call, k.shape[0], max(map(len, steps)), k.shape[-1] + v.shape[-1])
        names = [f"gather {slot}" for slot in range(min(2, len(steps)))]
        self.buffers = [self.transport.empty(name, elements, k.dtype, k.device) for name in names]

    def fetch(self, step: int) -> PendingKeys:
        """Start to gather the heads of a step: K (b, W T, heads, d) and V (b, W T, heads, dv)."""
        heads, buffer = self.steps[step], self.buffers[step % 2]
        own = [x[:, :, heads.start : heads.stop] for x in (self.k, self.v)]
        widths = [x.shape[-1] for x in own]
        messages = [sum(widths)] if self.pack_first and step == 0 else widths
        size = self.call, self.k.shape[0], len(heads)
        gathered = buffer[: _elements(*size, sum(widths))].split([_elements(*size, width) for width in messages])
        keys = [_rank_order(x, *size, width) for x, width in zip(gathered, messages, strict=True)]
        keys = keys if len(keys) == 2 else list(keys[0].split(widths, -1))
        first = self.call.rank * padded_tokens(self.call.layout)
        with self.transport.on_communication_stream():
            for target, source in zip(keys, own, strict=True):
                target[:, first : first + source.shape[1]].copy_(source)
            works = [self.transport.all_gather(x) for x in gathered]
        if step:  # the next kernel fills all SMs: a gather that starts later would wait for its end
            self.transport.wait_until_started()
        return PendingKeys(works, keys)


class ReduceScatter:
    """Sums over the ranks of dk and dv, the key heads ``steps[i]`` in step i, through two buffers that alternate.

    `stage` returns the buffer of a step, in reduce_dtype: kernels write the partial gradients of all ranks' keys there.
    `start` exchanges them all to all. `finish` sums the received parts in rank order and writes dk and dv of the own keys.
    While one buffer is in flight, kernels write the other one. Each buffer has at most one exchange in flight.

    Memory: 2 (1 for a single step) buffers to send and as many to receive, in reduce_dtype. A buffer has W T b (most heads of
    a step) (d + dv) elements. Traffic: one message a step; a rank receives (W - 1) T b (heads) (d + dv) elements.
    """

    def __init__(self, dk: Tensor, dv: Tensor, call: Call, steps: Sequence[range]):
        self.grads, self.call, self.steps = (dk, dv), call, steps
        self.transport = transport_for(call.group, dk.device)
        self.widths = [dk.shape[-1], dv.shape[-1]]
        elements = _elements(call, dk.shape[0], max(map(len, steps)), sum(self.widths))
        slots = range(min(2, len(steps)))
        self.sent, self.received = (
            [self.transport.empty(f"{name} {slot}", elements, call.reduce_dtype, dk.device) for slot in slots]
            for name in ("send", "receive")
        )
        self.pending: list[tuple[dist.Work, int] | None] = [
            None,
            None,
        ]  # by buffer: the exchange in flight and its step

    def stage(self, step: int, keys: slice) -> Sequence[Tensor]:
        """Return dk and dv (b, keys, heads, width) of these gathered ``keys``, to be written; set those of other keys to 0."""
        return zero_outside(self._view(self.sent, step), keys).split(self.widths, -1)

    def start(self, step: int) -> "PendingReduction":
        """Exchange the staged gradients. Raise RuntimeError if the last exchange of the buffer is not finished."""
        slot = step % 2
        if self.pending[slot] is not None:
            raise RuntimeError(f"step {step} needs buffer {slot}, where an exchange is in flight: finish it first")
        elements = self._elements_of(step)
        work = self.transport.all_to_all(self.received[slot][:elements], self.sent[slot][:elements])
        self.pending[slot] = work, step
        return PendingReduction(self, slot)

    def finish(self, slot: int) -> None:
        """Write the sums of the exchange that is in flight in a buffer, if any. Later kernels may read them in dk and dv."""
        pending, self.pending[slot] = self.pending[slot], None
        if pending is None:
            return
        (work, step), room = pending, padded_tokens(self.call.layout)
        heads, tokens = self.steps[step], self.grads[0].shape[1]
        with self.transport.on_communication_stream(after_compute=False):
            work.wait()
            received = self._view(self.received, step).unflatten(1, (self.call.ranks, room))[:, :, :tokens]
            for grad, part in zip(self.grads, received.split(self.widths, -1), strict=True):
                sum_ranks(part, grad[:, :, heads.start : heads.stop])
        self.transport.join()

    def _elements_of(self, step: int) -> int:
        return _elements(self.call, self.grads[0].shape[0], len(self.steps[step]), sum(self.widths))

    def _view(self, buffers: list[Tensor], step: int) -> Tensor:
        flat = buffers[step % 2][: self._elements_of(step)]
        return _rank_order(flat, self.call, self.grads[0].shape[0], len(self.steps[step]), sum(self.widths))


class PendingReduction:
    """An exchange of gradients in flight."""

    def __init__(self, reduction: ReduceScatter, slot: int):
        self.reduction, self.slot = reduction, slot

    def wait(self) -> None:
        """Finish it."""
        self.reduction.finish(self.slot)


def zero_outside(x: Tensor, tokens: slice) -> Tensor:
    """Return x[:, tokens] for a kernel to write, and set the rest of x to 0."""
    x[:, : tokens.start] = 0
    x[:, tokens.stop :] = 0
    return x[:, tokens]


@cached_plan
def padded_tokens(layout: Layout) -> int:
    """Return T, the most tokens that a rank holds: each rank has room for T tokens in a gathered buffer."""
    return max(map(layout.size, range(layout.ranks)))


@cached_plan
def gathered_mask(layout: Layout, mask: Mask, rank: int) -> Mask:
    """Return the mask between the queries of ``rank`` and a gathered buffer. Room behind small shards is masked."""
    room = padded_tokens(layout)
    if room * layout.ranks == layout.tokens:
        return layout.local_mask(mask, rank, range(layout.ranks))
    bands = [band.shift(0, r * room) for r in range(layout.ranks) for band in layout.local_mask(mask, rank, r).bands]
    return Mask.of_disjoint(joined(bands), layout.size(rank), layout.ranks * room)


def _elements(call: Call, batch: int, heads: int, width: int) -> int:
    return call.ranks * padded_tokens(call.layout) * batch * heads * width


def _rank_order(flat: Tensor, call: Call, batch: int, heads: int, width: int) -> Tensor:
    """Return a flat buffer, tokens outermost, as (b, W T, heads, width)."""
    return flat.view(call.ranks * padded_tokens(call.layout), batch, heads, width).transpose(0, 1)
