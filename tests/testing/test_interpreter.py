"""The repaired interpreter of Triton computes as PyTorch does, in every process whose first kernel
is interpreted.
"""

from functools import partial

import pytest
import torch
from programs import ended as ended_process

from canon.fast.kernels import interpreter

if not interpreter.repair():
    pytest.skip("kernels run on the GPU here, not in the interpreter", allow_module_level=True)

import triton
import triton.language as tl

pytestmark = pytest.mark.interpreted


@triton.jit
def arithmetic_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + N + i, x * y)
    tl.store(out + 2 * N + i, tl.where(x < y, x, y))
    tl.store(out + 3 * N + i, tl.maximum(x, y))
    tl.store(out + 4 * N + i, tl.zeros((N,), tl.bfloat16) + 1.5)
    tl.store(out + 5 * N + i, (i * 3).to(tl.bfloat16))
    tl.store(out + 6 * N + i, -x)


@triton.jit
def reduction_kernel(a, out, N: tl.constexpr):
    x = tl.load(a + tl.arange(0, N))
    tl.store(out, tl.sum(x, 0))
    tl.store(out + 1, tl.max(x, 0))
    tl.store(out + 2, tl.min(x, 0))
    tl.store(out + 3 + tl.arange(0, N), tl.cumsum(x.to(tl.float32), 0).to(tl.bfloat16))


@triton.jit
def plus_one(x):
    return x + 1


@triton.jit
def loop_kernel(bounds, out):
    total = 0
    for _ in range(tl.load(bounds), tl.load(bounds + 1)):
        total = plus_one(total)
    tl.store(out, tl.cdiv(total, 2))


@triton.jit
def operands_kernel(x, flags, out):
    i = tl.arange(0, 16)
    long, number = i.to(tl.int64), i.to(tl.float32)
    assert (long + i).dtype == (i + long).dtype == tl.int64
    assert (i * 0.5).dtype == (number + i).dtype == tl.float32
    tl.store(out + i, tl.where(tl.load(flags + i), -2 + i, 3 * number))
    tl.store(out + 16 + i, tl.load(i + x + long))


def test_operands_of_other_types_are_promoted():
    x, i, out = torch.randn(48), torch.arange(16), torch.empty(32)
    operands_kernel[(1,)](x, i % 2 == 0, out)
    assert torch.equal(out[:16], torch.where(i % 2 == 0, i - 2.0, i * 3.0))
    assert torch.equal(out[16:], x[:32:2])


def test_bfloat16_arithmetic_is_that_of_float32_rounded():
    x, y = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.empty(7, 64, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, N=64)
    numbers = torch.arange(64.0).bfloat16()
    expected = [
        x + y,
        x * y,
        torch.minimum(x, y),
        torch.maximum(x, y),
        torch.full_like(x, 1.5),
        numbers * 3,
        -x,
    ]
    assert torch.equal(out, torch.stack(expected))


def test_bfloat16_reductions():
    x, out = torch.randn(64).bfloat16(), torch.empty(67, dtype=torch.bfloat16)
    reduction_kernel[(1,)](x, out, N=64)
    assert out[:3].tolist() == [x.float().sum().bfloat16(), x.max(), x.min()]
    assert torch.equal(out[3:], x.float().cumsum(0).bfloat16())


def test_loop_bounds_may_be_loaded():
    out = torch.zeros(1, dtype=torch.int32)
    loop_kernel[(1,)](torch.tensor([3, 10], dtype=torch.int32), out)
    assert out.item() == 4


def test_tensors_of_one_shape_share_their_types():
    """interpreted_types.py makes them once, with the values of Triton and its errors."""
    sizes = [16, 32], (tl.constexpr(16), 32)
    one, other = (tl.tensor(None, tl.block_type(tl.float32, shape)) for shape in sizes)
    assert one.shape is other.shape
    assert one.type == other.type != tl.block_type(tl.int32, sizes[0])
    assert [size.value for size in one.shape] == list(one.type.shape) == sizes[0]
    assert one.numel.value == one.type.numel == 512
    assert one.dtype == one.type.scalar == tl.float32
    assert tl.tensor(None, tl.float32).numel.value == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [16, 24])


