"""Compute the fastest function by mask, length and link speed, and draw the figure `choose`.

The costs of both passes are those of notebooks 02 to 04: kernels at one rate, messages at the rate
of the link, and the overlap of both. Two numbers are fitted to records of four and eight GPUs: the
rate of the kernels, and the time that a step adds."""

from functools import cache
from itertools import product
from math import log
from typing import NamedTuple

from plots import GREEN, SKY, VERMILION, Drawing, new
from records import load, median, only
from schedule_tables import schedule

H, G, D, RANKS = 32, 8, 128, 8  # query heads, key heads, width; GPUs of the figure
TIMELINE = "schedules_timeline_four_h200"
FITTED = (
    ("schedules_four_h200", 4, (4096, 16384, 65536)),
    ("schedules_eight_h200", 8, (4096, 16384)),
)  # tokens of a GPU
SCHEDULES = (
    "ring zigzag",
    "strided zigzag 4",
    "strided zigzag 8",
    "magi, 0 stages",
    "magi, 1 stages",
)
COLOURS = {"zigzag_attention": SKY, "strided_attention": VERMILION, "magi_attention": GREEN}
PANELS = ("one causal document", "a window of 4,096 tokens", "packed documents")
LENGTHS = [1 << power for power in range(10, 18)]  # tokens of a GPU
LINKS = [4 * 10 ** (i / 16) for i in range(33)]  # GB/s


class Work(NamedTuple):
    """The largest work of a rank in visible cells, and its messages in tokens."""

    tokens: int  # of a rank
    ring: list[int]  # cells of each step of a zigzag ring
    strided: int  # cells of a zigzag shard
    magi: int  # cells of a planned shard
    own: int  # its least cells among a rank's own keys
    received: int  # tokens of other ranks
    own_keys_first: bool  # by the default rule


class Rates(NamedTuple):
    """Bytes per ms of a gather and of a hop, FLOPs per ms of kernels, and ms that a step adds."""

    gather: float
    hop: float
    kernels: float
    step: float


def work(of, ranks: int) -> Work:
    """Return the work of the mask ``of`` on so many ranks."""
    from canon import Layout, fast

    everyone = range(ranks)
    zigzag = Layout.zigzag(of.queries, ranks)
    planned = fast.dispatch(of, ranks)
    cells = lambda layout, rank, owner: layout.local_mask(of, rank, owner).area
    report = fast.plan_report(of, planned)
    return Work(
        of.queries // ranks,
        [max(cells(zigzag, rank, (rank - step) % ranks) for rank in everyone) for step in everyone],
        max(cells(zigzag, rank, tuple(everyone)) for rank in everyone),
        max(report.areas),
        min(cells(planned, rank, rank) for rank in everyone),
        max(report.received),
        fast.cast_plan(of, planned).own_keys_first,
    )


def milliseconds(name: str, work: Work, ranks: int, rates: Rates) -> float:
    """Return the predicted ms of both passes of a schedule of the records. 4 d FLOPs a cell
    forward, 10 d backward.
    """
    kernel = lambda cells, flops: flops * H * D * cells / rates.kernels + rates.step
    shard, key = (4 * work.tokens * G * D, 4 * G * D)  # bytes of K and V in bfloat16
    total = 0.0
    for flops, moved in ((4, 1), (10, 3)):  # the backward also moves dk and dv in float32
        if name.startswith("ring"):
            *steps, last = (kernel(cells, flops) for cells in work.ring)
            hop = shard / rates.hop
            total += sum(max(step, moved * hop) for step in steps) + last + (moved - 1) * hop
        elif name.startswith("strided"):
            groups = G // int(name.split()[-1])
            gather = (ranks - 1) * shard / groups / rates.gather
            step = kernel(work.strided / groups, flops)
            total += gather + step + (groups - 1) * max(step, moved * gather) + (moved - 1) * gather
        else:
            cast = work.received * key / rates.gather
            if name == "magi, 0 stages":
                total += cast + kernel(work.magi, flops)
            else:
                total += max(cast, kernel(work.own, flops)) + kernel(work.magi - work.own, flops)
            total += (moved - 1) * cast
    return total


def links() -> tuple[float, float]:
    """Return the bytes per ms of the first gather and of the first hop in a profile of four
    GPUs.
    """
    return rate("strided zigzag 8", "AllGather", 3 * 4), rate("ring zigzag", "SendRecv", 4)


def rate(name: str, kernel: str, bytes_of_key: int, last: bool = False) -> float:
    """Return the bytes per ms of the first or last message of a schedule, with so many bytes for
    each token, head and width.

    The first one starts on all ranks together; its slowest rank counts. A rank of the last one may
    wait; the fastest counts."""
    row = only(load(TIMELINE)["results"], schedule=name, transport="NCCL's default")
    of = [
        [us for _, us, label in kernels if kernel in label]
        for kernels in row["kernels_of_both_by_rank"]
    ]
    us = min(found[-1] for found in of) if last else max(found[0] for found in of)
    return 1e3 * 16384 * G * D * bytes_of_key / us


@cache
def fitted() -> tuple[Rates, float]:
    """Return the rates with the least squares of relative errors over the records, and the largest
    relative error.
    """
    from canon import Mask

    known = [
        (name, of, ranks, median(schedule(record, name, t * ranks)["both_ms"]))
        for record, ranks, sizes in FITTED
        for t in sizes
        for of in [work(Mask.causal(t * ranks), ranks)]
        for name in SCHEDULES
    ]

    def errors(rates: Rates) -> list[float]:
        return [log(milliseconds(name, of, ranks, rates) / ms) for name, of, ranks, ms in known]

    tried = (
        Rates(*links(), 1e9 * tflops, step / 100)
        for tflops, step in product(range(540, 720, 5), range(0, 60, 2))
    )
    best = min(tried, key=lambda rates: sum(error**2 for error in errors(rates)))
    return best, max(map(abs, errors(best)))


