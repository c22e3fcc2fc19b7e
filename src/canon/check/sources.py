"""Digest the code that a checked module runs: a record is only continued with the same code.

It covers canon, and of a module outside canon also

    its own code         its top-level package, or its folder if it is a single file
    what it imports      directly or through others, in functions too
    what pip installed   the hashes in RECORD of these packages

Python's library, and code that is loaded under a computed name, are left out.
"""

import ast
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import canon

SOURCES = (".py", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp",
           ".ptx", ".cubin", ".so", ".pyd")  # fmt: skip
_INSTALLED = {"site-packages", "dist-packages"}  # folders of pip


def digest(module: str) -> str:
    """Return 16 hexadecimal digits that change with the code."""
    total = hashlib.sha256()
    for name, text in _contents(module):
        total.update(f"{name} {len(text)} ".encode() + text)
    return total.hexdigest()[:16]


def _contents(module: str) -> Iterator[tuple[str, bytes]]:
    root = Path(canon.__file__).parent
    for file in _files_below(root):
        yield str(file.relative_to(root)), file.read_bytes()
    todo, seen, of_distribution = [module.partition(".")[0]], {"canon"}, None
    while todo:
        top = todo.pop(0)
        if top in seen or top in sys.stdlib_module_names:
            continue
        seen.add(top)
        roots = _roots(top)
        own = top == module.partition(".")[0]
        if not own and roots and all(_INSTALLED & set(root.parts) for root in roots):
            of_distribution = of_distribution or metadata.packages_distributions()
            names = of_distribution.get(top, ())
            records = [metadata.distribution(name).read_text("RECORD") for name in names]
            if records and all(records):
                yield top, "".join(map(str, records)).encode()
                continue
        for root in roots:
            files = sorted(root.parent.iterdir()) if own else [root]
            for file in _files_below(root) if root.is_dir() else files:
                if file.suffix in SOURCES and file.is_file():
                    text = file.read_bytes()
                    yield f"{top} {file.relative_to(root.parent)}", text
                    if file.suffix == ".py" and (root.is_dir() or file == root):
                        todo += sorted(_imported(text))


def _roots(top: str) -> list[Path]:
    """Return the folders of a package, or the file of a module."""
    found = None
    with suppress(ImportError, ValueError, AttributeError):
        found = find_spec(top)
    if found is None:
        return []
    if found.submodule_search_locations:
        return [Path(folder).absolute() for folder in found.submodule_search_locations]
    return [Path(found.origin).absolute()] if found.origin and Path(found.origin).is_file() else []


def _files_below(root: Path) -> list[Path]:
    """Return the source files of a folder, links followed."""
    found, seen = [], set()
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()  # a link to a folder above
            continue
        seen.add(real)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(SOURCES)]
    return found


def _imported(text: bytes) -> set[str]:
    """Return the first names of all modules that a file imports by name."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module or "")
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                for name in node.args[:1] if called in ("import_module", "__import__") else ():
                    names |= {str(name.value)} if isinstance(name, ast.Constant) else set()
    return {name.partition(".")[0] for name in names} - {""}
