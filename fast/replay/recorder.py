"""Record the kernels, temporaries, zeros and plans of a pass, each address as (buffer, offset)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Most bytes of temporaries in a replayed pass, which holds all at once. Larger passes run
# as written and free each one early; the GPU hides their host time.
MOST_BYTES = 1 << 28


def _operators(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# Views, and operators that change no memory.
_HARMLESS = _operators(
    "alias as_strided detach expand lift_fresh narrow permute reshape select slice split "
    "split_with_sizes squeeze t "
    "transpose unbind unflatten unsqueeze view _reshape_alias _unsafe_view record_stream"
)
_MAKES = _operators("empty empty_like empty_strided new_empty new_empty_strided")
_MAKES_ZEROS = _operators("zeros zeros_like new_zeros")


class NotReplayable(Exception):
    """Why a pass cannot be replayed."""


@dataclass(frozen=True)
class Place:
    """An address: ``offset`` bytes into tensor ``slot`` of the pass and then of its plans, or into
    temporary n if it is -1 - n.
    """

    slot: int
    offset: int


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and its arguments. ``compiled`` is None where kernels are interpreted."""

    kernel: Any
    compiled: Any
    blocks: int
    arguments: tuple
    constants: dict[str, Any]
    places: dict[int, Place]  # by id of a tensor among the arguments


@dataclass(frozen=True)
class Zero:
    """``bytes`` of zeros at a place."""

    place: Place
    bytes: int


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """A note of all that a pass does with its ``tensors``."""

    tensors: tuple[Tensor, ...]
    temporaries: list[Tensor] = field(default_factory=list)
    zeroed: set[int] = field(default_factory=set)  # temporaries that start as zeros
    used: set[int] = field(default_factory=set)  # temporaries that a launch has used
    operations: list[Launch | Zero] = field(default_factory=list)
    plans: list[Tensor] = field(default_factory=list)
    reason: str = ""
    # by address; the recorder keeps all tensors alive
    places: dict[int, Place] = field(default_factory=dict)

    def __post_init__(self):
        super().__init__()
        for slot, given in enumerate(self.tensors):
            self._begins(given, Place(slot, 0))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else the first call imports PyTorch's compiler."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name, device = func._schema.name, self.tensors[0].device
        if name in _MAKES or name in _MAKES_ZEROS:
            if result.device == device and not self.reason:
                self._begins(result, Place(-1 - len(self.temporaries), 0))
                self.temporaries.append(result)
                if name in _MAKES_ZEROS:
                    self.zeroed.add(len(self.temporaries) - 1)
                if sum(x.untyped_storage().nbytes() for x in self.temporaries) > MOST_BYTES:
                    self.give_up(f"the pass allocates more than {MOST_BYTES >> 20} MB")
        elif name == "aten::zero_" or (name == "aten::fill_" and args[1] == 0):
            self._zero(args[0])
        elif name not in _HARMLESS and any(
            isinstance(x, Tensor) and x.device == device for x in args
        ):
            self.give_up(f"the pass calls {name}")
        return result

    def give_up(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.temporaries.clear()

    def launched(
        self, kernel: Any, compiled: Any, blocks: int, arguments: tuple, constants: dict[str, Any]
    ) -> None:
        if self.reason:
            return
        try:
            places = {id(x): self._place(x) for x in tensors_of(arguments)}
        except NotReplayable as error:
            self.give_up(str(error))
            return
        self.used |= {-1 - place.slot for place in places.values() if place.slot < 0}
        self.operations.append(Launch(kernel, compiled, blocks, arguments, constants, places))

    def planned(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            if not any(x is plan for plan in self.plans):
                self._begins(x, Place(len(self.tensors) + len(self.plans), 0))
                self.plans.append(x)

    def _zero(self, x: Tensor) -> None:
        if self.reason:
            return
        try:
            place = self._place(x)
        except NotReplayable as error:
            self.give_up(str(error))
            return
        if place.slot >= len(self.tensors):
            self.give_up("the pass sets a plan to zero")
        elif not x.is_contiguous():
            self.give_up("the pass sets a tensor with gaps to zero")
        elif place.slot >= 0:
            self.operations.append(Zero(place, x.numel() * x.element_size()))
        elif (
            place.offset
            or x.numel() != self.temporaries[-1 - place.slot].numel()
            or -1 - place.slot in self.used
        ):
            self.give_up("the pass sets a temporary to zero late, or a part of it")
        else:
            self.zeroed.add(-1 - place.slot)

    def _begins(self, x: Tensor, place: Place) -> None:
        if x.numel():  # empty tensors may share an address
            self.places.setdefault(x.data_ptr(), place)

    def _place(self, x: Tensor) -> Place:
        address = x.data_ptr()
        if (place := self.places.get(address)) is None:
            place = self._searched(x, address)
            self._begins(x, place)
        return place

    def _searched(self, x: Tensor, address: int) -> Place:
        for number, made in enumerate(self.temporaries):
            if _inside(address, made):
                return Place(-1 - number, address - made.untyped_storage().data_ptr())
        for slot, given in enumerate(self.tensors):
            if given.data_ptr() == address:
                return Place(slot, 0)
        slots = [slot for slot, given in enumerate(self.tensors) if _inside(address, given)]
        if len(slots) == 1:
            return Place(slots[0], address - self.tensors[slots[0]].data_ptr())
        if slots:
            raise NotReplayable("the pass reads a part of tensors that share memory")
        for number, plan in enumerate(self.plans):
            if _inside(address, plan):
                return Place(len(self.tensors) + number, address - plan.data_ptr())
        if not x.numel():  # no kernel reads it
            return Place(0, 0)
        raise NotReplayable("the pass reads a tensor that it was not given")


def _inside(address: int, x: Tensor) -> bool:
    storage = x.untyped_storage()
    return storage.data_ptr() <= address < storage.data_ptr() + max(1, storage.nbytes())


def tensors_of(arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors among a launch's arguments, in descriptors and tuples too."""
    for x in arguments:
        if type(x) is int or type(x) is float:
            continue
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors_of(x)
        elif isinstance(base := getattr(x, "base", None), Tensor):
            yield base
