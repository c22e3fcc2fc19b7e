"""By which way the ranks of a group exchange gathered keys and scattered gradients: chosen once per group, and named.

    name                where                                     what it takes from attention
    "nccl copy engine"  one host, NCCL >= 2.28, torch >= 2.11     copy engines move the bytes, and leave the
                                                                  multiprocessors to the attention kernels
    "nccl"              other GPUs                                multiprocessors
    "gloo", "threads"   CPU ranks                                 -
    "none"              one rank                                  -

On GPUs gathers and reductions have a communicator each, so that a gather never queues behind the reduction before it,
and one stream beside the attention kernels, for what is copied and summed around the messages.

The copy engines serve a group made with NCCL's zero-CTA policy, on buffers in symmetric windows. These are allocated
once, grow to the largest call and are used by every call of the group; other ways allocate for each call. Before it is chosen
the way is tried, with a small gather and a small exchange that must arrive whole; if anything fails on any rank, all
take plain NCCL, and `transport_report` says why. They serve only where every rank has ``CANON_COPY_ENGINE=1`` in
its environment: torch has one backend of symmetric memory a process, which is NCCL's from then on, and that is for whoever
owns the process to say. On eight H200s both passes of strided attention are up to 5 % faster so (paper/copy_engines.md).
What is computed does not depend on the way: all move the same bytes, and no way adds anything up. (NCCL itself takes
multiprocessors again, without a word, where its copy engines cannot reach a peer: a profile shows which.)

Source: NCCL user guide, NCCL_CTA_POLICY_ZERO and window registration (NVIDIA, 2025).
"""

import hashlib
import os
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from canon.reference.group_backends import backend_of, new_group_of
from canon.reference.group_state import group_state

COPY_ENGINE = "nccl copy engine"


