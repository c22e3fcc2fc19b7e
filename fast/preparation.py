"""Make the plans of a call ahead of it: masks, cast plans, and the tables of every kernel.

`prepare` calls the launch functions on tensors of the meta device, and notes the plans that they
look up (`plan_cache.noted_plans`). The first call after ``load`` uploads the tables, and the host
does not wait (`device_plans`).

A pickle takes about the bytes of these tables.

Source: as `canon.reference.preparation`.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

from canon.faces import public_prepare
from canon.fast.backward import plan_gradients
from canon.fast.half import FAST, Part
from canon.fast.kernels.launcher import Gpu, gpu_of, meta_stands_for
from canon.fast.local import empty_result, forward_for
from canon.fast.mesh import plan_exchange
from canon.fast.tables.cells import Cells
from canon.fast.tables.device_plans import META
from canon.route.call import Call

__all__ = ["prepare"]


def _on(device: Any) -> AbstractContextManager:
    if isinstance(device, Gpu):
        return meta_stands_for(device)
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"prepare: device must be a CUDA device, the CPU or a Gpu, got {device}")
    return meta_stands_for(None if device.type == "cpu" else gpu_of(device))


def _run(call: Call, backward: bool) -> None:
    if call.columns > 1:
        plan_exchange(call)
        call = call.computed
    for part in call.algorithm.parts(call, backward):
        _launch(call, part, backward)


def _launch(call: Call, part: Part, backward: bool) -> None:
    q, k, *_ = call.shapes
    mask, share = part.mask, 1 if part.key_heads == q[2] else q[2] // k[2]
    new = lambda tokens, heads, width: torch.empty(
        q[0], tokens, heads, width, dtype=call.dtype, device=META
    )
    queries = new(mask.queries, share * part.key_heads, q[3])
    keys, values = (new(mask.keys, part.key_heads, width) for width in (q[3], call.value_width))
    out, lse = empty_result(queries, values, call.dtype)
    if part.forward:
        forward = forward_for(queries, values, mask, part.whole, call.options["return_max_logits"])
        forward(queries, keys, values, Cells(mask), 1.0, out, lse)
    if part.backward and backward:
        plan_gradients(queries, keys, values, out, lse, mask, call.backward, part.sends)


NOTES = """
    ``device`` may also be the result of `canon.fast.kernels.launcher.gpu_of`: a data-loader worker
    does not start CUDA.

    If the worker is forked after a call of `canon.fast` or of `gpu_of`, "cuda" suffices. Else
    RuntimeError is raised, because the GPU is unknown. Inside `canon.fast.backend` the plans are
    those of that kernel backend. """
prepare = public_prepare.prepare(FAST, _run, _on, NOTES)
