"""Write the course: the notebooks with holes, where the student writes a function that the notebook checks.

    python course.py FOLDER      (`make course`)

A hole stands between two comments in the cell of a function. Its sentence names the lines to write:

    # your turn: return the sum of both parts, each with its weight
    return weight * part
    # your turn ends

In the course the hole raises NotImplementedError with this sentence. The solution is folded below the cell.
"""

import argparse
import re
import shutil
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

HERE = Path(__file__).parent
HOLE = re.compile(
    r"^(?P<indent> *)# your turn: (?P<sentence>.*(?:\n(?P=indent)# .*)*)\n"
    r"(?P<solution>(?:.*\n)*?)(?P=indent)# your turn ends(?=\n|$)",
    re.MULTILINE,
)
TWIN = re.compile(r"\]\((\w+)\.md(?=[)#])")  # a link to another notebook
SOLVED = (
    "*This copy is solved. `make course` writes a copy with holes, functions that you write, into `build/course`.*\n\n"
)
OPEN = (
    "In `{root}`, the command `.venv/bin/jupyter lab {above}` opens the folder of these notebooks. In `{folder}`, the command "
    "`{root}/.venv/bin/canon check my_attention` checks all functions."
)
FOLDED = "<details><summary>Solution</summary>\n\n```python\n{}\n```\n\n</details>"


def with_hole(source: str) -> str:
    """Return the source of a cell with NotImplementedError in place of the solution."""

    def hole(found: re.Match) -> str:
        sentence = re.sub(r"\n *# ", " ", found["sentence"])
        return f'{found["indent"]}raise NotImplementedError(\n{found["indent"]}    "Your turn: {sentence}"\n{found["indent"]})'

    return HOLE.sub(hole, source)


def solution(source: str) -> str:
    """Return the lines of the hole."""
    return "\n".join(found["solution"].rstrip() for found in HOLE.finditer(source))


def holes(notebook: NotebookNode) -> list[str]:
    """Return the source of each cell that has a hole."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code" and HOLE.search(cell.source)]


def unprofiled(source: str) -> str:
    """Return the source without `named_steps`, which names the steps of a loop for a profiler. Pages leave it out."""
    return re.sub(r"named_steps\((.*)\):", r"\1:", source)


def from_root(folder: Path) -> Path:
    """Return the path of a folder from the root of the repository. Links of notebooks lead out of it, so open its parent."""
    return folder.relative_to(HERE.parent) if folder.is_relative_to(HERE.parent) else folder


def for_students(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Return the notebook with holes, folded solutions, links to notebooks, and the command that opens it in its first cell."""
    first, place = notebook.cells[0], from_root(folder)
    opens = OPEN.format(root=HERE.parent, folder=place, above=place.parent)
    first.source = f"{first.source.replace(SOLVED, '')}\n\n{opens}"
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "markdown":
            cell.source = TWIN.sub(r"](\1.ipynb", cell.source)
        if cell.cell_type == "code" and HOLE.search(cell.source):
            cells.append(new_markdown_cell(FOLDED.format(solution(cell.source))))
            cell.source = with_hole(cell.source)
    notebook.cells = cells
    return notebook


def write(folder: Path) -> None:
    """Write the course into a folder: notebooks with holes, their modules, and links to the rest of the repository.

    A notebook that is there already has the student's cells, and stays.
    """
    (folder / "my_functions").mkdir(parents=True, exist_ok=True)
    for module in HERE.glob("*.py"):
        shutil.copy(module, folder)
    for name in ("fast", "paper", "reference", "tests"):  # the notebooks link to their files
        link = folder.parent / name
        if not link.is_symlink():
            link.symlink_to(HERE.parent / name)
    for twin in sorted(HERE.glob("*.md")):
        notebook = folder / f"{twin.stem}.ipynb"
        if not notebook.exists():
            nbformat.write(for_students(jupytext.read(twin), folder), notebook)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write it; `make course` has build/course")
    chosen = parser.parse_args().folder.resolve()
    write(chosen)
    place = from_root(chosen)
    print(f"Start: .venv/bin/jupyter lab {place.parent}", f"First: {place.name}/00_softmax_in_pieces.ipynb", sep="\n")
    print("Notebooks that you have begun stay.")
