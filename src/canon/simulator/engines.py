"""Simulate Hopper's asynchronous operations.

operation   start                          end
TMA load    fills its tile with NaN        it lands: its barrier receives the bytes
wgmma       enters its partition's queue   the warpgroup_mma_wait that takes it off
TMA add     enters its partition's queue   store_wait (read), or the program's end (written)
"""

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from canon.simulator.barriers import Barrier, NamedBarrier
from canon.simulator.language import let_others, load
from canon.simulator.memory import Access, Allocation, Descriptor, Shared, garbage
from canon.simulator.program import Fault, Place, here
from canon.simulator.values import Tensor, number

init = lambda mbarrier, count: mbarrier.barrier.init(count)


def expect(mbarrier, bytes, pred=True):
    """Count one arrival, and bytes to wait for."""
    if number(pred):
        mbarrier.barrier.arrive(1, number(bytes))


def arrive(mbarrier, *, count=1, pred=True):
    """`mbarrier.arrive`."""
    if number(pred):
        mbarrier.barrier.arrive(count)
        here().program.step()


def wait(mbarrier, phase, pred=True, deps=()):
    """`mbarrier.wait`."""
    if number(pred):
        mbarrier.barrier.wait(int(number(phase)))


def fence_async_shared():
    """Make this partition's stores visible to wgmma and TMA."""
    me = here()
    for access in me.unfenced:
        access.fenced = me.clock[me.id]
    me.unfenced = []


def named_barrier(kind, number):
    """Wait for two warpgroups at a hardware barrier ("sync"), or arrive there ("arrive")."""
    program = here().program
    program.named.setdefault(number, NamedBarrier(number)).arrive(stay=kind == "sync")
    program.step()


@dataclass(eq=False)
class Load:
    """A TMA load in flight."""

    descriptor: Descriptor
    coordinates: list[int]
    barrier: Barrier
    view: Shared
    access: Access

    def __post_init__(self):
        self.started = here().program.note("load", self.descriptor.block_type.nbytes)

    def land(self) -> None:
        self.view.data.zero_()
        source, mine = self.descriptor.box(self.coordinates, self.view.data)
        mine.copy_(source)
        barrier = self.barrier.name, self.barrier.phase
        self.barrier.program.note("done", self.descriptor.block_type.nbytes, barrier, self.started)
        self.access.owner = self.barrier.id
        self.access.epoch = self.barrier.receive(self.descriptor.block_type.nbytes)


@dataclass(eq=False)
class Add:
    """A TMA add in flight."""

    descriptor: Descriptor
    coordinates: list[int]
    view: Shared
    access: Access

    def __post_init__(self):
        self.started = here().program.note("add", self.descriptor.block_type.nbytes)
        self.written = here().program.draws()
        if self.written:
            self.write(self.view.data)

    def write(self, data: torch.Tensor) -> None:
        target, mine = self.descriptor.box(self.coordinates, data)
        target.add_(mine)

    def complete(self) -> None:
        """A delayed write follows at the program's end."""
        self.view.allocation.settle(self.access)
        here().program.note("done", self.descriptor.block_type.nbytes, of=self.started)
        if not self.written:
            data = self.view.data.clone()
            self.access.by.program.late.append((self.access.by, lambda: self.write(data)))


def async_copy_global_to_shared(tensor_desc, coord, barrier, result, pred=True):
    """`tma.async_load`."""
    if not number(pred):
        return
    coordinates = [number(c) for c in coord]
    tensor_desc.check(coordinates)
    barrier.barrier.valid()
    access = result.allocation.write(result.region, "TMA load", asynchronous=True)
    result.data.copy_(garbage(result.data))
    program = here().program
    program.loads.append(Load(tensor_desc, coordinates, barrier.barrier, result, access))
    if program.order == "early":
        program.land()
    program.step()


def reduce_add(desc: Descriptor, coord: Any, smem: Shared) -> None:
    """Add a tile to a box of a tensor."""
    if here().acquired:
        raise Fault(f"TMA writes behind an acquire without fence.proxy.async.global, at {Place()}")
    coordinates = [number(c) for c in coord]
    desc.check(coordinates)
    access, taint = smem.allocation.read(smem.region, "TMA add", asynchronous=True)
    if access is None:
        raise Fault(taint)
    here().adds.append(Add(desc, coordinates, smem, access))
    here().program.step()


