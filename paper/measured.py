"""Write `measured.md`, the articles and their figures from the records under `data`.

    python paper/measured.py                 pages and figures, in place
    python paper/measured.py --out FOLDER    the same, elsewhere
    python paper/measured.py --text          pages only; needs no matplotlib

A page is a template under `templates` in which `{{name}}` stands for a table or a number. `kernel_tables.py`,
`schedule_tables.py` and `articles` compute these from records.
"""

import argparse
import re
from pathlib import Path

import cuda_tables
import kernel_tables
import measured_figures
import paper_figures
import readme_figures
import schedule_tables
from articles import copy_engines, deterministic_dq, hidden_wait, shared_memory_bound, stale_maximum
from plots import Drawing, save
from records import DATA, HERE, appendix

ARTICLES = {
    "deterministic_dq": deterministic_dq,
    "stale_maximum": stale_maximum,
    "shared_memory_bound": shared_memory_bound,
    "hidden_wait": hidden_wait,
    "copy_engines": copy_engines,
}
NOTE = "<!-- Written by measured.py from templates/{name}.md.template and data: change those, not this file. -->\n\n"
FIELD = re.compile(r"\{\{(\w+)\}\}")
LINK = re.compile(r"\]\((?:paper/)?data/([\w.*-]+)\)")


def filled(name: str, values: dict[str, str]) -> str:
    """Return the page ``name``. Raises ValueError unless the template uses exactly these values."""
    template = (HERE / "templates" / f"{name}.md.template").read_text()
    used = set(FIELD.findall(template))
    if used != values.keys():
        raise ValueError(f"{name}: unknown {sorted(used - values.keys())}, unused {sorted(values.keys() - used)}")
    spaced = {key: re.sub(r"(?<=\d)%", " %", value) for key, value in values.items()}
    return NOTE.format(name=name) + FIELD.sub(lambda match: spaced[match[1]], template)


def quoted(text: str) -> set[str]:
    """Return the files under `data` that a page links to."""
    return set(LINK.findall(text))


def measured() -> dict[str, str]:
    """Return all tables and numbers of `measured.md` but its appendix."""
    parts = (*kernel_tables.PARTS, *cuda_tables.PARTS, *schedule_tables.PARTS)
    return {key: value for part in parts for key, value in part().items()}


def pages() -> dict[str, str]:
    """Return the text of every page, by name. The appendix of `measured.md` lists the records that any of them links to."""
    found = {name: filled(name, article.values()) for name, article in ARTICLES.items()}
    values = measured()
    linked = quoted(filled("measured", values | {"appendix": ""})).union(*map(quoted, found.values()))
    return found | {"measured": filled("measured", values | {"appendix": appendix(linked)})}


def drawings() -> dict[str, Drawing]:
    """Return every figure, by name."""
    parts = (measured_figures.FIGURES, readme_figures.FIGURES, paper_figures.FIGURES)
    return {name: figure for part in parts for name, figure in part.items()} | {
        name: article.FIGURE for name, article in ARTICLES.items()
    }


def unquoted(pages: dict[str, str], *more: str) -> list[str]:
    """Return the files under `data` that neither these pages nor the texts ``more`` link to."""
    linked = set().union(*map(quoted, [*pages.values(), *more]))
    return sorted({path.name for path in DATA.iterdir()} - linked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, metavar="FOLDER", help="where pages and figures go")
    parser.add_argument("--text", action="store_true", help="write no figures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (options.out / f"{name}.md").write_text(text)
    if not options.text:
        save(drawings(), options.out / "figures")


if __name__ == "__main__":
    main()
