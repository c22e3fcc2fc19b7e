"""What tests of `canon check` share: the command in a folder of its own, and modules written for it."""

import json
import sys

import pytest

from canon.__main__ import main


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """``run(*words)``: status, what was printed, record."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        status = main(["check", *map(str, words)])
        name = "random.json" if "--random" in words else "record.json"
        kept = tmp_path / "canon-check" / name
        return status, capsys.readouterr(), json.loads(kept.read_text()) if kept.exists() else None

    return run


def module_in(folder, monkeypatch, name, text):
    """Write a module, and let it be imported."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
