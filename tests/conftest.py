"""Set up all tests. With --gpu, only the tests marked gpu or gpus run.

Folders mirror the source; files beside this one are shared by several tests. On the CPU
`canon.fast` computes with its PyTorch tiles. Tests of kernels, and of all that records, counts,
compiles or simulates them, run them in Triton's interpreter: they lie in the folders kernels and
simulator, or have the mark interpreted.
"""

import copyreg
import importlib
import json
import os
import shlex
import sys
from collections import defaultdict
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import pytest
import sampling
import torch
import torch.distributed as dist
from folders import PAPER
from hypothesis import settings
from torch.utils._pytree import tree_leaves

# Folders of tests of the kernels, which run interpreted without the mark.
INTERPRETED = [Path(__file__).parent / folder for folder in ("kernels", "simulator")]

# These begin first, so that no worker is left alone with a long test at the end.
SLOW = """
test_check test_check_warming test_compile test_compiled_graphs test_fsdp2_context_parallel
test_gluon_order test_gluon_protocol test_kernel_variants test_readme test_replayed_schedules
test_swap_it_in test_transformers
""".split()  # noqa: SIM905

# Programs of rank processes import these, if a test module does.
SEVERAL_RANKS = {"canon.integrations.trainer", "torch.distributed.checkpoint.state_dict"}

# Programs of rank processes take modules, such as a half: these are pickled by their names.
copyreg.pickle(ModuleType, lambda module: (importlib.import_module, (module.__name__,)))

# nbformat would build its grammars, in more than a second, to check the formats of URLs.
sys.modules["rfc3987_syntax"] = None

# The same examples in every run, so that a failure can be repeated.
settings.register_profile(
    "canon",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100 if sampling.ALL else 30,
)
settings.load_profile("canon")


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu or gpus, on GPUs")


def pytest_configure(config):
    """Choose where kernels run. Triton reads the variable when a test imports it,
    which is later.
    """
    config.addinivalue_line(
        "markers", "interpreted: Triton's interpreter runs the kernels, on the CPU"
    )
    config.addinivalue_line(
        "markers", "sweep(number=0): of these cases a sample runs, see sampling.py"
    )
    config.addinivalue_line("markers", "gpu: runs on the CPU, and with --gpu on a GPU")
    config.addinivalue_line("markers", "gpus(n): runs only with --gpu, on n GPUs")
    if not config.getoption("gpu"):
        os.environ["TRITON_INTERPRET"] = "1"
        import_before_forks(
            "interpreted_kernels", "canon.testing.process_groups", "torch._inductor.compile_fx"
        )
    elif torch.cuda.is_available():
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ["CANON_COMPILE_AHEAD"] = "0"  # most tests call a model once
    else:
        raise pytest.UsageError(
            "--gpu: torch finds no GPU here; without --gpu the tests run on the CPU"
        )


def import_before_forks(*modules):
    """Let the server that forks rank processes import these modules. Otherwise every rank imports
    them, in two seconds, and Triton defines kernels as the first test that starts the server.
    """
    # Python 3.11 gives the server no sys.path
    folders = Path(__file__).parent, Path(__file__).parents[1] / "src"
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    preload = forkserver.set_forkserver_preload
    forkserver.set_forkserver_preload = lambda names: preload(
        [*names, *modules, *SEVERAL_RANKS & sys.modules.keys()]
    )


