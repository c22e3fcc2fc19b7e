"""Keep the compiler from hoisting cheap integers into registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def opaque_zero(number):
    """Return 0 for a ``number`` >= 0 that is loaded nearby: x ^ 0 is then computed where it stands,
    and holds no registers.
    """
    return gl.minimum(number, 0)


@gluon.jit
def unhoisted_index(index, t):
    """Return the buffer number ``index``, for a count of tiles ``t`` < 2^30. Otherwise the shared
    addresses of up to 16 MMA instructions would hold registers.
    """
    return index + (t >> 30)
