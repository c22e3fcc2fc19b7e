"""What moves between the ranks of a ring: blocks of two tensors in one message a hop, between two flat buffers.

A `Lane` has a near and a far buffer, each as large as the largest rank's block. A hop sends the block in one and receives
the previous rank's block in the other; it starts before the kernel that it runs under, on the transport's own stream,
and `wait` makes the compute stream wait, never the host. Two buffers are enough: a hop starts only after every kernel
that reads its receiving buffer has been enqueued, and the transport waits for those.
"""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from canon.reference.call import Call


class Hop:
    """One started hop. `wait` lets the current stream go on once the block is here and the sent one has left."""

    def __init__(self, operations: list[dist.P2POp]):
        self.requests = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        for request in self.requests:
            request.wait()


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
        return Hop(operations)
