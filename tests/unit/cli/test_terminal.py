"""How the program `shardwise` ends where a user ends it: by Ctrl-C before it has begun, by a pipe that is closed."""

import io
import os
import sys
from contextlib import suppress
from types import ModuleType

import pytest
from rich.table import Table
from rich.text import Text

from harness.waiting import wait_until
from shardwise.__main__ import main
from shardwise.report.console import Terminal, progress


class _Interrupted(ModuleType):
    """A module during whose import Ctrl-C comes."""

    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_during_imports_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shardwise.cli.main", _Interrupted("shardwise.cli.main"))
    assert main() == 130
    assert capsys.readouterr().err == "shardwise: stopped by Ctrl-C\n"


def test_the_program_returns_what_the_command_line_does(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shardwise", "plan"])
    assert main() == 2
    assert "no model is given" in capsys.readouterr().err


def test_a_closed_pipe_ends_no_program_by_itself():
    reading, writing = os.pipe()
    os.close(reading)
    pipe = os.fdopen(writing, "w")
    with pytest.raises(BrokenPipeError):
        Terminal(file=pipe).print("what is not read")
    with suppress(BrokenPipeError):  # what was not written is tried once more
        pipe.close()


def test_what_a_file_says_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("a\x1b]0;title\x07", box=None)
    table.add_row("\x1b[31mred\u202e", "×\xa0ü")
    Terminal(width=80, force_terminal=True, color_system="truecolor").print(table, Text("own", style="red"), "\r\x9b2J")
    shown = capsys.readouterr().out
    assert "\\x1b]0;t" in shown
    assert "\\x9b2J" in shown
    assert "\x1b[31mown" in shown
    assert not {"\x07", "\r", "\x9b", "\u202e"} & set(shown)


def test_in_a_pipe_what_takes_long_is_said_by_a_line_now_and_then(monkeypatch, capsys) -> None:
    monkeypatch.setattr("shardwise.report.console.EVERY_S", 0.01)
    said = io.StringIO()

    def wait_for(words: str) -> None:
        assert wait_until(lambda: words in said.getvalue())

    with progress("starting", said) as announce:
        wait_for("starting\n")
        wait_for("starting: 0 s so far\n")
        announce("first")
        announce("second\x1b")
        wait_for("second\\x1b\n")
    assert "first" not in said.getvalue(), "what is over is not said"
    monkeypatch.setattr("shardwise.report.console.EVERY_S", 60.0)
    with progress("quick"):
        pass
    assert capsys.readouterr() == ("", "")
