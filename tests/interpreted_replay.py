"""Replay recorded passes through Triton's interpreter,
with arguments rebuilt on the new tensors.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from canon.fast.kernels import launcher
from canon.fast.replay.recorder import Launch, Place, Zero
from canon.fast.replay.recordings import PreparedPass
from canon.masks.plan_cache import PLANS


class InterpretedPass(PreparedPass):
    """A pass on CPU tensors."""

    _bound = staticmethod(lambda operations, place: _Interpreted(operations, place))

    def replay(self, tensors: tuple[Tensor, ...], addresses: list[int]) -> None:
        room = [torch.empty(self.bytes, dtype=torch.uint8)] if self.bytes else []
        self._run((*tensors, *self.held, *room))


EVERYWHERE = {"cuda": PreparedPass, "cpu": InterpretedPass}


def recorded():
    """Return the recorded passes of this process."""
    plans = [entry.plan for entry in list(PLANS.plans.values())]
    return [x for x in plans if isinstance(x, PreparedPass)]


class _Interpreted:
    def __init__(self, operations: list[Launch | Zero], place: Callable[[Place], Place]):
        self.operations, self.place = operations, place

    def __call__(self, buffers: tuple[Tensor, ...]) -> None:
        for operation in self.operations:
            if isinstance(operation, Zero):
                p = self.place(operation.place)
                _bytes_at(buffers[p.slot], p.offset, operation.bytes).zero_()
            else:
                arguments = self._rebuilt(operation.arguments, operation, buffers)
                launcher.launch(
                    operation.kernel,
                    operation.blocks,
                    buffers[0].device,
                    arguments,
                    **operation.constants,
                )

    def _rebuilt(self, arguments: tuple, launch: Launch, buffers: tuple[Tensor, ...]) -> tuple:
        made = []
        for x in arguments:
            if isinstance(x, tuple):
                made.append(self._rebuilt(x, launch, buffers))
            elif isinstance(x, Tensor):
                made.append(self._moved(x, launch, buffers))
            elif isinstance(getattr(x, "base", None), Tensor):
                made.append(copy.copy(x))
                made[-1].base = self._moved(x.base, launch, buffers)
            else:
                made.append(x)
        return tuple(made)

    def _moved(self, x: Tensor, launch: Launch, buffers: tuple[Tensor, ...]) -> Tensor:
        p = self.place(launch.places[id(x)])
        whole = buffers[p.slot]
        start = whole.data_ptr() + p.offset - whole.untyped_storage().data_ptr()
        moved = torch.empty(0, dtype=x.dtype)
        return moved.set_(whole.untyped_storage(), start // x.element_size(), x.shape, x.stride())


def _bytes_at(x: Tensor, offset: int, count: int) -> Tensor:
    start = x.data_ptr() + offset - x.untyped_storage().data_ptr()
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage(), start, (count,), (1,))
