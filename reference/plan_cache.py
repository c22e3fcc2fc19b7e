"""Plans by key, bounded by the bytes that they hold.

A plan (a local mask, a work table, an index on the device) is a pure function of its arguments, so a plan that was dropped
can be made again. The cache keeps the plans that were used last. All cached functions of a process share two limits,
one for the host and one for each device, so memory does not grow with the number of masks that a program sees.

A plan that the cache drops lives on while a caller, an autograd context or a stream still uses it.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")

HOST_LIMIT = 64 << 20  # bytes of plans on the host
DEVICE_LIMIT = 256 << 20  # bytes of plans on each device
ENTRY = 200  # bytes of a key and its place in the cache, about


class PlanCache:
    """The plans of one process, the least recently used first. Safe for threads."""

    def __init__(self, host_limit: int = HOST_LIMIT, device_limit: int = DEVICE_LIMIT):
        self.limits = {"cpu": host_limit}
        self.device_limit = device_limit
        self.plans: OrderedDict[Hashable, tuple[Any, Counter]] = OrderedDict()
        self.held: Counter = Counter()  # bytes by device
        self.made = 0  # plans so far
        self.lock = threading.RLock()

    def find(self, key: Hashable, make: Callable[[], R]) -> R:
        """Return the plan of ``key``; make it if it is not there."""
        if (known := self.get(key)) is not None:
            return known
        # A plan outlives the call: training may use it later. It is made of real tensors, whatever dispatch mode is active.
        with torch.inference_mode(False), _disable_current_modes():
            plan = make()
        return self.put(key, plan)

    def get(self, key: Hashable) -> Any:
        """Return the plan of ``key``, or None."""
        with self.lock:
            if (entry := self.plans.get(key)) is None:
                return None
            self.plans.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, plan: R) -> R:
        """Keep a plan, unless there is one; return the one that is kept."""
        size = sizes(plan) + Counter(cpu=ENTRY)
        with self.lock:
            if key in self.plans:  # another thread was faster
                return self.plans[key][0]
            self.made += 1
            self.plans[key] = plan, size
            self.held += size
            self._shrink(key)
        return plan

    def clear(self) -> None:
        """Drop every plan."""
        with self.lock:
            self.plans.clear()
            self.held.clear()

    def _shrink(self, newest: Hashable) -> None:
        """Drop the plans that were not used for longest, until each device is within its limit."""
        for device in list(self.held):
            while self.held[device] > self.limits.get(device, self.device_limit):
                oldest = next((key for key, (_, size) in self.plans.items() if size[device] and key != newest), None)
                if oldest is None:
                    break
                self.held -= self.plans.pop(oldest)[1]


PLANS = PlanCache()


def cached_plan(function: Callable[P, R]) -> Callable[P, R]:
    """Keep the results of a pure function of hashable arguments in `PLANS`."""

    @wraps(function)
    def _cached(*args: P.args, **kwargs: P.kwargs) -> R:
        key = (function, args, tuple(kwargs.items())) if kwargs else (function, args)
        return PLANS.find(key, lambda: function(*args, **kwargs))

    return _cached


def sizes(plan: Any) -> Counter:
    """Return the bytes that a plan holds, by device.

    Tensors are counted. Another object states its parts as ``held``, a tuple, or its bytes on the host as ``nbytes``.
    """
    if isinstance(plan, Tensor):
        return Counter({str(plan.device): plan.untyped_storage().nbytes()})
    if isinstance(plan, (tuple, list)):
        return sum(map(sizes, plan), Counter(cpu=56 + 8 * len(plan)))
    if isinstance(held := getattr(plan, "held", None), tuple):
        return sizes(held) + Counter(cpu=int(getattr(plan, "nbytes", 0)))
    return Counter(cpu=int(getattr(plan, "nbytes", 64)))
