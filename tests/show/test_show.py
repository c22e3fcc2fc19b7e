"""Claims about pictures: they have the cells, ranks, work and spans of their data. `canon show`
refuses what it cannot draw.
"""

import argparse
import json
import shlex
import sys

import drawing
import pytest
import spans
import timeline_figures
import torch
from folders import DATA

from canon import Layout, Mask, __main__, fast, show_command
from canon.show import layout_figures
from canon.show.plan_figures import plot_plan
from canon.show.style import RANKS, plt

RECORD = DATA / "schedules_timeline_four_h200.json"
DOCUMENTS = Mask.documents([0, 5, 5, 12, 32])


@pytest.fixture(autouse=True)
def _no_window():
    plt.switch_backend("agg")
    yield
    plt.close("all")


def cells(ax):
    """Return the drawn matrix of colour indices. 0 is blank."""
    return torch.as_tensor(ax.images[0].get_array().data)


def heights(ax):
    return [bar.get_height() for bar in ax.patches]


@pytest.mark.parametrize(
    "mask", [Mask.causal(24), DOCUMENTS, Mask.window(40, 3, 2), Mask.causal(3, 9)]
)
def test_a_picture_of_a_mask_has_its_cells_in_the_colours_of_their_bands(mask):
    ax = mask.plot()
    drawn = cells(ax)
    assert torch.equal(drawn > 0, mask.dense())
    for number, band in enumerate(mask.bands):
        assert set(drawn[Mask([band], mask.queries, mask.keys).dense()].tolist()) == {
            1 + number % 8
        }
    assert ax.get_title() == (
        f"{len(mask.bands)} band{'s' * (len(mask.bands) != 1)}, {mask.area} cells"
    )


def test_a_picture_of_a_long_mask_has_every_nth_query_and_key_and_counts_tokens():
    mask = Mask.documents([0, 700, 1500], window=(300, 0))
    given = plt.subplots()[1]
    assert mask.plot(given) is given
    assert torch.equal(cells(given) > 0, mask.dense()[::3, ::3])
    assert (given.get_xlim(), given.get_ylim()) == ((0, 1500), (1500, 0))
    assert (
        Mask.causal(1 << 20).plot().get_title().endswith("one cell for every 2048 queries and keys")
    )


@pytest.mark.parametrize(
    "layout", [Layout.zigzag(32, 3), Layout.striped(32, 4), Layout.contiguous(32, 9)]
)
def test_a_picture_of_a_layout_has_the_rank_of_each_row_and_the_work_of_each_rank(layout):
    left, right = layout.plot(DOCUMENTS).axes
    work = [int(DOCUMENTS.dense()[layout.positions(rank)].sum()) for rank in range(layout.ranks)]
    for rank in range(layout.ranks):
        rows = layout.positions(rank)
        assert torch.equal(cells(left)[rows], DOCUMENTS.dense()[rows] * (1 + rank % 8))
    assert heights(right) == pytest.approx([area * layout.ranks / sum(work) for area in work])
    assert torch.equal(cells(layout.plot().axes[0]) > 0, Mask.causal(32).dense())


def test_masks_without_cells_and_masks_of_another_length_are_refused():
    with pytest.raises(ValueError, match="there is nothing to draw: 0 x 3 tokens"):
        Mask.full(0, 3).plot()
    with pytest.raises(ValueError, match="there is nothing to draw: 0 tokens"):
        Layout.zigzag(0, 2).plot()
    with pytest.raises(ValueError, match="the mask is 24 x 24, the layout has 32 tokens"):
        Layout.zigzag(32, 2).plot(Mask.causal(24))


