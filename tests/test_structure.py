"""Claims about the source: the two halves are twins, imports stay within limits, docstrings are
complete.
"""

import ast
import importlib
import inspect
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from programs import printed
from prose import findings

import canon
from canon import fast, reference

ROOT = Path(__file__).parents[1]
parsed = cache(lambda path: ast.parse(path.read_text()))
BY_DESIGN_ONLY_FAST = {"backend", "warm_up"}

# The rooms of canon that the code of each room may import.
SHARED = {"masks", "ranks", "route", "faces"}
HALVES = {"reference", "fast"}
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
    "integrations": SHARED | HALVES | {"training"},
    "simulator": set(),
    "show": {"masks"},
    "testing": SHARED | HALVES | {"simulator"},
    "check": SHARED | HALVES | {"testing", "trees"},
    "bench": SHARED | HALVES | {"testing"},
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
    "tests": "tests",
    "notebooks": "notebooks",
    "paper": "paper",
}


def modules_of(half):
    return {path.stem for path in (ROOT / half).glob("*.py")} - {"__init__"}


def exported_modules(half):
    """Return the modules with names that the half exports."""
    tree = ast.parse((ROOT / half / "__init__.py").read_text())
    names = (
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    )
    return {name.split(".")[-1] for name in names if name.startswith(f"canon.{half}.")}


ALGORITHMS = sorted(exported_modules("reference") - {"masks", "strides"})
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


def notebook_code(path):
    cells = json.loads(path.read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return "\n".join(line for line in source.splitlines() if not line.startswith(("%", "!")))


# --- twins ---


def test_every_algorithm_of_the_reference_has_a_twin_in_fast():
    assert {"local", "ring"} <= set(ALGORITHMS)
    assert set(ALGORITHMS) <= modules_of("fast")


@every_algorithm
def test_twins_have_the_same_names_and_signatures(name):
    halves = [importlib.import_module(f"canon.{half}.{name}") for half in ("reference", "fast")]
    read, quick = (
        {f: str(inspect.signature(getattr(half, f))) for f in half.__all__} for half in halves
    )
    assert read == quick


@every_algorithm
def test_a_function_of_fast_has_the_docstring_of_its_twin_and_then_its_own(name):
    halves = [importlib.import_module(f"canon.{half}.{name}") for half in ("reference", "fast")]
    for function in halves[0].__all__:
        shared, whole = (inspect.getdoc(getattr(half, function)) or "" for half in halves)
        assert shared
        assert whole == shared or whole.startswith(f"{shared}\n\nIn `canon.fast`:\n\n"), function


def test_exports_of_the_halves_agree():
    assert set(fast.__all__) - set(reference.__all__) == BY_DESIGN_ONLY_FAST
    assert set(reference.__all__) <= set(fast.__all__)
    for name in ("Band", "Mask", "Layout"):
        assert getattr(canon, name) is getattr(reference, name) is getattr(fast, name)


@pytest.mark.parametrize("half", ["reference", "fast"])
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
        twins = (
            Path("halves")
            if str(folder) in ("reference", "fast")
            else Path("backends")
            if in_backend
            else folder
        )
        if path.stem not in ("__init__", "__main__"):
            paths.setdefault((path.name, in_backend), set()).add(twins / path.name)
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
                or ".strides" in name
            )
        else:
            allowed = room not in OUTSIDE or top in OUTSIDE[room] or top in sys.stdlib_module_names
        wrong += [] if allowed else [f"{module} imports {name}"]
    return wrong


def test_each_room_imports_the_rooms_below_it_only():
    assert not [wrong for path, module in python_files("reference", "fast", "src/canon")
                for wrong in forbidden_imports(path, module)]  # fmt: skip


@pytest.mark.parametrize(("module", "line"), [
    ("canon.masks.planted", "from canon.route.checks import batched"),
        ("canon.reference.planted", "from canon.fast import merge"),
    ("canon.reference.planted", "import triton"),
    ("canon.fast.planted", "from canon.reference.ring import ring_forward"),
        ("canon.fast.planted", "from canon import simulator"),
            ("canon.route.planted", "from canon.faces import public_ranks"),
    ("canon.simulator.planted", "from canon.fast.kernels.gluon import ptx"),
                ("canon.masks.planted", "from canon.show.style import plt"),
        ("canon.show.planted", "from canon.fast import dispatch"),
    ("canon.ranks.planted", "import canon.show.style"),
])  # fmt: skip
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


def test_nothing_imports_tests_or_a_half_by_its_folder_name():
    forbidden = {
        "tests",
        "conftest",
        "reference",
        "fast",
        *(path.stem for path in (ROOT / "tests").rglob("test_*.py")),
    }
    found = {path: imports_of_file(path, module) for path, module in python_files(*PACKAGES)}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        found[path] = set(imports(ast.parse(notebook_code(path)), "notebook"))
    for path, names in found.items():
        for name in names:
            assert name.split(".")[0] not in forbidden, f"{path.relative_to(ROOT)} imports {name}"


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


@pytest.mark.parametrize("half", ["reference", "fast"])
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
    if folder not in PACKAGES:
        return [ROOT / "README.md", ROOT / "STYLE.md"]
    python = (
        [path for path, _ in python_files(folder)]
        if folder in ("reference", "fast", "src/canon")
        else []
    )
    return [
        *sorted((ROOT / folder).glob("*.md")),
        *sorted((ROOT / folder).glob("canon.typ")),
        *python,
    ]


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
    page.write_text(
        "# What is it?\n\nWhat it gives is this. What is `told`?\n\n| told | said |\n\n"
        + "word " * 29
    )
    module.write_text(
        '"""Return x.\n\nNobody waits.\n"""\n\nx = 1  # which is one\n# a turn\n# number\n'
    )
    wrong, long, words = findings([page, module])
    assert wrong == [
        "page.md: What it gives is this.",
        "module.py: Nobody waits.",
        "module.py: which is one",
        "module.py: a turn number",
    ]
    assert [sentence.split()[0] for sentence in long] == ["page.md:"]
    assert words == 5 + 3 + 29 + 2 + 2 + 3 + 3
