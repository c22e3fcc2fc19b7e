"""The vocabulary of both halves: bands, masks, layouts, cast plans, and the cache of plans made from them."""

from canon.masks.band import Band
from canon.masks.layout import Layout
from canon.masks.mask import Mask

__all__ = ["Band", "Layout", "Mask"]
