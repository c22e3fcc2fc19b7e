"""Prepared passes: the launches of a pass are recorded in its first call, and replayed by one call into C afterwards.

A pass is a function of tensors that only launches kernels: the forward of one rank, or its backward. A ring step has several
passes: the forward of a block and a merge, or dk and dv, then dq. The launches depend on the kinds of the tensors (shapes,
strides, dtypes, alignment, device) and on the other arguments, never on the numbers in the tensors. So the first call of a
kind runs as written while a `Recorder` notes

    launches       the compiled kernel, its grid and its arguments, each address as (buffer, offset)
    temporaries    tensors that the pass allocates: a replay allocates one workspace for all of them
    zeros          zeroed temporaries lie at the start of the workspace, and one memset clears them; each zeroed result
                   is one memset, at its place among the launches
    plans          tensors of `device_plan`, at fixed addresses: the prepared pass keeps them alive

A replay costs one allocation and one call of `kernels/replay.c`. It works on any stream and inside a captured CUDA graph,
and threads may replay one pass at the same time.

A pass that does anything else with tensors (a copy, a cast, a read of a number) is not replayable. It runs as written in
each call, and `PreparedPass.reason` names the operation. A tensor of unknown origin has the same effect, so a replay never
reads memory that the pass was not given.

Cost of a replay on an H200: see `canon bench host`.
"""

import copy
import struct
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from canon.fast.device import chosen_backend
from canon.fast.device_plans import Upload, keep_for_stream, observed
from canon.fast.kernels import launcher
from canon.fast.kernels.gluon import config as gluon_config
from canon.fast.kernels.triton import config as triton_config
from canon.reference import plan_cache

ALIGNMENT = 256  # bytes, of each temporary inside the workspace
MOST_BYTES = (
    1 << 28
)  # of the workspace; a pass with more frees its temporaries one after another, and is bound by the GPU
REPLAYED = frozenset({"cuda"})  # device types; tests add "cpu", to replay through Triton's interpreter, or leave none


