"""The one route of every attention function, from a public call to the passes of its algorithm.

ring_attention(q, k, v, ...)      public signature and docstring (`public_ranks.py`), bound to both halves
attend(algorithm, q, k, v, ...)   autocast, one look-up of the `Call`, agreement between ranks, sink
Attention.forward                 an autograd Function (`autograd.py`); a traced program takes an operator (`operators.py`)
algorithm.forward(call, q, k, v)  the algorithm of a half
"""

from typing import Any

import torch
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.runtime.autograd import Attention, check_differentiation
from canon.runtime.call import Algorithm, call_of
from canon.runtime.checks import autocast_dtype, batched, cast, check_sink, kind_of_sink
from canon.runtime.operators import call_operator, is_traced
from canon.runtime.sink_weights import weighted


def attend(
    algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Layout | None,
    sink: Tensor | None, return_lse: bool, options: dict[str, Any], group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return out, or with ``return_lse`` (out, lse), as a differentiable function of q, k, v and the sink.

    Args: q, k, v with a batch axis, or packed without it; ``options``, the other arguments of the public function by name.
    Raises NotImplementedError under torch.func transforms and forward-mode differentiation. A second derivative raises
    RuntimeError when it is computed. Arguments that do not fit raise as in `call_of`.
    """
    if torch._C._is_any_autocast_enabled() and (dtype := autocast_dtype(q)) is not None:
        q, k, v = (cast(x, dtype) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            return attend(algorithm, q, k, v, mask, layout, sink, return_lse, options, group)
    if is_traced():
        check_sink(q, sink)
        out, lse = call_operator(algorithm, q, k, v, mask, layout, group, options)
    else:
        call = call_of(algorithm, q, k, v, mask, layout, group, options, None if sink is None else kind_of_sink(sink))
        if call.ranks > 1:
            grads = torch.is_grad_enabled()
            call.agree("forward", tuple([grads and x.requires_grad for x in (q, k, v)]))
        if sink is not None:
            check_sink(q, sink)  # the ranks agree on its kind: a wrong sink raises on all of them
        check_differentiation(q, k, v)
        if q.ndim == 3:
            out, lse = (x.squeeze(0) for x in Attention.apply(*batched(q, k, v), call))
        else:
            out, lse = Attention.apply(q, k, v, call)
    if sink is not None:
        under_sink = weighted if torch.compiler.is_compiling() else algorithm.half.under_sink
        out = under_sink(out, lse, sink)
    return (out, lse) if return_lse else out
