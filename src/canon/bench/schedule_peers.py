"""List the contenders of `canon bench schedules`: Canon's, and the peers.

torch's context parallel, ring-flash-attn    one causal sequence
MagiAttention                                packed documents

Source: PyTorch, torch/distributed/tensor/experimental/_context_parallel (2.11), which replaces SDPA
while a context is open, in the backward pass too.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from canon.bench import magi_attention_peer, ring_flash_attn_peer
from canon.bench.measuring import Settings
from canon.bench.peers import SDPA, sdpa
from canon.bench.shapes import Shape
from canon.masks.layout import Layout
from canon.ranks.group import TOKENS_HEADS
from canon.testing.deterministic import deterministic

MAGI: dict[str, dict[str, Any]] = {  # names of the records
    "magi, 0 stages": {"own_keys_first": False},
    "magi, 1 stages": {"own_keys_first": True},
    "magi, 2 stages": {"casts": 2},
}


@dataclass(frozen=True)
class Schedule:
    """A function of this rank's q, k, v and ``return_lse``; both passes run inside ``around``."""

    name: str
    layout: Layout
    attend: Callable[..., Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    peer: bool = False


def schedules(shape: Shape, ranks: int, settings: Settings) -> list[Schedule]:
    """Return Canon's schedules, filtered by the settings."""
    found = [one for one in schedules_of(shape, ranks) if settings.wants(one.name)]
    return found + list(_over_meshes(shape, ranks, settings))


def schedules_of(shape: Shape, ranks: int, columns: int = 1) -> Iterator[Schedule]:
    """Yield Canon's schedules on a group, or on a mesh with so many columns."""
    from canon import fast

    n, mask = shape.n, shape.mask

    def of(name: str, function: Callable, layout: Layout, **options: Any) -> Schedule:
        return Schedule(name, layout, partial(function, mask=mask, layout=layout, **options))

    kinds = "contiguous", "zigzag", "striped"
    layouts = {kind: getattr(Layout, kind)(n, ranks) for kind in kinds}
    for kind in kinds:
        yield of(f"ring {kind}", fast.ring_attention, layouts[kind])
    strided, zigzag = fast.strided_attention, layouts["zigzag"]
    for kind in ("contiguous", "zigzag"):
        for stride in (s for s in (1, 2, 4, 8) if shape.g % (s * columns) == 0):
            name, given = f"strided {kind} {stride}", {"head_stride": stride}
            yield of(name, strided, layouts[kind], **given)
            ends = {"forward_first_stride": 1, "backward_first_stride": 1}
            ends |= {"backward_last_stride": 1} if shape.g >= 2 * stride else {}
            if stride > 1:
                yield of(f"{name}, small ends", strided, layouts[kind], **given, **ends)
    planned, magi = fast.dispatch(mask, ranks // columns).divided(columns), fast.magi_attention
    for name, function, layout in ("strided zigzag", strided, zigzag), ("magi", magi, planned):
        yield of(f"{name}, no options", function, layout)
        yield replace(of(f"{name}, repeatable", function, layout), around=deterministic)
    for name, options in MAGI.items():
        yield of(name, magi, planned, keep_kv=False, **options)
        yield of(f"{name}, keys kept", magi, planned, keep_kv=True, **options)
    invariant: dict[str, Any] = {"rank_invariant": True}
    zigzag = Layout.zigzag(n, ranks, multiple_of=128)
    planned = fast.dispatch(mask, ranks, **invariant)
    name = f"strided zigzag {shape.g}, rank invariant"
    yield of(name, strided, zigzag, head_stride=shape.g, **invariant)
    yield of("magi, rank invariant", magi, planned, **invariant)


def _over_meshes(shape: Shape, ranks: int, settings: Settings) -> Iterator[Schedule]:
    """Yield schedules over every mesh of several heads. A collective: it makes groups."""
    from canon import fast

    layout, kind = Layout.zigzag(shape.n, ranks), settings.device.type
    functions = {"ring": fast.ring_attention, "strided": fast.strided_attention}
    for heads in (x for x in range(2, ranks + 1) if ranks % x == shape.g % x == 0):
        # in a column of one rank both are the same
        for name in functions if heads < ranks else ["strided"]:
            full_name = f"mesh {ranks // heads} x {heads}, {name} zigzag"
            if dist.is_initialized() and settings.wants(full_name):
                mesh_shape = ranks // heads, heads
                mesh = dist.init_device_mesh(kind, mesh_shape, mesh_dim_names=TOKENS_HEADS)
                attend = partial(functions[name], mask=shape.mask, layout=layout, group=mesh)
                yield Schedule(full_name, layout, attend)


def peer_schedules(shape: Shape, ranks: int, settings: Settings) -> list[Schedule]:
    """Return the installed peers for the shape. A collective on packed documents."""
    name = magi_attention_peer.NAME
    if ranks > 1 and settings.wants(name) and magi_attention_peer.takes(shape):
        layout, attend = Layout.contiguous(shape.n, ranks), _unplanned
        if dist.is_initialized():
            layout, attend = magi_attention_peer.planned(shape, settings.device)
        return [Schedule(name, layout, attend, peer=True)]
    if shape.mask_name != "causal" or shape.n % (2 * ranks) or ranks == 1:
        return []
    layout, device = Layout.zigzag(shape.n, ranks), settings.device.type
    found = []
    for backend, name in SDPA.items():
        attend = partial(_without_lse, sdpa(backend, shape))
        for rotation in ("allgather", "alltoall"):
            around = partial(_context_parallel, rotation, device)
            found.append(Schedule(f"torch {name} {rotation}", layout, attend, around, True))
    if device == "cuda" and (attend := ring_flash_attn_peer.zigzag_function()) is not None:
        found.append(Schedule(ring_flash_attn_peer.NAME, layout, attend, peer=True))
    return [schedule for schedule in found if settings.wants(schedule.name)]


def _unplanned(*_: Any, **__: Any) -> None:
    raise RuntimeError(f"{magi_attention_peer.NAME} plans in a process group")


def _without_lse(attend: Callable, *tensors: Any, return_lse: bool = False) -> Any:
    out = attend(*tensors)
    return (out, None) if return_lse else out


@contextmanager
def _context_parallel(rotation: str, device: str) -> Iterator[None]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    unused = torch.zeros(2 * dist.get_world_size(), device=device)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)
    with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]):
        yield
