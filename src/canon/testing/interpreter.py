"""Repairs for Triton's CPU interpreter (TRITON_INTERPRET=1), releases 3.6 to 3.9, and a lock for ranks as threads.

    from canon.testing import interpreter; interpreter.repair()      before the first kernel is launched

What is wrong, and what `repair` does about it (nothing at all unless TRITON_INTERPRET=1):

    bf16 is held as uint16 bit patterns     tl.dot, arithmetic, comparisons, reductions and scans of bf16 work on the
                                            patterns as if they were integers: widened to float32, rounded back
    casts to bf16                           truncate, and take integers for patterns: round to nearest even
    constants of bf16                       `get_bf16` is missing
    a tensor as a loop bound                TypeError with numpy >= 2.4 on 3.6: the one element is taken out
    TMA reductions (descriptor.atomic_add)  missing: load, add, store
    numpy's warnings                        -inf - -inf and exp2 overflows warn, GPUs do not: silenced during a launch
    launches from several threads           rewrite kernels, patch and restore triton.language under one another: one at a time
    calls of one kernel function by another patch the whole language again each time, milliseconds a call: once a launch
    products of tiles                       go to NumPy's BLAS, whose threads wait for one another: to torch's, with one
    Triton imported before the variable     its own functions (tl.sum, tl.cdiv) stay compiled ones: made anew
    integer sums, and looking up dtypes     checked for overflow each time, and looked up in a new table: a quarter of the time

Atomic adds of bf16 stay impossible (they raise); inline assembly and Gluon are not interpreted.
"""

import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch

parsing = threading.Lock()  # of who makes a tree of source: Python 3.11 counts the depth for all threads together
_launch = threading.RLock()
_repaired = threading.Event()
_patched: set[tuple] = set()  # language modules that the launch under way has patched


def gpus() -> int:
    """How many GPUs kernels can run on: none under TRITON_INTERPRET=1, which keeps them on the CPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.cuda.device_count() if torch.cuda.is_available() and not interpreted else 0


def repair() -> bool:
    """Apply the repairs, once; returns whether kernels are interpreted: those defined since TRITON_INTERPRET=1 was set."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    import triton.language  # noqa: F401

    with _launch:
        if not _repaired.is_set():
            _repair_library()
            _repair_bfloat16()
            _repair_loop_bounds()
            _repair_launches()
            _repaired.set()
    return True


