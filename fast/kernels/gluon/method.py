"""The method of a backward pass for "auto".

"fused" saves two of seven MMAs a tile, but sums dq in float32, which is cleared, added to in L2 and
cast. So it pays where the tiles of keys are visited often. If dk and dv are sent to other ranks,
the dq kernel of "split" hides their message."""

from torch import Tensor

from canon.fast.kernels.gluon.config import choose, padded_to
from canon.fast.kernels.gluon.dq_order import MIN_VISITS_OF_NARROW, ordered_dq_pays
from canon.fast.kernels.triton import launch as portable
from canon.fast.tables.cells import Cells
from canon.fast.tables.work_tables import visits
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan

# Visits of a tile of 128 keys by tiles of 128 queries, on average: "split" is faster at 4.5 and
# below, "fused" at 8.5 and above; at width 64 with shared key heads at 4.5, too.
MIN_VISITS = 8

# If dk and dv are sent: visits by all query heads of a key head, in proportion to the time of a
# kernel of dq over that of the message.
MIN_VISITS_OF_SENT = 60


def choose_method(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    multiprocessors: int,
    repeats: bool,
    sends: bool,
) -> str:
    """As the Triton backend, but "fused" where it is faster; dq in a fixed order if ``repeats``."""
    method = portable.choose_method(q, k, v, mask, multiprocessors)
    d, dv = q.shape[3], v.shape[3]
    if method == "head_parallel" or not padded_to("fused", d, dv):
        return method
    config, *pads = choose("fused", d, dv)
    width, tile = max(pads), (config.rows, config.columns)
    query_heads, key_heads = (x.shape[0] * x.shape[2] for x in (q, k))
    if repeats:
        pays = ordered_dq_pays(mask, query_heads, key_heads, multiprocessors, width, *tile, sends)
    else:
        pays = fused_pays(mask, q.shape[2] // k.shape[2], width, sends)
    return "fused" if pays else method


@cached_plan
def fused_pays(mask: Mask, share: int, width: int, sends: bool) -> bool:
    """Return whether "fused" with dq in any order is faster than "split".

    ``share``: query heads that share a key head; ``width`` is padded.
    tests/fast/test_method_records.py has the records."""
    visited, tiles = visits(Cells(mask), 128, 128, True, 128)
    least = MIN_VISITS_OF_NARROW if width == 64 and share > 1 else MIN_VISITS
    if visited <= least * tiles:
        return False
    return not sends or visited * share > MIN_VISITS_OF_SENT * tiles
