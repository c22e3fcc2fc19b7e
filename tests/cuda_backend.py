"""The CUDA backend for tests: with --gpu its kernels run on the GPU, else g++ compiles their source
for the CPU.
"""

from contextlib import contextmanager
from functools import partial

import hopper
from cuda_emulation import emulated
from sharded import DEVICE

from canon.fast import backend

inputs = partial(hopper.inputs, d=32, dv=32)  # the emulation is slow


@contextmanager
def cuda():
    """Compute with the CUDA kernels."""
    with backend("cuda") if DEVICE == "cuda" else emulated():
        yield
