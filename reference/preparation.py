"""Make the plans of a call ahead of it, for example in a worker of the data loader.

    in collate_fn             plans = prepare("magi_attention", mask, layout, rank=rank,
                                              heads=(32, 8), widths=(128, 128))
    before the first layer    plans.load()
    in every layer            out = magi_attention(q, k, v, plans.mask, plans.layout)

A mask of packed documents is new in every step, so its plans cannot come from an earlier one. In
threads of the training process, `prepare` alone fills the cache. Plans of `canon.reference` are
local masks, cast plans, and the hidden keys of `latent_attention`.

Source: MagiAttention (Tao and Huang, 2025) also plans once for each mask.
"""

from contextlib import nullcontext

from canon.faces import public_prepare
from canon.reference.local import REFERENCE
from canon.route.call import Call

__all__ = ["prepare"]


def _run(call: Call, backward: bool) -> None:
    for _ in call.algorithm.parts(call.computed, backward):
        pass


prepare = public_prepare.prepare(REFERENCE, _run, nullcontext)