def store_wait(pendings):
    """Wait until all but the newest adds have read shared memory."""
    adds = here().adds
    while len(adds) > number(pendings):
        adds.pop(0).complete()


def look(place):
    """Load with acquire, after other programs. TMA sees the data only after `fence_acquired`."""
    let_others()
    found = load(place)
    here().acquired = True
    here().look(place.data, found.data)
    return found


def fence_acquired() -> None:
    """Stand-in for ``fence.proxy.async.global``."""
    here().acquired = False


def await_written() -> None:
    """Wait until this partition's adds are written."""
    store_wait(0)
    me, program = here(), here().program
    for late in [x for x in program.late if x[0] is me]:
        program.late.remove(late)
        late[1]()


def in_steps(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    """Return a @ b + ``total`` in float32, by 16 columns of a: columns of b do not mix."""
    for products in a.unflatten(1, (-1, 16)).transpose(0, 1) @ b.unflatten(0, (-1, 16)):
        total = products.float() if total is None else total + products.float()
    return total


class _Product:
    def __init__(self, a: Any, b: Shared, before: Any, shape: list[int]):
        self.a, self.b, self.before, self.shape = a, b, before, shape
        self.place, self.value, self.taint = Place(), None, None
        self.started = here().program.note("wgmma", 2 * shape[0] * shape[1] * a.shape[1])
        self.reads: list[tuple[Allocation, Access]] = []
        for operand in (a, b):
            if isinstance(operand, Shared):
                access, taint = operand.allocation.read(operand.region, "wgmma", asynchronous=True)
                self.taint = self.taint or taint
                if access:
                    self.reads.append((operand.allocation, access))
            else:
                self.taint = self.taint or operand.taint
        if before is not None:
            self.taint = (
                self.taint or (before.product if isinstance(before, Pending) else before).taint
            )

    def __str__(self) -> str:
        return f"wgmma at {self.place}"

    def compute(self) -> torch.Tensor:
        if self.value is None:
            if self.taint:
                self.value = torch.full(self.shape, float("nan"))
            else:
                before = self.before
                if before is not None:
                    before = (
                        before.product.compute() if isinstance(before, Pending) else before.data
                    )
                self.value = in_steps(self.a.data.double(), self.b.data.double(), before)
            self.a = self.b = self.before = None
        return self.value

    def complete(self) -> None:
        self.compute()
        for allocation, access in self.reads:
            allocation.settle(access)
        here().program.note("done", of=self.started)
        self.reads = []


class Pending(Tensor):
    """The result of a wgmma in flight, for another wgmma or warpgroup_mma_wait only."""

    def __init__(self, product: _Product):
        self.product, self.dtype, self.memory = product, gl.float32, None

    @property
    def data(self):
        raise Fault(
            f"the result of a wgmma is used before warpgroup_mma_wait, at {Place()}: {self.product}"
        )

    @property
    def taint(self):
        return self.data

    @property
    def shape(self):
        return self.product.shape


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=True):
    """Multiply float16 or bfloat16 operands, accumulated in float32."""
    me = here()
    product = _Product(a, b, acc if number(use_acc) else None, [a.shape[0], b.shape[1]])
    me.products.append(product)
    if me.program.draws():
        product.compute()
    me.program.step()
    return Pending(product)


def warpgroup_mma_wait(num_outstanding=0, *, deps):
    """Return the results. The newest wgmma stay pending."""
    products = here().products
    while len(products) > num_outstanding:
        products.pop(0).complete()
    results = [
        Tensor(x.product.compute(), gl.float32, x.product.taint)
        if isinstance(x, Pending) and x.product not in products
        else x
        for x in deps
    ]
    return results[0] if len(results) == 1 else tuple(results)


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """`gl.warp_specialize`."""
    parts = [(f.name, lambda f=f, x=x: f(*x)) for f, x in functions_and_args]
    return here().program.specialise(parts, list(worker_num_warps))
