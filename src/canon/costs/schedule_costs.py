"""The time of both passes of a schedule: its steps on a clock, as `canon.fast.schedule` runs them.

A step takes as long as its kernels, or as the messages in flight: the keys of the next step, and
in the backward pass dk and dv of the step before. All are those of the schedule's own plans. Eight
ranks are followed, at equal distances.

On a mesh nothing hides the exchanges of heads inside a host, the first and the last message of a
pass. All columns are alike: the first is followed.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from canon.costs.kernel_costs import MEMORY, RATES, tile_work
from canon.costs.network import seconds
from canon.costs.traffic import all_gather, group_cast, hop, sizes_of
from canon.fast.half import FAST
from canon.fast.kernels.launcher import meta_stands_for
from canon.fast.ring import ring_of
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import noted_plans
from canon.route.call import Call
from canon.route.prepared_plans import prepared_call

FOLLOWED = 8  # ranks
RULED = "head_stride", "casts", "own_keys_first"
# bytes for each element of out or dq that row kernels read and write: to copy a 16-bit input, to
# merge a float32 part, and to round at the end
COPIED, MERGED, ROUNDED = 4, 12, 8


class Pass(NamedTuple):
    """``work`` of `tile_work` and bytes of row kernels: (followed ranks, steps). ``messages``:
    bytes (2, steps, 2, ranks) of `traffic`: keys arrive before a step, sums leave after it. In a
    ring, ranks wait for one another in each step.
    """

    rates: np.ndarray
    is_ring: bool
    work: np.ndarray
    rows: np.ndarray
    messages: np.ndarray

    def seconds(self, links: np.ndarray) -> tuple[float, float]:
        """Return the times of the slowest rank, and of the kernels of the busiest one."""
        tile, step = self.rates
        kernels = tile * self.work
        computed = kernels + step * (kernels > 0) + self.rows / MEMORY
        computed = computed.max(0, keepdims=True) if self.is_ring else computed
        loads = self.messages.max(-1)
        keys, sums = seconds(links, loads)
        # of each step: the keys of the next one, and the sums of the one before
        hidden = np.append(keys[1:], 0) + np.append(0, sums[:-1])
        both = np.maximum(computed, hidden).sum(1).max() + loads[1, :, 0].sum() / MEMORY
        return keys[0] + both + sums[-1], kernels.sum(1).max()


class Plan(NamedTuple):
    """Both passes of a ``call`` on the first rank."""

    call: Call
    forward: Pass
    backward: Pass

    def seconds(self, links: np.ndarray) -> tuple[float, ...]:
        """Return (forward, both passes, exposed): exposed is all but the busiest rank's kernels."""
        (forward, computed), (backward, more) = (one.seconds(links) for one in self[1:])
        return forward, forward + backward, forward + backward - computed - more

    def chosen(self) -> dict[str, Any]:
        """Return the options whose None follows a rule, with the values that they take."""
        one = self.call.computed
        casts = getattr(one.plan, "plan", None) if "casts" in one.options else None
        return {x: getattr(casts, x, given) for x, given in one.options.items() if x in RULED}

    @property
    def nic_bytes(self) -> float:
        return np.sum([one.messages[:, :, 1].sum((0, 1)) for one in self[1:]], 0).max()

    def tensors(self) -> dict[str, float]:
        """Return the bytes of a rank's tensors at the peak."""
        q, *own = (x.numel() for x in self.call.computed.shapes)
        own, merges = sum(own), self.backward.rows[:, 2:].any()
        keys, sums = np.sort(self.backward.messages[:, 1:-1, 0].max(-1))
        return {
            "q, k, v, out and dout": 6 * q + 2 * own,
            "dq, and its parts": (8 if merges else 6) * q,
            "K and V of all ranks": 2 * own + keys[-2:].sum(),
            "dk and dv of all ranks": (4 if merges else 6) * own + sums[-2:].sum() + sums[-1],
            "exchanged heads": self.backward.messages[:, [0, -1], 0].max(-1).sum(),
        }


