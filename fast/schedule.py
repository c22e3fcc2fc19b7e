"""Run the steps of a schedule so that messages overlap with kernels. Every distributed function uses this order.

    time       before    step 0    step 1    step 2    step 3    end
    fetch      0         1         2         3
    compute              0         1         2         3
    reduce                         0         1         2         3

A column shows the steps that are fetched, computed and reduced at the same time. While the kernels of `compute` run in step
i, the inputs of step i + 1 and the results of step i - 1 are in flight. While the rest of the step runs (dq), its own
results are.
The first fetch overlaps with nothing, unless the caller starts it earlier by `prefetched`. The last reduction overlaps with
dq, if a separate kernel computes dq.

A schedule defines `fetch`, `compute` and `reduce` of a step. `messages.py` has their messages.

`PartialBackward` launches the backward kernels of the active queries over the keys of one step, in two parts: dk and dv first,
then dq. A rank starts to send dk and dv between the two parts. A schedule replays each part as one pass (`replayed`). So
`dkdv` and `dq` below run only to record it, or where it cannot be replayed. Both parts share one scratch tensor:

    dout, q, lse, delta    copies at the active queries, if these form several ranges; one range is read in place
    statistics             row statistics in the form of the kernel backend, if it has its own form
    dq                     the part of dq, if it is added to a running dq

Source: double buffering; the order is that of aqlaboratory/ring-flash-attention pull request 12 (2025).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon.fast.active_queries import ActiveQueries
from canon.fast.backward import QueryInputs, _dkdv, _dq
from canon.fast.device import kernels_for
from canon.runtime.call import Call

ALIGNMENT = 256  # bytes, of each tensor inside a scratch tensor


def prefetched(fetch: Callable[[int], Any]) -> Callable[[int], Any]:
    """Start the fetch of step 0 now, and return ``fetch`` with that result for step 0."""
    first = [fetch(0)]  # popped at its use, so that no reference keeps the memory
    return lambda step: fetch(step) if step else first.pop()


def run_pipeline(
    steps: int,
    fetch: Callable[[int], Any],
    compute: Callable[[int, Any], Any],
    reduce: Callable[[int, Any, Any], Any] | None = None,
) -> Any:
    """Run all steps. Return the result of the last reduction's ``wait()``, or None if nothing was reduced.

    Args:
        fetch: ``fetch(step)`` starts the messages that bring the inputs of a step. Its result's ``wait()`` returns them.
        compute: ``compute(step, inputs)`` launches kernels. With ``reduce`` it returns a pair: the results to send, and a
            function that launches the rest of the step after the sending has started.
        reduce: ``reduce(step, results, previous)`` starts to send, and returns an object with ``wait()``, or None.
            ``previous`` is the result of ``wait()`` of the step before, None in step 0. At most one reduction is in flight.
    """
    fetching, reducing = fetch(0), None
    for step in range(steps):
        inputs = fetching.wait()
        if step + 1 < steps:
            fetching = fetch(step + 1)
        computed = compute(step, inputs)
        inputs = None  # their memory may be used again
        if reduce:
            previous = reducing.wait() if reducing else None
            reducing = reduce(step, computed[0], previous)
            computed[1]()
        computed = None
    return reducing.wait() if reducing else None


class _Place(NamedTuple):
    start: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize


class Scratch:
    """The places of named tensors in one allocation of ``nbytes``."""

    def __init__(self):
        self.places: dict[str, _Place] = {}
        self.nbytes = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Reserve room for a contiguous tensor."""
        start = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        self.places[name] = place = _Place(start, torch.Size(shape), dtype)
        self.nbytes = place.stop

    def empty(self, device: torch.device) -> Tensor | None:
        """Allocate the room; None if nothing needs any."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device) if self.nbytes else None

    def view(self, room: Tensor | None, name: str) -> Tensor:
        """Return a tensor inside the room. Raises KeyError if there is none of this name."""
        place = self.places[name]
        if room is None:
            return torch.empty(place.shape, dtype=place.dtype)
        return room[place.start : place.stop].view(place.dtype).view(place.shape)


class PartialBackward:
    """Launch the kernels of one step's part of the backward pass.

    With ``adds_dq`` the part of dq is added to a running dq, else it is written there. ``scratch`` has the places of the
    tensors that both parts use; a schedule may add its own.
    """

    def __init__(self, call: Call, active: ActiveQueries, inputs: QueryInputs, v: Tensor, dq: Tensor | None, adds_dq):
        self.call, self.active, self.adds_dq = call, active, adds_dq and dq is not None
        self.scratch = Scratch()
        tokens = active.mask.queries
        if not active.in_place:
            for name, x in zip(QueryInputs._fields, inputs, strict=True):
                self.scratch.add(name, active.shape(x), x.dtype)
        statistics = kernels_for(inputs.q, v).empty_statistics(inputs.lse.narrow(2, 0, tokens))
        if statistics is not None:
            self.scratch.add("statistics", statistics.shape, statistics.dtype)
        if self.adds_dq:
            self.scratch.add("dq", (dq.shape[0], tokens, *dq.shape[2:]), dq.dtype)

    def dkdv(self, inputs: QueryInputs, k: Tensor, v: Tensor, dq: Tensor | None, dk, dv, room: Tensor | None) -> None:
        """Launch dk and dv; "fused" also launches dq. If dk and dv are None, launch only what dq needs."""
        if not self.active.in_place:
            self.active.copy_inputs(inputs, self._copies(room))
        self._launch(_dkdv, inputs, k, v, room, self._dq(dq, room), dk, dv)

    def dq(self, inputs: QueryInputs, k: Tensor, v: Tensor, dq: Tensor | None, dk, room: Tensor | None) -> None:
        """Launch dq after `dkdv`, and add it to the running dq. ``dk`` is not read: as in `dkdv`, None changes the method."""
        if dq is None:
            return
        part = self._dq(dq, room)
        self._launch(_dq, inputs, k, v, room, part, dk)
        if self.adds_dq:
            self.active.add(dq, part)

    def _launch(self, launch, inputs: QueryInputs, k: Tensor, v: Tensor, room: Tensor | None, *grads) -> None:
        if self.active.in_place:
            dout, q, lse, delta = self.active.take_inputs(inputs)
        else:
            dout, q, lse, delta = self._copies(room)
        statistics = self.scratch.view(room, "statistics") if "statistics" in self.scratch.places else None
        options = self.active.mask, self.call.scale, self.call.backward
        launch(q, k, v, dout, lse, delta, statistics, *grads, *options)

    def _copies(self, room: Tensor | None) -> QueryInputs:
        return QueryInputs(*(self.scratch.view(room, name) for name in QueryInputs._fields))

    def _dq(self, dq: Tensor | None, room: Tensor | None) -> Tensor | None:
        return self.scratch.view(room, "dq") if self.adds_dq else dq
