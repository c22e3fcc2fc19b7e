"""Repairs of Triton's CPU interpreter (TRITON_INTERPRET=1), releases 3.6 to 3.9.

The first interpreted launch calls `repair`, for the whole process.

    fault of the interpreter                     repair
    bfloat16 is held as uint16 bit patterns,     widen operands to float32, round the results
    and computed as integers
    casts to bfloat16 truncate                   round to nearest, ties to even
    bfloat16 constants lack `get_bf16`           define it
    a tensor as loop bound raises TypeError      convert it to an int (Triton 3.6, numpy 2.4)
    NumPy warns of -inf - -inf and overflow      silence NumPy during a launch
    launches from several threads interfere      run one at a time
    each inner call patches triton.language      once per launch: milliseconds per call
    tl.dot runs on BLAS threads                  one thread of torch's matmul: ranks share the cores
    tl.sum stays compiled if Triton was          replace such functions by interpreted ones
    imported before the variable was set
    integer sums are checked for overflow        skip the check: a quarter of the time

Atomic adds of bfloat16, inline assembly and Gluon cannot be interpreted.
"""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

# Python 3.11 shares one nesting counter between all threads that parse source
parsing = threading.Lock()
_launch = threading.RLock()
_repaired = threading.Event()
_patched: set[tuple] = set()  # ids of language modules that the current launch has patched


def is_requested() -> bool:
    """Return whether Triton interprets the kernels that are defined from now on."""
    return triton.knobs.runtime.interpret


def repair(kernel: Any = None) -> bool:
    """Repair the interpreter if it is requested or runs ``kernel``. Return whether it is. Raises
    ImportError for another release of Triton.
    """
    if not (is_requested() or type(kernel).__name__ == "InterpretedFunction"):
        return False
    if _repaired.is_set():
        return True
    with _launch:
        if not _repaired.is_set():
            try:
                with triton.knobs.runtime.scope():
                    triton.knobs.runtime.interpret = True  # for Triton's own late imports
                    _repair_library()
                    _repair_bfloat16()
                    _repair_loop_bounds()
                    _repair_launches()
                    fits = _computes_bfloat16()
            except Exception as error:
                raise _misfit() from error
            if not fits:
                raise _misfit()
            _repaired.set()
    return True


def _misfit() -> ImportError:
    return ImportError(
        "canon.fast repairs the CPU interpreter of Triton 3.6 to 3.9, and the repairs do not fit "
        f"Triton {triton.__version__}: "
        "install one of those releases, or use canon.reference on the CPU"
    )


