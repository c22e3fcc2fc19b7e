"""Heads up to 512 wide: the Triton kernels agree with float64, and wider ones raise."""

import pytest
from hopper import assert_methods, both_passes, inputs

from canon import Mask
from canon.fast.kernels.triton.config import SMALLEST, fitting, shared_bytes
from canon.testing.compile import SHARED_LIMIT

MASK = Mask.window(150, 90, 3)


@pytest.mark.parametrize(
    ("d", "dv", "method"), [(512, 512, "split"), (512, 512, "fused"), (300, 512, "head_parallel")]
)
def test_both_passes_agree(d, dv, method):
    assert_methods(both_passes, inputs(MASK, d=d, dv=dv), MASK, methods=[method])


@pytest.mark.parametrize("arch", [80, 90])
def test_tiles_for_512_fit_the_device(arch):
    for kernel in ("forward", "dq", "dkdv", "parts"):
        config = fitting(kernel, 512, 512, 2, SHARED_LIMIT[arch], False, arch == 90)
        assert config != SMALLEST
        assert shared_bytes(kernel, config, 512, 512, 2) <= SHARED_LIMIT[arch]
    fitting("fused", 512, 512, 2, SHARED_LIMIT[arch], False, arch == 90)
