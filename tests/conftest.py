"""Set-up of all tests: where there is no GPU, Triton's kernels run in its interpreter."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from canon.testing import interpreter

interpreter.repair()

# The same examples in every run: a failure that comes and goes teaches nothing.
settings.register_profile("canon", deadline=None, derandomize=True, database=None)
settings.load_profile("canon")
