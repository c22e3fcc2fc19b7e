"""A cache of plans, limited by the bytes that they hold.

A plan (a local mask, a work table, an index on the device) is a pure function of its arguments.

    `PLANS`   what a repeated call looks up   64 MB on the host, 640 MB on each device
    `PARTS`   what only plans are made of     32 MB on the host
"""

import inspect
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")

HOST_LIMIT = 64 << 20
# bytes; 24 MB for 1M tokens in short documents, with 32 / 8 heads
DEVICE_LIMIT = 640 << 20
PARTS_LIMIT = 32 << 20
ENTRY = 200  # bytes of a key, estimated


@dataclass(slots=True)
class _Plan:
    plan: Any
    size: Counter  # bytes by device
    used: bool = False


class PlanCache:
    """Plans. Those that were not used for long go first. Thread-safe."""

    def __init__(self, host_limit: int = HOST_LIMIT, device_limit: int = DEVICE_LIMIT):
        self.limits = {"cpu": host_limit}
        self.device_limit = device_limit
        self.plans: OrderedDict[Hashable, _Plan] = OrderedDict()
        # keys of plans on a device: an eviction there scans no others
        self.on: defaultdict[str, OrderedDict[Hashable, None]] = defaultdict(OrderedDict)
        self.held: Counter = Counter()  # bytes by device
        self.made = 0
        self.lock = threading.RLock()

    def find(self, key: Hashable, make: Callable[[], R]) -> R:
        """Return the plan of ``key``; make it if needed."""
        if (plan := self.get(key)) is None:
            plan = self.put(key, _made(make))
        for noted in (_notes.plans, _notes.seen):
            if noted is not None:
                noted[key] = plan
        return plan

    def get(self, key: Hashable) -> Any:
        """Return the plan of ``key``, or None."""
        if (entry := self.plans.get(key)) is None:
            return None
        entry.used = True
        return entry.plan

    def put(self, key: Hashable, plan: R) -> R:
        """Keep the plan of ``key``, unless there is one. Return the kept one."""
        size = sizes(plan)
        size["cpu"] += ENTRY
        with self.lock:
            if key in self.plans:  # by another thread meanwhile
                return self.plans[key].plan
            self.made += 1
            self.plans[key] = _Plan(plan, size)
            for device, held in size.items():
                self.held[device] += held
                if held and device != "cpu":
                    self.on[device][key] = None
                self._shrink(device, key)
        return plan

    def clear(self) -> None:
        """Drop every plan."""
        with self.lock:
            self.plans.clear()
            self.on.clear()
            self.held.clear()

    def drop(self, key: Hashable) -> None:
        """Drop the plan of ``key``, if any."""
        with self.lock:
            if (entry := self.plans.pop(key, None)) is not None:
                for device, held in entry.size.items():
                    self.held[device] -= held
                    self.on[device].pop(key, None)

    def _shrink(self, device: str, newest: Hashable) -> None:
        """Drop plans of a device, the oldest first, but not the ``newest``, down to its limit. One
        used since it was last reached goes to the end: no look-up hashes its key twice.
        """
        limit = self.limits.get(device, self.device_limit)
        keys = self.plans if device == "cpu" else self.on[device]
        while self.held[device] > limit and len(keys) > 1:
            entry = self.plans[key := next(iter(keys))]
            if entry.used or key is newest:
                entry.used = False
                keys.move_to_end(key)
            else:
                self.drop(key)


PLANS = PlanCache()
PARTS = PlanCache(PARTS_LIMIT)
# tensors that a captured graph reads, by its id and their address
_captured: dict[int, dict[int, Tensor]] = {}
_retired: list[dict[int, Tensor]] = []  # those of graphs that have ended, but may still run


class _Notes(threading.local):
    plans: dict[Any, Any] | None = None
    seen: dict[Any, Any] | None = None
    making = False


_notes = _Notes()


def noted_plans() -> AbstractContextManager[dict[Any, Any]]:
    """Note the plans that this thread finds or makes inside, by key."""
    return _noting("plans")


def seen_plans() -> AbstractContextManager[dict[Any, Any]]:
    """As `noted_plans`, where nothing is made ahead (`are_noted`)."""
    return _noting("seen")


