"""Find sentences in docstrings, comments, Markdown and Typst that break the mechanical rules of
STYLE.md, parts 1 and 2.

Code spans, code blocks, formulas, tables and headings are not read.
"""

import ast
import io
import re
import tokenize

LONGEST = 28  # words of a sentence
CLAUSE = re.compile(r"(what|whatever|who|whoever|whose|which|that)\b(?!.*\?$)", re.IGNORECASE)
PRIVATE = re.compile(
    r"\b(told|hears?|heard|nobody|beside|stray(s|ed)?|blind rows?|under way|let go|items? of "
    r"work|list of items"
    r"|turn numbers?|optimistic maximum|small ends|way_of|let_begin)\b",
    re.IGNORECASE,
)
# starts a list item, or an argument in a docstring
ENTRY = re.compile(r"([-*+]|\d+\.|\w[\w, ]*:)\s")
SKIPPED = re.compile(r"[|#<!]|>>>|.*\S {3,}\S")  # tables, headings, HTML, doctests


def findings(paths):
    """Return sentences with a wrong word, sentences that are too long, and the number of words in
    all files.
    """
    found = [
        (f"{path.name}: {sentence}", sentence) for path in paths for sentence in sentences(path)
    ]
    wrong = [
        place for place, sentence in found if CLAUSE.match(sentence) or PRIVATE.search(sentence)
    ]
    long = [place for place, sentence in found if len(sentence.split()) > LONGEST]
    return wrong, long, sum(len(sentence.split()) for _, sentence in found)


def sentences(path):
    """Yield the sentences of a Python, Markdown or Typst file. A code span becomes one word."""
    text = path.read_text()
    blocks = {".md": [text], ".typ": [without_markup(text)]}.get(path.suffix)
    for block in blocks or docstrings_and_comments(text):
        for paragraph in paragraphs(
            re.sub(r"^```.*?^```", "", block, flags=re.DOTALL | re.MULTILINE)
        ):
            plain = re.sub(r"(?<=\])\([^)]*\)", "", re.sub(r"`+[^`]*`+", "CODE", paragraph))
            yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z(\"*])", plain)


def without_markup(source):
    """Return the text of a Typst file. A measured number, a formula and a reference become one word
    each.
    """
    text = re.sub(r"^(//|=).*|<[\w-]+>", "", source, flags=re.MULTILINE)
    text = re.sub(r"\$[^$]*\$", "FORMULA", re.sub(r'#v\("[^"]*"\)', "1", text))
    text = re.sub(r"(?<=\w)((,|\s)+@[a-z]+\d[\w-]*)+", "", text)  # citations
    text = re.sub(r"@[a-z]+-\w+", "REFERENCE", text)
    text = re.sub(r"^#(statement|proof)(\(\[[^]]*\], )?\[", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)|\]\)?$", "", text, flags=re.MULTILINE)


def docstrings_and_comments(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
    lines = [""] * (source.count("\n") + 2)  # adjacent comment lines make one paragraph
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            yield token.string.lstrip("# ")
        elif token.type == tokenize.COMMENT:
            lines[token.start[0]] = token.string.lstrip("# ")
    yield "\n".join(lines)


def paragraphs(text):
    lines: list[str] = []
    for line in [*map(str.strip, text.split("\n")), ""]:
        if lines and (not line or ENTRY.match(line) or SKIPPED.match(line)):
            yield " ".join(lines)
            lines = []
        if line and not SKIPPED.match(line):
            lines.append(ENTRY.sub("", line, count=1) if ENTRY.match(line) else line)
