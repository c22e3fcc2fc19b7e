"""Soft-caps in the Hopper kernels: a score s becomes softcap * tanh(s / softcap), before the mask.

`tanh.approx.f32` has 11 correct bits, too few for lse.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon.fast.kernels.gluon.ptx import capped_weights, tanh
from canon.fast.kernels.triton.blocks import LOG2E


@gluon.jit
def capped(s, scale_log2, SOFTCAP: gl.constexpr):
    """Return the capped scores in base 2; without a soft-cap s, which lacks `factor_of_capped`."""
    if SOFTCAP is None:
        return s
    else:
        return tanh(s * (scale_log2 * (1.0 / (SOFTCAP * LOG2E)))) * (SOFTCAP * LOG2E)


@gluon.jit
def factor_of_capped(scale_log2, SOFTCAP: gl.constexpr):
    """Return 1, or without a soft-cap scale_log2."""
    if SOFTCAP is None:
        return scale_log2
    else:
        return gl.to_tensor(1.0)


@gluon.jit
def weights(s, lse, scale_log2, SOFTCAP: gl.constexpr):
    """Return P, and P times the slope of the capped scores, NaN perhaps in hidden cells."""
    if SOFTCAP is None:
        p = gl.exp2(s * scale_log2 - lse)
        return p, p
    else:
        return capped_weights(s * (scale_log2 * (1.0 / (SOFTCAP * LOG2E))), lse, SOFTCAP * LOG2E)
