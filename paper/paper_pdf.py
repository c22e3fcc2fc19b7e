"""Build `canon.pdf`, the paper, from `canon.typ`, `references.bib`, the records, the figures and
the listed functions.

    python paper/paper_pdf.py                   the PDF, in place
    python paper/paper_pdf.py --out FILE        the PDF, elsewhere
    python paper/paper_pdf.py --pages FOLDER    also each page as an image

`canon.typ` holds no measured number: `v("name")` stands for a value of `paper_values`, and
`records("name")` for a table. The same inputs and the same release of Typst give the same bytes.
Needs Typst, with the fonts that it brings."""

import argparse
import json
from pathlib import Path

from listings import listings
from paper_values import tables, values
from records import HERE

TEXT = HERE / "canon.typ"


def inputs(text: str) -> dict[str, str]:
    """Return the inputs of a Typst text, as JSON: its values, its tables and its listings."""
    parts = {"values": values(), "tables": tables(), "listings": listings(text)}
    return {name: json.dumps(part, ensure_ascii=False) for name, part in parts.items()}


def built(text: Path = TEXT, kind: str = "pdf", ppi: float = 110.0) -> list[bytes]:
    """Return the paper as one PDF, or with ``kind`` "png" as one image for each page. Raises
    ValueError or TypstError.
    """
    import typst

    found = typst.compile(
        str(text),
        root=str(text.parent),
        format=kind,
        ppi=ppi,
        ignore_system_fonts=True,
        sys_inputs=inputs(text.read_text()),
    )
    return found if isinstance(found, list) else [found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=HERE / "canon.pdf", metavar="FILE", help="the PDF"
    )
    parser.add_argument(
        "--pages", type=Path, metavar="FOLDER", help="write each page as an image, too"
    )
    options = parser.parse_args()
    options.out.write_bytes(built()[0])
    if options.pages:
        options.pages.mkdir(parents=True, exist_ok=True)
        for number, page in enumerate(built(kind="png"), start=1):
            (options.pages / f"page_{number:02}.png").write_bytes(page)


if __name__ == "__main__":
    main()
