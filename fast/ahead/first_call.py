"""Compile all kernels of a model in its first call, so that no later call waits for a compiler.

The first process of a host compiles for all, in new interpreters, so scripts need no main guard.
CANON_COMPILE_AHEAD=0 disables it: kernels then compile when first used.
"""

import os
import sys
import threading
import time
import warnings
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from canon.fast.ahead.compilation import Outcome, are_stamped, compile_ahead
from canon.fast.ahead.kernel_variants import Model, collect, identities, precision_of
from canon.fast.kernels.triton.launch import INTERPRETED
from canon.route.call import Call
from canon.route.checks import split_scale

_lock = threading.Lock()  # ranks may be threads
_compiled: set[Model | tuple] = set()  # models, and their `identities`


def compile_for(call: Call) -> None:
    """Compile the kernels of a call's model on a GPU, once. Warn if some do not compile."""
    if call.device.type != "cuda" or INTERPRETED or os.environ.get("CANON_COMPILE_AHEAD") == "0":
        return
    model = model_of(call.computed)
    if call.columns > 1:
        model = replace(model, over_mesh=True)
    if model in _compiled:  # another mask or length
        return
    needed = identities(model)
    with _lock:
        if not _compiled.issuperset(needed) and not are_stamped(needed):
            _compile(model, call.device)
        _compiled.update((model, *needed))


def model_of(call: Call) -> Model:
    """Return the model of a call."""
    (_, _, h, d), (_, _, g, _), _, *weights = call.shapes
    g, dv = h if weights else g, call.value_width  # K and V of each query head are projected
    return Model(
        call.dtype,
        d,
        dv,
        (h, g),
        (call.function,),
        call.settings,
        call.backward,
        (call.ranks,),
        call.reduce_dtype,
        torch.are_deterministic_algorithms_enabled(),
        precision_of(call.dtype),
        call.sink is not None,
        call.options.get("rank_invariant", False),
        split_scale(call.scale)[1],
        call.options["return_max_logits"],
    )


def _compile(model: Model, device: torch.device) -> None:
    first_rank, began = not dist.is_initialized() or dist.get_rank() == 0, time.monotonic()
    what = (
        f"{model.functions[0]} ({model.dtype}, widths {model.d}/{model.dv}, heads "
        f"{model.heads[0]}/{model.heads[1]})"
    )
    tell = partial(print, file=sys.stderr, flush=True) if first_rank else lambda text: None
    tell(f"canon.fast: compiling the kernels of {what}, once on each host ...")
    work = [partial(collect, model, str(device))]
    try:
        done = compile_ahead(work, identities(model), progress=first_rank)
    except OSError as error:  # the cache cannot be written, or its file system has no locks
        done = Outcome(error=f"{type(error).__name__}: {error}")
    if not done.complete:
        warnings.warn(
            f"canon.fast compiled {done.compiled} of {done.of or 'unknown many'} kernels of "
            f"{what}; the others compile when they are first used: {done.error}",
            stacklevel=2,
        )
    else:
        tell(f"canon.fast: compiled in {time.monotonic() - began:.0f} s")
