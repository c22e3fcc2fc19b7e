"""Which key heads travel together, and how small the first and the last group should be.

    heads = 8, stride = 4             |0 1 2 3|4 5 6 7|
    first = 1                         |0|1 2 3|4 5 6 7|        [f, s-f], s, s, ...
    last = 2                          |0 1 2 3|4 5|6 7|        ..., s, s, [s-l, l]
    first = 1, last = 2               |0|1 2 3|4 5|6 7|

While one group is computed, the next one is fetched and the gradients of the one before are reduced. Nothing runs beside
the first fetch and the last reduction: these are exposed, and are as long as the first and the last group are wide.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.reference.checks import accumulate_dtype
from canon.reference.layout import Layout
from canon.reference.mask import Mask

__all__ = ["Steps", "head_groups", "strided_steps", "suggest_strides"]

SCHEDULES = ("scatter", "ring")
BACKWARD = 2.5  # times the operations of the forward pass: five products of a tile in place of two


def head_groups(
    heads: int, stride: int, first: int | None = None, last: int | None = None, *, option: str = ""
) -> tuple[range, ...]:
    """The key heads of each step, in order: ``stride`` at a time, the first and last groups split on request.

        first = f splits the first group into [f, s-f], last = l the last one into [s-l, l]: see the module's docstring

    ``option`` is what the names of ``first`` and ``last`` begin with in errors ("forward_").
    Raises ValueError if the stride does not divide the heads, if f or l is not in (0, stride), or if both are given and
    there are fewer than two full groups.
    """
    if stride < 1 or heads % stride:
        raise ValueError(f"head_stride={stride} does not divide the {heads} key heads")
    for name, part in (("first", first), ("last", last)):
        if part is not None and not 0 < part < stride:
            raise ValueError(f"{option}{name}_stride={part}: expected 0 < {name} < head_stride, which is {stride}")
    if first is not None and last is not None and heads < 2 * stride:
        raise ValueError(
            f"{option}first_stride={first} and {option}last_stride={last} split two groups, but {heads} key heads at "
            f"head_stride={stride} are one: give one of them, or a smaller head_stride"
        )
    ends = set(range(0, heads + 1, stride))
    ends |= {first} if first is not None else set()
    ends |= {heads - last} if last is not None else set()
    edges = sorted(ends)
    return tuple(range(start, stop) for start, stop in zip(edges, edges[1:], strict=False))


class Steps(NamedTuple):
    """The key heads of each step, forward and backward (None: a ring), and whether the first ones travel packed."""

    forward: tuple[range, ...]
    backward: tuple[range, ...] | None
    pack_first: bool


def strided_steps(
    heads: int,
    head_stride: int,
    forward_first_stride: int | None,
    backward_first_stride: int | None,
    backward_last_stride: int | None,
    pack_first: bool,
    backward_schedule: str,
) -> Steps:
    """The steps that the options of `strided_attention` ask for; ValueError if they do not fit the ``heads`` key heads."""
    if backward_schedule not in SCHEDULES:
        raise ValueError(f"backward_schedule={backward_schedule!r}: expected one of {', '.join(map(repr, SCHEDULES))}")
    forward = head_groups(heads, head_stride, forward_first_stride, option="forward_")
    if backward_schedule == "scatter":
        backward = head_groups(heads, head_stride, backward_first_stride, backward_last_stride, option="backward_")
        return Steps(forward, backward, pack_first)
    for name, part in (("first", backward_first_stride), ("last", backward_last_stride)):
        if part is not None:
            raise ValueError(f'backward_{name}_stride={part} is of no use with backward_schedule="ring": leave it None')
    return Steps(forward, None, pack_first)


def suggest_strides(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    layout: Layout | None = None,
    *,
    head_stride: int = 1,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    kernel_flops: float = 500e12,
    link_bytes: float = 300e9,
) -> tuple[dict[str, int | None], dict[str, float]]:
    """(first and last strides for `strided_attention`, what was assumed): equal on all ranks, nothing is sent.

    With c seconds of computing and m of moving for each key head, the fetches that the first steps wait for last

        f m                  the first, beside nothing
        (s - f) m - f c      what is left of the second after the first step, if anything
        s m - (s - f) c      what is left of the third after the second step, if there is one

    A small f makes the first short, too small a one only moves the wait. The f that makes their sum least is returned, None
    if that is s. The end of a backward pass is the same, mirrored. Where both would split the only group there is, the one
    that gains more does.

    Args:
        q, k, v, mask, layout, head_stride, group, reduce_dtype: as for `strided_attention`; of q, k, v only shapes and
            dtypes are read. Work is taken to be the mean over the ranks.
        kernel_flops: operations a second of the attention kernels, forward and backward (backward: 2.5 times as many).
        link_bytes: bytes a second that each rank receives. The defaults are an H200's, in bfloat16, over NVLink.

    Returns the options ``forward_first_stride``, ``backward_first_stride``, ``backward_last_stride``, and by name the
    rates and the seconds for each key head that they follow from.

    Raises ValueError if head_stride does not divide the key heads.
    Source: split ends are aqlaboratory/ring-flash-attention's, pull request 12 (2025), which leaves their size to the user.
    """
    head_groups(k.shape[-2], head_stride)
    ranks = layout.ranks if layout else dist.get_world_size(group) if dist.is_initialized() else 1
    tokens = mask.queries if mask else layout.tokens if layout else ranks * q.shape[-3]
    mask, layout = mask or Mask.causal(tokens), layout or Layout.contiguous(tokens, ranks)
    batch = q.shape[0] if q.ndim == 4 else 1
    travels = accumulate_dtype(q.dtype) if reduce_dtype is None else reduce_dtype
    items = (ranks - 1) * batch * max(map(layout.size, range(ranks))) * (k.shape[-1] + v.shape[-1])
    work = 2 * batch * mask.area / ranks * (k.shape[-1] + v.shape[-1]) * q.shape[-2] / k.shape[-2]
    seconds = {
        "fetch": items * k.element_size() / link_bytes,
        "reduce": items * travels.itemsize / link_bytes,
        "forward": work / kernel_flops,
        "backward": BACKWARD * work / kernel_flops,
    }
    several = k.shape[-2] > head_stride
    strides, gains = {}, {}
    for name, moving, computing in (
        ("forward_first_stride", "fetch", "forward"),
        ("backward_first_stride", "fetch", "backward"),
        ("backward_last_stride", "reduce", "backward"),
    ):
        strides[name], gains[name] = _least_exposed(head_stride, several, seconds[moving], seconds[computing])
    ends = ("backward_first_stride", "backward_last_stride")
    if not several and None not in (strides[name] for name in ends):
        strides[min(ends, key=gains.__getitem__)] = None
    return strides, {"kernel_flops": kernel_flops, "link_bytes": link_bytes, **seconds}


def _least_exposed(stride: int, several: bool, moving: float, computing: float) -> tuple[int | None, float]:
    """How small the outer group should be (None: as large as the others), and the seconds that this gains."""

    def exposed(part: int) -> float:
        rest = stride - part  # 0: not split
        beside = rest or part  # computed while the next whole group moves
        later = max(0.0, stride * moving - beside * computing) if several else 0.0
        return part * moving + max(0.0, rest * moving - part * computing) + later

    best = min(range(1, stride + 1), key=exposed)
    gain = exposed(stride) - exposed(best)
    return (best, gain) if gain > 1e-9 * exposed(stride) else (None, 0.0)