def _repair_library() -> None:
    """`tl.sum` and its like are kernel functions, compiled ones if Triton was imported before the variable was set."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    made: dict[int, InterpretedFunction] = {}
    library = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    for holder in [*library, sys.modules["triton.language"].tensor]:
        for name, value in list(vars(holder).items()):
            if isinstance(value, JITFunction):
                setattr(holder, name, made.setdefault(id(value), InterpretedFunction(value.fn)))


# ---------------------------------------------------------------------- bfloat16
def widen(bits: np.ndarray) -> np.ndarray:
    """float32 values of uint16 bfloat16 patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Any) -> np.ndarray:
    """uint16 bfloat16 patterns of numbers, rounded to nearest, ties to even."""
    values = np.asarray(values, np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    return np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _repair_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def is_bf16(x: Any) -> bool:
        return isinstance(x, handle) and x.dtype.scalar == tl.bfloat16 and x.data.dtype == np.uint16

    def wide(x: Any) -> Any:
        return handle(widen(x.data), tl.float32) if is_bf16(x) else x

    def as_bf16(x: Any) -> Any:
        return handle(narrow(x.data), tl.bfloat16)

    def through_float32(method: Callable) -> Callable:
        """An operation whose bf16 operands are widened, and whose float32 result is rounded back if there were any."""

        @wraps(method)
        def repaired(self, *operands):
            if not any(map(is_bf16, operands)):
                return method(self, *operands)
            result = method(self, *map(wide, operands))
            if result.data.dtype == bool:
                return handle(result.data, tl.int1)
            return as_bf16(result)

        return repaired

    def create_dot(self, a, b, d, *rest, dot=builder.create_dot):
        a, b, total = wide(a), wide(b), wide(d)
        if {a.data.dtype.kind, b.data.dtype.kind, total.data.dtype.kind} == {"f"}:
            factors = (_as_torch(x.data, total.data.dtype) for x in (a, b))
            result = handle(torch.matmul(*factors).numpy() + total.data, total.dtype.scalar)
        else:
            result = dot(self, a, b, total, *rest)
        return as_bf16(result) if is_bf16(d) else result

    def cast_impl(self, source, target, cast=builder.cast_impl):
        if tl.bfloat16 not in (source.dtype.scalar, target.scalar) or source.dtype.scalar == target.scalar:
            return cast(self, source, target)
        values = widen(source.data) if is_bf16(source) else source.data
        if target.scalar == tl.bfloat16:
            return handle(narrow(values), tl.bfloat16)
        return handle(values.astype(interpreter._get_np_dtype(target.scalar)), target.scalar)

    def create_fp_to_fp(self, source, target, rounding, convert=builder.create_fp_to_fp):
        kinds = {source.dtype.scalar.name, target.scalar.name}
        if "bf16" in kinds and not any(kind.startswith("fp8") for kind in kinds) and "RTZ" not in str(rounding):
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    def descriptor_reduce(self, kind, descriptor, value, indices):
        if not str(kind).endswith("ADD"):
            raise NotImplementedError(f"the interpreter's TMA reduction knows ADD alone, got {kind}")
        pointers, mask = descriptor.materialize_pointers(indices)
        old = self.create_masked_load(pointers, mask, None, None, None, None)
        new = self.create_fadd(old, value) if value.dtype.scalar.is_floating() else self.create_add(old, value)
        return self.create_masked_store(pointers, new, mask, None, None)

    for name in ("binary_op", "ternary_op", "unary_op"):
        setattr(builder, name, _except_selection(through_float32(getattr(builder, name)), getattr(builder, name)))
    builder.create_fma = through_float32(builder.create_fma)
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: handle(narrow([value]), tl.bfloat16)
    if not hasattr(builder, "create_descriptor_reduce"):
        builder.create_descriptor_reduce = descriptor_reduce
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply_impl = _reduced_wide(operation.apply_impl, tl, wide, as_bf16, is_bf16)


def _as_torch(x: np.ndarray, dtype: np.dtype) -> torch.Tensor:
    x = x.astype(dtype, copy=False)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def _except_selection(repaired: Callable, method: Callable) -> Callable:
    """`where` moves patterns and computes nothing: it keeps the payload of a NaN."""

    @wraps(method)
    def chosen(self, *arguments):
        *operands, operation = arguments
        if operation is np.where:
            return method(self, *arguments)
        return repaired(self, *operands, operation)

    return chosen


def _reduced_wide(method: Callable, tl: Any, wide: Callable, as_bf16: Callable, is_bf16: Callable) -> Callable:
    @wraps(method)
    def apply_impl(self, tensors):
        if not any(is_bf16(x.handle) for x in tensors):
            return method(self, tensors)

        def retyped(x, scalar, handle):
            return tl.core.tensor(handle, tl.block_type(scalar, list(x.shape)) if x.type.is_block() else scalar)

        widened = tuple(retyped(x, tl.float32, wide(x.handle)) if is_bf16(x.handle) else x for x in tensors)
        results = method(self, widened)
        several = results if isinstance(results, (list, tuple)) else [results]
        rounded = [
            retyped(y, tl.bfloat16, as_bf16(y.handle)) if is_bf16(x.handle) and y.dtype == tl.float32 else y
            for x, y in zip(tensors, several, strict=False)
        ]
        return rounded if isinstance(results, (list, tuple)) else rounded[0]

    return apply_impl


# ---------------------------------------------------------------------- loop bounds
def _repair_loop_bounds() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def index(self) -> int:
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    def patch_tensor(tensor, *scope):
        patch(tensor, *scope)
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = patch_tensor


# ---------------------------------------------------------------------- launches
def _repair_launches() -> None:
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    rewrite = interpreter.InterpretedFunction.rewrite

    @wraps(launch)
    def one_at_a_time(self, *arguments, **options):
        with _launch, np.errstate(all="ignore"):
            outer, threads = _patched.copy(), torch.get_num_threads()
            _patched.clear()
            torch.set_num_threads(1)
            try:
                return launch(self, *arguments, **options)
            finally:
                torch.set_num_threads(threads)
                _patched.clear()
                _patched.update(outer)

    def one_rewrite_at_a_time(self):
        with parsing:
            return rewrite(self)

    def patch_once(function):
        names = id(function.__globals__)
        languages = known[names] = known.get(names) or _languages(function, interpreter)
        if languages in _patched:
            return contextlib.nullcontext()  # what an inner call gets: nothing to restore
        _patched.add(languages)
        return patch(function)

    def patch_builtin(package, builder, scope):
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [(name, member) for name, member in members if interpreter.tl.core.is_builtin(member)]
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    known: dict[int, tuple] = {}
    builtins: dict[Any, list] = {}
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype, interpreter.tl)
    interpreter.GridExecutor.__call__ = one_at_a_time
    interpreter.InterpretedFunction.rewrite = one_rewrite_at_a_time
    interpreter._patch_lang = patch_once
    interpreter._patch_builtin = patch_builtin


def _looked_up_once(look_up: Callable, tl: Any) -> Callable:
    found: dict[str, np.dtype] = {}

    def np_dtype(kind: Any) -> np.dtype:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return look_up(scalar)
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    return np_dtype


def _languages(function: Any, interpreter: Any) -> tuple:
    """Which language modules a kernel function names: those get patched for it."""
    core = (interpreter.tl, interpreter.tl.core)
    return tuple(sorted({id(x) for x in function.__globals__.values() if any(x is module for module in core)}))
