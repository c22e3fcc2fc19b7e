"""List the contenders of `canon bench schedules`: Canon's, torch's context parallel and
ring-flash-attn.

torch's context parallel replaces SDPA while a context is open, in the backward pass too: ``around``
opens it, untimed. Source: PyTorch, torch/distributed/tensor/experimental/_context_parallel (2.11).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon.bench import ring_flash_attn_peer
from canon.bench.shapes import Shape, asked_for
from canon.masks.layout import Layout

MAGI: dict[str, dict[str, Any]] = {  # names of the records
    "magi, 0 stages": {"own_keys_first": False},
    "magi, 1 stages": {"own_keys_first": True},
    "magi, 2 stages": {"casts": 2},
}


@dataclass(frozen=True)
class Schedule:
    """A function of this rank's q, k, v and ``return_lse``. ``around`` opens what both passes must
    run in.
    """

    name: str
    layout: Layout
    attend: Callable[..., Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    peer: bool = False


def schedules(shape: Shape, ranks: int, only: str) -> list[Schedule]:
    """Return Canon's schedules, filtered by a part of the name."""
    from canon import fast

    n, mask = shape.n, shape.mask
    layouts = {
        kind: getattr(Layout, kind)(n, ranks) for kind in ("contiguous", "zigzag", "striped")
    }
    found = [
        Schedule(f"ring {kind}", layout, partial(fast.ring_attention, mask=mask, layout=layout))
        for kind, layout in layouts.items()
    ]
    for kind in ("contiguous", "zigzag"):
        layout = layouts[kind]
        for stride in (s for s in (1, 2, 4, 8) if shape.g % s == 0):
            ends = {"forward_first_stride": 1, "backward_first_stride": 1}
            ends |= {"backward_last_stride": 1} if shape.g >= 2 * stride else {}
            for name, options in (("", {}), (", small ends", ends)):
                if stride > 1 or not options:
                    attend = partial(
                        fast.strided_attention,
                        mask=mask,
                        layout=layout,
                        head_stride=stride,
                        **options,
                    )
                    found.append(Schedule(f"strided {kind} {stride}{name}", layout, attend))
    planned = fast.dispatch(mask, ranks)
    strided = partial(fast.strided_attention, mask=mask, layout=layouts["zigzag"])
    magi = partial(fast.magi_attention, mask=mask, layout=planned)
    found += [
        Schedule("strided zigzag, no options", layouts["zigzag"], strided),
        Schedule("magi, no options", planned, magi),
    ]
    for name, options in MAGI.items():
        for kept in (False, True):
            attend = partial(
                fast.magi_attention, mask=mask, layout=planned, keep_kv=kept, **options
            )
            found.append(Schedule(name + kept * ", keys kept", planned, attend))
    zigzag, planned = (
        Layout.zigzag(n, ranks, multiple_of=128),
        fast.dispatch(mask, ranks, rank_invariant=True),
    )
    strided = partial(
        fast.strided_attention, mask=mask, layout=zigzag, head_stride=shape.g, rank_invariant=True
    )
    found.append(Schedule(f"strided zigzag {shape.g}, rank invariant", zigzag, strided))
    magi = partial(fast.magi_attention, mask=mask, layout=planned, rank_invariant=True)
    found.append(Schedule("magi, rank invariant", planned, magi))
    return [schedule for schedule in found if asked_for(schedule.name, only)]


def peer_schedules(shape: Shape, ranks: int, only: str, device: str) -> list[Schedule]:
    """Return the installed peers for the shape, filtered by a part of the name."""
    if shape.mask_name != "causal" or shape.n % (2 * ranks) or ranks == 1:
        return []
    layout = Layout.zigzag(shape.n, ranks)
    found = [
        Schedule(
            f"torch {backend.split('_')[0].lower()} {rotation}",
            layout,
            partial(_sdpa, backend=backend, grouped=shape.h != shape.g),
            partial(_context_parallel, rotation, device),
            peer=True,
        )
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION")
        for rotation in ("allgather", "alltoall")
    ]
    if device == "cuda" and (attend := ring_flash_attn_peer.zigzag_function()) is not None:
        found.append(Schedule(ring_flash_attn_peer.NAME, layout, attend, peer=True))
    return [schedule for schedule in found if asked_for(schedule.name, only)]


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str, grouped: bool, return_lse: bool = False
):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # by its name each time: the open context has replaced it
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        )
    out = out.transpose(1, 2)
    return (out, None) if return_lse else out


@contextmanager
def _context_parallel(rotation: str, device: str) -> Iterator[None]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    everyone = dist.group.WORLD
    unused = torch.zeros(2 * dist.get_world_size(), device=device)
    with context_parallel(
        DeviceMesh.from_group(everyone, device), buffers=[unused], buffer_seq_dims=[0]
    ):
        yield
