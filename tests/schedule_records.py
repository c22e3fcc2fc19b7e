"""The records of schedules, by shape and ranks."""

import json
from functools import cache

from folders import DATA


@cache
def recorded(name):
    """Return {(shape, ranks): {schedule: its row}} of a record."""
    found = {}
    for row in json.loads((DATA / name).read_text())["results"]:
        if "both_ms" in row and not row.get("peer") and row["schedule"] != "one GPU":
            b, n, h, g, d, mask = (word.lstrip("BSHqkD") for word in row["shape"].split())
            found.setdefault((f"{b},{n},{h},{g},{d},{mask}", row["ranks"]), {})[row["schedule"]] = (
                row
            )
    return found
