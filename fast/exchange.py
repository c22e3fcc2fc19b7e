"""What moves between ranks: blocks round a ring, gathered keys, and gradients to be added up; in buffers that are reused.

    schedule    fetch                                  reduce
    ring        `Lane`: one block from rank to rank    `Lane`: a block's gradient, one step behind it
    strided     `Gathers`: some heads of all ranks     `Reductions`: their gradients, all to all, summed in rank order
    magi        `GroupCast`: the tokens needed         `GroupReduce`: their gradients, added in rank order

Lanes, gathers and reductions hold two buffers, which take turns: one travels while the other one is read. (Casts differ in
size, so each has a memory of its own.) A message starts before the kernel that it runs under, and `wait` makes the compute
stream wait, never the host. Two buffers are enough: a message starts only after every kernel that reads its receiving
buffer has been enqueued, and the transport waits for those.
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
    """One started hop. `wait` lets the current stream go on once the block is here, and gives it."""

    def __init__(self, operations: list[dist.P2POp], block: list[Tensor]):
        self.requests, self.block = dist.batch_isend_irecv(operations) if operations else [], block

    def wait(self) -> list[Tensor]:
        for request in self.requests:  # also the sent block's: then its buffer is free
            request.wait()
        return self.block


class Lane:
    """Blocks ``(b, tokens, *shape)``, one per shape, of the rank that owns them; tokens as the layout says.

    Memory: 2 buffers of b * max tokens * sum of the shapes' sizes items. Traffic: one message of the block's size a hop;
    nothing where the block is empty.
    """

    def __init__(self, call: Call, batch: int, shapes: tuple[tuple[int, ...], ...], like: Tensor, dtype: torch.dtype):
        self.call, self.batch, self.shapes = call, batch, shapes
        self.sizes = [call.layout.size(rank) for rank in range(call.ranks)]
        items = batch * max(self.sizes) * sum(map(prod, shapes))
        self.buffers = [like.new_empty(items, dtype=dtype) for _ in range(2 if call.ranks > 1 else 1)]

    def block(self, buffer: int, owner: int) -> list[Tensor]:
        """The tensors of ``owner``'s block, as views of a buffer."""
        tokens, start, views = self.sizes[owner], 0, []
        for shape in self.shapes:
            view = self.buffers[buffer][start : start + self.batch * tokens * prod(shape)]
            views.append(view.view(self.batch, tokens, *shape))
            start += view.numel()
        return views

    def hop(self, buffer: int, sent: int, received: int) -> Hop:
        """Send rank ``sent``'s block from ``buffer`` to the next rank; receive rank ``received``'s in the other one."""
        call = self.call
        everyone = dist.group.WORLD if call.group is None else call.group
        operations = []
        for kind, owner, where, way in ((dist.isend, sent, buffer, 1), (dist.irecv, received, 1 - buffer, -1)):
            items = self.batch * self.sizes[owner] * sum(map(prod, self.shapes))
            peer = dist.get_global_rank(everyone, (call.rank + way) % call.ranks)
            if items:
                operations.append(dist.P2POp(kind, self.buffers[where][:items], peer, call.group))
        return Hop(operations, self.block(1 - buffer, received))


class Gathers:
    """The keys and values of all ranks, a group of heads at a time, in two buffers that take turns.

    A buffer stands in rank order, tokens outermost: T tokens of each rank, T being the most that a rank holds, so the last
    of a smaller shard's are left as they were. K and V are views of it, with one stride from token to token:

        packed      (W T, b, heads, d + dv)                            one message for K and V
        apart       (W T, b, heads, d), then (W T, b, heads, dv)       two

    Memory: 2 (1 for a single step) x W T b (most heads of a step) (d + dv) items of the inputs' dtype. Traffic: with each step
    every rank receives (W - 1) T b (heads) (d + dv) of them.
    """

    def __init__(self, k: Tensor, v: Tensor, call: Call, steps: Sequence[range], pack_first: bool):
        self.k, self.v, self.call, self.steps, self.pack_first = k, v, call, steps, pack_first
        self.way = transport_for(call.group, k.device)
        items = _items(call, k.shape[0], max(map(len, steps)), k.shape[-1] + v.shape[-1])
        names = [f"gather {slot}" for slot in range(min(2, len(steps)))]
        self.slots = [self.way.empty(name, items, k.dtype, k.device) for name in names]

    def fetch(self, step: int) -> "Arriving":
        """Start to gather the heads of a step; `wait` gives K (b, W T, heads, d) and V (b, W T, heads, dv)."""
        heads, slot = self.steps[step], self.slots[step % 2]
        own = [x[:, :, heads.start : heads.stop] for x in (self.k, self.v)]
        widths = [x.shape[-1] for x in own]
        messages = [sum(widths)] if self.pack_first and step == 0 else widths
        size = self.call, self.k.shape[0], len(heads)
        full = slot[: _items(*size, sum(widths))].split([_items(*size, width) for width in messages])
        keys = [_rank_order(x, *size, width) for x, width in zip(full, messages, strict=True)]
        keys = keys if len(keys) == 2 else list(keys[0].split(widths, -1))
        first = self.call.rank * padded_tokens(self.call.layout)
        with self.way.beside():
            for target, source in zip(keys, own, strict=True):
                target[:, first : first + source.shape[1]].copy_(source)
            works = [self.way.all_gather(x) for x in full]
        if step:  # the kernel of the step before comes next, and beside one that fills all processors nothing begins
            self.way.wait_until_started()
        return Arriving(works, keys)


