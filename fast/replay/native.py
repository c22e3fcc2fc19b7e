"""Pack the launches of a pass for `replay.c`."""

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from canon.fast.c_modules import c_module
from canon.fast.replay.recorder import Launch, NotReplayable, Place, Zero

_NUMBERS = {
    "i1": "<b",
    "u1": "<B",
    "i8": "<b",
    "u8": "<B",
    "i32": "<i",
    "u32": "<I",
    "i64": "<q",
    "u64": "<Q",
    "fp32": "<f",
    "fp64": "<d",
}
# Triton's number of an element type -> CUtensorMapDataType's, if different
_HOST_TYPE = {8: 10, 9: 8, 10: 9}


@lru_cache(maxsize=1)
def native_module() -> ModuleType:
    """Compile and load `replay.c` with Triton's compiler, or raise NotReplayable."""
    import triton

    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    try:
        return c_module(
            Path(__file__).with_name("replay.c"), include_dirs=[str(headers)], libraries=["dl"]
        )
    except Exception as error:
        raise NotReplayable(f"replay.c does not compile: {error}") from error


def packed(operation: Launch | Zero, place: Callable[[Place], Place]) -> tuple:
    """Return an operation as `replay.c` expects it, or raise NotReplayable."""
    if isinstance(operation, Zero):
        p = place(operation.place)
        return 0, p.slot, p.offset, operation.bytes
    from canon.fast.kernels.cuda.kernel import LoadedKernel  # only with Triton

    compiled = operation.compiled
    if isinstance(compiled, LoadedKernel):
        tensors = operation.arguments[: compiled.kernel.pointers]
        places = [place(operation.places[id(x)]) for x in tensors]
        return compiled.packed(
            operation.blocks, operation.arguments, [(p.slot, p.offset) for p in places]
        )
    metadata = compiled.metadata
    for name in (
        "global_scratch_size",
        "profile_scratch_size",
        "launch_cooperative_grid",
        "launch_pdl",
    ):
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
        _add(parameters, kind, value, maps, operation, place)
    parameters += [("b", bytes(8)), ("b", bytes(8))]  # scratch memory, which the kernel lacks
    return compiled.function, operation.blocks, 32 * warps, shared, tuple(parameters)


def _add(
    parameters: list[tuple],
    kind: Any,
    value: Any,
    maps: Iterator,
    launch: Launch,
    place: Callable[[Place], Place],
) -> None:
    if isinstance(kind, tuple):
        for some, x in zip(kind, value, strict=True):
            _add(parameters, some, x, maps, launch, place)
    elif kind == "constexpr":
        return
    elif kind in _NUMBERS:
        parameters.append(("b", struct.pack(_NUMBERS[kind], value)))
    elif kind.startswith("*"):
        p = place(launch.places[id(value)])
        parameters.append(("p", p.slot, p.offset))
    elif kind.startswith("tensordesc"):
        parameters += _tensor_map(value, next(maps), launch, place)
    else:
        raise NotReplayable(f"a kernel has a parameter of type {kind}")


def _tensor_map(
    value: Any, metadata: dict | None, launch: Launch, place: Callable[[Place], Place]
) -> list[tuple]:
    p = place(launch.places[id(value.base)])
    if (
        metadata is None
        or metadata.get("fp4_padded")
        or value.padding != "zero"
        or getattr(value, "round_f32_to_tf32", 0)
    ):
        raise NotReplayable("a kernel has a descriptor of an unusual kind")
    size, element = metadata["elem_size"], metadata["elem_type"]
    strides = tuple(stride * size for stride in value.strides[:-1])
    box, shape = tuple(metadata["block_size"]), tuple(value.shape)
    tensor_map = (
        "m",
        p.slot,
        p.offset,
        _HOST_TYPE.get(element, element),
        metadata["swizzle"],
        box,
        shape,
        strides,
    )
    shapes = [("b", struct.pack("<i", n)) for n in value.shape]
    return [tensor_map, *shapes, *[("b", struct.pack("<q", n)) for n in value.strides]]
