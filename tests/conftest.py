"""Set-up of all tests: the same everywhere, on the CPU by Triton's interpreter; with --gpu the kernels' tests, on GPUs."""

import os

import pytest
import torch
from hypothesis import settings

# The same examples in every run: a failure that comes and goes teaches nothing.
settings.register_profile("canon", deadline=None, derandomize=True, database=None)
settings.load_profile("canon")


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu or gpus, on GPUs")


def pytest_configure(config):
    """Choose where kernels run, before a test imports Triton: it reads the variable then."""
    config.addinivalue_line("markers", "gpu: with --gpu, too, and then on a GPU")
    config.addinivalue_line("markers", "gpus(n): with --gpu alone, on n GPUs")
    if not config.getoption("gpu"):
        os.environ["TRITON_INTERPRET"] = "1"
    elif torch.cuda.is_available():
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        raise pytest.UsageError("--gpu: torch finds no GPU here; without --gpu the kernels are tested on the CPU")


def pytest_collection_modifyitems(config, items):
    on_gpu = config.getoption("gpu")
    for item in items:
        if marker := item.get_closest_marker("gpus"):
            (needed,) = marker.args
            too_few = torch.cuda.device_count() < needed
            item.add_marker(pytest.mark.skipif(not on_gpu, reason=f"needs pytest --gpu, and {needed} GPUs"))
            item.add_marker(pytest.mark.skipif(too_few, reason=f"needs {needed} GPUs"))
    if on_gpu:
        chosen = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("gpus")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.fixture
def deterministic():
    """The test asks for the same bits."""
    from canon.testing import peers

    with peers.deterministic():
        yield


@pytest.fixture
def own_errors():
    """The test passes arguments of wrong types: the library's own errors come, not those of the tests' type checker."""
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
