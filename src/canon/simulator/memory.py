"""Simulate shared memory with race detection, and TMA descriptors of tensors.

Each access is recorded until a later write covers it. Its epoch is the clock of its partition, or
the phase of a barrier for TMA loads. Three errors are found in every interleaving:

    a read that no barrier orders after the write        the value is tainted
    a write that no barrier orders after a read          a fault at once, with both places
    a read by the async proxy (wgmma, TMA) of a store    a fault at once
      without fence_async_shared in between

A kernel may drop a tainted value (NaN). To store it, branch on it or use it as an address raises
the fault."""

from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from canon.simulator.barriers import Barrier
from canon.simulator.program import Fault, Partition, Place, here
from canon.simulator.values import MEMORY, Tensor, held, number, type_of

# bytes of a CTA on sm_90: CUDA Programming Guide, 16.2
MAX_SHARED = 232448

Region = tuple[int, tuple[tuple[int, int], ...]]  # first element; (stride, size) of each axis


@lru_cache(maxsize=4096)
def elements(region: Region) -> frozenset[int]:
    """Return the indices of a region's elements."""
    offset, axes = region
    places = torch.tensor([offset])
    for stride, size in axes:
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    return frozenset(places.tolist())


@lru_cache(maxsize=65536)
def overlap(a: Region, b: Region) -> bool:
    """Return whether two regions share elements."""
    return a == b or not elements(a).isdisjoint(elements(b))


@lru_cache(maxsize=65536)
def covers(a: Region, b: Region) -> bool:
    """Return whether region a contains region b."""
    return a == b or elements(a) >= elements(b)


class Access:
    """A read or a write, in flight until it has an ``epoch`` of the clock of ``owner``."""

    def __init__(self, region: Region, what: str, by: Partition, write: bool, asynchronous: bool):
        self.region, self.what, self.by, self.write = region, what, by, write
        self.asynchronous = asynchronous
        self.owner = by.id
        self.epoch: int | None = None if asynchronous else by.clock[by.id]
        self.fenced: int | None = None
        self.place = Place()

    def __str__(self) -> str:
        return f"{self.what} of {self.by.name} at {self.place}"

    def before(self, me: Partition) -> bool:
        return self.epoch is not None and me.clock.get(self.owner, 0) >= self.epoch

    def unfinished(self) -> str:
        return (
            f"the {self} is still in flight"
            if self.epoch is None
            else f"no barrier says that the {self} is over"
        )

    def visible(self, me: Partition) -> bool:
        return self.asynchronous or (
            self.fenced is not None and me.clock.get(self.by.id, 0) >= self.fenced
        )


class Allocation:
    """A piece of shared memory."""

    def __init__(self, kind: Any, shape: list[int], layout: Any):
        program = here().program
        dtype = MEMORY[kind.name]
        self.data = garbage(torch.empty(shape, dtype=dtype))
        self.kind, self.accesses = kind, []
        self.name = f"shared memory {program.allocations} (allocated at {Place()})"
        self.barriers: list[Barrier] = []
        if isinstance(layout, gl.nvidia.hopper.mbarrier.MBarrierLayout):
            names = (
                f"barrier {program.allocations}[{i}] of {Place()}" for i in range(self.data.numel())
            )
            self.barriers = [Barrier(program, name) for name in names]
            program.barriers += self.barriers
        program.allocations += 1
        program.shared_bytes += self.data.numel() * dtype.itemsize
        if program.shared_bytes > MAX_SHARED:
            raise Fault(
                f"{program.shared_bytes} bytes of shared memory, {MAX_SHARED} are there, "
                f"at {Place()}"
            )

    def read(
        self, region: Region, what: str, asynchronous: bool = False
    ) -> tuple[Access | None, str | None]:
        """Return (access, None), or (None, reason) if the value is garbage."""
        me, written = here(), False
        access = Access(region, what, me, False, asynchronous)
        for other in self.accesses:
            if not other.write or not overlap(other.region, region):
                continue
            written = True
            if not other.before(me):
                return None, f"{access} reads {self.name}, but {other.unfinished()}"
            if asynchronous and not other.visible(me):
                raise Fault(
                    f"{access} reads {self.name}, but there is no fence_async_shared "
                    f"after the {other}"
                )
        if not written:
            return None, f"{access} reads {self.name}, but no store has reached it"
        self._keep_latest(access)
        self.accesses.append(access)
        return access, None

    def settle(self, access: Access) -> None:
        access.epoch = access.by.clock[access.by.id]
        self._keep_latest(access)

    def _keep_latest(self, access: Access) -> None:
        """Drop earlier reads of the region: what follows this one follows them."""
        if access.epoch is None:
            return
        mine = access.owner, access.region
        self.accesses = [
            a
            for a in self.accesses
            if a is access or a.write or a.epoch is None or (a.owner, a.region) != mine
        ]

    def write(self, region: Region, what: str, asynchronous: bool = False) -> Access:
        """Raise Fault if an overlapping access may be in flight."""
        me = here()
        access = Access(region, what, me, True, asynchronous)
        for other in self.accesses:
            if not overlap(other.region, region):
                continue
            if not other.before(me):
                raise Fault(f"{access} overwrites {self.name}, but {other.unfinished()}")
            if asynchronous and other.write and not other.visible(me):
                raise Fault(
                    f"{access} overwrites {self.name}, but there is no fence_async_shared "
                    f"after the {other}"
                )
        self.accesses = [a for a in self.accesses if not covers(region, a.region)]
        self.accesses.append(access)
        return access


