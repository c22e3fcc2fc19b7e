"""Launch planning of the CUDA kernels: every width fits into the shared memory of every supported
GPU.
"""

from itertools import product

import pytest

from canon.fast.kernels.cuda.config import RESERVED, TABLE, choose, shared_bytes
from canon.fast.kernels.launcher import Gpu

GPUS = {  # the most shared memory of a CTA; an SM has 1 KB more
    "sm_80": Gpu((8, 0), 108, 163 << 10),
    "sm_86": Gpu((8, 6), 84, 99 << 10),
    "sm_89": Gpu((8, 9), 142, 99 << 10),
    "sm_90": Gpu((9, 0), 132, 227 << 10),
}
WIDTHS = range(16, 257, 16)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("kernel", TABLE)
def test_every_pair_of_widths_fits_every_gpu(kernel, gpu):
    for d, dv in product(WIDTHS, WIDTHS):
        config = choose(kernel, d, dv, gpu)
        assert config.shared_bytes == shared_bytes(kernel, config, d, dv)
        assert config.ctas * (config.shared_bytes + RESERVED) <= gpu.shared_memory + RESERVED


@pytest.mark.parametrize(
    "config",
    sorted({c for rows in TABLE.values() for row in rows.values() for c in row}, key=str),
    ids=str,
)
def test_tiles_suit_the_kernels_and_rank_invariance(config):
    assert 128 % config.rows == 128 % config.columns == 0, (
        "tiles of rank_invariant=True divide 128 tokens"
    )
    assert config.rows * config.parts in (16 * config.warps, 32 * config.warps)
    assert config.columns % (16 * config.parts) == 0
    assert 32 * config.warps * config.ctas * 255 <= 65536, "the registers of an SM"


def test_too_little_shared_memory_is_an_error_with_need_limit_and_remedy():
    need = shared_bytes("dkdv", TABLE["dkdv"][256][-1], 256, 256)
    with pytest.raises(
        ValueError, match=f"needs {need} bytes .* but this GPU has 49152: use backend"
    ):
        choose("dkdv", 256, 256, Gpu((7, 5), 40, 48 << 10))
