"""Claims about `paper`: pages follow from records, each record is quoted, and no figure is older
than its records.
"""

import re

import pytest
from folders import DATA, NOTEBOOKS, PAPER, ROOT


@pytest.fixture(scope="module")
def pages(scripts):
    return scripts("measured").pages()


def test_every_number_on_a_page_follows_from_its_records(pages):
    for name, text in pages.items():
        assert (PAPER / f"{name}.md").read_text() == text, "run `python paper/measured.py`"


def words(text):
    """Return the words of a page, without addresses and the marks of tables."""
    plain = re.sub(r"<!--.*?-->|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in plain.split())


def test_the_measurements_and_articles_are_read_in_45_minutes(pages):
    assert words(pages["measured"]) <= 1500
    assert pages["measured"].count("](figures/") == 2
    assert sum(map(words, pages.values())) <= 45 * 200


def test_the_index_of_records_is_written_from_them(scripts):
    assert (DATA / "README.md").read_text() == scripts("records").index(), (
        "run `python paper/measured.py`"
    )


def test_every_record_is_quoted_by_a_page_a_notebook_or_the_readme(scripts, pages):
    notebooks = [
        path.read_text().replace("](../paper/", "](paper/") for path in NOTEBOOKS.glob("*.md")
    ]
    assert scripts("measured").unquoted(pages, (ROOT / "README.md").read_text(), *notebooks) == []


def test_every_figure_is_drawn_from_its_records_as_they_are(scripts):
    drawings, plots = scripts("measured").drawings(), scripts("plots")
    assert {path.stem for path in (PAPER / "figures").iterdir()} == drawings.keys()
    for name, drawing in drawings.items():
        path = PAPER / "figures" / f"{name}.svg"
        assert plots.drawn_from(path) == plots.digest(drawing.records), (
            f"{path} is old: run `python paper/measured.py`"
        )
        assert path.stat().st_size < 150_000


def test_every_figure_of_speeds_names_its_clock(scripts):
    drawings = scripts("measured").drawings().values()
    for axes in (x for drawing in drawings if drawing.records for x in drawing.make().axes):
        for label in (axes.get_xlabel(), axes.get_ylabel()):
            of_speed = re.search(r"TFLOP/s|speed|time|over", label.replace("over its bound", ""))
            assert not of_speed or re.search(r"GPU time|wall time", label), label