class Shared:
    """A shared memory descriptor: a view of an allocation."""

    def __init__(self, allocation: Allocation, data: torch.Tensor, layout: Any):
        self.allocation, self.data, self.layout = allocation, data, layout
        self.shape = list(data.shape)
        axes = sorted(
            (a for a in zip(data.stride(), data.shape, strict=True) if a[1] > 1), reverse=True
        )
        self.region: Region = (data.storage_offset(), tuple(axes))

    @property
    def dtype(self):
        return self.allocation.kind

    @property
    def barrier(self) -> Barrier:
        return self.allocation.barriers[self.data.storage_offset()]

    def _view(self, data: torch.Tensor) -> "Shared":
        return Shared(self.allocation, data, self.layout)

    def index(self, index):
        i = number(index)
        if not 0 <= i < self.shape[0]:
            raise Fault(f"index {i} of {self.shape[0]} in {self.allocation.name}, at {Place()}")
        return self._view(self.data[i])

    def slice(self, start, length, dim=0):
        return self._view(self.data.narrow(dim, start, length))

    def permute(self, order):
        return self._view(self.data.permute(*order))

    def reshape(self, shape):
        return self._view(self.data.view(*shape))

    def load(self, layout=None):
        _, taint = self.allocation.read(self.region, "load")
        return Tensor(held(garbage(self.data) if taint else self.data.clone()), self.dtype, taint)

    def store(self, value):
        if value.taint:
            raise Fault(value.taint)
        access = self.allocation.write(self.region, "store")
        here().unfenced.append(access)
        self.data.copy_(value.data)


def garbage(like: torch.Tensor) -> torch.Tensor:
    """Return the result of an early read."""
    return torch.full_like(like, float("nan") if like.dtype.is_floating_point else 77)


def allocate_shared_memory(element_ty, shape, layout):
    """Return new shared memory, filled with NaN."""
    allocation = Allocation(element_ty, list(shape), layout)
    return Shared(allocation, allocation.data, layout)


class Descriptor:
    """A TMA descriptor of a tensor on the CPU."""

    def __init__(self, host: Any):
        base, size = host.base, host.base.element_size()
        self.layout = host.layout
        self.dtype = type_of(base)
        self.block_shape = [int(n) for n in host.block_shape]
        self.block_type = gl.block_type(self.dtype, self.block_shape)
        shape, strides = [int(n) for n in host.shape], [int(n) for n in host.strides]
        if base.data_ptr() % 16 or any(n * size % 16 for n in strides[:-1]) or strides[-1] != 1:
            raise Fault(
                "TMA wants addresses and strides that are multiples of 16 bytes, got "
                f"strides {strides}"
            )
        self._data = base.detach().as_strided(shape, strides)

    def box(self, coordinates: list[int], tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the part of the block inside the tensor, as views of both."""
        inside, outside = self._data, tile.view(self.block_shape)
        for axis, (c, n) in enumerate(zip(coordinates, self.block_shape, strict=True)):
            first = min(max(c, 0), self._data.shape[axis])
            stop = max(first, min(c + n, self._data.shape[axis]))
            inside = inside.narrow(axis, first, stop - first)
            outside = outside.narrow(axis, first - c if stop > first else 0, stop - first)
        return inside, outside

    def check(self, coordinates: list[int]) -> None:
        if coordinates[-1] * self._data.element_size() % 16:
            raise Fault(
                f"the innermost coordinate {coordinates[-1]} is no multiple of 16 bytes, "
                f"at {Place()}"
            )
