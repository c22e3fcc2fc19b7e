"""`canon bench beside`: measure kernels while another stream holds SMs, as NCCL's messages do.

With p SMs, h of them held, a kernel takes at least p / (p - h) times as long. Instead of messages, a kernel that only waits
holds SMs: its CTA has so many threads that no CTA of a Hopper kernel fits on the SM.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from triton.language.extra.cuda import globaltimer

from canon.bench.shapes import Shape
from canon.bench.timing import LEAD, table

SHAPES = [
    "1,2048,32,8,128,causal", "1,4096,32,8,128,causal", "1,16384,32,8,128,causal", "1,8192,32,8,128,full",
    "1,8192,32,8,64,causal", "1,4096,16,4,256,causal", "1,16384,32,8,128,documents:2048",
]  # fmt: skip
HELD = (0, 8, 16, 32)
CALLS = 3  # in one measurement
MARGIN = 4_000_000  # nanoseconds that SMs are held longer than expected: `LEAD`, and slower calls


@triton.jit
def _hold(nanoseconds):
    start = globaltimer()
    while globaltimer() - start < nanoseconds:  # pyright: ignore[reportOperatorIssue]
        pass


def beside(shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each kernel, with milliseconds by number of held SMs."""
    rows, side = [], torch.cuda.Stream(device)
    for name, run in _kernels(shape, dtype, device).items():
        times: dict[int, list[float]] = {held: [] for held in HELD}
        run()
        expected = _milliseconds(run, 0, 0.0, side)
        for _ in range(rounds):
            for held, list_of in times.items():
                list_of.append(_milliseconds(run, held, 2 * expected, side))
        rows.append({"shape": str(shape), "kernel": name, "held_ms": {str(held): x for held, x in times.items()}})
    return rows


def _kernels(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    from canon import fast

    q, k, v, dout = shape.inputs(dtype, device)
    out, lse = fast.attention_forward(q, k, v, shape.mask)
    backward = partial(fast.attention_backward, dout, q, k, v, out, lse, shape.mask, method="split")
    return {
        "forward": lambda: fast.attention_forward(q, k, v, shape.mask),
        "dk, dv": partial(backward, needs_grad=(False, True, True)),
        "dq": partial(backward, needs_grad=(True, False, False)),
    }


def _milliseconds(run: Callable[[], object], held: int, expected: float, side: torch.cuda.Stream) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    if held:
        with torch.cuda.stream(side):
            _hold[(held,)](MARGIN + int(1e6 * (CALLS + 1) * expected), num_warps=32)
    torch.cuda._sleep(LEAD)  # the launches are queued meanwhile
    run()
    events[0].record()
    for _ in range(CALLS):
        run()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / CALLS


def tables(rows: Sequence[dict]) -> list:
    """Return a table of medians, in brackets over the best possible."""
    title = "GPU ms while other kernels hold SMs; in brackets: over the time without them x SMs / free SMs"
    sms, lines = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count, []
    for row in rows:
        medians = {held: statistics.median(row["held_ms"][str(held)]) for held in HELD}
        ratios = {held: x * (sms - held) / (medians[0] * sms) for held, x in medians.items()}
        lines.append((row["shape"], row["kernel"], *(f"{medians[x]:.3f} ({ratios[x]:.2f})" for x in HELD)))
    return [table(title, ("shape", "kernel", *(f"{held} held" for held in HELD)), lines)]
