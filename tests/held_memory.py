"""Count the bytes of tensors that a block of a program holds at a time."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from canon.route import operators


class Held(TorchDispatchMode):
    """Measure ``peak``, the largest number of bytes that this thread's storages from inside the
    block hold at a time.
    """

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "canon":  # measured inside the operator
            with self:
                return operators.BODIES[func._opname](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        for storage in [
            x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)
        ]:
            if storage._cdata not in given | self.sizes.keys():
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result
