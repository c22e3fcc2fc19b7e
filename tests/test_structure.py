"""Claims about the source: the two halves are twins, imports stay within limits, docstrings are
complete.
"""

import ast
import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from folders import ROOT
from programs import printed
from prose import findings

import canon
from canon import fast, reference

parsed = cache(lambda path: ast.parse(path.read_text()))
BY_DESIGN_ONLY_FAST = {"backend", "warm_up"}

# The rooms of canon that the code of each room may import.
SHARED = {"masks", "ranks", "route", "faces"}
HALVES = "reference", "fast"
ROOMS = {
    "masks": set(),
    "ranks": {"masks"},
    "route": {"masks", "ranks"},
    "faces": SHARED - {"faces"},
    "reference": SHARED,
    "fast": SHARED,
    "costs": {"masks", "route", "fast"},
    "training": {"masks", "ranks", "route"},
    "trees": {"masks"},
    "integrations": SHARED | {*HALVES} | {"training"},
    "simulator": set(),
    "show": {"masks"},
    "testing": SHARED | {*HALVES} | {"simulator"},
    "check": SHARED | {*HALVES} | {"testing", "trees"},
    "bench": SHARED | {*HALVES} | {"testing"},
}
OUTSIDE = {
    **{room: {"torch", "numpy", "jaxtyping"} for room in SHARED},
    "reference": {"torch", "jaxtyping"},
    "simulator": {"torch", "numpy", "triton"},
    "show": {"torch", "matplotlib"},
}
# The rooms that the methods of Layout and of Mask import when they are called.
CALLED = {"layout.py": {"ranks", "show"}, "mask.py": {"show"}}

# Package of the files in each folder.
PACKAGES = {
    "reference": "canon.reference",
    "fast": "canon.fast",
    "src/canon": "canon",
    "notebooks": "notebooks",
}


def modules_of(half):
    return {path.stem for path in (ROOT / half).glob("*.py")} - {"__init__"}


ALGORITHMS = sorted(  # the modules whose names the reference exports
    node.module.split(".")[-1]
    for node in parsed(ROOT / "reference" / "__init__.py").body
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("canon.reference.")
)
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def python_files(*folders):
    """Yield (path, module name) of every Python file in the folders. Links are not followed, so
    each file comes once.
    """
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            linked = any((ROOT / folder / parent).is_symlink() for parent in inside.parents)
            if not linked:
                parts = [PACKAGES[folder], *inside.with_suffix("").parts]
                yield path, ".".join(parts)


