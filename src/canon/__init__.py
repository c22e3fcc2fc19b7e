"""Exact attention over a sequence that many GPUs hold together, written twice.

    from canon import reference as attn      # plain PyTorch: read it, step through it, trust it
    from canon import fast as attn           # the same functions at the speed of the hardware

Both halves speak of a mask (`Mask`, a set of `Band`s) and of who holds which tokens (`Layout`).
Importing `canon` needs torch alone: `fast`, and with it Triton, loads when it is first asked for.
"""

from importlib import import_module

from canon.reference import Band, Layout, Mask

__version__ = "0.1.0"
__all__ = ["Band", "Layout", "Mask", "fast", "reference"]


def __getattr__(name):
    """Load `canon.fast` on first use (PEP 562)."""
    if name == "fast":
        return import_module("canon.fast")
    raise AttributeError(f"module 'canon' has no attribute {name!r}")
