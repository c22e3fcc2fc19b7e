"""Repairs of Triton's CPU interpreter (TRITON_INTERPRET=1), releases 3.6 to 3.9.

The first interpreted launch calls `repair`, for the whole process.

    fault of the interpreter                     repair
    bfloat16 is computed as uint16 patterns      hold it as float32, round each result
    a tensor as loop bound raises TypeError      convert it to an int (Triton 3.6)
    NumPy warns of -inf - -inf and overflow      silence NumPy during a launch
    launches from several threads interfere      run one at a time
    each inner call patches triton.language      once per launch: milliseconds per call
    tl.dot runs on BLAS threads                  torch's matmul on one thread
    tl.sum stays compiled if Triton was          replace such functions by interpreted ones
    imported before the variable was set
    integer sums are checked for overflow        skip it: a quarter of the time

Atomics and bitcasts of bfloat16, inline assembly and Gluon cannot be interpreted.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

# Python 3.11 shares one nesting counter between threads that parse source
parsing = threading.Lock()
_launch = threading.RLock()
_repaired = threading.Event()


def is_requested() -> bool:
    """Return whether new kernels are interpreted."""
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
                    _check_bfloat16()
            except Exception as error:
                raise ImportError(
                    "canon.fast repairs the CPU interpreter of Triton 3.6 to 3.9, and the repairs "
                    f"do not fit Triton {triton.__version__}: "
                    "install one of those releases, or use canon.reference on the CPU"
                ) from error
            _repaired.set()
    return True


def _probe(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    cells = i[:, None] * N + i[None, :]
    tile = tl.load(x + cells)
    tl.store(out + cells, tl.dot(tile, tile).to(tl.bfloat16) + tile)


def _check_bfloat16() -> None:
    """Compare a kernel with PyTorch on small integers."""
    from triton.runtime.interpreter import InterpretedFunction

    x = (torch.arange(256, device="cpu").reshape(16, 16) % 5 - 2).bfloat16()
    out = torch.empty_like(x)
    InterpretedFunction(_probe)[(1,)](x, out, N=16)
    torch.testing.assert_close(out, x @ x + x, rtol=0, atol=0)


def _repair_library() -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    made: dict[int, InterpretedFunction] = {}
    library = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    for holder in [*library, tl.tensor]:
        for name, value in list(vars(holder).items()):
            if isinstance(value, JITFunction):
                setattr(holder, name, made.setdefault(id(value), InterpretedFunction(value.fn)))


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
    validate, cast, convert = handle.__post_init__, builder.cast_impl, builder.create_fp_to_fp
    dot, load, store = builder.create_dot, builder.create_masked_load, builder.create_masked_store

    def round_to_bfloat16(self):
        if self.dtype.scalar.name != "bf16":
            validate(self)
        elif self.data.dtype != bool:  # a comparison has the dtype of its operands
            self.data = widen(narrow(self.data))

    def create_masked_load(self, pointers, mask, other, *rest, **options):
        if pointers.get_element_ty() != tl.bfloat16:
            return load(self, pointers, mask, other, *rest, **options)
        other = None if other is None else handle(narrow(other.data), tl.uint16)
        pointers = handle(pointers.data, tl.pointer_type(tl.uint16))
        bits = load(self, pointers, mask, other, *rest, **options).data
        return handle(widen(bits), tl.bfloat16)

    def create_masked_store(self, pointers, value, *rest):
        if pointers.get_element_ty() == tl.bfloat16:
            value = handle(narrow(value.data), tl.uint16)
        return store(self, pointers, value, *rest)

    def create_dot(self, a, b, total, *rest):
        if {x.data.dtype.kind for x in (a, b, total)} != {"f"}:
            return dot(self, a, b, total, *rest)
        operands = (_as_torch(x.data, total.data.dtype) for x in (a, b))
        return handle(torch.matmul(*operands).numpy() + total.data, total.dtype.scalar)

    def cast_impl(self, source, target):
        if tl.bfloat16 not in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        return handle(source.data.astype(interpreter._get_np_dtype(target)), target.scalar)

    def create_fp_to_fp(self, source, target, rounding):
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    def except_bfloat16(method: Callable) -> Callable:
        def checked(self, *operands):
            kinds = [x.get_element_ty() if isinstance(x, handle) else x for x in operands]
            if tl.bfloat16 in kinds:
                raise TypeError("atomics and bitcasts of bfloat16 cannot be interpreted")
            return method(self, *operands)

        return checked

    for name in ("create_atomic_rmw", "create_atomic_cas", "create_bitcast"):
        setattr(builder, name, except_bfloat16(getattr(builder, name)))
    for method in (create_masked_load, create_masked_store, create_dot, cast_impl, create_fp_to_fp):
        setattr(builder, method.__name__, method)
    handle.__post_init__ = round_to_bfloat16
    builder.create_fabs = lambda self, x: self.unary_op(x, np.abs)
    builder.get_bf16 = lambda self, value: handle(np.array([value]), tl.bfloat16)
    interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype)


def _as_torch(x: np.ndarray, dtype: np.dtype) -> torch.Tensor:
    x = x.astype(dtype, copy=False)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def _looked_up_once(look_up: Callable) -> Callable:
    found = {"bf16": np.dtype(np.float32)}

    def np_dtype(kind: Any) -> np.dtype:
        scalar = kind.scalar
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    return np_dtype


def _repair_loop_bounds() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


def _repair_launches() -> None:
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    rewrite = interpreter.InterpretedFunction.rewrite

    @wraps(launch)
    def one_at_a_time(self, *arguments, **options):
        with _launch, np.errstate(all="ignore"), torch.autocast("cpu", enabled=False):
            threads, patched = torch.get_num_threads(), patch(every_language)
            torch.set_num_threads(1)
            try:
                return launch(self, *arguments, **options)
            finally:
                torch.set_num_threads(threads)
                patched.restore()

    def one_rewrite_at_a_time(self):
        with parsing:
            return rewrite(self)

    def patch_builtin(package, builder, scope):
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [(name, x) for name, x in members if tl.core.is_builtin(x)]
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    builtins: dict[Any, list] = {}
    every_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.GridExecutor.__call__ = one_at_a_time
    interpreter.InterpretedFunction.rewrite = one_rewrite_at_a_time
    # a launch has patched all, so its functions patch nothing
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    interpreter._patch_builtin = patch_builtin
