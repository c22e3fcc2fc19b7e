"""Compute the tables and numbers of `copy_engines.md` from the records, and draw its figure."""

from plots import BLUE, ORANGE, SKY, VERMILION, Drawing, finish, new
from records import load, median, only, span, table
from schedule_tables import schedule

MOVED = ("ring zigzag", "strided zigzag 1", "strided zigzag 2", "strided zigzag 4", "strided zigzag 8")
TIMED = ("ring zigzag", "strided zigzag 4", "strided zigzag 8", "magi, 0 stages")
TRANSPORTS = {"NCCL's default": "NCCL kernels", "copy engines": "copy engines"}


def timeline(name: str, transport: str) -> dict:
    """Return the timed and profiled run of a schedule with a transport."""
    return only(load("schedules_timeline_four_h200")["results"], schedule=name, transport=transport)


def values() -> dict[str, str]:
    """Return the tables and numbers of the page, by name."""
    return {"timed": timed()} | eight() | gathers() | started()


def timed() -> str:
    """Return the times of both passes on four GPUs, by transport."""
    rows = []
    for name in TIMED:
        times = [median(map(max, timeline(name, transport)["both_ms_by_rank"])) for transport in TRANSPORTS]
        shown = [f"{time:.1f}" for time in times]
        rows.append([name.replace("magi, 0 stages", "magi, one group cast"), *shown, f"{times[0] / times[1]:.2f}"])
    return table(("both passes, slowest rank, ms", "NCCL kernels", "copy engines", "speed-up"), rows)


def eight() -> dict[str, str]:
    """Return the speeds on eight GPUs by transport, and their ratios over all schedules that ran both ways."""
    ratios: dict[str, dict[str, float]] = {}
    for row in load("schedules_copy_engines_eight_h200")["results"]:
        plain = schedule("schedules_eight_h200", row["schedule"], 131072)
        ratios[row["schedule"]] = {key: row[f"{key}_tflops"] / plain[f"{key}_tflops"] for key in ("forward", "both")}
    rows = []
    for name in MOVED:
        runs = [schedule(f"schedules_{kind}eight_h200", name, 131072) for kind in ("", "copy_engines_")]
        speeds = [f"{run['forward_tflops']:.0f} / {run['both_tflops']:.0f}" for run in runs]
        shown = name.replace("zigzag", "zigzag,") if name[-1].isdigit() else name
        rows.append([shown, *speeds, f"{ratios[name]['forward']:.2f} / {ratios[name]['both']:.2f}"])
    return {
        "eight": table(("forward / both passes, TFLOP/s per GPU", "NCCL kernels", "copy engines", "ratio"), rows),
        "forward_range": span(ratio["forward"] for ratio in ratios.values()),
        "both_range": span(ratio["both"] for ratio in ratios.values()),
    }


def gathers() -> dict[str, str]:
    """Return the ms of the longest gather of ranks 1 to 3, and of the gathers without a competing kernel."""
    ranks = [
        [(begin, length / 1000) for begin, length, kernel in kernels if "AllGather" in kernel]
        for kernels in timeline("strided zigzag 4", "NCCL's default")["kernels_of_both_by_rank"]
    ]
    longest = [max(length for _, length in found) for found in ranks]
    alone = [length for found in ranks for begin, length in found if begin < 1000]
    return {"gather_worst": span(longest[1:], 1), "gather_alone": span(alone, 2)}


def started() -> dict[str, str]:
    """Return the gain if the attention kernel waits until a message has started, for the forward and for both passes."""
    waiting, late = (load(f"packs_{name}_four_h200")["results"] for name in ("begun", "not_begun"))
    pairs = [(one, two) for one, two in zip(waiting, late, strict=True) if one["schedule"].startswith("magi, 1")]
    gain = lambda key: span(one[f"{key}_tflops"] / two[f"{key}_tflops"] for one, two in pairs)
    return {"started_forward": gain("forward"), "started_both": gain("both")}


def figure():
    """Draw the timeline of one run with each transport."""
    figure, grid = new(1, 2, width=10, height=5.2, sharex=True)
    looks = (
        ("forward_kernel", SKY, 0.5),
        ("dkdv_kernel", BLUE, 0.5),
        ("ncclDevKernel", VERMILION, 0.28),
        ("Memcpy PtoP", ORANGE, 0.28),
    )
    for axes, (transport, label) in zip((row[0] for row in grid), TRANSPORTS.items(), strict=True):
        ranks = timeline("strided zigzag 4", transport)["kernels_of_both_by_rank"]
        for rank, kernels in enumerate(ranks):
            for begin, length, name in kernels:
                for start, colour, height in looks:
                    if name.startswith(start):
                        message = height < 0.4
                        axes.barh(
                            -rank + (0.3 if message else -0.12), length / 1000, height, left=begin / 1000, color=colour
                        )
        axes.set_yticks([-rank for rank in range(len(ranks))], [f"rank {rank}" for rank in range(len(ranks))])
        finish(axes, f"messages by {label}", "ms" if transport != "NCCL's default" else "")
    for name, colour in (
        ("forward", SKY),
        ("backward", BLUE),
        ("message: NCCL kernel", VERMILION),
        ("message: copy engine", ORANGE),
    ):
        grid[0][0].barh([0], [0], color=colour, label=name)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        "Both passes of strided attention, zigzag, 4 key heads at a time: 65,536 tokens on four NVIDIA H200s",
        fontsize=10,
    )
    return figure


FIGURE = Drawing(figure, ("schedules_timeline_four_h200.json",))
