"""Run a bench of several GPUs: a process for each, all shapes in turn."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from canon.bench.measuring import Settings
from canon.bench.shapes import Shape
from canon.testing import process_groups


@dataclass(frozen=True)
class OnRanks:
    """A program for every rank, which can be pickled. All ranks return the same rows."""

    measure: Callable[[Shape, Settings], list[dict[str, Any]]]
    shapes: tuple[Shape, ...]
    settings: Settings
    # rank 0 calls it after each shape, with all rows
    keep: Callable[[list[dict]], object] | None = None

    def __call__(self) -> list[dict[str, Any]]:
        settings, rows = self.settings, []
        if settings.device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            settings = replace(settings, device=device)
        for shape in self.shapes:
            rows += self.measure(shape, settings)
            if self.keep and not dist.get_rank():
                self.keep(rows)
        return rows

    def on_gpus(self, ranks: int | None, timeout: float) -> list[dict[str, Any]]:
        """Return the rows. Raises what `process_groups.gpus` raises."""
        return process_groups.gpus(self, ranks, timeout=timeout)[0]
