"""Options, ceilings and a constant clock for tests of `canon bench`."""

from argparse import ArgumentParser

import pytest
import torch

from canon.bench import bench_command, timing, tune

CPU = torch.device("cpu")
CEILINGS = {"matmul_tflops": 800.0, "copy_tbs": 4.0}


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Let every run take a millisecond: CPUs have no events to time between."""

    def milliseconds(run, times=10, *, warm=2):
        run()
        return [1.0] * times

    for module in (timing, tune):
        monkeypatch.setattr(module, "milliseconds", milliseconds)


def options_of(*words):
    """Return the options that `canon bench` reads from these words."""
    parser = ArgumentParser()
    bench_command.add_arguments(parser)
    return parser.parse_args(words)
