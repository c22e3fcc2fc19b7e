"""Claims about notebooks: each has the cells of its .md twin, and the outputs of one complete run."""

from pathlib import Path

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def test_every_notebook_has_a_twin():
    assert NAMES
    twins = sorted(path.stem for path in FOLDER.glob("*.md"))
    assert twins == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_twins_hold_the_same_cells(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    twin = jupytext.read(FOLDER / f"{name}.md")
    cells, text = ([(cell.cell_type, cell.source.strip()) for cell in book.cells] for book in (notebook, twin))
    assert cells == text


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_hold_the_outputs_of_one_run_from_top_to_bottom(name):
    cells = [cell for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.get("name", output.output_type) for cell in cells for output in cell.outputs}
    assert not kinds & {"stderr", "error"}
