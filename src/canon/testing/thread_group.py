"""Implement a torch.distributed backend with threads of one process as ranks: the collectives of
canon, DDP and FSDP2.

The last rank that posts its tensors moves the data of all; reductions are in rank order. Sends are
buffered. torch's own group of threads has no send and receive.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon.testing.rendezvous import Rendezvous


@dataclass
class Call:
    """One collective of one group, in flight."""

    size: int
    names: dict[int, str] = field(default_factory=dict)
    data: dict[int, Any] = field(default_factory=dict)
    posted: list = field(default_factory=list)  # CUDA events
    moved: Any = None  # CUDA event
    done: bool = False
    error: Exception | None = None

    def complete(self, move: Callable[[list], object]) -> None:
        if len(set(self.names.values())) > 1:
            calls = ", ".join(
                f"rank {rank} called {name}" for rank, name in sorted(self.names.items())
            )
            self.error = RuntimeError(f"the ranks of a group called different collectives: {calls}")
        else:
            _await(*self.posted)
            try:
                with torch.no_grad():
                    move([self.data[rank] for rank in range(self.size)])
            except Exception as error:
                self.error = error
            self.moved = _event() if self.posted else None
        self.data.clear()  # like a real group, keep no tensors after the call
        self.done = True

    def describe(self, global_ranks: list[int]) -> str:
        missing = [str(global_ranks[rank]) for rank in range(self.size) if rank not in self.names]
        return f"{next(iter(self.names.values()))} for rank {', '.join(missing)}"


def _event() -> Any:
    return torch.cuda.current_stream().record_event()


def _await(*events: Any) -> None:
    for event in events:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class _Work(dist.Work):
    def __init__(
        self, group: "ThreadGroup", ready: Callable[[], bool], describe: Callable[[], str], finish
    ):
        super().__init__()
        self.group, self.ready, self.describe, self.finish = group, ready, describe, finish

    def wait(self, timeout=None) -> bool:
        self.group.rendezvous.wait(self.group.global_rank, self.ready, self.describe)
        finish, self.finish = self.finish, None
        if finish is not None:
            with torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        with self.group.rendezvous.changed:
            return self.ready()

    def is_success(self) -> bool:
        return self.is_completed()


def _copy(target: Tensor, source: Tensor) -> None:
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise RuntimeError(
            f"{source.numel()} elements of {source.dtype} do not fit {target.numel()} elements of "
            f"{target.dtype}"
        )
    target.copy_(source.reshape(target.shape))


_REDUCTIONS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _reduced(tensors: list[Tensor], op: Any) -> Tensor:
    name = next((name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise NotImplementedError(
            f"a group of threads cannot reduce by {op}: use one of {', '.join(_REDUCTIONS)}"
        )
    total = reduce(_REDUCTIONS[name], tensors[1:], tensors[0].clone())
    return total / len(tensors) if name == "AVG" else total


class ThreadGroup(dist.ProcessGroup):
    """A process group of threads, with the method names of torch 2.11, 2.13 and 2.15."""

    def __init__(self, rendezvous: Rendezvous, global_rank: int, rank: int, size: int):
        super().__init__(rank, size)
        self.rendezvous, self.group_rank, self.ranks = rendezvous, rank, size
        self.global_rank = global_rank
        self.calls, self.sent, self.received = 0, Counter(), Counter()
        self.known_name = ""

    def getBackendName(self) -> str:
        return "threads"

    def _get_backend(self, device) -> "ThreadGroup":
        """torch 2.15 looks up the backend of a batch of sends."""
        return self

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        """torch also reads the name of an ended group."""
        self.known_name = dist.distributed_c10d._world.pg_names.get(self, self.known_name)
        return self.known_name

    def _global_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self)

    def _call(
        self, name: str, tensors: list[Tensor], data: Any, move: Callable[[list], object]
    ) -> _Work:
        key, global_ranks = (self.pg_name, self.calls), self._global_ranks()
        self.calls += 1
        with self.rendezvous.changed:
            call = self.rendezvous.calls.setdefault(key, Call(self.ranks))
            call.names[self.group_rank], call.data[self.group_rank] = name, data
            if any(x.is_cuda for x in tensors):
                call.posted.append(_event())
            if len(call.names) == self.ranks:
                del self.rendezvous.calls[key]
                call.complete(move)
                self.rendezvous.changed.notify_all()

        def finish():
            if call.error is not None:
                raise type(call.error)(*call.error.args)
            _await(call.moved)

        return _Work(self, lambda: call.done, lambda: call.describe(global_ranks), finish)

    def allgather(self, outputs, inputs, opts=None):
        move = lambda data: [
            _copy(out, source)
            for outs, _ in data
            for out, (_, source) in zip(outs, data, strict=True)
        ]
        return self._call("all_gather", inputs, (outputs[0], inputs[0]), move)

    def all_gather_single(self, output, input, opts=None):
        return self.allgather([output.view(-1).tensor_split(self.ranks)], [input], opts)

    def reduce_scatter(self, outputs, inputs, opts):
        def move(data):
            totals = [
                _reduced([parts[i] for _, parts in data], opts.reduceOp) for i in range(len(data))
            ]
            for (out, _), total in zip(data, totals, strict=True):
                _copy(out, total)

        return self._call("reduce_scatter", outputs, (outputs[0], inputs[0]), move)

    def reduce_scatter_single(self, output, input, opts):
        return self.reduce_scatter([output], [input.reshape(-1).tensor_split(self.ranks)], opts)

    def allreduce(self, tensors, opts):
        def move(data):
            for i, _ in enumerate(tensors):
                total = _reduced([mine[i] for mine in data], opts.reduceOp)
                for mine in data:
                    _copy(mine[i], total)

        return self._call("all_reduce", tensors, tensors, move)

    def broadcast(self, tensors, opts):
        move = lambda data: [_copy(mine[0], data[opts.rootRank][0]) for mine in data]
        return self._call("broadcast", tensors, tensors, move)

    def alltoall(self, outputs, inputs, opts=None):
        def move(data):
            for rank, (outs, _) in enumerate(data):
                for out, (_, parts) in zip(outs, data, strict=True):
                    _copy(out, parts[rank])

        return self._call("all_to_all", inputs, (outputs, inputs), move)

    def all_to_all_single(self, output, input, output_splits=None, input_splits=None, opts=None):
        outs = output.split(output_splits) if output_splits else output.tensor_split(self.ranks)
        parts = input.split(input_splits) if input_splits else input.tensor_split(self.ranks)
        return self.alltoall(list(outs), list(parts), opts)

    def barrier(self, opts=None):
        return self._call("barrier", [], None, lambda data: None)

    alltoall_base = all_to_all_single  # this and the following are torch 2.11's names
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def send(self, tensors, to, tag=0):
        message = tensors[0].detach().clone()
        posted = _event() if message.is_cuda else None
        key = (self.pg_name, self.group_rank, to, tag, self.sent[to, tag])
        self.sent[to, tag] += 1
        with self.rendezvous.changed:
            self.rendezvous.messages[key] = (message, posted)
            self.rendezvous.changed.notify_all()
        return _Work(self, lambda: True, str, None)

    def recv(self, tensors, source, tag=0):
        key = (self.pg_name, source, self.group_rank, tag, self.received[source, tag])
        self.received[source, tag] += 1
        messages, sender = self.rendezvous.messages, self._global_ranks()[source]

        def finish():
            message, posted = messages.pop(key)
            received.append(True)
            _await(posted)
            _copy(tensors[0], message)
            if message.is_cuda:
                message.record_stream(torch.cuda.current_stream())

        received: list[bool] = []
        ready = lambda: bool(received) or key in messages
        return _Work(self, ready, lambda: f"a receive from rank {sender}", finish)
