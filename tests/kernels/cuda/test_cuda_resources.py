"""Every CUDA kernel compiles by NVRTC for sm_80 to sm_90, and its main configurations spill no
register and fit the SM.
"""

import pytest
from cuda_resources import compile_all, ctas, main_cases

from canon.fast.kernels.cuda import config
from canon.testing.compile import SHARED_LIMIT

pytest.importorskip("cuda.core", reason="needs the extra cuda")


@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_the_kernels_compile_without_spills_and_fit_the_device(arch):
    found = compile_all(arch)
    assert len(found) == len(list(main_cases(arch))), (
        "every width has a configuration for this shared memory"
    )
    assert {(one.kernel, one.d, one.dv) for one in found if one.d == 128} == {
        (k, 128, 128) for k in config.KERNELS
    }
    assert not [str(one) for one in found if one.spilled]
    assert not [str(one) for one in found if one.shared > SHARED_LIMIT[arch] or one.ctas < 1]


def test_an_sm_holds_as_many_ctas_as_registers_memory_and_threads_permit():
    assert ctas(80, 4, 255, 50 << 10) == 2, "registers"
    assert ctas(80, 8, 255, 50 << 10) == 1
    assert ctas(80, 4, 64, 80 << 10) == 2, "shared memory"
    assert ctas(86, 4, 64, 80 << 10) == 1
    assert ctas(80, 8, 32, 0) == 8, "threads"
    assert ctas(86, 8, 32, 0) == 6
