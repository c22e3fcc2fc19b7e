"""PyTorch's switch for deterministic algorithms, on for a block of code."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_open: list[tuple[bool, bool, bool]] = []  # the settings before each open block


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    """Use deterministic algorithms, without filling new memory with NaN. Threads as ranks share the
    switch.
    """
    filling = torch.utils.deterministic
    with _lock:
        _open.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                filling.fill_uninitialized_memory,
            )
        )
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        with _lock:
            enabled, warned, filled = _open.pop()
            torch.use_deterministic_algorithms(enabled, warn_only=warned)
            filling.fill_uninitialized_memory = filled