class Arriving:
    """Messages under way. `wait` lets the current stream go on once they are here, and gives K and V."""

    def __init__(self, works: Sequence[dist.Work], keys: Sequence[Tensor]):
        self.works, self.keys = works, keys

    def wait(self) -> Sequence[Tensor]:
        for work in self.works:
            work.wait()
        self.works = ()  # what was sent may go
        return self.keys


class Reductions:
    """Sums over the ranks of dk and dv, a group of heads at a time, through two slots that take turns.

    `stage` says where kernels write a step's partial gradients of all ranks' keys: the slot's buffer, in reduce_dtype. It may
    still be on its way when the next step is written in the other one. `start` exchanges them all to all, `drain` adds up
    what came, in rank order, and writes it where it belongs. At most one exchange is under way in a slot.

    Memory: 2 (1) buffers to send, and as many to receive, of W T b (most heads of a step) (d + dv) items of reduce_dtype.
    Traffic: one message a step, with which every rank receives (W - 1) T b (heads) (d + dv) of them.
    """

    def __init__(self, dk: Tensor, dv: Tensor, call: Call, steps: Sequence[range]):
        self.grads, self.call, self.steps = (dk, dv), call, steps
        self.way = transport_for(call.group, dk.device)
        self.width = dk.shape[-1] + dv.shape[-1]
        items = _items(call, dk.shape[0], max(map(len, steps)), self.width)
        self.sent, self.received = (
            [
                self.way.empty(f"{what} {slot}", items, call.reduce_dtype, dk.device)
                for slot in range(min(2, len(steps)))
            ]
            for what in ("send", "receive")
        )
        self.pending: list[tuple[dist.Work, int] | None] = [None, None]  # by slot: what is under way, and its step

    def stage(self, step: int, columns: slice) -> Sequence[Tensor]:
        """dk and dv (b, keys, heads, width) of the keys ``columns`` of all ranks, to be written; those of the others are 0."""
        return zero_outside(self._view(self.sent, step), columns).split([x.shape[-1] for x in self.grads], -1)

    def start(self, step: int) -> "Leaving":
        """Exchange what was staged. Raises RuntimeError if the slot's last exchange has not been drained."""
        slot, heads = step % 2, len(self.steps[step])
        if self.pending[slot] is not None:
            raise RuntimeError(f"step {step} starts a reduction in slot {slot}, where one is under way: drain it first")
        items = _items(self.call, self.grads[0].shape[0], heads, self.width)
        work = self.way.all_to_all(self.received[slot][:items], self.sent[slot][:items])
        self.pending[slot] = work, step
        return Leaving(self, slot)

    def drain(self, slot: int) -> None:
        """Finish the slot's exchange, if there is one: the sums are in dk and dv for what is launched from here on."""
        pending, self.pending[slot] = self.pending[slot], None
        if pending is None:
            return
        (work, step), room = pending, padded_tokens(self.call.layout)
        heads, tokens = self.steps[step], self.grads[0].shape[1]
        with self.way.beside(after_all=False):
            work.wait()
            received = self._view(self.received, step).unflatten(1, (self.call.ranks, room))[:, :, :tokens]
            parts = received.split([x.shape[-1] for x in self.grads], -1)
            for grad, part in zip(self.grads, parts, strict=True):
                sum_ranks(part, grad[:, :, heads.start : heads.stop])
        self.way.join()

    def _view(self, buffers: list[Tensor], step: int) -> Tensor:
        batch, heads = self.grads[0].shape[0], len(self.steps[step])
        items = _items(self.call, batch, heads, self.width)
        return _rank_order(buffers[step % 2][:items], self.call, batch, heads, self.width)


class Leaving:
    """A reduction under way; `wait` drains it."""

    def __init__(self, reductions: Reductions, slot: int):
        self.reductions, self.slot = reductions, slot

    def wait(self) -> None:
        self.reductions.drain(self.slot)


def zero_outside(x: Tensor, tokens: slice) -> Tensor:
    """x[:, tokens], for a kernel to write; the rest of x becomes 0."""
    x[:, : tokens.start] = 0
    x[:, tokens.stop :] = 0
    return x[:, tokens]


@cached_plan
def padded_tokens(layout: Layout) -> int:
    """T, the most tokens that a rank holds: what each rank has room for in a gathered buffer."""
    return max(map(layout.size, range(layout.ranks)))


@cached_plan
def gathered_mask(layout: Layout, mask: Mask, rank: int) -> Mask:
    """What the queries of ``rank`` see of a gathered buffer, in its coordinates: nobody sees what fills up small shards."""
    room = padded_tokens(layout)
    if room * layout.ranks == layout.tokens:
        return layout.local_mask(mask, rank, range(layout.ranks))
    bands = [band.shift(0, r * room) for r in range(layout.ranks) for band in layout.local_mask(mask, rank, r).bands]
    return Mask(joined(bands), layout.size(rank), layout.ranks * room)


def _items(call: Call, batch: int, heads: int, width: int) -> int:
    return call.ranks * padded_tokens(call.layout) * batch * heads * width


def _rank_order(flat: Tensor, call: Call, batch: int, heads: int, width: int) -> Tensor:
    """A flat buffer, tokens outermost, as (b, W T, heads, width)."""
    return flat.view(call.ranks * padded_tokens(call.layout), batch, heads, width).transpose(0, 1)
