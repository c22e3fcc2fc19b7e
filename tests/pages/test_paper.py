"""Claims about `paper/canon.pdf`: it is the build of its text, its numbers follow from records, its
figures are readable.
"""

import itertools
import json
import re

import pytest
from folders import PAPER

TEXT, SOURCES = ((PAPER / name).read_text() for name in ("canon.typ", "references.bib"))
LABELS = ("sec", "fig", "tab", "lst", "eq")
UNITS = r"%|percent|ms\b|microseconds|TFLOP|times\b|GB|of its"


@pytest.fixture(scope="module")
def paper_pdf(scripts):
    pytest.importorskip("typst", reason="the extra paper is not installed")
    return scripts("paper_pdf")


# --- the build ---


def test_the_pdf_is_the_build_of_its_text_and_its_records(paper_pdf):
    assert (PAPER / "canon.pdf").read_bytes() == paper_pdf.built()[0], (
        "paper/canon.pdf is old: run `make paper`"
    )


def test_no_figure_covers_a_caption_or_a_row_of_another_one(paper_pdf):
    """Floats of a column and of the page do, if both are on one page. Each figure, table and
    listing reaches from its caption to its last row.
    """
    typst = pytest.importorskip("typst")
    given = dict(root=str(PAPER), ignore_system_fonts=True, sys_inputs=paper_pdf.inputs(TEXT))
    edges = json.loads(typst.query(str(paper_pdf.TEXT), "<edge>", field="value", **given))
    for edge in edges:
        edge |= {key: float(edge[key].removesuffix("pt")) for key in "xy"}
    boxes = list(zip(edges[::2], edges[1::2], strict=True))
    assert len(boxes) == len(re.findall(r"^#(drawn|records|listing)\(", TEXT, re.MULTILINE))
    for top, bottom in boxes:
        assert top["page"] == bottom["page"]
        assert top["y"] < bottom["y"] < 842 - 50, "below the last line of an A4 page"
    for (one, end), (two, last) in itertools.combinations(boxes, 2):
        one_column = one["wide"] or two["wide"] or (one["x"] < 297) == (two["x"] < 297)
        apart = one["y"] >= last["y"] or two["y"] >= end["y"]
        assert one["page"] != two["page"] or not one_column or apart, (one, two)


def test_the_abstract_has_at_most_150_words_in_six_sentences(scripts):
    abstract = re.search(r"abstract: \[\n(.*?)\n  \],", TEXT, re.DOTALL)[1]
    assert len(re.findall(r"\.(?=\s|$)", abstract)) == 6
    numbers = scripts("paper_values").values()
    words = re.sub(r'#v\("(\w+)"\)', lambda name: numbers[name[1]], abstract).split()
    assert len(words) <= 150


# --- numbers ---


def test_every_number_and_every_table_of_the_text_is_computed_from_records(scripts):
    module = scripts("paper_values")
    used = set(re.findall(r'\bv\("([^"]+)"\)', TEXT))
    assert len(used) > 60
    assert used <= module.values().keys()
    assert set(re.findall(r'records\(\s*"([^"]+)"', TEXT)) == module.tables().keys()


def test_no_measured_number_is_typed():
    """A number with a unit behind it must be a value. Settings have other words behind them."""
    plain = re.sub(r"//.*|\$[^$]*\$", "", TEXT).replace("1.05 times the lower bound", "")
    typed = rf'[^\n"]*(?<![\w."])\d[\d.,]*(?=\s+(?:{UNITS}))[^\n]*'
    assert re.findall(typed, plain) == []


# --- listings and sources ---


def test_every_listing_is_the_code_of_its_function(scripts):
    module = scripts("listings")
    found = module.listings(TEXT)
    assert len(found) >= 3
    for place, code in found.items():
        file, names = place.split(":")
        source = (PAPER.parent / file).read_text()
        assert all(f"def {name.split('.')[-1]}(" in code for name in names.split(", "))
        assert all(line.strip() in source for line in code.splitlines())
        # characters in a column, on a page
        width = 56 if "wide: false" in TEXT.split(names)[1][:20] else 117
        assert max(map(len, code.splitlines())) <= width, f"{place} is too wide"


def test_every_source_is_cited():
    cited = {key for key in re.findall(r"@([a-z][\w-]*)", TEXT) if key.split("-")[0] not in LABELS}
    assert cited == set(re.findall(r"^@\w+\{(\w+),", SOURCES, re.MULTILINE))


# --- figures ---


def test_no_text_of_a_figure_is_small_or_outside_of_it(scripts):
    from matplotlib.text import Text

    figures = scripts("paper_figures")
    assert set(re.findall(r'drawn\("([^"]+)"', TEXT)) == figures.FIGURES.keys()
    for name, drawing in figures.FIGURES.items():
        figure = drawing.make()
        figure.canvas.draw()
        width, height = figure.get_size_inches()
        drawn, slack = figure.get_tightbbox(), 0.02  # inches
        assert width in (figures.WIDE, figures.NARROW), name
        assert min(drawn.x0, drawn.y0, width - drawn.x1, height - drawn.y1) >= -slack, name
        for text in figure.findobj(Text):
            hidden = not text.get_text().strip() or (text.axes and not text.axes.axison)
            assert hidden or text.get_fontsize() >= 7, f"{name}: {text.get_text()!r}"
        for axes in figure.axes:  # axes without an axis have only these texts
            assert all(text.get_fontsize() >= 7 for text in axes.texts), name