def imports(tree, module, is_package=False):
    """Yield every dotted name that the code imports: the module, or with `from` each name in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            base = parents[: len(parents) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def imports_of_file(path, module):
    is_package = path.name == "__init__.py"
    return set(imports(parsed(path), module.removesuffix(".__init__"), is_package))


# --- twins ---


def test_every_algorithm_of_the_reference_has_a_twin_in_fast():
    assert {"local", "ring"} <= set(ALGORITHMS)
    assert set(ALGORITHMS) <= modules_of("fast")


@every_algorithm
def test_twins_have_the_same_names_signatures_and_docstrings(name):
    read, quick = (importlib.import_module(f"canon.{half}.{name}") for half in HALVES)
    assert read.__all__ == quick.__all__
    for function in read.__all__:
        one, two = getattr(read, function), getattr(quick, function)
        assert str(inspect.signature(one)) == str(inspect.signature(two))
        shared, whole = inspect.getdoc(one), inspect.getdoc(two)
        assert shared
        assert whole == shared or whole.startswith(f"{shared}\n\nIn `canon.fast`:\n\n"), function


def test_exports_of_the_halves_agree():
    assert set(fast.__all__) - set(reference.__all__) == BY_DESIGN_ONLY_FAST
    assert set(reference.__all__) <= set(fast.__all__)
    for name in ("Band", "Mask", "Layout"):
        assert getattr(canon, name) is getattr(reference, name) is getattr(fast, name)


@pytest.mark.parametrize("half", HALVES)
def test_exports_hold_every_public_function_and_hide_no_module(half):
    package = importlib.import_module(f"canon.{half}")
    for name in ALGORITHMS:
        assert set(importlib.import_module(f"canon.{half}.{name}").__all__) <= set(package.__all__)
    for name in modules_of(half):
        importlib.import_module(f"canon.{half}.{name}")
        assert inspect.ismodule(getattr(package, name)), (
            f"{name} is hidden by something of the same name"
        )


def test_only_twins_share_a_file_name():
    """Twins are the modules of the halves, and the parallel files of the kernel backends."""
    paths: dict[tuple[str, bool], set[Path]] = {}
    for path, _ in python_files("reference", "fast", "src/canon"):
        folder = path.parent.relative_to(ROOT)
        in_backend = folder.parent == Path("fast/kernels")
        place = Path("twins") if in_backend or str(folder) in HALVES else folder
        if path.stem not in ("__init__", "__main__"):
            paths.setdefault((path.name, in_backend), set()).add(place / path.name)
    assert not [sorted(map(str, same)) for same in paths.values() if len(same) > 1]


# --- imports ---


def room_of(module):
    """Return the room of a module of canon: "masks" for "canon.masks.band"."""
    return module.split(".")[1] if module.count(".") else ""


def lazy_imports(path):
    """Return the modules that the methods of `Layout` and `Mask` import when they are called."""
    if path.name not in CALLED or path.parent.name != "masks":
        return set()
    functions = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
    checking = [
        node
        for node in parsed(path).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    found = {
        name for node in (*functions, *checking) for name in imports(node, "canon.masks.layout")
    }
    return {name for name in found if room_of(name) in CALLED[path.name]}


def forbidden_imports(path, module):
    """Return the imports of a file that the rules of its room forbid."""
    room = room_of(module)
    if room not in ROOMS:
        return []
    found = imports_of_file(path, module) - lazy_imports(path) - {"canon.__version__", "canon"}
    wrong = []
    for name in found:
        top = name.split(".")[0]
        if top == "canon":
            # "from canon import reference" names the half itself: the twins' docstrings come from
            # there
            allowed = (
                room_of(name) in ROOMS[room] | {room}
                or name == "canon.reference"
                or name.startswith("canon.reference.planner")  # plans without a C compiler
                or ".strides" in name
            )
        else:
            allowed = room not in OUTSIDE or top in OUTSIDE[room] or top in sys.stdlib_module_names
        wrong += [] if allowed else [f"{module} imports {name}"]
    return wrong


def test_each_room_imports_the_rooms_below_it_only():
    assert not [wrong for path, module in python_files("reference", "fast", "src/canon")
                for wrong in forbidden_imports(path, module)]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("canon.masks.planted", "from canon.route.checks import batched"),
        ("canon.reference.planted", "from canon.fast import merge"),
        ("canon.reference.planted", "import triton"),
        ("canon.fast.planted", "from canon.reference.ring import ring_forward"),
        ("canon.simulator.planted", "from canon.fast.kernels.gluon import ptx"),
        ("canon.masks.planted", "from canon.show.style import plt"),
    ],
)
def test_a_planted_forbidden_import_is_found(tmp_path, module, line):
    path = tmp_path / "planted.py"
    path.write_text(f"def f():\n    {line}\n")
    assert forbidden_imports(path, module)


def test_reference_runs_without_triton_and_without_fast():
    program = """