def test_a_picture_of_a_plan_has_its_owners_work_and_traffic():
    layout = fast.dispatch(DOCUMENTS, 3, chunk=4)
    report = fast.plan_report(DOCUMENTS, layout)
    strips, work, traffic = plot_plan(DOCUMENTS, layout, report).axes
    assert cells(strips).flatten().tolist() == layout_figures.owners_of(layout).tolist()
    assert [(b.get_x(), b.get_x() + b.get_width()) for b in strips.patches] == [
        b[:2] for b in DOCUMENTS.bands
    ]
    assert heights(work) == pytest.approx([3 * area / sum(report.areas) for area in report.areas])
    assert heights(traffic) == [*report.received, *report.sent]
    assert f"volume {report.volume:.2f}" in traffic.get_title()


def test_a_timeline_has_the_kernels_of_its_record():
    record = json.loads(RECORD.read_text())
    rows = [row for row in record["results"] if row["schedule"] == "ring zigzag"]
    found = {row["transport"]: spans.by_rank(row) for row in rows}
    figure = timeline_figures.measured_spans(found)
    for ax, row in zip(figure.axes, rows, strict=True):
        ran = [kernel for rank in row[spans.KERNELS] for kernel in rank]
        drawn = [
            (round(1e3 * box.get_x(), 1), round(1e3 * box.get_width(), 1)) for box in ax.patches
        ]
        assert drawn == [(start, length) for start, length, _ in ran]
    assert {span.kind for ranks in found.values() for of in ranks.values() for span in of} == set(
        spans.KIND_NAMES
    )


def test_a_window_of_a_mask_has_its_cells_in_the_colours_of_the_mask():
    left, right = drawing.crop.__wrapped__(DOCUMENTS, range(2, 9), range(1, 9)).axes
    number = [0, *(1 + RANKS.index(colour) for colour in right.images[0].cmap.colors[1:])]
    assert torch.equal(torch.tensor(number)[cells(right)], cells(left)[2:9, 1:9])


# --- the command


@pytest.mark.parametrize(
    "words",
    [
        "mask --full 8",
        "mask --window 64,9 --prefix 64,4 --blocks 8:20,30:32",
        "layout --causal 96 --layout striped",
        "plan --documents 4096,1024,300",
    ],
)
def test_the_command_writes_its_picture(words, tmp_path, capsys):
    file = tmp_path / "picture.svg"
    ranks = ["--ranks", "8"] * words.startswith(("layout", "plan"))
    assert __main__.main(["show", *shlex.split(words), *ranks, "--out", str(file)]) == 0
    assert "<svg" in file.read_text()
    assert capsys.readouterr().out.strip() == str(file)


def test_the_command_draws_the_union_of_its_masks_with_blocks():
    words = "mask --window 24,3 --prefix 24,4 --blocks 8:20,21:23 --out x.svg"
    arguments = argparse.ArgumentParser()
    show_command.add_arguments(arguments)
    drawn = show_command.drawn(arguments.parse_args(words.split())).axes[0]
    expected = Mask.window(24, 3, 0).dense() | Mask.prefix(24, 4).dense()
    for block in (slice(8, 20), slice(21, 23)):
        expected[block, block] = True
    assert torch.equal(cells(drawn) > 0, expected)


@pytest.mark.parametrize(("words", "message"), [
    ("mask --window 4", "--window takes TOKENS,LEFT[,RIGHT], got 4"),
    ("mask", "give one or more of the masks --causal, --full, --window, --prefix, --documents"),
    ("mask --causal 4 --out m", "--out m: expected a name that ends in .svg"),
    ("mask --causal 4 --blocks 2:5", "block 0 needs 0 <= start < stop <= 4"),
])  # fmt: skip
def test_the_command_refuses_what_it_cannot_draw(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    what, *options = words.split()
    assert __main__.main(["show", what, "--out", "x.svg", *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- matplotlib


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("canon.show.")]:
        monkeypatch.delitem(sys.modules, name)
    sentence = "Pictures need matplotlib: run `pip install matplotlib`."
    for draw in (Mask.causal(4).plot, Layout.zigzag(4, 2).plot):
        with pytest.raises(ModuleNotFoundError, match=sentence):
            draw()
    assert __main__.main(["show", "mask", "--causal", "4", "--out", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr().err == f"canon show: {sentence}\n"
