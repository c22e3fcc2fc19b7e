"""Simulate Gluon kernels on the CPU: launches inside `simulated` run the Python source, and check
its synchronisation.

    with simulator.simulated(order="late", seed=0, log=[]):      # the log receives each `Event`
        kernel[grid](*tensors_and_descriptors, **constants)      # of CPU tensors
    simulator.register(add_box, simulator.reduce_add)            # a stand-in for a builtin

Partitions of a program (CTA) are alternating threads. Another program may continue at its end, its
atomic operations and its loads with acquire. TMA loads land, wgmma read and adds write "early" (at
once), "late" (at a wait, or when nothing else can happen) or at "random" times. A `Fault` names the
kernel's lines for

    reads of data that is not there yet, buffers overwritten too early: in every interleaving
    deadlocks, results of wgmma used before a wait, missing fences, wrong barrier counts, addresses
    out of bounds, misaligned TMA, int32 overflow, too much shared memory

Not simulated: layouts, types and other rules of the compiler (`canon.testing.compile`), clusters,
races in global memory, and time."""

import builtins
import inspect
import operator
import random
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from canon.simulator import engines, language, memory, values
from canon.simulator.aggregates import is_aggregate, python_class
from canon.simulator.engines import await_written, fence_acquired, look, reduce_add
from canon.simulator.memory import Descriptor
from canon.simulator.program import Deadlock, Event, Fault, Program, take_turns

__all__ = ["Deadlock", "Event", "Fault", "reduce_add", "register", "simulated"]

ORDERS = ("late", "early", "random")

# id of the real object: (real object, to keep it alive, and its stand-in)
_stand_ins: dict[int, tuple[Any, Any]] = {}
_simulations: list[tuple[str, int, list | None]] = []  # order, seed, log; the last one applies
_threads: list[int] = []  # torch's number of threads outside simulations
_changing = threading.Lock()
# Python 3.11 shares one nesting counter between all threads that parse source
parsing = threading.Lock()


def register(real: Any, stand_in: Any) -> None:
    """Call ``stand_in`` where a kernel calls ``real``."""
    _stand_ins[id(real)] = (real, stand_in)


_HINTS = dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), language.hint)
_OTHER_NAMES = {
    **_HINTS,
    "constexpr": lambda x: x,
    "to_tensor": values.tensor,
    "static_range": range,
    "async_load": engines.async_copy_global_to_shared,  # since Triton 3.8
}


def _register_all() -> None:
    stand_ins = dict(_OTHER_NAMES)
    for module in (language, memory, engines):
        stand_ins |= {
            name: f
            for name, f in vars(module).items()
            if getattr(f, "__module__", "") == module.__name__
        }
    for module in (gl, hopper, hopper.mbarrier, hopper.tma):
        for name in stand_ins.keys() & set(dir(module)):
            register(getattr(module, name), stand_ins[name])


_register_all()

_PTX_STAND_INS: dict[str, Callable] = {
    "tma_reduce_add": reduce_add,
    "wait_for_reductions": await_written,
    "transpose_words": language.transpose_words,
    "broadcast_rows": language.broadcast_rows,
    "load_acquire": look,
    "back_off": lambda: None,
    "fence_async_global": fence_acquired,
    "store_release": language.store,
    "tanh": language.tanh,
    "capped_weights": language.capped_weights,
    "keep_where_nonzero": lambda x, p: language.where(p == 0.0, 0.0, x),
    "rescale_rows": operator.mul,
    "zero_rows": lambda x, factors: language.where(factors == 0.0, 0.0, x),
    "declare_registers": lambda p, warpgroup: None,
    "round_and_keep": lambda p, like, warpgroup: p.to(like.dtype),
    "any_above": language.any_above,
    "keep_between": language.keep_between,
    "named_barrier": engines.named_barrier,
}


def adopt(ptx: ModuleType, lane_sum: GluonJITFunction) -> None:
    """Register stand-ins for ``ptx``. ``lane_sum`` sums the rows of a tile by lane."""

    def add_rounding_excess(excess, p, sums, limit, warpgroup):
        rounded_sums = _Function(lane_sum)(p.to(language.gl.float32))
        return excess + language.where(sums > limit, sums - rounded_sums, 0.0)

    register(ptx.add_rounding_excess, add_rounding_excess)
    for name, stand_in in _PTX_STAND_INS.items():
        register(getattr(ptx, name), stand_in)


class _Module:
    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str):
        seen = self.__dict__[name] = _seen(
            getattr(self._module, name), f"{self._module.__name__}.{name}"
        )
        return seen


