"""Kernel backends: ``triton`` runs on any CUDA GPU, and in Triton's interpreter on a CPU; ``gluon`` runs on Hopper.

Importing this package repairs the interpreter if TRITON_INTERPRET=1 is set (`canon.fast.kernels.interpreter`).
"""

try:
    import triton  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise ModuleNotFoundError(
        "canon.fast needs Triton: pip install 'triton>=3.6' (on Linux), or use canon.reference, which needs torch alone",
        name="triton",
    ) from None

from canon.fast.kernels.interpreter import repair

repair()
