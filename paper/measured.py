"""Write `measured.md`, `records.md`, the articles, their figures and the index of the records, from
the files under `data`.

    python paper/measured.py                 pages and figures, in place
    python paper/measured.py --out FOLDER    the same, elsewhere
    python paper/measured.py --text          pages only; needs no matplotlib

A page is a template under `templates` in which `{{name}}` stands for a table or a number.
The modules `*_tables.py`, `other_libraries.py` and `articles` compute these from records."""

import argparse
import re
from pathlib import Path

import cuda_tables
import detection_tables
import kernel_tables
import measured_figures
import other_libraries
import paper_figures
import readme_figures
import schedule_tables
import short_tables
from articles import backward_on_hopper, hidden_wait, order_of_dq, stale_maximum
from plots import Drawing, save
from records import DATA, HERE, index

ARTICLES = {
    "backward_on_hopper": backward_on_hopper,
    "stale_maximum": stale_maximum,
    "hidden_wait": hidden_wait,
}
PAGES = ("measured", "records")
INDEX = "README.md"  # under `data`
NOTE = (
    "<!-- Written by measured.py from templates/{name}.md.template and data: change those, not "
    "this file. -->\n\n"
)
FIELD = re.compile(r"\{\{(\w+)\}\}")
IN_PAPER = re.compile(r'\bv\("(\w+)"\)')
LINK = re.compile(r"\]\((?:paper/)?data/([\w.*-]+)\)")


def fields(name: str) -> set[str]:
    """Return the names of the tables and numbers in a template."""
    return set(FIELD.findall((HERE / "templates" / f"{name}.md.template").read_text()))


def filled(name: str, values: dict[str, str]) -> str:
    """Return the page ``name``. Raises ValueError unless the template uses exactly these values."""
    template, used = (HERE / "templates" / f"{name}.md.template").read_text(), fields(name)
    if used != values.keys():
        raise ValueError(
            f"{name}: unknown {sorted(used - values.keys())}, unused {sorted(values.keys() - used)}"
        )
    spaced = {key: re.sub(r"(?<=\d)%", " %", value) for key, value in values.items()}
    return NOTE.format(name=name) + FIELD.sub(lambda match: spaced[match[1]], template)


def quoted(text: str) -> set[str]:
    """Return the files under `data` that a page links to."""
    return set(LINK.findall(text)) - {INDEX}


def measured() -> dict[str, str]:
    """Return all tables and numbers of `measured.md` and `records.md`, and those that only the
    paper uses.
    """
    modules = (kernel_tables, cuda_tables, schedule_tables, short_tables, other_libraries)
    modules += (detection_tables,)
    parts = [part for module in modules for part in module.PARTS]
    return {key: value for part in parts for key, value in part().items()}


def pages() -> dict[str, str]:
    """Return the text of every page, by name. Raises ValueError for a value that neither a page nor
    the paper uses.
    """
    values, used = measured(), {name: fields(name) for name in PAGES}
    # a table of the paper
    in_paper = set(IN_PAPER.findall((HERE / "canon.typ").read_text())) | {"host_calls"}
    if unused := sorted(values.keys() - in_paper.union(*used.values())):
        raise ValueError(f"unused {unused}")
    found = {
        name: filled(name, {key: values[key] for key in used[name] & values.keys()})
        for name in PAGES
    }
    return found | {name: filled(name, article.values()) for name, article in ARTICLES.items()}


def drawings() -> dict[str, Drawing]:
    """Return every figure, by name."""
    parts = (
        measured_figures.FIGURES,
        readme_figures.FIGURES,
        paper_figures.FIGURES,
    )
    return {name: figure for part in parts for name, figure in part.items()} | {
        "order_of_dq": order_of_dq.FIGURE,
        **{name: article.FIGURE for name, article in ARTICLES.items()},
    }


def unquoted(pages: dict[str, str], *more: str) -> list[str]:
    """Return the files under `data` that neither these pages nor the texts ``more`` link to."""
    linked = set().union(*map(quoted, [*pages.values(), *more]))
    return sorted({path.name for path in DATA.iterdir()} - linked - {INDEX})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=HERE, metavar="FOLDER", help="where pages and figures go"
    )
    parser.add_argument("--text", action="store_true", help="write no figures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (options.out / f"{name}.md").write_text(text)
    (options.out / "data").mkdir(exist_ok=True)
    (options.out / "data" / INDEX).write_text(index())
    if not options.text:
        save(drawings(), options.out / "figures")


if __name__ == "__main__":
    main()
