"""What all algorithms of `canon.fast` share, and the parts that `prepare` launches for them.
`canon.fast` hands in ``FAST.compile_for``, which needs all algorithms."""

from typing import NamedTuple

from canon.fast.device import check_inputs, restored, settings_of
from canon.fast.sinks import under_sink
from canon.masks.mask import Mask
from canon.route.algorithm import Side

FAST = Side("fast", under_sink, settings_of, restored, check_inputs)


class Part(NamedTuple):
    """One kernel part of a call: the cells of ``mask``, and ``key_heads`` of the key heads.
    ``whole``: the part is the call, on one rank. ``forward``, ``backward``: the passes that launch
    it. ``sends``: as in `canon.fast.backward.Method`.
    """

    mask: Mask
    key_heads: int
    whole: bool = False
    forward: bool = True
    backward: bool = True
    sends: bool = False
