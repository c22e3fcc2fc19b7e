"""Read the listings of the paper from source files: the code of a function, without its docstring.

`canon.typ` names a listing by a file and one or more functions, `listing("reference/ring.py",
"ring_forward", ...)`. So a listing is always the code in the repository. Only docstrings and
comments for the formatter are left out."""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r'listing\(\s*"([^"]+)",\s*"([^"]+)"')


def listings(text: str) -> dict[str, str]:
    """Return the code of every listing that a Typst text names, by "file:function"."""
    return {
        f"{file}:{names}": code_of(file, *names.split(", ")) for file, names in NAMED.findall(text)
    }


def code_of(file: str, *names: str) -> str:
    """Return the code of functions or of methods such as "Band.pick". Raises ValueError if the file
    or a name is missing.
    """
    path = ROOT / file
    if not path.is_file():
        raise ValueError(f"a listing names {file}, which is not in the repository")
    source = path.read_text()
    return "\n\n".join(
        _without_docstring(source.splitlines(), _found(source, file, name)) for name in names
    )


def _found(source: str, file: str, name: str) -> ast.AST:
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = [
            child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part
        ]
        if not found:
            raise ValueError(f"a listing names {name} in {file}, and there is no {part}")
        node = found[0]
    return node


def _without_docstring(lines: list[str], node: ast.FunctionDef) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    numbers = set(range(first, node.end_lineno + 1))
    if ast.get_docstring(node):
        numbers -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code = textwrap.dedent("\n".join(lines[number - 1] for number in sorted(numbers)))
    return re.sub(r" +# fmt: skip", "", code)
