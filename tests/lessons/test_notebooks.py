"""Claims about notebooks: each has the cells of its .md twin, the outputs of one complete run, and
the parts of a lesson.
"""

import re
import textwrap

import course
import jupytext
import nbformat
import pytest
from folders import NOTEBOOKS, ROOT

TAUGHT = tuple(f"{number:02}_" for number in range(13))  # a takeaway, exercises and their time
SHOWN = [
    *(ROOT / "reference").glob("*.py"),
    *(ROOT / "fast").rglob("*.*"),
    *(ROOT / "src/canon/masks").glob("*.py"),
]
SHOWN += NOTEBOOKS.glob("*.py")
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.md"))


def unindented(text):
    """Return the lines of a text without their indentation, apart by line breaks."""
    return "".join(f"\n{line.strip()}" for line in text.splitlines() if line.strip()) + "\n"


SOURCES = [
    unindented(course.unprofiled(path.read_text()))
    for path in SHOWN
    if path.suffix in (".py", ".cu")
]


@pytest.mark.parametrize("name", NAMES)
def test_twins_hold_the_same_cells(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    twin = jupytext.read(NOTEBOOKS / f"{name}.md")
    cells, text = (
        [(cell.cell_type, cell.source.strip()) for cell in book.cells] for book in (notebook, twin)
    )
    assert cells == text


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_hold_the_outputs_of_one_run_of_few_cells(name):
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    cells = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert len(cells) <= 14
    for cell in cells:
        kinds = {output.get("name", output.output_type) for output in cell.outputs}
        assert not kinds & {"stderr", "error"}
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            assert len(cell.metadata.get("alt", "").split()) >= 8, "no text for a picture"


@pytest.mark.parametrize("name", NAMES)
def test_code_on_the_page_is_an_excerpt_of_the_source(name):
    """A block "py", "cpp" or "text" shows lines of one file, without their indentation. A line
    "..." leaves lines out.
    """
    blocks = re.findall(
        r"^```(?:py|cpp|text)\n(.*?)^```",
        (NOTEBOOKS / f"{name}.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    for part in (
        part for block in blocks for part in re.split(r"^\.\.\.\n", block, flags=re.MULTILINE)
    ):
        assert part == textwrap.dedent(part)
        assert any(unindented(part) in source for source in SOURCES), part


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(TAUGHT)])
def test_a_lesson_states_its_time_and_ends_with_a_takeaway_and_exercises(name):
    text = (NOTEBOOKS / f"{name}.md").read_text()
    assert re.search(r"\b\d+\s+seconds on two CPU\s+cores", text)
    assert text.count("> **Takeaway.**") == 1
    assert text.index("> **Takeaway.**") < text.index("## Exercises")
    exercises = text[text.index("## Exercises") :]
    questions = re.findall(r"^\*\*(\d)\.\*\*", exercises, re.MULTILINE)
    assert 3 <= len(questions) <= 5
    answers = exercises.count("<details><summary>Answer</summary>"), exercises.count("</details>")
    assert answers == (len(questions), len(questions))
