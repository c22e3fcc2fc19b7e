"""The head groups of strided attention, and the sizes of the first and the last group with the least waiting.

    heads = 8, stride = 4             |0 1 2 3|4 5 6 7|
    first = 1                         |0|1 2 3|4 5 6 7|        [f, s-f], s, s, ...
    last = 2                          |0 1 2 3|4 5|6 7|        ..., s, s, [s-l, l]
    first = 1, last = 2               |0|1 2 3|4 5|6 7|

During the computation of one group, the next one is gathered and the gradients of the previous one are reduced. The first
gather and the last reduction have no computation to hide them. A smaller first and last group make them shorter. But each split
adds a step with its own messages and kernels, and smaller kernels are slower. On H200s with NVLink, the additional steps cost
more than the splits save in nearly all measured cases (paper/data/schedules_four_h200.json and its neighbours).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.runtime.checks import accumulate_dtype, check_method
from canon.runtime.group import Group, place_in

__all__ = ["Steps", "head_groups", "strided_steps", "suggest_strides"]

SCHEDULES = ("scatter", "ring")
STEP_SECONDS, STEP_SHARE = 2e-4, 0.034  # the measured cost of an additional step on H200s: see `suggest_strides`
# Matrix products of width d and of width dv in the backward pass; the forward pass has one of each. "auto": the mean.
PRODUCTS = {"fused": (3, 2), "split": (4, 3), "head_parallel": (4, 3), "auto": (3.5, 2.5)}


def head_groups(
    heads: int, stride: int, first: int | None = None, last: int | None = None, *, option: str = ""
) -> tuple[range, ...]:
    """Return the key heads of each step, in order: ``stride`` heads a step.

        first = f splits the first group into [f, s-f], last = l the last one into [s-l, l]: see the module's docstring

    ``option`` is the prefix of the names ``first_stride`` and ``last_stride`` in errors, for example "forward_".
    Raises ValueError if the stride does not divide the heads, or if f or l is not in (0, stride). Also if f and l are both
    given and there are fewer than two full groups.
    """
    if stride < 1 or heads % stride:
        raise ValueError(f"head_stride={stride} does not divide the {heads} key heads")
    for name, part in (("first", first), ("last", last)):
        if part is not None and not 0 < part < stride:
            raise ValueError(f"{option}{name}_stride={part}: expected 0 < {name} < head_stride, which is {stride}")
    if first is not None and last is not None and heads < 2 * stride:
        raise ValueError(
            f"{option}first_stride={first} and {option}last_stride={last} split two head groups, but {heads} key heads "
            f"with head_stride={stride} form one: pass one of the two, or a smaller head_stride"
        )
    ends = set(range(0, heads + 1, stride))
    ends |= {first} if first is not None else set()
    ends |= {heads - last} if last is not None else set()
    edges = sorted(ends)
    return tuple(range(start, stop) for start, stop in zip(edges, edges[1:], strict=False))


class Steps(NamedTuple):
    """The key heads of each step, forward and backward (None: a ring). ``pack_first``: one message for the first K and V."""

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
    """Return the steps for these options of `strided_attention`. Raise ValueError if they do not fit ``heads`` key heads."""
    if backward_schedule not in SCHEDULES:
        raise ValueError(f"backward_schedule={backward_schedule!r}: expected one of {', '.join(map(repr, SCHEDULES))}")
    forward = head_groups(heads, head_stride, forward_first_stride, option="forward_")
    if backward_schedule == "scatter":
        backward = head_groups(heads, head_stride, backward_first_stride, backward_last_stride, option="backward_")
        return Steps(forward, backward, pack_first)
    for name, part in (("first", backward_first_stride), ("last", backward_last_stride)):
        if part is not None:
            raise ValueError(f'backward_{name}_stride={part} has no effect with backward_schedule="ring": pass None')
    return Steps(forward, None, pack_first)


def suggest_strides(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    layout: Layout | None = None,
    *,
    head_stride: int = 1,
    group: Group = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    kernel_flops: float = 500e12,
    link_bytes: float = 300e9,
    step_seconds: float = STEP_SECONDS,
    step_share: float = STEP_SHARE,
) -> tuple[dict[str, int | None], dict[str, float]]:
    """Return (strides, assumptions): the first and last strides for `strided_attention` that save the most time, if any.

    Exposed time is the time in which a rank only waits for messages. All ranks get the same result; nothing is sent. Let s
    be head_stride, and f the key heads of the first step. A key head takes c seconds to compute and m seconds to gather.
    The exposed time is the sum of these seconds:

        f m                  the gather of the first step: no computation hides it
        (s - f) m - f c      the second gather beyond the first step's computation, if positive
        s m - (s - f) c      the third gather beyond the second step's computation, if positive and if there is a third

    A small f makes the first wait short; a very small f makes the second one long. A split also costs step_seconds + step_share
    g c, for the messages and kernels of one more step. Without a split the waits are s m and s m - s c. The result is the f
    with the least sum, if it gains more than the cost of a split. Otherwise it is None. The end of the backward pass has the
    same formulas, in reverse order. There l, the heads of the last step, replaces f, and m is the seconds to reduce a key head.

    The model ignores that gathers and reductions share the link. It counts s heads for the third group, split or not. If the
    backward pass has only one group and both of its splits would help, only the split that gains more is returned.

    Args:
        q, k, v, mask, layout, head_stride, group, reduce_dtype, backward: as for `strided_attention`. Only shapes and
            dtypes of q, k, v are read. All ranks are assumed to have the mean work.
        kernel_flops: FLOPs per second of the attention kernels, in both passes. If d = dv, the backward pass has 2.5 times
            the forward FLOPs with "fused", and 3.5 times with "split" and "head_parallel". "auto" takes one of these, and
            counts as 3 times; it takes 3.0 to 3.3 times as long at d = 128 on an H200 (paper/data/kernels_ten_h200.json).
        link_bytes: bytes per second that each rank receives. The defaults are for an H200, bfloat16 and NVLink.
        step_seconds, step_share: the cost of an additional step, in seconds and as a share of the pass's computing time.
            Defaults: the median seconds of passes below 7 ms, and the median share of longer backward passes, on two to
            eight H200s. tests/test_strides.py computes them from paper/data.

    Returns:
        The options ``forward_first_stride``, ``backward_first_stride`` and ``backward_last_stride``; and a dict of
        kernel_flops, link_bytes, step_seconds, step_share, and the seconds for each key head: "fetch" (gather), "reduce",
        "forward", "backward".

    Raises ValueError if head_stride does not divide the key heads, or if the method ``backward`` is unknown.
    Source: split groups are from aqlaboratory/ring-flash-attention pull request 12 (2025), where the user chooses the sizes.
    """
    head_groups(k.shape[-2], head_stride)
    check_method("backward", backward)
    ranks = layout.ranks if layout else place_in("suggest_strides", group)[2]
    tokens = mask.queries if mask else layout.tokens if layout else ranks * q.shape[-3]
    mask, layout = mask or Mask.causal(tokens), layout or Layout.contiguous(tokens, ranks)
    batch = q.shape[0] if q.ndim == 4 else 1
    reduced = accumulate_dtype(q.dtype) if reduce_dtype is None else reduce_dtype
    elements = (ranks - 1) * batch * max(map(layout.size, range(ranks))) * (k.shape[-1] + v.shape[-1])
    product = 2 * batch * mask.area / ranks * q.shape[-2] / k.shape[-2]  # FLOPs for each element of the width
    of_d, of_dv = PRODUCTS[backward]
    seconds = {
        "fetch": elements * k.element_size() / link_bytes,
        "reduce": elements * reduced.itemsize / link_bytes,
        "forward": product * (k.shape[-1] + v.shape[-1]) / kernel_flops,
        "backward": product * (of_d * k.shape[-1] + of_dv * v.shape[-1]) / kernel_flops,
    }
    several = k.shape[-2] > head_stride
    strides, gains = {}, {}
    for name, moving, computing in (
        ("forward_first_stride", "fetch", "forward"),
        ("backward_first_stride", "fetch", "backward"),
        ("backward_last_stride", "reduce", "backward"),
    ):
        split_cost = step_seconds + step_share * k.shape[-2] * seconds[computing]
        best, gain = _least_exposed(head_stride, several, seconds[moving], seconds[computing])
        strides[name], gains[name] = (best, gain - split_cost) if best and gain > split_cost else (None, 0.0)
    ends = ("backward_first_stride", "backward_last_stride")
    if not several and None not in (strides[name] for name in ends):
        strides[min(ends, key=gains.__getitem__)] = None
    rates = {"kernel_flops": kernel_flops, "link_bytes": link_bytes}
    return strides, {**rates, "step_seconds": step_seconds, "step_share": step_share, **seconds}


def _least_exposed(stride: int, several: bool, moving: float, computing: float) -> tuple[int | None, float]:
    """Return the size of the outer part of a split group (None: no split), and the seconds that the split gains."""

    def exposed(part: int) -> float:
        rest = stride - part  # 0: not split
        computed = rest or part  # in the step that hides the transfer of the next whole group
        later = max(0.0, stride * moving - computed * computing) if several else 0.0
        return part * moving + max(0.0, rest * moving - part * computing) + later

    best = min(range(1, stride + 1), key=exposed)
    gain = exposed(stride) - exposed(best)
    return (best, gain) if gain > 1e-9 * exposed(stride) else (None, 0.0)
