"""Masks, layouts and every algorithm in plain PyTorch: the definition of the results, written to be read."""

from canon.masks.band import Band
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.reference.decode import decode_attention
from canon.reference.latent import latent_attention
from canon.reference.local import attention, attention_backward, attention_forward, merge
from canon.reference.magi import cast_plan, dispatch, group_cast, group_reduce, magi_attention, plan_report
from canon.reference.preparation import prepare
from canon.reference.ring import ring_attention, striped_attention, zigzag_attention
from canon.reference.strided import strided_attention

__all__ = [
    "Band",
    "Layout",
    "Mask",
    "attention",
    "attention_backward",
    "attention_forward",
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
    "zigzag_attention",
]
