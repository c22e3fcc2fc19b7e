"""Claims about the lengths of source files: one idea a file, at most 500 lines (tests 400)."""

import os
from pathlib import Path

from folders import ROOT

FOLDERS = "src", "reference", "fast", "notebooks", "paper", "tests"
SUFFIXES = ".py", ".c", ".cu", ".cuh", ".h"
LONGER = {  # files with their own limits, which may fall and not rise
    "tests/faces/test_arguments.py": 470,
}


def test_no_file_is_longer_than_its_limit():
    found = {}
    for top in FOLDERS:
        for folder, _, names in os.walk(ROOT / top):  # links are not followed
            for path in (Path(folder, name) for name in names if name.endswith(SUFFIXES)):
                found[path.relative_to(ROOT).as_posix()] = len(path.read_text().splitlines())
    limits = {name: 400 if name.startswith("tests/") else 500 for name in found}
    assert not {x: n for x, n in found.items() if n > LONGER.get(x, limits[x])}
    assert all(found[name] > limits[name] for name in LONGER), "an exception that is not needed"
