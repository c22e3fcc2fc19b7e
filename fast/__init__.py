"""Fast kernels for the functions of `canon.reference`, with the same modules, signatures and defaults."""

from canon.fast.device import backend
from canon.fast.local import attention, attention_backward, attention_forward, merge
from canon.fast.magi import cast_plan, dispatch, group_cast, group_reduce, magi_attention, plan_report
from canon.fast.preparation import prepare
from canon.fast.ring import ring_attention, striped_attention, zigzag_attention
from canon.fast.strided import strided_attention, suggest_strides
from canon.reference.band import Band
from canon.reference.layout import Layout
from canon.reference.mask import Mask

__all__ = [
    "Band",
    "Layout",
    "Mask",
    "attention",
    "attention_backward",
    "attention_forward",
    "backend",
    "cast_plan",
    "dispatch",
    "group_cast",
    "group_reduce",
    "magi_attention",
    "merge",
    "plan_report",
    "prepare",
    "ring_attention",
    "strided_attention",
    "striped_attention",
    "suggest_strides",
    "zigzag_attention",
]