def _probe(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    cells = i[:, None] * N + i[None, :]
    tile = tl.load(x + cells)
    tl.store(out + cells, tl.dot(tile, tile).to(tl.bfloat16) + tile)


def _computes_bfloat16() -> bool:
    """Return whether an interpreted kernel has PyTorch's bits on small integers: sums are exact."""
    from triton.runtime.interpreter import InterpretedFunction

    x = (torch.arange(256, device="cpu").reshape(16, 16) % 5 - 2).bfloat16()
    out = torch.empty_like(x)
    InterpretedFunction(_probe)[(1,)](x, out, N=16)
    return torch.equal(out, x @ x + x)


def _repair_library() -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    made: dict[int, InterpretedFunction] = {}
    library = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    for holder in [*library, tl.tensor]:
        for name, value in list(vars(holder).items()):
            if isinstance(value, JITFunction):
                setattr(holder, name, made.setdefault(id(value), InterpretedFunction(value.fn)))


# ---------------------------------------------------------------------- bfloat16
def widen(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of uint16 bfloat16 patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Any) -> np.ndarray:
    """Return the uint16 bfloat16 patterns of numbers, rounded to nearest, ties to even."""
    values = np.asarray(values, np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    return np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(
        np.uint16
    )


def _repair_bfloat16() -> None:
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def is_bf16(x: Any) -> bool:
        return isinstance(x, handle) and x.dtype.scalar == tl.bfloat16 and x.data.dtype == np.uint16

    def wide(x: Any) -> Any:
        return handle(widen(x.data), tl.float32) if is_bf16(x) else x

    def as_bf16(x: Any) -> Any:
        return handle(narrow(x.data), tl.bfloat16)

    def through_float32(method: Callable) -> Callable:
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
            operands = (_as_torch(x.data, total.data.dtype) for x in (a, b))
            result = handle(torch.matmul(*operands).numpy() + total.data, total.dtype.scalar)
        else:
            result = dot(self, a, b, total, *rest)
        return as_bf16(result) if is_bf16(d) else result

    def cast_impl(self, source, target, cast=builder.cast_impl):
        if (
            tl.bfloat16 not in (source.dtype.scalar, target.scalar)
            or source.dtype.scalar == target.scalar
        ):
            return cast(self, source, target)
        values = widen(source.data) if is_bf16(source) else source.data
        if target.scalar == tl.bfloat16:
            return handle(narrow(values), tl.bfloat16)
        return handle(values.astype(interpreter._get_np_dtype(target.scalar)), target.scalar)

    def create_fp_to_fp(self, source, target, rounding, convert=builder.create_fp_to_fp):
        kinds = {source.dtype.scalar.name, target.scalar.name}
        if (
            "bf16" in kinds
            and not any(kind.startswith("fp8") for kind in kinds)
            and "RTZ" not in str(rounding)
        ):
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    for name in ("binary_op", "ternary_op", "unary_op"):
        setattr(
            builder,
            name,
            _except_selection(through_float32(getattr(builder, name)), getattr(builder, name)),
        )
    builder.create_fma = through_float32(builder.create_fma)
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = (
        create_dot,
        cast_impl,
        create_fp_to_fp,
    )
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: handle(narrow([value]), tl.bfloat16)
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply_impl = _reduced_wide(operation.apply_impl, wide, as_bf16, is_bf16)


def _as_torch(x: np.ndarray, dtype: np.dtype) -> torch.Tensor:
    x = x.astype(dtype, copy=False)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def _except_selection(repaired: Callable, method: Callable) -> Callable:
    """Do not repair `where`, which copies bit patterns."""

    @wraps(method)
    def chosen(self, *arguments):
        *operands, operation = arguments
        if operation is np.where:
            return method(self, *arguments)
        return repaired(self, *operands, operation)

    return chosen


def _reduced_wide(
    method: Callable, wide: Callable, as_bf16: Callable, is_bf16: Callable
) -> Callable:
    @wraps(method)
    def apply_impl(self, tensors):
        if not any(is_bf16(x.handle) for x in tensors):
            return method(self, tensors)

        def retyped(x, scalar, handle):
            return tl.core.tensor(
                handle, tl.block_type(scalar, list(x.shape)) if x.type.is_block() else scalar
            )

        widened = tuple(
            retyped(x, tl.float32, wide(x.handle)) if is_bf16(x.handle) else x for x in tensors
        )
        results = method(self, widened)
        several = results if isinstance(results, (list, tuple)) else [results]
        rounded = [
            retyped(y, tl.bfloat16, as_bf16(y.handle))
            if is_bf16(x.handle) and y.dtype == tl.float32
            else y
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
        with _launch, np.errstate(all="ignore"), torch.autocast("cpu", enabled=False):
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
        names = function.__globals__
        if id(names) not in known:
            known[id(names)] = names, _languages(names)
        _, languages = known[id(names)]
        if languages in _patched:
            return contextlib.nullcontext()  # an inner call has nothing to restore
        _patched.add(languages)
        return patch(function)

    def patch_builtin(package, builder, scope):
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [
                (name, member) for name, member in members if tl.core.is_builtin(member)
            ]
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    # holds the globals, so that no other object gets their id
    known: dict[int, tuple[dict, tuple]] = {}
    builtins: dict[Any, list] = {}
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype)
    interpreter.GridExecutor.__call__ = one_at_a_time
    interpreter.InterpretedFunction.rewrite = one_rewrite_at_a_time
    interpreter._patch_lang = patch_once
    interpreter._patch_builtin = patch_builtin


def _looked_up_once(look_up: Callable) -> Callable:
    found: dict[str, np.dtype] = {}

    def np_dtype(kind: Any) -> np.dtype:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return look_up(scalar)
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    return np_dtype


def _languages(names: dict) -> tuple:
    """Return the ids of the language modules that a kernel with these globals patches."""
    core = (tl, tl.core)
    return tuple(sorted({id(x) for x in names.values() if any(x is module for module in core)}))
