"""Load the records under `data`, and format what pages quote from them.

A record is a JSON file that a benchmark wrote, a listing of a profiler (CSV or text), or the text
of a run that was cut off. `TEXTS` holds the provenance of the records that cannot hold it
themselves.
"""

import csv
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
TIMES = re.compile(r"(_|^)(ms|us|seconds)(_by_rank)?$")  # keys of single times

PROFILER = "Nsight Compute"
# name of a record, or of several: commit that holds the kernel or the record, date, GPUs, what made
# it
TEXTS = {
    "check_runs_cut_off_eight_h200.txt": ("3ce3ee2", "2026-11-22", "8 H200", "canon check"),
    "tests_cpu.txt": ("52b4140", "2026-11-29", "none", "make test-all"),
    "tests_h200.txt": ("fdadd11", "2026-11-29", "1 and 2 H200", "pytest --gpu tests"),
    "first_calls_h200.txt": ("fdadd11", "2026-11-29", "1 H200", "a script, in the record"),
    "sanitizer_h200.txt": ("6112dcf", "2026-11-23", "1 H200", "compute-sanitizer"),
    "forward_plain_h100.txt": ("c01975e", "2026-11-25", "1 H100", "canon bench tune"),
    "ncu_first": ("54bacf9", "2026-11-20", "1 H200", PROFILER),
    "ncu_third": ("a3c8ed9", "2026-11-20", "1 H200", PROFILER),
    "ncu_fifth": ("0445676", "2026-11-21", "1 H200", PROFILER),
}
INDEX = """\
<!-- Written by measured.py from the records: change it there, not here. -->

# The records and their commands

"Single times" counts the times that a record keeps; an empty cell means that a record keeps
medians, errors or counters. "With changes" means that the run measured changes on top of the
commit. The commit of a profile is the one that added the record. A GPU entry of "none" is a run on
a CPU.

{table}

## Commands

{commands}
"""


@cache
def load(name: str) -> Any:
    """Return the record `data/NAME.json`. Callers must not change it."""
    return json.loads((DATA / f"{name}.json").read_text())


def lines(name: str) -> list[str]:
    """Return the lines of the text record `data/NAME`."""
    return (DATA / name).read_text().splitlines()


