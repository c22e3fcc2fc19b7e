"""The passes of a call: what an autograd Function and an operator have in common.

For each public function, each half has a maker. It checks the arguments of a call, on all ranks together, and returns the
forward and the backward pass. An eager call runs it at once. An operator runs it whenever the operator runs.
"""

from collections.abc import Callable
from typing import NamedTuple

from canon.masks.layout import Layout
from canon.runtime.call import Call

LAYOUTS = {"zigzag_attention": Layout.zigzag, "striped_attention": Layout.striped}  # of functions without ``layout``


class Passes(NamedTuple):
    """Both passes of a checked call, as in `canon.runtime.autograd`.

    ``call`` is None on one rank. ``kept_rows`` returns the first sizes of the other tensors that the forward pass returns.
    """

    forward: Callable
    backward: Callable
    call: Call | None = None
    kept_rows: Callable[[], list[int]] | None = None


MAKERS: dict[tuple[str, str], Callable[..., Passes]] = {}  # by half and function


def makes_passes(half: str, *functions: str) -> Callable[[Callable], Callable]:
    """Decorate the function (name, q, k, v, mask, layout, **options) -> Passes of some public functions of a half."""

    def _decorate(make: Callable) -> Callable:
        MAKERS.update({(half, function): make for function in functions})
        return make

    return _decorate
