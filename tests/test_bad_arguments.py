"""Bad arguments raise a plain error on every rank, in a process without the checks of the test suite."""

import subprocess
import sys
from pathlib import Path


def test_bad_arguments_are_named_in_a_fresh_process():
    file = Path(__file__).with_name("bad_arguments.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "addopts=", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
