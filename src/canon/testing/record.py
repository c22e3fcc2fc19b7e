"""Write records of runs, as JSON."""

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import canon


def write(path: Path, command: str, results: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write a record with further fields ``more``."""
    entry = {**head(command), **more, "results": list(results)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(entry), indent=1, allow_nan=False) + "\n")


def check_path(path: Path) -> None:
    """Raise ValueError if a record cannot be written there."""
    found = next(x for x in (path, *path.parents) if os.path.exists(x))
    if (found == path) == found.is_dir() or not os.access(found, os.W_OK):
        raise ValueError(f"no record can be written to {path}: choose another path with --record")


def head(command: str) -> dict[str, Any]:
    """Return the provenance of a run, in UTC."""
    return {
        "command": command,
        "canon": canon.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }


def command(*words: str, **options: Any) -> str:
    """Return a command line. A list repeats its option."""
    line = [*words]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is None or one is False or one in ("", ()):
                continue
            line.append(f"--{name}")
            if one is not True:
                line += map(str, one if isinstance(one, tuple) else [one])
    return shlex.join(line)


def machine() -> dict[str, Any]:
    """Return hardware and versions; no names of hosts, users or folders."""
    on_gpu = torch.cuda.is_available()
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "driver": _told(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        if on_gpu
        else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None
    )


def commit() -> str | None:
    """Return the commit, with "+changes" if tracked files differ from it, or None."""
    here = ["git", "-C", str(Path(__file__).resolve().parent)]
    found = _told([*here, "rev-parse", "HEAD"])
    if found is None:
        return None
    return found + (
        "+changes" if _told([*here, "status", "--porcelain", "--untracked-files=no"]) else ""
    )


def _told(command: list[str]) -> str | None:
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(said.splitlines()), "")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def finite(value: Any) -> Any:
    """Replace infinities, which JSON lacks, by strings."""
    if isinstance(value, dict):
        return {key: finite(some) for key, some in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(some) for some in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return str(value)
    return value
