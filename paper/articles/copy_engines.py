"""Compute the tables and numbers of `copy_engines.md` from the records, and draw its figure."""

from plots import BLUE, ORANGE, SKY, VERMILION, Drawing, finish, new
from records import load, median, only, span, table
from schedule_tables import schedule

MOVED = ("ring zigzag", "strided zigzag 1", "strided zigzag 2", "strided zigzag 4", "strided zigzag 8")
TIMED = ("ring zigzag", "strided zigzag 4", "strided zigzag 8", "magi, 0 stages")
TRANSPORTS = {"NCCL's default": "NCCL kernels", "copy engines": "copy engines"}


def timeline(name: str, transport: str) -> dict:
    return only(load("schedules_timeline_four_h200")["results"], schedule=name, transport=transport)


def values() -> dict[str, str]:
    n, rows, gains = 131072, [], {}
    for name in MOVED:
        plain, engines = (schedule(f"schedules_{kind}eight_h200", name, n) for kind in ("", "copy_engines_"))
        cells = [f"{row['forward_tflops']:.0f} / {row['both_tflops']:.0f}" for row in (plain, engines)]
        gains[name] = engines["both_tflops"] / plain["both_tflops"]
        rows.append(
            [
                name.replace("zigzag", "zigzag,") if name[-1].isdigit() else name,
                *cells,
                f"{engines['forward_tflops'] / plain['forward_tflops']:.2f} / {gains[name]:.2f}",
            ]
        )
    timed = []
    for name in TIMED:
        times = [median(map(max, timeline(name, transport)["both_ms_by_rank"])) for transport in TRANSPORTS]
        timed.append(
            [
                name.replace("magi, 0 stages", "magi, one group cast"),
                *(f"{time:.1f}" for time in times),
                f"{times[0] / times[1]:.2f}",
            ]
        )
    gathers = [
        max(length for _, length, kernel in kernels if "AllGather" in kernel) / 1000
        for kernels in timeline("strided zigzag 4", "NCCL's default")["kernels_of_both_by_rank"]
    ]
    alone = [
        length / 1000
        for kernels in timeline("strided zigzag 4", "NCCL's default")["kernels_of_both_by_rank"]
        for begin, length, kernel in kernels
        if "AllGather" in kernel and begin < 1000
    ]
    started, late = (load(f"packs_{name}_four_h200")["results"] for name in ("begun", "not_begun"))
    ratios = {key: [] for key in ("forward_tflops", "both_tflops")}
    for one, two in zip(started, late, strict=True):
        for key, found in ratios.items():
            if one["schedule"].startswith("magi, 1"):
                found.append(one[key] / two[key])
    forward = [
        engines["forward_tflops"] / schedule("schedules_eight_h200", engines["schedule"], n)["forward_tflops"]
        for engines in load("schedules_copy_engines_eight_h200")["results"]
    ]
    both = [
        engines["both_tflops"] / schedule("schedules_eight_h200", engines["schedule"], n)["both_tflops"]
        for engines in load("schedules_copy_engines_eight_h200")["results"]
    ]
    return {
        "eight": table(("forward / both passes, TFLOP/s per GPU", "NCCL kernels", "copy engines", "ratio"), rows),
        "timed": table(("both passes, slowest rank, ms", "NCCL kernels", "copy engines", "speed-up"), timed),
        "gather_worst": span(gathers[1:], 1),
        "gather_alone": span(alone, 2),
        "forward_range": span(forward),
        "both_range": span(both),
        "started_forward": span(ratios["forward_tflops"]),
        "started_both": span(ratios["both_tflops"]),
    }


def figure():
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
