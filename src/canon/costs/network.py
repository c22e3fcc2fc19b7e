"""The links of a cluster: an array with a row for NVLink inside a host, and one for the NIC of each
GPU: GB/s of one direction, and the latency of a message in microseconds.
"""

import json
from pathlib import Path

import numpy as np

# Round figures of NCCL on H200s and of 400 Gbit/s; a latency that is fitted with the rates of
# `kernel_costs`, and one that was never measured.
ASSUMED = np.array([[300, 35.4], [50, 40]])


def seconds(links: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Return the times of messages from their bytes (..., 2) on both links."""
    gb_s, us = links.T
    return (1e-6 * us * (loads > 0) + 1e-9 * loads / gb_s).max(-1)


def read_links(path: Path) -> tuple[np.ndarray, list[str]]:
    """Return the medians of a record of `canon bench links`, or assumed ones where it has none, and
    for both links "measured" or "assumed". Raises ValueError for another file.
    """
    links, sources = ASSUMED.copy(), ["assumed"] * 2
    try:
        rows = json.loads(path.read_text())["results"]
        for kind in {row["one_host"] for row in rows}:
            some = [(row["gb_s"], row["us"]) for row in rows if row["one_host"] is kind]
            place = 0 if kind else 1
            links[place], sources[place] = np.median(some, 0), "measured"
        if not ((links > 0) & np.isfinite(links)).all():
            raise ValueError(f"links {links.tolist()} are not above 0")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a record of canon bench links: {error!r}") from error
    return links, sources
