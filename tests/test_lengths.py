"""Claims about the lengths of source files: one idea a file, at most 500 lines (tests 400)."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = "src", "reference", "fast", "notebooks", "paper", "tests"
SUFFIXES = {".py", ".c", ".cu", ".cuh", ".h"}
LONGER = {  # files with their own limits, which may fall and not rise
    "tests/faces/test_arguments.py": 470,
    "tests/test_structure.py": 403,
}


def lengths(root):
    """Return the number of lines of each source file, by its path. Links are not followed."""
    paths = (
        path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in SUFFIXES
    )
    own = (
        path
        for path in paths
        if not any(parent.is_symlink() for parent in path.parents if root in parent.parents)
    )
    return {path.relative_to(root).as_posix(): len(path.read_text().splitlines()) for path in own}


def limit_of(name):
    return 400 if name.startswith("tests/") else 500


def too_long(root):
    return {
        name: lines
        for name, lines in lengths(root).items()
        if lines > LONGER.get(name, limit_of(name))
    }


def test_no_file_is_longer_than_its_limit():
    assert not too_long(ROOT)


def test_every_exception_is_needed():
    found = lengths(ROOT)
    assert not [name for name in LONGER if found.get(name, 0) <= limit_of(name)]


@pytest.mark.parametrize(
    ("name", "lines"), [("fast/planner.py", 501), ("tests/test_ring.py", 401), ("fast/a.cu", 501)]
)
def test_a_file_with_a_line_too_many_is_found(tmp_path, name, lines):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("\n" * (lines - 1))
    assert not too_long(tmp_path)
    path.write_text("\n" * lines)
    assert too_long(tmp_path) == {name: lines}