@cache
def samples(name: str) -> tuple[dict[str, str], ...]:
    """Return the rows of `data/NAME.csv`: one for each instruction that the profiler sampled."""
    with (DATA / f"{name}.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))


def cell(name: str, metric: str) -> float:
    """Return the value of a metric from the profiler's text `data/NAME.txt`: the first line that
    starts with its name.
    """
    row = next(row for row in lines(f"{name}.txt") if row.strip().startswith(metric))
    return float(row.split()[-1].replace(",", ""))


def median(times: Iterable[float]) -> float:
    """Return the median of single times."""
    return statistics.median(times)


def only(rows: Iterable[dict], **wanted: Any) -> dict:
    """Return the one row that has these values. Raises ValueError unless there is exactly one."""
    (row,) = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    return row


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table. The first ``left`` columns are aligned to the left, the others to
    the right.
    """
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [list(header), rule, *map(list, rows)]
    )


def span(values: Iterable[float], digits: int = 2) -> str:
    """Return "least to largest", or one number where both print alike."""
    ordered = sorted(values)
    least, largest = f"{ordered[0]:.{digits}f}", f"{ordered[-1]:.{digits}f}"
    return least if least == largest else f"{least} to {largest}"


def tokens(number: int) -> str:
    """Return a number of tokens with a comma at the thousands."""
    return f"{number:,}"


def named(shape: str) -> str:
    """Return a shape as "1 x 16,384, 32/8 heads, D 128, causal"."""
    b, n, h, g, d, mask = shape.split()
    mask = mask.replace("documents:", "documents of mean ")
    return f"{b[1:]} x {tokens(int(n[1:]))}, {h[2:]}/{g[2:]} heads, D {d[1:]}, {mask}"


def case(text: str) -> str:
    """Return "1,16384,8,2,128,causal" as "1 x 16,384, 8/2 heads, D 128, causal"."""
    b, n, h, g, d, mask = text.split(",")
    return named(f"B{b} S{n} Hq{h} Hk{g} D{d} {mask}")


def single_times(value: Any) -> int:
    """Count the single times that a record holds: numbers in lists under keys that name a unit of
    time, at any depth.
    """
    if isinstance(value, dict):
        return sum(
            _numbers(some) if _timed(key) and not isinstance(some, float) else single_times(some)
            for key, some in value.items()
        )
    return sum(map(single_times, value)) if isinstance(value, list) else 0


def _timed(key: str) -> bool:
    return bool(TIMES.search(key)) or key == "shapes" or key.startswith("(")


def _numbers(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_numbers, value.values()))
    if isinstance(value, list):
        return sum(map(_numbers, value))
    return isinstance(value, float)


def provenance(name: str) -> tuple[str, str, str, str, int]:
    """Return (commit, date, GPUs, versions, number of single times) of a file under `data`."""
    if not name.endswith(".json"):
        found = next(key for key in TEXTS if name.startswith(key))
        commit, date, gpus, _ = TEXTS[found]
        return f"`{commit}`", date, gpus, "", 0
    record = json.loads((DATA / name).read_text())
    if (
        "module" in record and "runs" in record
    ):  # of `canon check --random`: the first run's machine, the commits of all
        commits = " ".join(dict.fromkeys(run["commit"] for run in record["runs"]))
        record = record["runs"][0] | {"commit": commits}
    machine = record.get("machine", record)
    gpus = machine.get("gpus", [machine["gpu"]] if "gpu" in machine else [])
    versions = [f"{each} {machine[each]}" for each in ("torch", "triton") if machine.get(each)]
    if "peers" in record and "cudnn" in machine:
        versions.append(f"cuDNN {machine['cudnn']}")
    versions += [
        f"{peer} {version}"
        for peer, version in record.get("peers", {}).items()
        if "not installed" not in version
    ]
    if len(gpus) > 1:
        versions.append(f"NCCL {machine['nccl']}")
    kinds = {gpu.removeprefix("NVIDIA ") for gpu in gpus}
    used = f"{len(gpus)} {kinds.pop()}" if gpus else "none"
    return (
        f"{_commit(record)}",
        record["date"][:10],
        used,
        ", ".join(versions),
        single_times(record),
    )


def command(name: str) -> str:
    """Return the command that made a record, or a note where the record names none."""
    if not name.endswith(".json"):
        return f"`{TEXTS[next(key for key in TEXTS if name.startswith(key))][3]}`"
    record = json.loads((DATA / name).read_text())
    runs = record.get("runs", []) if "module" in record else []
    found = record.get("command") or "; ".join(run["command"] for run in runs) or None
    if found is None:
        return "a script; the record describes it"
    return f"`{found}`" if found.startswith(("canon ", "python ")) else found


def _commit(record: dict) -> str:
    found = record.get("commit") or record.get("commits") or ""
    found = " ".join(found.values()) if isinstance(found, dict) else found
    hashes = re.findall(r"\b[0-9a-f]{7,40}\b", found)
    changed = (
        " with changes"
        if "+changes" in found or (" " in found.strip() and len(hashes) == 1)
        else ""
    )
    return " ".join(f"`{each[:7]}`" for each in hashes) + changed if hashes else "in the record"


def index() -> str:
    """Return the index of the records: a table with the provenance of each, and the commands under
    it.
    """
    names = sorted(path.name for path in DATA.iterdir() if path.suffix != ".md")
    rows = []
    for name in names:
        commit, date, gpus, versions, count = provenance(name)
        rows.append(
            [f"[{name}]({name})", commit, date, gpus, versions, tokens(count) if count else ""]
        )
    header = ("record", "commit", "date", "GPUs", "versions", "single times")
    commands = "\n".join(f"- [{name}]({name}): {command(name)}" for name in names)
    return INDEX.format(table=table(header, rows, left=5), commands=commands)


def cut_off_cases(name: str) -> tuple[int, int, int]:
    """Return the numbers of cases that agree, were judged and were planned, of the printed table of
    `canon check`.
    """
    found = [re.match(r"(\d+)/(\d+) .+ (\w+)$", line) for line in lines(name)]
    cases = [match.groups() for match in found if match]
    planned = re.findall(r"^(\d+) cases of", "\n".join(lines(name)), re.MULTILINE)
    agree = sum(verdict == "agrees" for _, _, verdict in cases)
    return agree, len(cases), sum(map(int, planned))