import importlib.abc, sys


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "cuda") or name.startswith("canon.fast"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


sys.meta_path.insert(0, Blocked())
import torch
from canon import Mask, reference as attn

q, k, v = (torch.randn(1, 5, heads, 8, requires_grad=True) for heads in (4, 2, 2))
attn.attention(q, k, v, Mask.window(5, left=1, right=0)).sum().backward()
attn.zigzag_attention(q, k, v).sum().backward()
assert q.grad.isfinite().all() and k.grad.isfinite().all() and v.grad.isfinite().all()
assert not any(
    name == "triton" or name.startswith(("triton.", "canon.fast")) for name in sys.modules
)
"""
    printed(program)


def documented_elsewhere(node):
    """Return whether the decorator is ``twin_of(reference.name)`` or ``overload``."""
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id in ("twin_of", "overload")


# --- docstrings ---


def public_definitions(tree):
    """Yield (name, node) of the public functions and classes of a module or a class."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node


def test_every_module_and_every_public_name_has_a_docstring():
    missing, documented = [], set()
    for path, module in python_files("reference", "fast", "src/canon", "notebooks"):
        named = [("the module", parsed(path)), *public_definitions(parsed(path))]
        # both halves use these classes: their methods need docstrings, too
        if room_of(module) in ("masks", "ranks", "route", "faces"):
            named += [
                (f"{name}.{part}", inner)
                for name, node in named[1:]
                for part, inner in public_definitions(node)
                if part not in ("forward", "backward")  # of autograd Functions
            ]
        twin = module.replace("canon.fast", "canon.reference")  # may have the docstring
        for name, node in named:
            elsewhere = map(documented_elsewhere, getattr(node, "decorator_list", ()))
            if ast.get_docstring(node) or any(elsewhere):
                documented.add((module, name))
            elif (twin, name) not in documented:
                missing.append(f"{module}: {name}")
    assert not missing


@pytest.mark.parametrize("half", HALVES)
@every_algorithm
def test_algorithms_give_shapes_errors_and_source(half, name):
    module = importlib.import_module(f"canon.{half}.{name}")
    assert re.search(r"\bSources?:|\b(19|20)\d\d\b", module.__doc__ or ""), (
        "no source: authors, title, year"
    )
    for function in map(module.__dict__.get, module.__all__):
        doc = inspect.getdoc(function) or ""
        signature = str(inspect.signature(function))
        assert "Tensor, '" in signature or "Tensor" not in signature, (
            f"{function.__name__}: no shapes in the signature"
        )
        assert re.search(r"[Rr]aise|Error", doc), (
            f"{function.__name__}: the docstring names no error"
        )
        source = (
            r"\bSource|[Aa]lgorithm \d|[Ee]quation|\bet al\b|\b(19|20)\d\d\b|module's "
            r"docstring"
        )
        assert re.search(source, doc), f"{function.__name__}: no source"


# --- prose ---

PROSE = ("README.md and STYLE.md", "reference", "fast", "src/canon", "notebooks", "paper")


def prose_files(folder):
    """Return the Markdown and Typst files of a folder and, in a package, its Python files."""
    if folder == PROSE[0]:
        return [ROOT / "README.md", ROOT / "STYLE.md"]
    pages = [*(ROOT / folder).glob("*.md"), *(ROOT / folder).glob("canon.typ")]
    modules = [path for path, _ in python_files(folder)] if folder in PROSE[1:4] else []
    return sorted(pages) + modules


@pytest.mark.parametrize("folder", PROSE)
def test_sentences_follow_the_mechanical_rules_of_the_style(folder):
    wrong, long, words = findings(prose_files(folder))
    assert 1000 * len(wrong) <= words, (
        f"{len(wrong)} sentences with wrong words, {words} words:\n"
    ) + "\n".join(wrong)
    assert 1000 * len(long) <= 4 * words, (
        f"{len(long)} long sentences, {words} words:\n"
    ) + "\n".join(long)


def test_wrong_words_and_long_sentences_are_found(tmp_path):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("# What is it?\n\nWhat it gives is this. `told`\n\n" + "word " * 29)
    module.write_text('"""Return x."""\n\nx = 1  # which is one\n# a turn\n# number\n')
    wrong, long, words = findings([page, module])
    assert wrong == [
        "page.md: What it gives is this.",
        "module.py: which is one",
        "module.py: a turn number",
    ]
    assert [sentence.split()[0] for sentence in long] == ["page.md:"]
    assert words == 5 + 1 + 29 + 2 + 3 + 3
