"""Run programs in processes of their own, for tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

SOURCES, TESTS = str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)


def ended(program, *arguments, **environment):
    """Run a program in a process that has TRITON_INTERPRET from ``environment`` alone. Return the
    ended process.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, timeout=3600
    )


def printed(program, *arguments, **environment):
    """Run a program that must succeed, as `ended` does. Return its output."""
    done = ended(program, *arguments, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def under_torchrun(script, ranks, *options, cwd=None, **environment):
    """Run a script on ranks that are processes on this host. Return its output."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    paths = os.pathsep.join([SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths} | environment
    command = [*torchrun, str(script), *options]
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(output):
    """Return the losses of the lines "step N: loss X"."""
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)]
