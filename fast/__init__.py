"""Fast kernels for the functions of `canon.reference`, with the same modules, signatures, defaults
and docstrings. Where there is no Triton, plain PyTorch computes (`backend`).

Both passes of a function have the names of those in `canon.reference`. They return lse in the
accumulation dtype, compute dk and dv together, and neither compute nor send unneeded gradients.
"""

from canon.fast.ahead.warm import warm_up
from canon.fast.decode import decode_attention
from canon.fast.device import backend, compiles
from canon.fast.half import FAST
from canon.fast.latent import latent_attention
from canon.fast.local import attention, attention_backward, attention_forward, merge
from canon.fast.magi import (
    cast_plan,
    dispatch,
    group_cast,
    group_reduce,
    magi_attention,
    plan_report,
)
from canon.fast.mesh import mesh_backward, mesh_forward
from canon.fast.preparation import prepare
from canon.fast.ring import ring_attention, striped_attention, zigzag_attention
from canon.fast.strided import strided_attention
from canon.masks.band import Band
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.route.call import Call


def _compile_for(call: Call) -> None:
    widths = call.shapes[0][-1], call.value_width
    if call.device.type == "cuda" and compiles(call.device, call.dtype, *widths):
        from canon.fast.ahead.first_call import compile_for

        compile_for(call)


FAST.compile_for = _compile_for
FAST.over_mesh = mesh_forward, mesh_backward

__all__ = [
    "Band",
    "Layout",
    "Mask",
    "attention",
    "attention_backward",
    "attention_forward",
    "backend",
    "cast_plan",
    "decode_attention",
    "dispatch",
    "group_cast",
    "group_reduce",
    "latent_attention",
    "magi_attention",
    "merge",
    "plan_report",
    "prepare",
    "ring_attention",
    "strided_attention",
    "striped_attention",
    "warm_up",
    "zigzag_attention",
]
