"""The links of a cluster: NVLink inside a host, and the NIC of each GPU between hosts."""

import json
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np


class Links(NamedTuple):
    """Bandwidths of one direction, in GB/s, and latencies of a message, in microseconds: inside a
    host and between hosts. ``source``: "assumed", or the file in which they were measured.
    """

    gb_s: tuple[float, float]
    us: tuple[float, float]
    source: str = "assumed"

    def seconds(self, loads: np.ndarray) -> np.ndarray:
        """Return the times of messages from their bytes (..., 2) on both links, 0 for none."""
        return (1e-6 * np.array(self.us) * (loads > 0) + 1e-9 * loads / self.gb_s).max(-1)


# Bandwidths are round figures of NCCL on H200s and of 400 Gbit/s. The first latency is fitted with
# the rates of `kernel_costs`. The second was never measured.
ASSUMED = Links((300, 50), (35.4, 40))


def read_links(path: Path) -> Links:
    """Return the medians of a record of `canon bench links`. Links that it lacks are assumed.

    Raises ValueError for another file.
    """
    try:
        rows = json.loads(path.read_text())["results"]
        gb_s, us = (
            tuple(
                median([row[name] for row in rows if row["one_host"] is inside] or [assumed])
                for inside, assumed in zip((True, False), getattr(ASSUMED, name), strict=True)
            )
            for name in ("gb_s", "us")
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a record of canon bench links: {error!r}") from error
    return Links(gb_s, us, f"measured, {path.name}")
