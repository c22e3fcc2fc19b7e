"""Define all kernels as interpreted ones. TRITON_INTERPRET then chooses, test by test, whether they
run, or PyTorch's tiles.

Triton reads the variable when a module defines its kernels, so all of these modules are imported
here, with the variable set."""

import os

before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"

import canon.fast  # noqa: E402
import canon.fast.kernels.cuda.launch  # noqa: E402
import canon.fast.kernels.gluon.launch  # noqa: E402
import canon.fast.kernels.triton.parts  # noqa: E402
import canon.fast.kernels.triton.rows  # noqa: E402, F401

if before is None:
    del os.environ["TRITON_INTERPRET"]