def plan_of(
    function: str, heads: tuple[int, int], width: int, hosts: int = 1, mesh_heads: int = 1, *,
    mask: Mask, layout: Layout, **options: Any,
) -> Plan:  # fmt: skip
    """Return the plan of a bfloat16 call on equal hosts, with whole rows of a mesh in each. Raises
    ValueError or TypeError as the call would.
    """
    rows = np.unique(np.linspace(0, layout.ranks // mesh_heads - 1, FOLLOWED, dtype=int))
    given = heads, (width, width), torch.bfloat16, options
    with meta_stands_for(None), noted_plans():
        calls = [
            prepared_call(FAST, function, mask, layout, row * mesh_heads, mesh_heads, 1, *given)
            for row in rows.tolist()
        ]
        host = np.arange(0, layout.ranks, mesh_heads) * hosts // layout.ranks
        return Plan(calls[0], *(_pass(calls, host, backward) for backward in (False, True)))


def _pass(calls, hosts, backward) -> Pass:
    whole, one = calls[0], calls[0].computed
    steps = [_steps(call.computed, backward) for call in calls]
    messages = _messages(one, steps[0], hosts)
    messages[1] *= backward
    if backward and whole.options.get("keep_kv"):  # nothing is fetched, own keys come last
        messages[0] = 0
        messages = np.roll(messages, -1, 1)
        steps = [(*some[1:], some[0]) for some in steps]
    (_, t, h, d), (_, _, g, _), _ = one.shapes
    costs = [[_costs(step, h // g, backward) for step in some] for some in steps]
    work, rows = np.pad(costs, [(0, 0), (1, 1), (0, 0)]).transpose(2, 0, 1)
    rows[:, 1] += t * (ROUNDED * rows.any() + COPIED * backward)
    # q, k, v; out and lse, padded to 16 elements
    ends = 2 * d * (h + 2 * g), -(-h * (2 * d + 4) // 32) * 32
    tokens = (whole.columns - 1) * sizes_of(whole.layout)[:: whole.columns]
    messages = np.pad(messages, [(0, 0), (1, 1), (0, 0), (0, 0)])
    messages[0, 0, 0], messages[1, -1, 0] = np.outer(ends[::-1] if backward else ends, tokens)
    costs = work * d / 128, rows * h * d
    return Pass(RATES[int(backward)], one.algorithm.plan is None, *costs, messages)


def _steps(call, backward):
    if call.algorithm.plan is None or call.ranks == 1:
        return ring_of(call).steps
    return getattr(call.plan, "steps", None) or (call.plan.forward, call.plan.backward)[backward]


def _costs(step, share, backward):
    if not step.has_work:
        return 0, 0
    mask, heads = step.active.mask, len(range(step.call.shapes[0][2])[step.heads])
    copied = 0 if step.active.in_place else COPIED * (1 + backward)
    rows = 0 if step.writes else mask.queries * (MERGED + copied)
    return tile_work(mask, heads // share, share, backward), rows


def _messages(call, steps, hosts) -> np.ndarray:
    (_, _, g, d), layout = call.shapes[1], call.layout
    if hasattr(steps[0], "group"):  # strided: some heads in each step
        shares = [len(step.group.heads) / g for step in steps]
        tokens = [[x * share for share in shares] for x in all_gather(layout, hosts)]
    elif hasattr(steps[0], "transfer"):  # magi: casts of equal parts
        casts = np.array([step.transfer is not None for step in steps])
        cast = group_cast(call.mask, layout, hosts) / max(1, sum(casts))
        tokens = [np.multiply.outer(casts, cast)] * 2
    else:
        rest = range(len(steps))
        tokens = [[(n > 0) * hop(layout, hosts, n + late) for n in rest] for late in (0, 1)]
    nbytes = [2, call.reduce_dtype.itemsize]
    return 2 * g * d * np.reshape(nbytes, (2, 1, 1, 1)) * tokens
