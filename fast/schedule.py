"""Run the steps of a schedule so that messages overlap with kernels.

    time        before    step 0    step 1    step 2    step 3    end
    messages    0         1         2         3                           K and V of the step
    kernels               0         1         2         3
    messages                        0         1         2         3       dk and dv of the step

The first message overlaps with nothing, unless the caller calls `receiving` earlier. dk and dv of a
step are sent before its dq is launched, if dq has a kernel of its own.

`replayed` repeats a forward step as one pass, and a backward step as two: dk and dv, then dq. Both
share one scratch tensor, with

    dout, q, lse, delta    copies at the active queries, if these form several ranges
    statistics             row statistics, if the kernel backend has a form of its own
    dq                     the part of dq, if it is added to a running dq

Source: the order is that of aqlaboratory/ring-flash-attention pull request 12 (2025).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon.fast.active_queries import ActiveQueries, query_indices
from canon.fast.backward import QueryInputs, _dkdv, _dq, method_now
from canon.fast.device import chosen_backend, kernels_for
from canon.fast.half import Part
from canon.fast.local import empty_result, launch_forward
from canon.fast.replay.recordings import replayed
from canon.fast.tables.cells import Cells
from canon.fast.tables.device_plans import META
from canon.masks.plan_cache import PLANS
from canon.ranks.profiling import named_steps
from canon.route.call import Call, kinds_of
from canon.route.checks import accumulate_dtype

ALIGNMENT = 256  # bytes, of each tensor inside a scratch tensor


def receiving(steps: int, fetch: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """Start the messages of step 0. Return an iterator over (step, tensors that they have brought).

    ``fetch(step)`` starts the messages of a step; ``wait()`` of its result returns the tensors. The
    next messages start before a step is returned: first set its tensors to None.
    """
    return iter(named_steps(_received(steps, fetch, fetch(0))))


def _received(steps: int, fetch: Callable[[int], Any], fetching: Any) -> Iterator[tuple[int, Any]]:
    for step in range(steps):
        held = fetching.wait()
        if step + 1 < steps:
            fetching = fetch(step + 1)
        yield step, held
        held = None


def run_forward(
    steps: Sequence["Step"],
    received: Iterator[tuple[int, Any]],
    q: Tensor,
    v: Tensor,
    max_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in q's dtype and lse (b, h, t). ``received``: of `receiving`."""
    merges = [number for number, step in enumerate(steps) if step.has_work and not step.writes]
    accumulate, out, result = accumulate_dtype(q.dtype), None, None
    for number, held in received:
        if out is None:  # now, because the tokens that step 0 has sent need no memory any more
            out, lse = empty_result(q, v, accumulate if merges else q.dtype)
        step = steps[number]
        if merges[-1:] == [number] and accumulate is not q.dtype:
            result = torch.empty_like(out, dtype=q.dtype)
        if step.has_work:
            replayed(step.forward, (q, out, lse, result, max_logits, *held), kind=step)
        held = None
    return out if result is None else result, lse


def run_backward(
    parts: Sequence["StepBackward"],
    received: Iterator[tuple[int, Any]],
    inputs: QueryInputs,
    dq: Tensor | None,
    grads: Iterator[Tensor | None],
    reduce: Callable[[int, Tensor | None, Tensor | None], Any],
) -> Any:
    """Write dq. Return the result of the last reduction's ``wait()``, or None.

    Args:
        received: of `receiving`.
        grads: yields the tensor for dk and dv of each step, None if they are not needed.
        reduce: ``reduce(step, grads, room)`` starts to send dk and dv, and returns an object with
            ``wait()``, or None. At most one is in flight. ``room``: the scratch tensor of the step.
    """
    reducing = None
    for number, held in received:
        part, written, room, tensors = parts[number], next(grads), None, ()
        if part.step.has_work:
            room = part.scratch.empty(inputs.q.device)
            tensors = (*inputs, dq, written, room, *held)
            replayed(part.dkdv, tensors, kind=part)
        if reducing:
            reducing.wait()
        reducing = reduce(number, written, room)
        if tensors:
            replayed(part.dq, tensors, kind=part)
        held = written = room = tensors = None  # their memory may be used again
    return reducing.wait() if reducing else None


class Step:
    """The ``active`` queries of some query ``heads``, over some keys, for one kind of call. A step
    that ``writes`` initialises the results of its heads; others merge their part.
    """

    def __init__(self, call: Call, active: ActiveQueries, writes: bool, heads: slice = slice(None)):
        self.call, self.active, self.writes, self.heads = call, active, writes, heads
        self.has_work = writes or bool(active.mask.bands)

    def keys(self, *held: Any) -> Sequence[Tensor]:
        """Return K and V (b, keys, heads, width), views of the step's message ``held``."""
        raise NotImplementedError

    def gradients(self, grads: Tensor) -> Sequence[Tensor]:
        """Return the views of ``grads`` for dk and dv of these keys, and set others to 0."""
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        result: Tensor | None,
        max_logits: Tensor | None,
        *held: Tensor | None,
    ) -> None:
        """Compute the part of the step, into ``out`` and ``lse`` of all queries. ``result``: as in
        `ActiveQueries.merge`.
        """
        heads, keys = self.heads, self.keys(*held)
        cells, scale = Cells(self.active.mask), self.call.scale
        if self.writes:
            written = out[:, :, heads], lse[:, heads]
            largest = None if max_logits is None else max_logits[heads]
            launch_forward(q[:, :, heads], *keys, *written, largest, cells, scale)
        else:
            q = self.active.take(q)
            part = empty_result(q, keys[1], out.dtype)
            launch_forward(q, *keys, *part, max_logits, cells, scale)
            self.active.merge([out, lse], part, result)


