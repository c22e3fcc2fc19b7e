"""Options, ceilings and a constant clock for tests of `canon bench`."""

from argparse import ArgumentParser

import pytest
import torch

from canon.bench import bench_command, kernels, schedules, timing
from canon.bench.measuring import Settings

CPU = torch.device("cpu")
CEILINGS = {"matmul_tflops": 800.0, "copy_tbs": 4.0}


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Let every run take a millisecond: CPUs have no events to time between."""

    def milliseconds(run, times=10, *, warm=2, before=None):
        if before:
            before()
        run()
        return [1.0] * times

    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    monkeypatch.setattr(kernels, "ceilings", lambda dtype, device: CEILINGS)


@pytest.fixture(autouse=True)
def no_clock_of_schedules(monkeypatch):
    """Let every run of a schedule take a millisecond, half of it for launches."""
    monkeypatch.setattr(schedules, "_timed", lambda run, device: (run(), (1.0, 0.5))[1])
    monkeypatch.setattr(schedules, "_exposed", lambda run, device: 0.0)
    monkeypatch.setattr(timing, "eager", lambda run, calls, device: (1.0, 0.5))


def on_cpu(only="", rounds=2, dtype=torch.float32, **options):
    """Return settings of a bench on the CPU."""
    return Settings(dtype, CPU, rounds, only, **options)


def options_of(*words):
    """Return the options that `canon bench` reads from these words."""
    parser = ArgumentParser()
    bench_command.add_arguments(parser)
    return parser.parse_args(words)
