"""The command line without a command, and the import of the package."""

from programs import ended, printed

import canon
from canon.__main__ import main

IMPORTED = """
import sys
import canon, canon.show_command, canon.masks.layout, torch
from canon import fast, reference
from canon.fast.replay.recorder import Recorder

with Recorder((torch.zeros(4),)) as recorder:
    torch.zeros(3)
assert len(recorder.temporaries) == 1
slow = "torch._dynamo", "matplotlib", "canon.show.style"
assert not [name for name in sys.modules if name.startswith(slow)]
"""

UNREAD = """
import os, sys
from canon.__main__ import main
reader, pipe = os.pipe()
os.close(reader)
for place in (pipe, os.open("/dev/full", os.O_WRONLY)):
    for words in ("plan --tokens 64 --gpus 2", "show -h", "check canon.reference --list"):
        os.dup2(place, 1)
        print(main(words.split()), file=sys.stderr)
"""


def test_output_that_nobody_takes_ends_a_command_without_a_traceback():
    full = "canon: No space left on device\n2\n"
    assert ended(UNREAD).stderr == 3 * "141\n" + 3 * full


def test_imports_and_recordings_do_not_load_dynamo_and_matplotlib():
    """Either takes longer to import than canon. Pictures and compiled calls load them."""
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


def test_widths_that_are_no_numbers_are_refused(capsys):
    assert main(["warm", "--widths", "8x2"]) == 2
    assert "--widths: '8x2': expected a number, or two as 32/8" in capsys.readouterr().err
