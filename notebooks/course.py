"""Write the course: the notebooks with holes, where the student writes a function that the notebook
checks.

    python course.py FOLDER      (`make course` has build)

The notebooks stand in FOLDER/course. FOLDER also gets links to four folders of the repository,
because notebooks link to their files.

A hole stands between two comments in the cell of a function. Its first line is the task:

    # your turn: return the sum of both parts, each with its weight
    # hint: the weight of a part is exp(its lse - whole)
    return weight * part
    # your turn ends

In the course the hole raises NotImplementedError with the task. The hint and the solution are
folded below the cell.
"""

import argparse
import re
import shutil
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

HERE = Path(__file__).resolve().parent
LINKED = ("fast", "paper", "reference", "tests")  # folders that the notebooks link to
HOLE = re.compile(
    r"^(?P<indent> *)# your turn: (?P<task>.*)\n(?P=indent)# hint: "
    r"(?P<hint>.*(?:\n(?P=indent)# .*)*)\n"
    r"(?P<solution>(?:.*\n)*?)(?P=indent)# your turn ends(?=\n|$)",
    re.MULTILINE,
)
TWIN = re.compile(r"\]\((\w+)\.md(?=[)#])")  # a link to another notebook
SOLVED = (
    "*This copy is solved. `make course` writes a copy with holes, functions that you write, into "
    "`build/course`.*\n\n"
)
OPEN = (
    "In `{root}`, the command `.venv/bin/jupyter lab {above}` opens the folder of these "
    "notebooks. In `{folder}`, the command "
    "`{root}/.venv/bin/canon check my_attention` checks all functions."
)
FOLDED = "<details><summary>{}</summary>\n\n{}\n\n</details>"


def with_hole(source: str) -> str:
    """Return the source of a cell with NotImplementedError in place of the solution."""

    lines = r"\g<indent>raise NotImplementedError(", r'    "Your turn: \g<task>"', ")"
    return HOLE.sub(r"\n\g<indent>".join(lines), source)


def folded(source: str) -> str:
    """Return the hint and the solution of a cell, folded."""
    hint = " ".join(re.sub(r"\n *# ", " ", found["hint"]) for found in HOLE.finditer(source))
    hint = hint[0].upper() + hint[1:]
    code = f"```python\n{solution(source)}\n```"
    return f"{FOLDED.format('Hint', hint)}\n\n{FOLDED.format('Solution', code)}"


def solution(source: str) -> str:
    """Return the lines of the hole."""
    return "\n".join(found["solution"].rstrip() for found in HOLE.finditer(source))


def holes(notebook: NotebookNode) -> list[str]:
    """Return the source of each cell that has a hole."""
    return [
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code" and HOLE.search(cell.source)
    ]


def unprofiled(source: str) -> str:
    """Return the source without `named_steps`, which names the steps of a loop for a profiler.
    Pages leave it out.
    """
    return re.sub(r"named_steps\((.*)\):", r"\1:", source)


def from_root(folder: Path) -> Path:
    """Return the path of a folder from the root of the repository."""
    return folder.relative_to(HERE.parent) if folder.is_relative_to(HERE.parent) else folder


def for_students(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Return the notebook with holes, folded hints and solutions, links to notebooks, and in its
    first cell the command that opens it.
    """
    first, place = notebook.cells[0], from_root(folder)
    opens = OPEN.format(root=HERE.parent, folder=place, above=place.parent)
    first.source = f"{first.source.replace(SOLVED, '')}\n\n{opens}"
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "markdown":
            cell.source = TWIN.sub(r"](\1.ipynb", cell.source)
        if cell.cell_type == "code" and HOLE.search(cell.source):
            cells.append(new_markdown_cell(folded(cell.source)))
            cell.source = with_hole(cell.source)
    notebook.cells = cells
    return notebook


def write(above: Path) -> Path:
    """Write the course into ``above / "course"``, and return this folder: notebooks with holes, and
    their modules.

    ``above`` gets links to the repository. A notebook that is there already has the student's
    cells, and stays. Raises FileExistsError, before it writes anything, if something else has the
    name of a link."""
    folder, links = above / "course", {above / name: HERE.parent / name for name in LINKED}
    for link, target in links.items():
        if (link.is_symlink() or link.exists()) and link.resolve() != target:
            raise FileExistsError(
                f"{link} is not a link to {target}: choose another folder, as a new one"
            )
    (folder / "my_functions").mkdir(parents=True, exist_ok=True)
    for ending in ("py", "h", "cpp"):
        for module in HERE.glob(f"*.{ending}"):
            shutil.copy(module, folder)
    for link, target in links.items():
        if not link.is_symlink():
            link.symlink_to(target)
    for twin in sorted(HERE.glob("*.md")):
        notebook = folder / f"{twin.stem}.ipynb"
        if not notebook.exists():
            nbformat.write(for_students(jupytext.read(twin), folder), notebook)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="gets the folder course, and links beside it"
    )
    try:
        place = from_root(write(parser.parse_args().folder.resolve()))
    except FileExistsError as error:
        parser.error(str(error))
    print(
        f"Start: .venv/bin/jupyter lab {place.parent}",
        f"First: {place.name}/00_softmax_in_pieces.ipynb",
        sep="\n",
    )
    print("Notebooks that you have begun stay.")
