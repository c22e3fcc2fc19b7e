"""Compile all kernels of a model on request: `warm_up`, which the command `canon warm` calls."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from canon.fast.ahead.kernel_variants import Model, collect, identities, precision_of
from canon.fast.ahead.kernel_variants import functions as all_functions
from canon.fast.device import BACKENDS, chosen_backend
from canon.route.checks import DTYPES, check_method, checked_softcap

DEFAULT = (
    "attention",
    "ring_attention",
    "zigzag_attention",
    "striped_attention",
    "strided_attention",
    "magi_attention",
)


def warm_up(
    dtype: torch.dtype = torch.bfloat16,
    d: int = 128,
    dv: int | None = None,
    *,
    heads: tuple[int, int] = (32, 8),
    functions: Sequence[str] = DEFAULT,
    backend: str | None = None,
    backward: str = "auto",
    ranks: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    rank_invariant: bool = False,
    softcap: float | None = None,
    return_max_logits: bool = False,
    processes: int | None = None,
    progress: bool = True,
) -> int:
    """Compile every kernel variant that a model can need into the disk cache. Return how many this
    call compiled.

    Later calls of ``functions`` compile nothing, whatever their masks, sizes, layouts and scales.
    It is no collective: the first process of a host compiles for all. Without a CUDA device it only
    prints a line. Call it after setting `torch.use_deterministic_algorithms` and
    `torch.backends.cuda.matmul.fp32_precision`.

    Args:
        dtype, d, dv: dtype of q, k and v; widths of K and V, multiples of 16. dv None is d.
        heads: numbers of query heads and key heads of one call.
        functions: the functions of `canon.fast` that the model calls.
        backend: as for `canon.fast.backend`. None is the backend that surrounds this call, or the
            automatic choice.
        backward, softcap, return_max_logits, reduce_dtype: the options of the functions.
        ranks: of the group; None is the world size, or 1, 2, 4 and 8 without a process group.
        rank_invariant: compile for calls with this option, not for those without it.
        processes: compiling processes; None is one per core.
        progress: show a progress bar on the standard error stream.

    Raises:
        ValueError: an argument is not as described.
        RuntimeError: a kernel does not compile, or no kernel supports the model.
    """
    model = _checked_model(
        dtype, d, d if dv is None else dv, heads, functions, backend, backward, ranks, softcap,
        reduce_dtype=reduce_dtype, rank_invariant=rank_invariant, max_logits=return_max_logits,
    )  # fmt: skip
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1 or None, got {processes}")
    if not torch.cuda.is_available():
        print("canon.fast.warm_up: there is no CUDA device, so there is nothing to compile")
        return 0
    # only here: needs progress bars and processes
    from canon.fast.ahead.compilation import compile_ahead

    device = f"cuda:{torch.cuda.current_device()}"
    outcome = compile_ahead(
        [partial(collect, model, device)],
        identities(model),
        processes=processes,
        progress=progress,
    )
    if not outcome.complete:
        raise RuntimeError(
            f"warm_up compiled {outcome.compiled} of {outcome.of or 'unknown many'} kernel "
            f"variants: {outcome.error}"
        )
    return outcome.compiled


def _checked_model(
    dtype, d, dv, heads, functions, backend=None, backward="auto", ranks=None, softcap=None,
    **options,
) -> Model:  # fmt: skip
    functions = (functions,) if isinstance(functions, str) else tuple(functions)
    sizes: tuple[int, ...] = tuple(heads) if isinstance(heads, Sequence) else ()
    paired = len(sizes) == 2 and all(map(_is_count, sizes)) and sizes[0] % sizes[1] == 0
    known, reduced = all_functions(), options.get("reduce_dtype")
    dtypes, backends = ", ".join(map(str, DTYPES)), ", ".join(map(repr, BACKENDS))
    width = "a positive multiple of 16 (others compile when used)"
    for name, value, fits, expected in (
        ("dtype", dtype, dtype in DTYPES, f"one of {dtypes}"),
        ("d", d, _is_count(d) and d % 16 == 0, width),
        ("dv", dv, _is_count(dv) and dv % 16 == 0, width),
        ("heads", heads, paired, "(query heads, key heads), the first a multiple of the second"),
        ("functions", functions, functions and {*known} >= {*functions}, f"some of {known}"),
        ("backend", backend, backend in (None, *BACKENDS), f"one of {backends} or None"),
        ("ranks", ranks, ranks is None or _is_count(ranks), "a positive number of ranks or None"),
        ("reduce_dtype", reduced, reduced in (None, *DTYPES), f"None or one of {dtypes}"),
    ):
        if not fits:
            raise ValueError(f"{name} must be {expected}, got {value!r}")
    if "latent_attention" in functions and len({*sizes}) > 1:
        raise ValueError(
            "latent_attention projects a key head for each query head, so heads "
            f"must be {sizes[:1] * 2}"
        )
    check_method("backward", backward)
    if ranks is None and dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
    ranks = (1, 2, 4, 8) if ranks is None else (ranks,)
    return Model(
        dtype, d, dv, sizes, functions, backend or chosen_backend(), backward, ranks,
        deterministic=torch.are_deterministic_algorithms_enabled(), precision=precision_of(dtype),
        softcap=checked_softcap(softcap), **options,
    )  # fmt: skip


def _is_count(n) -> bool:
    return type(n) is int and n > 0