def parts_of(
    steps: Iterable[Step], key_heads: int, forward: bool = True, sends: bool | None = None
) -> Iterator[Part]:
    """Yield the parts of steps, and look up their plans. ``sends``: by default on several ranks."""
    for step in steps:
        if step.has_work:
            if not step.writes:
                query_indices(step.active, META)
            is_sent = step.call.ranks > 1 if sends is None else sends
            yield Part(step.active.mask, key_heads, forward=forward, sends=is_sent)


class _Place(NamedTuple):
    start: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize


class Scratch:
    """Named tensors in one allocation of ``nbytes``."""

    def __init__(self):
        self.places: dict[str, _Place] = {}
        self.nbytes = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        start = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        self.places[name] = place = _Place(start, torch.Size(shape), dtype)
        self.nbytes = place.stop

    def empty(self, device: torch.device) -> Tensor | None:
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device) if self.nbytes else None

    def view(self, room: Tensor | None, name: str) -> Tensor:
        place = self.places[name]
        if room is None:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")  # without elements
        return room[place.start : place.stop].view(place.dtype).view(place.shape)


def cached_parts(
    key: tuple[Hashable, ...],
    inputs: QueryInputs,
    make: Callable[[Any], "StepBackward"],
    steps: Iterable[Any],
) -> tuple["StepBackward", ...]:
    """Return ``make(step)`` of each step, from the plan cache. ``key``: all that decides them,
    besides the kinds of the inputs and the caller's settings.
    """
    settings = chosen_backend(), torch.are_deterministic_algorithms_enabled()
    whole = (StepBackward, *key, kinds_of(*inputs[:3]), settings)
    return PLANS.find(whole, lambda: tuple(map(make, steps)))


class StepBackward:
    """The kernels of a step's backward pass, for one kind of call. ``adds_dq``: the part of dq is
    added to a running dq, else written there. A schedule may add tensors to ``scratch``.
    """

    def __init__(
        self, step: Step, inputs: QueryInputs, v: Tensor, dq: Tensor | None, adds_dq: bool
    ):
        self.step: Any = step  # of the schedule's own class
        self.active, self.adds_dq = step.active, adds_dq and dq is not None
        # of the whole pass, so that `dq` computes what `dkdv` has left
        self.method = method_now(step.call.backward, sends=step.call.ranks > 1)
        self.scratch = Scratch()
        inputs, tokens = inputs.heads(step.heads), self.active.mask.queries
        if not self.active.in_place:
            for name, x in zip(QueryInputs._fields, inputs, strict=True):
                self.scratch.add(name, self.active.shape(x), x.dtype)
        statistics = kernels_for(inputs.q, v).empty_statistics(inputs.lse.narrow(2, 0, tokens))
        if statistics is not None:
            self.scratch.add("statistics", statistics.shape, statistics.dtype)
        if self.adds_dq:
            self.scratch.add("dq", (dq.shape[0], tokens, *dq.shape[2:]), dq.dtype)

    def dkdv(
        self,
        dout,
        q,
        lse,
        delta,
        dq: Tensor | None,
        grads: Tensor | None,
        room: Tensor | None,
        *held,
    ) -> None:
        """Launch dk and dv; "fused": also dq. Without ``grads``, launch only what dq needs."""
        inputs = QueryInputs(dout, q, lse, delta).heads(self.step.heads)
        written = (None, None) if grads is None else self.gradients(grads, room)
        if not self.active.in_place:
            self.active.copy_inputs(inputs, self._copies(room))
        self._launch(_dkdv, inputs, held, room, self._dq(dq, room), *written)

    def dq(
        self,
        dout,
        q,
        lse,
        delta,
        dq: Tensor | None,
        grads: Tensor | None,
        room: Tensor | None,
        *held,
    ) -> None:
        """Launch dq after `dkdv`, and add it to the running dq."""
        if dq is None:
            return
        part = self._dq(dq, room)
        self._launch(
            _dq, QueryInputs(dout, q, lse, delta).heads(self.step.heads), held, room, part, grads
        )
        if self.adds_dq:
            self.active.add(dq, part)

    def gradients(self, grads: Tensor, room: Tensor | None) -> Sequence[Tensor]:
        return self.step.gradients(grads)

    def _launch(
        self,
        launch,
        inputs: QueryInputs,
        held: Sequence[Tensor | None],
        room: Tensor | None,
        *grads,
    ) -> None:
        dout, q, lse, delta = (
            self.active.take_inputs(inputs) if self.active.in_place else self._copies(room)
        )
        statistics = (
            self.scratch.view(room, "statistics") if "statistics" in self.scratch.places else None
        )
        options = Cells(self.active.mask), self.step.call.scale, self.method
        launch(q, *self.step.keys(*held), dout, lse, delta, statistics, *grads, *options)

    def _copies(self, room: Tensor | None) -> QueryInputs:
        return QueryInputs(*(self.scratch.view(room, name) for name in QueryInputs._fields))

    def _dq(self, dq: Tensor | None, room: Tensor | None) -> Tensor | None:
        if self.adds_dq:
            return self.scratch.view(room, "dq")
        return None if dq is None else dq[:, :, self.step.heads]
