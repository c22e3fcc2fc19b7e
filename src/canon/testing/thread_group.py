"""A torch.distributed backend whose ranks are threads of one process.

    rank 0   all_gather ──┐ posts, waits               rank r holds a place in each call of its group; whoever
    rank 1   all_gather ──┤ posts, waits               comes last moves the data of all of them and wakes the
    rank 2   all_gather ──┘ posts last: moves, wakes   others. A send leaves a copy for the receive of its number.

The state of torch.distributed is kept per thread by torch's private ThreadLocalWorld; its private threaded group is
not used: it has no send and receive, waits for ever on a rank that has returned, completes asynchronous calls at once
only if nobody is late, casts silently where ranks disagree on a dtype, and its method names change between releases.

`Rendezvous` sees every wait, so it knows when all ranks wait for one another: it says so at once instead of hanging.
Ranks that share one GPU are ordered by events, whatever streams they work on.

What it does not do: sends are buffered, so unmatched blocking sends pass here (gloo processes test the same); no
receive from any source; reductions are SUM, AVG, PRODUCT, MIN and MAX, added in rank order in the dtype given.
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
    """One collective of one group, under way."""

    size: int
    names: dict[int, str] = field(default_factory=dict)
    data: dict[int, Any] = field(default_factory=dict)
    posted: list = field(default_factory=list)  # CUDA events
    moved: Any = None  # CUDA event
    done: bool = False
    error: Exception | None = None

    def complete(self, move: Callable[[list], None]) -> None:
        if len(set(self.names.values())) > 1:
            told = ", ".join(f"rank {rank} called {name}" for rank, name in sorted(self.names.items()))
            self.error = RuntimeError(f"the ranks of a group called different collectives: {told}")
        else:
            _await(*self.posted)
            try:
                with torch.no_grad():
                    move([self.data[rank] for rank in range(self.size)])
            except Exception as error:
                self.error = error
            self.moved = _event() if self.posted else None
        self.data.clear()  # as a real group would: who wants to keep what was sent, keeps it
        self.done = True

    def told(self, who: list[int]) -> str:
        missing = [str(who[rank]) for rank in range(self.size) if rank not in self.names]
        return f"{next(iter(self.names.values()))} for rank {', '.join(missing)}"


def _event() -> Any:
    return torch.cuda.current_stream().record_event()


def _await(*events: Any) -> None:
    for event in events:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class _Work(dist.Work):
    """What is under way: ``wait`` blocks this rank until ``ready``, then runs ``finish`` once."""

    def __init__(self, group: "ThreadGroup", ready: Callable[[], bool], told: Callable[[], str], finish):
        super().__init__()
        self.group, self.ready, self.told, self.finish = group, ready, told, finish

    def wait(self, timeout=None) -> bool:
        self.group.meeting.wait(self.group.world_rank, self.ready, self.told)
        finish, self.finish = self.finish, None
        if finish is not None:
            with torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        with self.group.meeting.changed:
            return self.ready()

    def is_success(self) -> bool:
        return self.is_completed()


def _copy(target: Tensor, source: Tensor) -> None:
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise RuntimeError(
            f"{source.numel()} values of {source.dtype} do not fit the {target.numel()} of {target.dtype} expected"
        )
    target.copy_(source.reshape(target.shape))


_REDUCTIONS = {"SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}


def _reduced(tensors: list[Tensor], op: Any) -> Tensor:
    """The tensors of all ranks as one, in rank order, in a memory of its own."""
    name = next((name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise NotImplementedError(f"ranks as threads cannot reduce by {op}: use one of {', '.join(_REDUCTIONS)}")
    total = reduce(_REDUCTIONS[name], tensors[1:], tensors[0].clone())
    return total / len(tensors) if name == "AVG" else total


class ThreadGroup(dist.ProcessGroup):
    """The methods that torch.distributed calls, under the names of torch 2.11, 2.13 and 2.15."""

    def __init__(self, meeting: Rendezvous, world_rank: int, rank: int, size: int):
        super().__init__(rank, size)
        self.meeting, self.place, self.ranks = meeting, rank, size
        self.world_rank = world_rank
        self.calls, self.sent, self.received = 0, Counter(), Counter()

    def getBackendName(self) -> str:
        return "threads"

    def _get_backend(self, device) -> "ThreadGroup":
        """Return the group itself, for every device: torch 2.15 looks up the backend of a batch of sends."""
        return self

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _who(self) -> list[int]:
        return dist.get_process_group_ranks(self)

    def _call(self, name: str, tensors: list[Tensor], data: Any, move: Callable[[list], None]) -> _Work:
        key, who = (self.pg_name, self.calls), self._who()
        self.calls += 1
        with self.meeting.changed:
            call = self.meeting.calls.setdefault(key, Call(self.ranks))
            call.names[self.place], call.data[self.place] = name, data
            if any(x.is_cuda for x in tensors):
                call.posted.append(_event())
            if len(call.names) == self.ranks:
                del self.meeting.calls[key]
                call.complete(move)
                self.meeting.changed.notify_all()

        def finish():
            if call.error is not None:
                raise type(call.error)(*call.error.args)
            _await(call.moved)

        return _Work(self, lambda: call.done, lambda: call.told(who), finish)

    # ------------------------------------------------------------------ gathering and scattering
    def allgather(self, outputs, inputs, opts=None):
        def move(data):
            for outs, _ in data:
                for out, (_, source) in zip(outs, data, strict=True):
                    _copy(out, source)

        return self._call("all_gather", inputs, (outputs[0], inputs[0]), move)

    def all_gather_single(self, output, input, opts=None):
        def move(data):
            for out, _ in data:
                rows = out.view(-1).tensor_split(len(data))
                for row, (_, source) in zip(rows, data, strict=True):
                    _copy(row, source)

        return self._call("all_gather_into_tensor", [input], (output, input), move)

    def reduce_scatter(self, outputs, inputs, opts):
        def move(data):
            totals = [_reduced([parts[i] for _, parts in data], opts.reduceOp) for i in range(len(data))]
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

    def reduce(self, tensors, opts):
        def move(data):
            _copy(data[opts.rootRank][0], _reduced([mine[0] for mine in data], opts.reduceOp))

        return self._call("reduce", tensors, tensors, move)

    def broadcast(self, tensors, opts):
        def move(data):
            for place, mine in enumerate(data):
                if place != opts.rootRank:
                    _copy(mine[0], data[opts.rootRank][0])

        return self._call("broadcast", tensors, tensors, move)

    def gather(self, outputs, inputs, opts):
        def move(data):
            for out, (_, source) in zip(data[opts.rootRank][0][0], data, strict=True):
                _copy(out, source)

        return self._call("gather", inputs, (outputs, inputs[0]), move)

    def scatter(self, outputs, inputs, opts):
        def move(data):
            for (out, _), source in zip(data, data[opts.rootRank][1][0], strict=True):
                _copy(out, source)

        return self._call("scatter", outputs, (outputs[0], inputs), move)

    def alltoall(self, outputs, inputs, opts=None):
        def move(data):
            for place, (outs, _) in enumerate(data):
                for out, (_, parts) in zip(outs, data, strict=True):
                    _copy(out, parts[place])

        return self._call("all_to_all", inputs, (outputs, inputs), move)

    def all_to_all_single(self, output, input, output_splits=None, input_splits=None, opts=None):
        outs = output.split(output_splits) if output_splits else output.tensor_split(self.ranks)
        parts = input.split(input_splits) if input_splits else input.tensor_split(self.ranks)
        return self.alltoall(list(outs), list(parts), opts)

    def barrier(self, opts=None):
        return self._call("barrier", [], None, lambda data: None)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self._all([self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        return self._all([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def _all(self, works: list[_Work]) -> _Work:
        told = works[-1].told if works else str
        return _Work(self, lambda: all(w.ready() for w in works), told, lambda: [w.wait() for w in works])

    allreduce_coalesced = allreduce
    alltoall_base = all_to_all_single  # from here: torch 2.11's names
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------ from one to another
    def send(self, tensors, to, tag=0):
        letter = tensors[0].detach().clone()
        posted = _event() if letter.is_cuda else None
        key = (self.pg_name, self.place, to, tag, self.sent[to, tag])
        self.sent[to, tag] += 1
        with self.meeting.changed:
            self.meeting.letters[key] = (letter, posted)
            self.meeting.changed.notify_all()
        return _Work(self, lambda: True, str, None)

    def recv(self, tensors, source, tag=0):
        key = (self.pg_name, source, self.place, tag, self.received[source, tag])
        self.received[source, tag] += 1
        letters, who = self.meeting.letters, self._who()[source]

        def finish():
            letter, posted = letters.pop(key)
            taken.append(True)
            _await(posted)
            _copy(tensors[0], letter)
            if letter.is_cuda:
                letter.record_stream(torch.cuda.current_stream())

        taken: list[bool] = []
        return _Work(self, lambda: bool(taken) or key in letters, lambda: f"a receive from rank {who}", finish)
