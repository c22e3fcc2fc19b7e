"""Choose where the ranks of `canon check` run."""

from dataclasses import dataclass

import torch

from canon.testing import process_groups


@dataclass(frozen=True)
class Placement:
    """The world of a check."""

    kind: str  # "threads", "processes" or "gpus": a function of `process_groups`
    device: str  # "cpu" or "cuda"
    ranks: int

    def describe(self, backend: str | None) -> str:
        gpu = torch.cuda.get_device_name() if self.device == "cuda" else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        simulated = ", simulated" * (backend == "gluon" and self.device == "cpu")
        places = {
            "gpus": f"each a process with its own {gpu} (NCCL)",
            "processes": "each a process on the CPU (gloo)",
            "threads": "threads that share " + (f"one {gpu}" if gpu else "the CPU"),
        }
        kernels = f", {backend} kernels{simulated}" if backend else ""
        return f"{ranks}, {places[self.kind]}{kernels}"


def placement(world: str, ranks: int | None) -> Placement:
    """Return the placement for ``--world`` and ``--ranks``. Raises ValueError if there is none."""
    gpus = process_groups.kernel_gpus()
    kind = world
    if world == "auto":
        kind = "gpus" if gpus > 1 and (ranks or gpus) <= gpus else "threads"
    if kind == "gpus":
        if (ranks or 1) > gpus:
            raise ValueError(
                f"--world gpus needs a GPU for each rank: {ranks or 1} ranks, {gpus} GPUs "
                "(none under TRITON_INTERPRET=1)"
            )
        return Placement(kind, "cuda", ranks or gpus)
    return Placement(kind, "cuda" if gpus and kind == "threads" else "cpu", ranks or 4)
