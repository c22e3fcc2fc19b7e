"""Read and write the records of `canon check --random`: one row per case, and details only of failures.

    {"module", "runs": [{"command", "source", "commit", "date", "machine", "seed", "table", "ranks", "runs",
                         "cases": [[index, function, verdict, ratio], ...], "failures": [...]}, ...]}

Results with equal `KEY` are added to the same run. So the same command continues a run.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from canon.testing.record import finite

KEY = ("source", "seed", "table", "ranks", "runs")


def read(path: Path, module: str | None = None) -> dict[str, Any]:
    """Return the record at ``path``, or an empty record of ``module``. Raises ValueError if the file is no such record."""
    if not path.exists() and module is not None:
        return {"module": module, "runs": []}
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the record {path}: {error}") from error
    if not isinstance(kept, dict) or "runs" not in kept or (module is not None and kept.get("module") != module):
        raise ValueError(f"{path} is not a record of canon check --random" + (f" {module}" if module else ""))
    return kept


def run_of(kept: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Return the run of ``kept`` with the key of ``run``; add an empty one if there is none."""
    for known in kept["runs"]:
        if all(known[name] == run[name] for name in KEY):
            return known
    kept["runs"].append({**run, "cases": [], "failures": []})
    return kept["runs"][-1]


def add(run: dict[str, Any], rows: Iterable[list], failures: Iterable[dict[str, Any]]) -> None:
    """Add cases to ``run``. A case that is already there keeps its verdict."""
    known = {row[0] for row in run["cases"]}
    run["cases"] = sorted([*run["cases"], *(row for row in rows if row[0] not in known)], key=lambda row: row[0])
    run["failures"] += [failure for failure in failures if failure["index"] not in known]


def write(path: Path, kept: dict[str, Any]) -> None:
    """Write the record, one line per case. An interrupted write leaves the old file."""
    runs = []
    for run in kept["runs"]:
        head = {name: value for name, value in run.items() if name not in ("cases", "failures")}
        lines = ",\n".join(json.dumps(finite(row)) for row in run["cases"])
        failures = json.dumps(finite(run["failures"]), indent=1)
        runs.append(f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n{lines}],\n "failures": {failures}}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(f'{{"module": {json.dumps(kept["module"])}, "runs": [\n' + ",\n".join(runs) + "]}\n")
    part.replace(path)


def counts(kept: dict[str, Any]) -> dict[str, int]:
    """Return the number of cases by verdict."""
    verdicts = [row[2] for run in kept["runs"] for row in run["cases"]]
    return {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}