def functions(work: Work) -> dict[str, str]:
    """Return the schedule that each function runs without options."""
    from canon.masks.head_groups import default_stride

    stride = default_stride(G, RANKS * work.tokens * 4 * D)
    return {
        "zigzag_attention": "ring zigzag",
        "strided_attention": f"strided zigzag {stride}",
        "magi_attention": f"magi, {int(work.own_keys_first)} stages",
    }


def fastest(work: Work, gigabytes: float) -> tuple[str, float]:
    """Return the function with the least predicted time on a link of so many GB/s, and the time of
    the second over it.
    """
    rates = fitted()[0]
    there = rates._replace(gather=1e6 * gigabytes, hop=min(1e6 * gigabytes, rates.hop))
    times = {name: milliseconds(run, work, RANKS, there) for name, run in functions(work).items()}
    first, second, _ = sorted(times, key=lambda name: times[name])
    return first, times[second] / times[first]


def mask(title: str, tokens: int):
    """Return the mask of a panel, for so many tokens."""
    from canon import Mask
    from canon.bench.packs import sampled_packs

    if title == "packed documents":
        return Mask.documents(sampled_packs(tokens, 1)[0])
    return Mask.causal(tokens) if title == "one causal document" else Mask.window(tokens, 4095, 0)


def values() -> dict[str, str]:
    """Return the numbers of the page about the choice."""
    rates, error = fitted()
    exchanged = rate("strided zigzag 8 fused", "SendRecv", 3 * 8, last=True)
    return {
        "choice_error": f"{100 * error:.0f} %",
        "choice_runs": str(len(SCHEDULES) * sum(len(sizes) for *_, sizes in FITTED)),
        "choice_tflops": f"{rates.kernels / 1e9:.0f}",
        "choice_step": f"{rates.step:.2f}",
        "gather_rate": f"{rates.gather / 1e6:.0f}",
        "hop_rate": f"{rates.hop / 1e6:.0f}",
        "exchange_rate": f"{exchanged / 1e6:.0f}",
    }


def measured(title: str) -> list[tuple[int, str]]:
    """Return (tokens of a GPU, fastest function) of the records of eight GPUs with one of the
    figure's masks.
    """
    defaults = {
        "zigzag_attention": "ring zigzag",
        "strided_attention": "strided zigzag 8",
        "magi_attention": "magi, 0 stages",
    }
    if title == "one causal document":
        speed = lambda name, t: schedule("schedules_eight_h200", name, RANKS * t)["both_tflops"]
        return [
            (t, max(defaults, key=lambda each, t=t: speed(defaults[each], t)))
            for t in (4096, 16384)
        ]
    if title == "packed documents":
        rows = [row for row in load("packs_eight_h200")["results"] if "pack:0" in row["shape"]]
        speeds = {row["schedule"]: row["both_tflops"] for row in rows}
        return [(8192, max(defaults, key=lambda each: speeds[defaults[each]]))]
    return []


def choose():
    """Draw the fastest function by link speed and length, one panel for each mask."""
    from matplotlib.colors import to_rgba

    figure, grid = new(3, width=10, height=4.3, sharey=True)
    rates, error = fitted()
    for axes, title in zip(grid[0], PANELS, strict=True):
        works = [work(mask(title, RANKS * t), RANKS) for t in LENGTHS]
        cells = [[fastest(of, link) for link in LINKS] for of in works]
        image = [
            [to_rgba(COLOURS[name], 0.85 if lead > 1 + error else 0.35) for name, lead in row]
            for row in cells
        ]
        axes.imshow(
            image,
            origin="lower",
            aspect="auto",
            extent=(-0.5, len(LINKS) - 0.5, -0.5, len(LENGTHS) - 0.5),
        )
        at = lambda gigabytes: 16 * log(gigabytes / LINKS[0], 10)
        for tokens, name in measured(title):
            axes.plot(
                at(rates.gather / 1e6),
                LENGTHS.index(tokens),
                "o",
                color=COLOURS[name],
                markeredgecolor="black",
                markersize=9,
            )
        axes.set_xticks(
            [at(link) for link in (5, 12, 25, 50, 100, 300)], ["5", "12", "25", "50", "100", "300"]
        )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("link of each GPU, GB/s", fontsize=9)
        axes.tick_params(labelsize=8)
    grid[0][0].set_yticks(range(len(LENGTHS)), [f"{t // 1024}K" for t in LENGTHS])
    grid[0][0].set_ylabel("tokens of each GPU", fontsize=9)
    handles = [
        grid[0][0].plot([], [], "s", color=colour, label=name)[0]
        for name, colour in COLOURS.items()
    ]
    handles.append(
        grid[0][0].plot(
            [], [], "o", color="white", markeredgecolor="black", label="fastest in a record"
        )[0]
    )
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"Fastest function, computed for {RANKS} GPUs, {H}/{G} heads, D {D}, both passes. "
        f"Pale: the second is within {100 * error:.0f} %",
        fontsize=10,
    )
    return figure


FIGURES = {
    "choose": Drawing(
        choose,
        (
            "schedules_four_h200.json",
            "schedules_eight_h200.json",
            f"{TIMELINE}.json",
            "packs_eight_h200.json",
        ),
    )
}