def pytest_collection_modifyitems(config, items):
    on_gpu = config.getoption("gpu")
    items[:] = sorted(sampling.chosen(items), key=lambda item: item.path.stem not in SLOW)
    for item in items:
        if marker := item.get_closest_marker("gpus"):
            (needed,) = marker.args
            too_few = torch.cuda.device_count() < needed
            item.add_marker(
                pytest.mark.skipif(not on_gpu, reason=f"needs pytest --gpu, and {needed} GPUs")
            )
            item.add_marker(pytest.mark.skipif(too_few, reason=f"needs {needed} GPUs"))
    if on_gpu:
        chosen = [
            item
            for item in items
            if item.get_closest_marker("gpu") or item.get_closest_marker("gpus")
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """On the CPU, choose the kernels of a test before its fixtures run."""
    if item.config.getoption("gpu"):
        return
    importlib.import_module("interpreted_kernels")
    records = "replays" in item.fixturenames  # only launches of kernels are recorded
    if (
        records
        or any(folder in item.path.parents for folder in INTERPRETED)
        or item.get_closest_marker("interpreted")
    ):
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter(pytestconfig):
    """Speed up the interpreter, if a test module has imported Triton."""
    if "triton" in sys.modules and not pytestconfig.getoption("gpu"):
        from canon.testing.interpreted_types import share_types

        share_types()


@pytest.fixture(autouse=True)
def _no_cuts():
    """Run each test as if no layout had divided a tensor before it."""
    from canon.masks.cuts import forget_cuts

    forget_cuts()


@pytest.fixture(params=["reference", "fast"])
def half(request):
    """Return the package of each half."""
    return importlib.import_module(f"canon.{request.param}")


@pytest.fixture
def deterministic():
    """Run the test with deterministic algorithms."""
    from canon.bench import peers

    with peers.deterministic():
        yield


@pytest.fixture
def unwritten_is_nan():
    """Fill the result of torch.empty with NaN, so that a read of unwritten memory fails the
    test.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def exchanged(monkeypatch):
    """Return a list that collects (rank, output, input, output sizes, input sizes) of every
    exchange.
    """
    seen, exchange = [], dist.all_to_all_single

    def recording(*given, **options):
        seen.append((dist.get_rank(), *given))
        return exchange(*given, **options)

    monkeypatch.setattr(dist, "all_to_all_single", recording)
    return seen


@pytest.fixture
def sent(monkeypatch):
    """Return a list that collects the bytes of every message of rank 0, if ranks are threads."""
    from canon.testing.thread_group import ThreadGroup

    found = []

    def note(name, place):
        method = getattr(ThreadGroup, name)

        def noted(group, *given, **options):
            if group.group_rank == 0:
                found.append(sum(x.numel() * x.element_size() for x in tree_leaves(given[place])))
            return method(group, *given, **options)

        monkeypatch.setattr(ThreadGroup, name, noted)

    for name in ("all_to_all_single", "all_gather_single", "allgather"):
        note(name, 1)
    note("send", 0)
    return found


@pytest.fixture
def empty_cache():
    """Run the test with an empty cache of plans."""
    from canon.masks.plan_cache import PLANS

    PLANS.clear()
    yield
    PLANS.clear()


@pytest.fixture
def replays(monkeypatch, empty_cache):
    """Replay passes on the CPU, too. Return a function that lists for each pass why it cannot be
    replayed, or "".
    """
    from interpreted_replay import EVERYWHERE, recorded

    from canon.fast.replay import recordings

    monkeypatch.setattr(recordings, "REPLAYED", EVERYWHERE)
    return lambda: [x.reason for x in recorded()]


@pytest.fixture
def own_errors():
    """Disable the type checker of the tests, so that arguments of wrong types reach the library's
    own errors.
    """
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return ``run(line, *words)``: run `canon check` in an empty folder, and return (status,
    output, record).
    """
    from canon.__main__ import main

    monkeypatch.chdir(tmp_path)

    def run(line, *more):
        words = [*(shlex.split(line) or [line]), *map(str, more)]
        status = main(["check", *words])
        module = "canon.fast" if words[0].startswith("-") else words[0]
        name = f"random.{module}.json" if "--random" in words else "record.json"
        kept = tmp_path / "canon-check" / name
        return status, capsys.readouterr(), json.loads(kept.read_text()) if kept.exists() else None

    return run


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Return ``write_module(name, text)``, which writes a module that can be imported."""

    def write_module(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write_module


@pytest.fixture
def verdicts_of(run, write_module):
    """Return ``verdicts_of(text, lines, options)``: check a module whose other lines are "pass".
    Return one verdict of each function with cases, and the output.
    """

    def verdicts_of(text, lines, options):
        write_module("planted", text.format_map(defaultdict(lambda: "pass", lines)))
        status, printed, record = run(f"planted {options}")
        found = {x["case"].split("/")[0]: x["verdict"] for x in record["results"]}
        assert status == ({*found.values()} != {"agrees"}), printed.out
        assert "the reference itself" not in printed.out
        return found, printed.out

    return verdicts_of


@pytest.fixture(scope="module")
def scripts():
    """Return a function that imports a script of `paper` by its name. The scripts import each other
    from their folder.
    """
    before, folder = set(sys.modules), str(PAPER)
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)
    for name in set(sys.modules) - before:
        if folder in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
