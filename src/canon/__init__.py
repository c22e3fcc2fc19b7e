"""Exact attention over a sequence that several GPUs hold together. Every algorithm is written
twice.

    from canon import reference as attn      # plain PyTorch: read it, step through it
    from canon import fast as attn           # the same functions as Triton and Gluon kernels

Both halves take a `Mask` (a set of `Band`s) and a `Layout` (the tokens of each rank).
`canon.training` has the loss, and `canon.trees` packs sequences that begin alike.
"""

from importlib import import_module

from canon import training, trees
from canon.masks import Band, Layout, Mask

__version__ = "0.1.0"
__all__ = ["Band", "Layout", "Mask", "fast", "reference", "training", "trees"]


def __getattr__(name):
    """Import a half on first use (PEP 562)."""
    if name in ("reference", "fast"):
        return import_module(f"canon.{name}")
    where = f": canon.training.{name} exists" if hasattr(training, name) else ""
    raise AttributeError(f"module 'canon' has no attribute {name!r}{where}")