class _Function:
    def __init__(self, function: GluonJITFunction):
        self.function, self.name = function, function.fn.__name__
        self.python: Callable | None = None

    def __call__(self, *arguments, **named):
        if self.python is None:
            self.python = _rebuilt(self.function)
        return self.python(*arguments, **named)


def _unknown(name: str) -> Callable:
    def raised(*arguments, **named):
        raise NotImplementedError(
            f"{name} is not simulated; simulator.register may give it a stand-in"
        )

    return raised


def _seen(value: Any, name: str) -> Any:
    if id(value) in _stand_ins:
        return _stand_ins[id(value)][1]
    if isinstance(value, ModuleType):
        return _Module(value)
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(value, GluonJITFunction):
        return _Function(value)
    if is_aggregate(value):
        return python_class(value, _Function)
    if type(value) is tuple:
        return tuple(_seen(x, name) for x in value)
    if isinstance(value, JITFunction) or getattr(value, "__triton_builtin__", False):
        return _unknown(name)
    return value


_BUILTINS = {**vars(builtins), "range": language.dynamic_range}


@cache
def _code(kernel: GluonJITFunction) -> CodeType:
    """Return the code of the kernel's source, which may be a mutant's."""
    source = "\n" * (kernel.starting_line_number - 1) + textwrap.dedent("".join(kernel.raw_src))
    module = compile(source, kernel.fn.__code__.co_filename, "exec")
    codes = filter(inspect.iscode, module.co_consts)
    return next(code for code in codes if code.co_name == kernel.fn.__name__)


def _rebuilt(kernel: GluonJITFunction) -> Callable:
    function = kernel.fn
    with parsing:
        code = _code(kernel)
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    names: dict[str, Any] = {
        name: _seen(known[name], name) for name in _names(code) if name in known
    }
    names |= {"__builtins__": _BUILTINS, "__simulated__": True}
    defaults = tuple(_seen(value, "default") for value in function.__defaults__ or ())
    rebuilt = FunctionType(code, names, function.__name__, defaults)
    rebuilt.__kwdefaults__ = {
        name: _seen(value, name) for name, value in (function.__kwdefaults__ or {}).items()
    }
    return rebuilt


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if inspect.iscode(constant))
    return set(code.co_names).union(*inner)


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return values.pointer(value)
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if type(value) is tuple:
        return tuple(_argument(x) for x in value)
    return value if value is None else values.tensor(value)


def _bound(kernel: GluonJITFunction, arguments: tuple, named: dict) -> tuple[dict, dict, dict]:
    """Return bound arguments, kernel values and options. A specialised 1 is a constant."""
    signature = inspect.signature(kernel.fn)
    options = {name: value for name, value in named.items() if name not in signature.parameters}
    bound = signature.bind(
        *arguments, **{name: named[name] for name in named if name not in options}
    )
    bound.apply_defaults()
    given = {}
    for parameter in kernel.params:
        value = bound.arguments[parameter.name]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        constant = parameter.is_constexpr or one
        given[parameter.name] = _seen(value, parameter.name) if constant else _argument(value)
    return bound.arguments, given, options


def _run(kernel: GluonJITFunction, *arguments, grid: Any, warmup=False, **named) -> Any:
    raw, given, options = _bound(kernel, arguments, named)
    order, seed, log = _simulations[-1]
    shape: tuple[int, ...] = grid(raw) if callable(grid) else grid
    sizes = (*shape, 1, 1)[:3]
    chance, function = random.Random(seed), _rebuilt(kernel)
    places = [(x, y, z) for z in range(sizes[2]) for y in range(sizes[1]) for x in range(sizes[0])]
    programs = [Program(place, sizes, order, chance, log) for place in places]
    take_turns(
        programs, chance, kernel.fn.__name__, options.get("num_warps", 4), lambda: function(**given)
    )
    return None


@contextmanager
def simulated(order: str = "late", seed: int = 0, log: list[Event] | None = None) -> Iterator[None]:
    """Simulate the Gluon launches of all threads. ``seed`` draws all choices."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    with _changing:
        if not _simulations:
            GluonJITFunction.run = _run
            _threads.append(torch.get_num_threads())
            torch.set_num_threads(1)  # tiles are small, and partitions are already threads
        _simulations.append(mine := (order, seed, log))
    try:
        yield
    finally:
        with _changing:
            _simulations[:] = [simulation for simulation in _simulations if simulation is not mine]
            if not _simulations:
                del GluonJITFunction.run
                torch.set_num_threads(_threads.pop())
