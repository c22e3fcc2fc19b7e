"""The command line without a command."""

from canon.__main__ import main


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    printed, wrong = capsys.readouterr()
    assert not wrong
    assert printed.startswith("usage: canon [-h]")
    for command in ("check", "bench", "plan", "show", "warm"):
        assert f"\n    {command} " in printed


def test_an_unknown_command_is_refused(capsys):
    assert main(["diff", "a", "b"]) == 2
    assert "invalid choice: 'diff'" in capsys.readouterr().err