class Transport:
    """One way for one group: two communicators, a stream beside the kernels, and buffers. All calls are collective.

    ``gathers`` and ``reductions`` are the group itself unless they are given.
    """

    def __init__(self, name: str, group, device: torch.device, gathers=None, reductions=None, reason: str = ""):
        self.name, self.reason = name, reason
        self._group, self._gathers, self._reductions = ref(group), gathers, reductions  # the group may end before this
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._moment = torch.zeros(1, device=device)  # what `wait_until_started` spends its time on

    @property
    def gathers(self):
        """The communicator of gathers."""
        return self._gathers or self._group()

    @property
    def reductions(self):
        """The communicator of reductions."""
        return self._reductions or self._group()

    def all_gather(self, buffer: Tensor) -> dist.Work:
        """Start to fill a flat buffer, of which this rank has written its own equal part, with the parts of all ranks."""
        parts = buffer.view(dist.get_world_size(self.gathers), -1)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name until torch 2.12
        return gather(buffer, parts[dist.get_rank(self.gathers)], group=self.gathers, async_op=True)

    def all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work:
        """Start to send the r-th equal part of ``sent`` to rank r, and to receive its part for this rank."""
        return dist.all_to_all_single(received, sent, group=self.reductions, async_op=True)

    def empty(self, name: str, items: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer for the messages of one call; ``name`` tells those that a call holds at once apart."""
        return torch.empty(items, dtype=dtype, device=device)

    def beside(self, after_all: bool = True) -> AbstractContextManager:
        """What is launched inside runs on the stream beside the kernels; after what was launched before, if ``after_all``."""
        if self.stream is None:
            return nullcontext()
        if after_all:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def wait_until_started(self) -> None:
        """What is launched from here on waits for what has been launched beside, and begins after the messages from there."""
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                self._moment.zero_()  # for 2 us, in which messages, on streams of their own, begin
            self.join()

    def join(self) -> None:
        """What is launched from here on waits for what has been launched beside."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class CopyEngines(Transport):
    """NCCL by copy engines, on symmetric windows that stay. Raises whatever is wrong with that, on construction."""

    def __init__(self, group, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        self.symmetric_memory = symmetric_memory
        if symmetric_memory.get_backend(device) != "NCCL":
            symmetric_memory.set_backend("NCCL")  # raises if the process has used another one
        gathers, reductions = (_another(group, zero_cta=True) for _ in range(2))
        for made in (gathers, reductions):
            dist.all_reduce(torch.zeros(1, device=device), group=made)  # windows need a communicator that exists
        super().__init__(COPY_ENGINE, group, device, gathers, reductions)
        self.windows: dict[str, Tensor] = {}
        self.last_stream: torch.cuda.Stream | None = None  # of the last call that used them
        self._try(device)

    def empty(self, name: str, items: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        needed = items * dtype.itemsize
        self._follow_last_call()
        window = self.windows.get(name)
        if window is None or window.numel() < needed:  # of equal size on every rank, so all of them come here
            torch.cuda.synchronize(device)
            group = self.gathers if name.startswith("gather") else self.reductions
            with torch.inference_mode(False):
                self.windows[name] = window = self._window(-(-needed // 4096) * 4096, group, device)
        return window[:needed].view(dtype)

    def _follow_last_call(self) -> None:
        """All calls share the windows: a call on another stream waits until the last one has read them."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        if self.last_stream is not None and self.last_stream != current:
            current.wait_stream(self.last_stream)
        self.last_stream = current

    def _window(self, size: int, group, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(self.symmetric_memory.get_mem_pool(device)):
            window = torch.empty(size, dtype=torch.uint8, device=device)
        self.symmetric_memory.rendezvous(window, group=group.group_name)
        return window

    def _try(self, device: torch.device) -> None:
        rank, ranks = dist.get_rank(self.gathers), dist.get_world_size(self.gathers)
        everyone = torch.arange(ranks, dtype=torch.float32, device=device).repeat_interleave(1024)
        gathered, sent, received = (
            self.empty(name, 1024 * ranks, torch.float32, device) for name in ("gather try", "send try", "receive try")
        )
        gathered.view(ranks, -1)[rank] = rank
        sent.fill_(rank)
        for work in (self.all_gather(gathered), self.all_to_all(received, sent)):
            work.wait()
        if not (torch.equal(gathered, everyone) and torch.equal(received, everyone)):
            raise RuntimeError("a message through symmetric windows did not arrive whole")
        self.windows.clear()


def transport_for(group, device: torch.device) -> Transport:
    """The way of this group on this device (``group=None``: all ranks). The first call is a collective of the group."""
    ways = group_state(group).transports
    if device not in ways:  # only this rank's thread uses its own group
        with torch.inference_mode(False):  # buffers stay, and training may write to them later
            ways[device] = _choose(dist.group.WORLD if group is None else group, device)
    return ways[device]


def transport_report(device: torch.device | str, group=None) -> str:
    """The name of the way that this group's messages take, and why no better one. A collective, the first time."""
    device = torch.device(device)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return "none: one rank"
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    chosen = transport_for(group, device)
    return f"{chosen.name}: {chosen.reason}" if chosen.reason else chosen.name


def _choose(group, device: torch.device) -> Transport:
    backend = backend_of(group, device)
    if backend != "nccl":
        return Transport(backend, group, device)
    reason = _everyones(why_not_copy_engines(), group, device)
    if not reason and not _one_host(group, device):
        reason = "the ranks are on several hosts"
    if not reason:
        try:
            made, reason = CopyEngines(group, device), ""
        except Exception as error:
            made, reason = None, f"{type(error).__name__}: {error}"
        reason = _everyones(reason, group, device)
        if made and not reason:
            return made
    reductions = _another(group) if _in_order(group) else None
    return Transport(backend, group, device, reductions=reductions, reason=reason)


def why_not_copy_engines() -> str:
    """What this rank lacks, or nothing; asks no other rank."""
    if os.environ.get("CANON_COPY_ENGINE") != "1":
        return "CANON_COPY_ENGINE is not 1"
    if not hasattr(_nccl_group(), "NCCL_CTA_POLICY_ZERO"):
        return f"torch {torch.__version__} offers no zero-CTA policy"
    if nccl.version() < (2, 28):
        return f"NCCL {'.'.join(map(str, nccl.version()))} has no collectives by copy engines: 2.28 has"
    return ""


def _one_host(group, device: torch.device) -> bool:
    digest = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7], "big")
    least = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    low, high = least.tolist()
    return low == -high


def _nccl_group() -> Any:
    return getattr(dist, "ProcessGroupNCCL", None)  # None where torch is built without NCCL


def _everyones(reason: str, group, device: torch.device) -> str:
    """Nothing if no rank has a reason; else this rank's, or that another one has one."""
    fine = torch.tensor([int(not reason)], device=device)
    dist.all_reduce(fine, dist.ReduceOp.MIN, group=group)
    return "" if fine.item() else reason or "another rank cannot"


def _another(group, zero_cta: bool = False):
    """Return a second communicator of the same ranks in the same order; only they take part.

    Raises NotImplementedError if that order is not ascending, as that of a new group would be.
    """
    if not _in_order(group):
        raise NotImplementedError("the ranks of the group are not in ascending order, those of a new group would be")
    options = None
    backend = "nccl" if "nccl" in dist.get_backend_config(group) else dist.get_backend(group)
    if zero_cta:
        options = _nccl_group().Options()
        options.config.cta_policy = _nccl_group().NCCL_CTA_POLICY_ZERO
    made = new_group_of(group, backend, options)
    group_state(group).aborted.append(made)
    return made


def _in_order(group) -> bool:
    ranks = dist.get_process_group_ranks(group)
    return ranks == sorted(ranks)