@contextmanager
def _noting(name: str) -> Iterator[dict[Any, Any]]:
    before, found = getattr(_notes, name), {}
    setattr(_notes, name, found)
    try:
        yield found
    finally:
        setattr(_notes, name, before)


def _made(make: Callable[[], R]) -> R:
    """Make a plan of real tensors, without notes of its parts."""
    if _notes.making:  # a part of another plan
        return make()
    plans, seen = _notes.plans, _notes.seen
    _notes.plans, _notes.seen, _notes.making = None, None, True
    inference = torch.is_inference_mode_enabled()
    modes = (
        torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch()
    )
    try:
        # a context takes longer than the plan of a short mask
        with (
            torch.inference_mode(False) if inference else nullcontext(),
            _disable_current_modes() if modes else nullcontext(),
        ):
            return make()
    finally:
        _notes.plans, _notes.seen, _notes.making = plans, seen, False


def are_noted() -> bool:
    """Return whether this thread is inside `noted_plans`."""
    return _notes.plans is not None


def cached_plan(function: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of a pure function of hashable arguments in `PLANS`."""
    return _cached_in(lambda: PLANS, function)


def cached_part(function: Callable[P, R]) -> Callable[P, R]:
    """As `cached_plan` in `PARTS`, for functions that only plans call."""
    return _cached_in(lambda: PARTS, function)


def _cached_in(cache: Callable[[], PlanCache], function: Callable[P, R]) -> Callable[P, R]:
    signature, required = inspect.signature(function), inspect.Parameter.empty
    named = [
        (x.name, x.default)
        for x in signature.parameters.values()
        if x.kind is x.POSITIONAL_OR_KEYWORD
    ]

    @wraps(function)
    def _cached(*args: P.args, **kwargs: P.kwargs) -> R:
        given = args
        if kwargs or len(args) < len(named):
            rest = dict(named[len(args) :])
            given += tuple((rest | kwargs).values())
            if required in given or len(given) > len(named):
                # raises TypeError: an argument is missing or unknown
                signature.bind(*args, **kwargs)
        return cache().find((_cached, given), lambda: function(*given))

    return _cached


def keep_for_stream(*tensors: Tensor) -> None:
    """Keep tensors valid for the current stream or captured graph."""
    for x in tensors:
        if not x.is_cuda:
            continue
        if torch.cuda.is_current_stream_capturing():
            _tensors_of_captured_graph()[x.data_ptr()] = x
        else:
            x.record_stream(torch.cuda.current_stream(x.device))


def _tensors_of_captured_graph() -> dict[int, Tensor]:
    """Return the tensors that the graph being captured reads, by address. They live as long as its
    CUDAGraph, and until the next capture begins, where `torch.cuda.graph` synchronises the device.
    Those of an unknown graph stay for good.
    """
    found = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", lambda: None)()
    if not isinstance(found, torch.cuda.CUDAGraph):
        return _captured.setdefault(0, {})
    if (number := id(found)) not in _captured:
        _retired.clear()
        _captured[number] = {}
        finalize(found, lambda: _retired.append(_captured.pop(number))).atexit = False
    return _captured[number]


def sizes(plan: Any) -> Counter:
    """Return bytes by device: of tensors, tuples, lists, objects with ``held`` or ``nbytes``."""
    total: Counter = Counter()
    _add_sizes(plan, total)
    return total


def _add_sizes(plan: Any, total: Counter) -> None:
    if type(plan) in (bool, int, float, str):  # most parts, and most plans
        total["cpu"] += 64
    elif isinstance(plan, Tensor):
        total[str(plan.device)] += plan.untyped_storage().nbytes()
    elif isinstance(plan, (tuple, list)):
        total["cpu"] += 56 + 8 * len(plan)
        for part in plan:
            _add_sizes(part, total)
    elif isinstance(held := getattr(plan, "held", None), tuple):
        _add_sizes(held, total)
        total["cpu"] += int(getattr(plan, "nbytes", 0))
    else:
        total["cpu"] += int(getattr(plan, "nbytes", 64))
