"""The common part of all distributed attention functions: an operator or an autograd Function, then the sink.

eager call            passes agreed between all ranks -> one autograd Function -> sink
traced or compiled    `canon::` operator, whose body makes the passes          -> sink
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from canon.fast.differentiable import call_operator, differentiable
from canon.fast.sinks import under_sink
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.runtime.checks import check_sink, kind_of_sink
from canon.runtime.operators import is_traced
from canon.runtime.passes import Passes


def attend_distributed(
    function: str, make: Callable[..., Passes], q: Tensor, k: Tensor, v: Tensor, mask: Mask | None,
    layout: Layout | None, sink: Tensor | None, return_lse: bool, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return out, or out and lse, of the function whose passes ``make`` returns. ``options``: its other arguments."""
    if is_traced():
        check_sink(q, sink)
        out, lse = call_operator(function, q, k, v, mask, layout, **options)
    else:
        passes = make(function, q, k, v, mask, layout, sink=kind_of_sink(sink), **options)
        check_sink(q, sink)  # all ranks agree on its kind: a bad one raises on all of them
        out, lse = differentiable(q, k, v, passes.forward, passes.backward, call=passes.call, return_lse=True)
    return under_sink(out, lse, sink, return_lse)
