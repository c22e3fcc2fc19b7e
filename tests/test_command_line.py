"""The command line without a command, and the import of the package."""

from programs import printed

import canon
from canon.__main__ import main

IMPORTED = """
import sys
from canon import fast, reference

assert not [name for name in sys.modules if name.startswith("torch._dynamo")]
"""


def test_an_import_does_not_load_dynamo():
    """torch._dynamo takes longer to import than canon."""
    printed(IMPORTED)


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    printed, wrong = capsys.readouterr()
    assert not wrong
    assert printed.startswith("usage: canon [-h]")
    for command in ("check", "bench", "plan", "show", "warm"):
        assert f"\n    {command} " in printed


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["canon", canon.__version__]


def test_an_unknown_command_is_refused(capsys):
    assert main(["diff", "a", "b"]) == 2
    assert "invalid choice: 'diff'" in capsys.readouterr().err
