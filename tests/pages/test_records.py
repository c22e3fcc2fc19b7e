"""Claims about `paper`: pages follow from records, each record is quoted, and no figure is older
than its records.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT / "paper"


@pytest.fixture(scope="module")
def pages(scripts) -> dict[str, str]:
    return scripts("measured").pages()


def test_every_number_on_a_page_follows_from_its_records(pages):
    assert pages.keys() >= {
        "measured",
        "records",
        "stale_maximum",
        "backward_on_hopper",
        "hidden_wait",
    }
    for name, text in pages.items():
        written = (PAPER / f"{name}.md").read_text().splitlines()
        changed = [
            (i + 1, one, two)
            for i, (one, two) in enumerate(zip(written, text.splitlines(), strict=False))
            if one != two
        ]
        assert not changed, (
            f"paper/{name}.md differs from its records: run `python paper/measured.py`"
        )
        assert len(written) == len(text.splitlines()), (
            f"paper/{name}.md: run `python paper/measured.py`"
        )


def words(text: str) -> int:
    """Return the words of a page, without addresses and the marks of tables."""
    plain = re.sub(r"<!--.*?-->|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in plain.split())


def test_the_measurements_and_articles_are_read_in_45_minutes(pages):
    assert words("| a | [b c](d e) | - | 1.5 |\n<!-- f -->") == 4
    assert words(pages["measured"]) <= 1500
    assert pages["measured"].count("](figures/") == 3
    assert sum(map(words, pages.values())) <= 45 * 200


def test_the_index_of_records_is_written_from_them(scripts):
    assert (PAPER / "data" / "README.md").read_text() == scripts("records").index(), (
        "run `python paper/measured.py`"
    )


def test_every_record_is_quoted_by_a_page_a_notebook_or_the_readme(scripts, pages):
    notebooks = [
        path.read_text().replace("](../paper/", "](paper/")
        for path in (ROOT / "notebooks").glob("*.md")
    ]
    assert scripts("measured").unquoted(pages, (ROOT / "README.md").read_text(), *notebooks) == []


def test_no_exposed_time_of_a_record_is_longer_than_the_passes_that_it_is_a_part_of(scripts):
    records, longer, timed = scripts("records"), [], 0
    for path in (PAPER / "data").glob("*.json"):
        for row in records.load(path.stem).get("results", []):
            if isinstance(row, dict) and "exposed_ms" in row:
                timed += 1
                if row["exposed_ms"] > records.median(row["both_ms"]):
                    longer.append((path.name, row["schedule"], row["shape"]))
    assert timed > 300
    assert longer == []


def test_no_agreement_of_several_gpus_is_older_than_the_fix_of_the_merge(scripts):
    race_fixed = "409cdf4"
    records = scripts("records")
    gpus = {path.stem: records.provenance(path.name)[2] for path in PAPER.glob("data/check_*.json")}
    several = [name for name, used in gpus.items() if used[0] not in "1n"]
    assert several, "no check of several GPUs is recorded"
    known = (
        subprocess.run(
            ["git", "cat-file", "-e", race_fixed], cwd=ROOT, capture_output=True
        ).returncode
        == 0
    )
    if not known:
        pytest.skip("a shallow clone or an export of the repository: its history is not there")
    for name in several:
        commit = records.load(name)["commit"].split("+")[0]
        asked = ["git", "merge-base", "--is-ancestor", race_fixed, commit]
        assert subprocess.run(asked, cwd=ROOT, check=False).returncode == 0, (
            f"{name} was made before {race_fixed}"
        )


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
    compared = 0
    measured = {
        name: drawing for name, drawing in scripts("measured").drawings().items() if drawing.records
    }
    for name, drawing in measured.items():
        for axes in drawing.make().axes:
            for label in (axes.get_xlabel(), axes.get_ylabel()):
                if re.search(r"TFLOP/s|speed|time|over", label.replace("over its bound", "")):
                    assert re.search(r"GPU time|wall time", label), (name, label)
                    compared += 1
    assert compared >= 20


def test_a_score_that_counts_sent_tokens_lowers_the_busiest_rank_of_packs(scripts):
    """Means over packs: a plan may receive a little more in all, but no rank moves as much."""
    found = [scripts("records").load(name)["results"] for name in ("plans", "plans_received")]
    assert [row["kind"] for row in found[0]] == [row["kind"] for row in found[1]]
    packs = [[row for row in rows if row["kind"] == "packs"] for rows in found]
    mean = lambda values: sum(values) / len(values)
    busiest = [
        [mean([*map(max, row["worst_receive"], row["worst_send"])]) for row in rows]
        for rows in packs
    ]
    assert all(now < 0.8 * before for now, before in zip(*busiest, strict=True))
    assert all(
        mean(now["volume"]) < 1.06 * mean(before["volume"])
        for now, before in zip(*packs, strict=True)
    )
