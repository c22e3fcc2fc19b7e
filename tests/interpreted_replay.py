"""Replay recorded passes through Triton's interpreter,
with arguments rebuilt on the new tensors.
"""

import copy

import torch
from torch import Tensor

from canon.fast.kernels import launcher
from canon.fast.replay.recorder import Zero
from canon.fast.replay.recordings import PreparedPass
from canon.masks.plan_cache import PLANS


class InterpretedPass(PreparedPass):
    """A pass on CPU tensors."""

    _bound = staticmethod(lambda operations, place: _Interpreted(operations, place))

    def replay(self, tensors, addresses):
        room = [torch.empty(self.bytes, dtype=torch.uint8)] if self.bytes else []
        self._run((*tensors, *self.held, *room))


EVERYWHERE = {"cuda": PreparedPass, "cpu": InterpretedPass}


def recorded():
    """Return the recorded passes of this process."""
    plans = [entry.plan for entry in list(PLANS.plans.values())]
    return [x for x in plans if isinstance(x, PreparedPass)]


class _Interpreted:
    def __init__(self, operations, place):
        self.operations, self.place = operations, place

    def __call__(self, buffers):
        for operation in self.operations:
            if isinstance(operation, Zero):
                self._view(buffers, operation.place, torch.uint8, (operation.bytes,), (1,)).zero_()
            else:
                launcher.launch(
                    operation.kernel,
                    operation.blocks,
                    buffers[0].device,
                    self._rebuilt(operation.arguments, operation, buffers),
                    **operation.constants,
                )

    def _rebuilt(self, x, launch, buffers):
        if isinstance(x, tuple):
            return tuple(self._rebuilt(part, launch, buffers) for part in x)
        if isinstance(x, Tensor):
            place = launch.places[id(x)]
            return self._view(buffers, place, x.dtype, x.shape, x.stride())
        if isinstance(getattr(x, "base", None), Tensor):
            made = copy.copy(x)
            made.base = self._rebuilt(x.base, launch, buffers)
            return made
        return x

    def _view(self, buffers, place, dtype, *sizes):
        p, new = self.place(place), torch.empty(0, dtype=dtype)
        storage = buffers[p.slot].untyped_storage()
        start = buffers[p.slot].data_ptr() + p.offset - storage.data_ptr()
        return new.set_(storage, start // dtype.itemsize, *sizes)
