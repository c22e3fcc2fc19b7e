"""Bands, masks, layouts and cast plans of both halves, and the cache of plans."""

from canon.masks.band import Band
from canon.masks.layout import Layout
from canon.masks.mask import Mask

__all__ = ["Band", "Layout", "Mask"]