def _operators(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


_VIEWS = _operators(
    *(
        "alias",
        "as_strided",
        "detach",
        "expand",
        "lift_fresh",
        "narrow",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
    ),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "_reshape_alias"),
    "_unsafe_view",
)
_HARMLESS = _VIEWS | _operators("record_stream")  # record_stream changes no memory
_MAKES = _operators("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_MAKES_ZEROS = _operators("zeros", "zeros_like", "new_zeros")
_NUMBERS = {"i1": "<b", "u1": "<B", "i8": "<b", "u8": "<B", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q"}
_NUMBERS |= {"fp32": "<f", "fp64": "<d"}
_HOST_TYPE = {
    8: 10,
    9: 8,
    10: 9,
}  # Triton's number of an element type -> that of CUtensorMapDataType, where they differ


class NotReplayable(Exception):
    """Why a pass cannot be replayed."""


@dataclass(frozen=True)
class Place:
    """An address: ``offset`` bytes into a buffer. Temporary n has ``slot`` -2 - n. With -1 the offset is absolute.

    Slots >= 0 are the pass's tensors, in order.
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
    """Note what a pass does with its ``tensors``."""

    tensors: tuple[Tensor, ...]
    temporaries: list[Tensor] = field(default_factory=list)
    zeroed: set[int] = field(default_factory=set)  # numbers of temporaries that start as zeros
    used: set[int] = field(default_factory=set)  # numbers of temporaries that a launch has read or written
    operations: list[Launch | Zero] = field(default_factory=list)
    plans: list[Tensor] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)
    reason: str = ""

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name, device = func._schema.name, self.tensors[0].device
        if name in _MAKES or name in _MAKES_ZEROS:
            if result.device == device and not self.reason:
                self.temporaries.append(result)
                if name in _MAKES_ZEROS:
                    self.zeroed.add(len(self.temporaries) - 1)
                if sum(x.untyped_storage().nbytes() for x in self.temporaries) > MOST_BYTES:
                    self._give_up(f"the pass allocates more than {MOST_BYTES >> 20} MB")
        elif name == "aten::zero_" or (name == "aten::fill_" and args[1] == 0):
            self._zero(args[0])
        elif name not in _HARMLESS and any(isinstance(x, Tensor) and x.device == device for x in args):
            self._give_up(f"the pass calls {name}")
        return result

    def _give_up(self, reason: str) -> None:
        """Note the first reason, and release the temporaries: the pass runs as written, and frees them early."""
        self.reason = self.reason or reason
        self.temporaries.clear()

    def launched(self, kernel: Any, compiled: Any, blocks: int, arguments: tuple, constants: dict[str, Any]) -> None:
        """Note a launch, which has just been made."""
        if self.reason:
            return
        try:
            places = {id(x): self._place(x) for x in _tensors(arguments)}
        except NotReplayable as error:
            self._give_up(str(error))
            return
        self.used |= {-2 - place.slot for place in places.values() if place.slot <= -2}
        self.operations.append(Launch(kernel, compiled, blocks, arguments, constants, places))

    def planned(self, tensors: list[Tensor], upload: Upload | None) -> None:
        """Note the tensors of a plan that the pass has looked up, and their upload."""
        self.plans += tensors
        self.uploads += [] if upload is None else [upload]

    def _zero(self, x: Tensor) -> None:
        if self.reason:
            return
        try:
            place = self._place(x)
        except NotReplayable as error:
            self._give_up(str(error))
            return
        if not x.is_contiguous():
            self._give_up("the pass sets a tensor with gaps to zero")
        elif place.slot >= 0:
            self.operations.append(Zero(place, x.numel() * x.element_size()))
        elif place.offset or x.numel() != self.temporaries[-2 - place.slot].numel() or -2 - place.slot in self.used:
            self._give_up("the pass sets a temporary to zero late, or a part of it")
        else:
            self.zeroed.add(-2 - place.slot)

    def _place(self, x: Tensor) -> Place:
        """Return where ``x`` begins. Raises NotReplayable if that is not known for sure."""
        address = x.data_ptr()
        for number, made in enumerate(self.temporaries):
            if _inside(address, made):
                return Place(-2 - number, address - made.untyped_storage().data_ptr())
        for slot, given in enumerate(self.tensors):
            if given.data_ptr() == address:
                return Place(slot, 0)
        slots = [slot for slot, given in enumerate(self.tensors) if _inside(address, given)]
        if len(slots) == 1:
            return Place(slots[0], address - self.tensors[slots[0]].data_ptr())
        if slots:
            raise NotReplayable("the pass reads a part of tensors that share memory")
        if any(_inside(address, plan) for plan in self.plans) or not x.numel():
            return Place(-1, address)
        raise NotReplayable("the pass reads a tensor that it was not given")


def _inside(address: int, x: Tensor) -> bool:
    storage = x.untyped_storage()
    return storage.data_ptr() <= address < storage.data_ptr() + max(1, storage.nbytes())


def _tensors(arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors among a launch's arguments, those of descriptors and tuples included."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors(x)
        elif isinstance(base := getattr(x, "base", None), Tensor):
            yield base


class PreparedPass:
    """The launches of one pass, for tensors of one kind. ``held`` are the plans' tensors that the launches read."""

    def __init__(self, recorder: Recorder):
        self.device = recorder.tensors[0].device
        self.reason, self.held = recorder.reason, ()
        self.bytes, self._streams, self._uploads = 0, set(), recorder.uploads
        self._run: Callable[..., None] = _nothing
        if self.reason:
            return
        try:
            self._pack(recorder)
        except NotReplayable as error:
            self.reason = str(error)

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes on the host."""
        return 2048 if self.reason else 8192

    def replay(self, tensors: tuple[Tensor, ...], addresses: list[int]) -> None:
        """Enqueue the launches on the current stream. ``addresses`` are those of the tensors."""
        room = torch.empty(self.bytes, dtype=torch.uint8, device=self.device) if self.bytes else None
        if self.device.type == "cpu":
            self._run(tensors, room)
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream not in self._streams or torch._C._cuda_isCurrentStreamCapturing():
            keep_for_stream(*self.held)
            self._streams.add(stream)
        if self._uploads:
            self._uploads = [one for one in self._uploads if one.wait()]
        addresses.append(0 if room is None else room.data_ptr())
        if torch._C._cuda_getDevice() == self.device.index:
            self._run(stream, *addresses)
        else:
            with torch.cuda.device(self.device):
                self._run(stream, *addresses)

    def _pack(self, recorder: Recorder) -> None:
        offsets = self._lay_out(recorder)
        workspace = len(recorder.tensors)

        def place(p: Place) -> Place:
            return Place(workspace, offsets[-2 - p.slot] + p.offset) if p.slot <= -2 else p

        operations = list(recorder.operations)
        zeros = max((end for number, end in self._ends.items() if number in recorder.zeroed), default=0)
        if zeros:
            operations.insert(0, Zero(Place(workspace, 0), zeros))
        launches = [x for x in operations if isinstance(x, Launch)]
        self.held = tuple(
            {
                x.data_ptr(): x for one in launches for x in _tensors(one.arguments) if one.places[id(x)].slot == -1
            }.values()
        )
        if self.device.type == "cpu":
            self._run = _Interpreted(operations, place)
        else:
            native = native_module()
            self._run = partial(native.run, native.make(tuple(_packed(x, place) for x in operations)))

    def _lay_out(self, recorder: Recorder) -> dict[int, int]:
        """Return the offset of each temporary in the workspace, zeroed ones first; set the workspace's size."""
        order = sorted(range(len(recorder.temporaries)), key=lambda number: number not in recorder.zeroed)
        offsets, self._ends = {}, {}
        for number in order:
            offsets[number] = self.bytes
            self.bytes += -(-recorder.temporaries[number].untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
            self._ends[number] = self.bytes
        return offsets


def _nothing(*_: Any) -> None:
    """Launch nothing: the pass is not replayable."""


class _Interpreted:
    """Replay through Triton's interpreter, with arguments rebuilt on the new tensors: for tests on a CPU."""

    def __init__(self, operations: list[Launch | Zero], place: Callable[[Place], Place]):
        self.operations, self.place = operations, place

    def __call__(self, tensors: tuple[Tensor, ...], room: Tensor | None) -> None:
        buffers = (*tensors, *([] if room is None else [room]))
        for operation in self.operations:
            if isinstance(operation, Zero):
                p = self.place(operation.place)
                _bytes_at(buffers[p.slot], p.offset, operation.bytes).zero_()
            else:
                arguments = self._rebuilt(operation.arguments, operation, buffers)
                launcher.launch(
                    operation.kernel, operation.blocks, self.device(buffers), arguments, **operation.constants
                )

    @staticmethod
    def device(buffers: tuple[Tensor, ...]) -> torch.device:
        return buffers[0].device

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
        if p.slot == -1:
            return x
        whole = buffers[p.slot]
        start = whole.data_ptr() + p.offset - whole.untyped_storage().data_ptr()
        moved = torch.empty(0, dtype=x.dtype)
        return moved.set_(whole.untyped_storage(), start // x.element_size(), x.shape, x.stride())


def _bytes_at(x: Tensor, offset: int, count: int) -> Tensor:
    start = x.data_ptr() + offset - x.untyped_storage().data_ptr()
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage(), start, (count,), (1,))


# ---------------------------------------------------------------------- for replay.c
@lru_cache(maxsize=1)
def native_module() -> ModuleType:
    """Compile and load `kernels/replay.c`, with the compiler and the cache that Triton uses for its own launchers.

    Raises NotReplayable if there is no C compiler.
    """
    import triton
    from triton.runtime.build import compile_module_from_src

    source = (Path(__file__).parent / "kernels" / "replay.c").read_text()
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    try:
        return compile_module_from_src(source, "canon_replay", include_dirs=[str(headers)], libraries=["dl"])
    except Exception as error:
        raise NotReplayable(f"kernels/replay.c does not compile: {error}") from error


def _packed(operation: Launch | Zero, place: Callable[[Place], Place]) -> tuple:
    """Return an operation as `replay.c` expects it. Raises NotReplayable for a kernel that `replay.c` cannot launch."""
    if isinstance(operation, Zero):
        p = place(operation.place)
        return 0, p.slot, p.offset, operation.bytes
    compiled = operation.compiled
    metadata = compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"):
        if getattr(metadata, name, 0):
            raise NotReplayable(f"a kernel needs {name}")
    if getattr(metadata, "num_ctas", 1) != 1:
        raise NotReplayable("a kernel has clusters")
    warps, _, shared = compiled.packed_metadata[:3]
    names = operation.kernel.arg_names[len(operation.arguments) :]
    values = (*operation.arguments, *map(operation.constants.get, names))
    maps = iter(metadata.tensordesc_meta or ())
    parameters: list[tuple] = []
    for kind, value in zip(compiled.src.signature.values(), values, strict=True):
        parameters += _parameters(kind, value, maps, operation, place)
    parameters += [("b", bytes(8)), ("b", bytes(8))]  # scratch memory, which the kernel does not have
    return compiled.function, operation.blocks, 32 * warps, shared, tuple(parameters)


def _parameters(
    kind: Any, value: Any, maps: Iterator, launch: Launch, place: Callable[[Place], Place]
) -> Iterator[tuple]:
    """Yield the parameters that one argument of a kernel becomes."""
    if isinstance(kind, tuple):
        for some, x in zip(kind, value, strict=True):
            yield from _parameters(some, x, maps, launch, place)
    elif kind == "constexpr":
        return
    elif kind.startswith("*"):
        p = place(launch.places[id(value)])
        yield "p", p.slot, p.offset
    elif kind.startswith("tensordesc"):
        yield from _tensor_map(value, next(maps), launch, place)
    elif kind in _NUMBERS:
        yield "b", struct.pack(_NUMBERS[kind], value)
    else:
        raise NotReplayable(f"a kernel has a parameter of type {kind}")


def _tensor_map(value: Any, metadata: dict | None, launch: Launch, place: Callable[[Place], Place]) -> Iterator[tuple]:
    p = place(launch.places[id(value.base)])
    if (
        metadata is None
        or metadata.get("fp4_padded")
        or value.padding != "zero"
        or getattr(value, "round_f32_to_tf32", 0)
    ):
        raise NotReplayable("a kernel has a descriptor of an unusual kind")
    if p.slot < 0:
        raise NotReplayable("a kernel has a descriptor of a plan")
    size, element = metadata["elem_size"], metadata["elem_type"]
    strides = tuple(stride * size for stride in value.strides[:-1])
    box, shape = tuple(metadata["block_size"]), tuple(value.shape)
    yield "m", p.slot, p.offset, _HOST_TYPE.get(element, element), metadata["swizzle"], box, shape, strides
    yield from (("b", struct.pack("<i", n)) for n in value.shape)
    yield from (("b", struct.pack("<q", n)) for n in value.strides)


# ---------------------------------------------------------------------- the cache
def replayed(
    body: Callable[..., None],
    tensors: tuple[Tensor | None, ...],
    *options: Hashable,
    kind: Hashable = None,
) -> None:
    """Do what ``body(*tensors, *options)`` does, from its recording if there is one for such tensors and options.

    ``body`` writes its results into tensors that it is given, and returns None. The first tensor is not None, and its device
    is that of all. Everything else that the launches depend on is in ``options``, or in `_settings`.
    ``kind``: decides shapes, strides, dtypes, alignment and aliases of all tensors, and the options; None derives them.
    """
    first = tensors[0]
    if (
        first.device.type not in REPLAYED
        or gluon_config.FORCED
        or triton_config.FORCED
        or launcher.is_recording()  # the launches belong to the pass that is being recorded
    ):
        body(*tensors, *options)
        return
    given = tuple([x for x in tensors if x is not None])
    addresses = [x.data_ptr() for x in given]
    if kind is None:
        kinds = [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]
        kind = (options, *kinds, *[address & 15 for address in addresses], first.device, _aliases(addresses))
    key = (body, kind, _settings(first))
    found = plan_cache.PLANS.get(key)
    if found is None:
        plan_cache.PLANS.put(key, _recorded(partial(_with_none, body, tensors), given, options))
    elif found.reason:
        body(*tensors, *options)
    else:
        found.replay(given, addresses)


def _with_none(body: Callable[..., None], tensors: tuple[Tensor | None, ...], *arguments: Any) -> None:
    """Call ``body`` with the ``tensors``, None included. ``arguments``: those that are not None, then the options."""
    body(*tensors, *arguments[sum(x is not None for x in tensors) :])


def _settings(x: Tensor) -> tuple[Hashable, ...]:
    """Return the settings of the process and the context that decide which kernels are launched."""
    precision = torch.backends.cuda.matmul.fp32_precision if x.dtype == torch.float32 else None
    return chosen_backend(), torch.are_deterministic_algorithms_enabled(), precision


def _aliases(addresses: list[int]) -> tuple[int, ...] | None:
    """Return, for each address, the index of the first equal one; None if all addresses differ."""
    return None if len(set(addresses)) == len(addresses) else tuple(map(addresses.index, addresses))


def _recorded(body: Callable[..., None], tensors: tuple[Tensor, ...], options: tuple) -> PreparedPass:
    recorder = Recorder(tensors)
    with launcher.recording(recorder), observed(recorder.planned), recorder:
        body(*tensors, *options)
    return PreparedPass(recorder)
