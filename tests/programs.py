"""Run programs in processes of their own, for tests."""

import functools
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.multiprocessing as multiprocessing

# Forks a process for each program, which takes two seconds less than to import torch.
SERVER = """
import json, os, signal, sys, tempfile, textwrap, warnings
import torch

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a killed test reads no more
for line in sys.stdin:
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    if not (child := os.fork()):
        break
    _, status = os.waitpid(child, 0)
    texts = [file.read() for file in files if not file.seek(0)]
    print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), flush=True)
else:
    sys.exit()
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
signal.alarm(1800)
for number, file in enumerate([open(os.devnull), *files]):
    os.dup2(file.fileno(), number)
program, sys.argv[1:], before, environment, folder = json.loads(line)
os.chdir(folder)
os.environ.clear()
os.environ.update(before)
os.environ.pop("TRITON_INTERPRET", None)
os.environ.update(environment)
if action := environment.get("PYTHONWARNINGS"):
    warnings.simplefilter(action)
tempfile.tempdir = None
exec(textwrap.dedent(program))
"""


@functools.cache
def server():
    """Start a process with torch. It ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(program, *arguments, **environment):
    """Run a program in a process that has torch, and TRITON_INTERPRET from ``environment`` alone.
    Return the ended process.
    """
    given = program, [*map(str, arguments)], dict(os.environ), environment, os.getcwd()
    print(json.dumps(given), file=server().stdin, flush=True)
    return subprocess.CompletedProcess(program, *json.loads(server().stdout.readline()))


def printed(program, *arguments, **environment):
    """Run a program that must succeed, as `ended` does. Return its output."""
    done = ended(program, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def under_torchrun(script, ranks):
    """Run a script on ranks that are processes on the CPU of this host. Return its output."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *torchrun, str(ranks), str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_forked_ranks(script, ranks, *options):
    """Run a script on ranks that a server with torch forks, with the variables of torchrun. It
    starts faster than torchrun. Return the output of rank 0.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        variables = dict(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE=str(ranks),
            GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="", **os.environ,
        )  # fmt: skip
        free.close()
        given = [(rank, Path(script), options, variables, folder) for rank in range(ranks)]
        children = [context.Process(target=_script, args=one, daemon=True) for one in given]
        for child in children:
            child.start()
        for child in children:
            child.join(300)
        texts = [Path(folder, str(rank)).read_text() for rank in range(ranks)]
        assert [child.exitcode for child in children] == [0] * ranks, texts
    return texts[0]


def _script(rank, script, options, variables, folder):
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *options]
    with open(Path(folder, str(rank)), "w", buffering=1) as output:
        sys.stdout = sys.stderr = output
        runpy.run_path(str(script), run_name="__main__")


def losses_of(output):
    """Return the losses of the lines "step N: loss X"."""
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)]