# ---------------------------------------------------------------------- in a fresh process
fresh = partial(ended_process, PYTHONWARNINGS="error")
ATTEND = """
import torch
from canon import fast, reference

q, k, v = (
    torch.randn(1, 70, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (2, 1, 1)
)
dout, results = torch.randn(1, 70, 2, 16), []
for half, dtype in ((fast, torch.bfloat16), (reference, torch.float64)):
    out = half.attention(*(x.to(dtype) for x in (q, k, v)))
    results.append([out, *torch.autograd.grad(out, (q, k, v), dout.to(dtype))])
for got, exact in zip(*results):
    error = (got.double() - exact).norm() / exact.norm()
    assert error < 0.02, error
"""


def test_the_variable_may_be_set_after_triton_is_imported():
    """Triton's own functions, which were compiled ones until then, are interpreted too."""
    before = (
        "import os, triton.language, "
        "triton.runtime.interpreter\nos.environ['TRITON_INTERPRET'] = 'true'\n"
    )
    after = (
        "import triton.language as tl, triton\nassert not isinstance(tl.sum, triton.JITFunction)\n"
    )
    ended = fresh(before + ATTEND + after)
    assert ended.returncode == 0, ended.stderr


def test_a_variable_set_too_late_is_an_error():
    ended = fresh(
        "import canon.fast.kernels.triton.launch, os\nos.environ['TRITON_INTERPRET'] = "
        f"'1'\n{ATTEND}"
    )
    assert "canon.fast was imported before TRITON_INTERPRET=1 was set" in ended.stderr


RENAMED = "del interpreter.GridExecutor.__call__"
WRONG = """
builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
load = builder.create_masked_load
builder.create_masked_load = lambda *given: handle(
    load(*given).data + 1, tl.bfloat16
)  # the next bfloat16 number
"""


@pytest.mark.parametrize("fault", [RENAMED, WRONG])
def test_an_interpreter_that_the_repairs_do_not_fit_is_refused(fault):
    before = "import triton.language as tl\nfrom triton.runtime import interpreter\n"
    ended = fresh(f"{before}{fault}\n{ATTEND}", TRITON_INTERPRET="1")
    assert (
        "ImportError: canon.fast repairs the CPU interpreter of Triton 3.6 to 3.9"
    ) in ended.stderr


def test_an_import_leaves_triton_as_it_is():
    ended = fresh(
        """
        from triton.runtime import interpreter
        names = "GridExecutor", "InterpreterBuilder", "InterpretedFunction"
        parts = [getattr(interpreter, name) for name in names]
        before = [dict(vars(part)) for part in parts], interpreter._patch_lang
        import canon.fast
        assert before == ([dict(vars(part)) for part in parts], interpreter._patch_lang)
        """,
        TRITON_INTERPRET="1",
    )
    assert ended.returncode == 0, ended.stderr


def test_without_triton_pytorch_computes_and_a_chosen_backend_says_how_to_install_it():
    before = "import sys\nsys.modules['triton'] = None\n"
    after = """
try:
    with fast.backend("triton"):
        fast.attention(q, k, v)
except RuntimeError as error:
    print(error)
"""
    ended = fresh(before + ATTEND + after)
    told = (
        "the kernels need Triton: pip install 'triton>=3.6' (on Linux), or use backend(\"torch\")"
    )
    assert ended.stdout.splitlines() == [told], ended.stderr


ROUTES = """
import os, sys, threading, time
from canon import Mask, fast
from canon.fast.device import BACKENDS


def pause(event, names):
    if event == "import" and names[0].startswith("triton.") and not threads:
        threads.append(threading.Thread(target=route))
        threads[0].start()
        time.sleep(0.5)


threads, names = [], ("module", "rows", "forward_in_parts")
routes = [lambda x=x, name=name: getattr(BACKENDS[x], name)
          for x in ("triton", "gluon", "cuda") for name in names[: 3 if x == "triton" else 1]]
for route in [lambda: fast.dispatch(Mask.full(9), 2), *routes]:
    if not (child := os.fork()):
        sys.addaudithook(pause)
        import triton

        threads[0].join()
        route()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_threads_may_import_triton_at_the_same_time_by_any_route():
    """Without a pause, about half of the runs would show a fault."""
    ended = fresh(ROUTES)
    assert ended.returncode == 0, ended.stderr
