"""Run notebooks as tests: `pytest --nbval` collects their cells and the tests, also with several
workers.
"""

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Start the kernel of a notebook without TRITON_INTERPRET, which the tests set. A notebook sets
    it if it needs it.
    """
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        return (yield)
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Run all cells of a notebook in one worker, whatever `--dist` says: they share a kernel."""
    if not config.getoption("nbval", default=False):
        return None
    from xdist.scheduler import LoadScopeScheduling

    return LoadScopeScheduling(config, log)
