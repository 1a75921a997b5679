"""Text from data reaches a terminal as text: through each place that shows it, and with each kind of character."""

from __future__ import annotations

import ast
import io
import logging
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

import shardwise
from shardwise.cli.main import main
from shardwise.config.errors import printable, steering
from shardwise.config.untrusted_files import UntrustedFileError
from shardwise.launch.exit_report import RankExit, report
from shardwise.launch.local import _say
from shardwise.report.console import Escaped, LogFormatter, Terminal, progress, refuse, write_line
from shardwise.report.panel import TerminalPanel
from shardwise.report.timeline_text import draw
from shardwise.schedule import Action, TimedAction
from shardwise.train.loop import Sample
from shardwise.train.progress import Display, Header, Progress, say
from shardwise.train.summary import RunOutcome, render_outcome

STEERING = (
    "\x00", "\x07", "\x08", "\r", "\x1b", "\x1b[2J", "\x1b]0;title\x07", "\x7f", "\x85", "\x9b2J", "\x9d0;t\x9c",
    "\xad", "\u034f", "\u061c", "\u180e", "\u200b", "\u200e", "\u200f", "\u2028", "\u2029", "\u202a", "\u202e",
    "\u2060", "\u2066", "\u2069", "\u3164", "\ufeff", "\ufff9", "\ud800", "\U000e0041", "\u200d", "\u200c",
)  # fmt: skip
# What rich would take for its markup, and for a picture.
MARKUP = "[red]x[/red] [/] :bomb: [link=file:///a]b[/link]"
HOSTILE = "a" + "b".join(STEERING) + "b " + MARKUP
STATE = Progress(Header(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE), 10, step=0, first_step=0)
ACTIONS = [TimedAction(Action.parse("0F0"), 0, 0.0, 1.0, HOSTILE)]


def in_progress() -> None:
    with progress(HOSTILE) as announce:
        announce(HOSTILE)


def in_log() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(message)s"))
    logger = logging.Logger("own")
    logger.addHandler(handler)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("%s", HOSTILE)


def in_rank_report(folder: Path) -> None:
    path = folder / "rank-0.log"
    path.write_text(HOSTILE, encoding="utf-8", errors="replace", newline="")
    _say(report(RankExit(0, 1, path)))


def display(console: Console) -> None:
    Display(console, STATE).close()


# Where outside text is drawn on a console, which may be the caller's own.
DRAWN: dict[str, Callable[[Console], object]] = {
    "panel": display,
    "line": lambda console: say(console, HOSTILE),
    "sample": lambda console: console.print(
        Escaped(render_outcome(RunOutcome(STATE, Path(HOSTILE), sample=Sample(HOSTILE, HOSTILE))))
    ),
}
# Where it is printed.
PRINTED: dict[str, Callable[[Path], object]] = {
    "print": lambda folder: Terminal().print(HOSTILE),
    "timeline": lambda folder: Terminal().print(draw([TerminalPanel(HOSTILE, ACTIONS)], 80), soft_wrap=True),
    "write_line": lambda folder: write_line(HOSTILE),
    "refuse": lambda folder: refuse(UntrustedFileError("a-code", HOSTILE)),
    "refuse a plain error": lambda folder: refuse(ValueError(HOSTILE)),
    "progress": lambda folder: in_progress(),
    "log": lambda folder: in_log(),
    "dead rank": in_rank_report,
    "usage": lambda folder: main(["plan", f"--{HOSTILE.replace(chr(0), '')}"]),
    "file name": lambda folder: main(["report", str(folder / "\x1b[2J\u202e[red]")]),
    "no space": lambda folder: main(["timeline", "--html", str(folder / "\x1b[2J\u202e[red]" / "none.html")]),
}


def check(text: str) -> None:
    """Only what the library writes itself is left: the ends of lines, and the escapes of its own pictures."""
    text = re.sub(r"\x1b\[(K\n|J|\d+F)", "", text)
    assert not [each for each in STEERING if each in text]
    assert not steering(text.replace("\n", ""))


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("kind", [Console, Terminal])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_drawn_steers_no_terminal(name: str, kind: type[Console], is_terminal: bool) -> None:
    file = io.StringIO()
    DRAWN[name](kind(file=file, width=400, height=200, force_terminal=is_terminal, color_system=None))
    check(file.getvalue())
    shown = file.getvalue().replace("\n", "")
    assert "\\x1b" in shown
    assert name == "panel" or "[red]" in "".join(shown.split())


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_steers_no_terminal(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PRINTED[name](tmp_path)
    printed = capsys.readouterr()
    check(printed.out + printed.err)


@pytest.mark.parametrize("text", STEERING)
def test_each_kind_is_escaped_once_and_in_ascii(text: str) -> None:
    for place in (text, f"a{text}b", f"世{text}", f"{text}ü"):
        shown = printable(place)
        assert not steering(shown)
        assert printable(shown) == shown
    assert printable(text).isascii()


def test_text_of_people_stays() -> None:
    for text in ("größer × 世界", "می\u200cخواهم", "👩\u200d🚀", "❤️", "שלום", "a\xa0b", "é"):
        assert printable(text) == text


ALLOWED_CONSOLES = {"report/console.py", "planner/plan.py", "train/progress.py"}


@cache
def calls(path: Path) -> tuple[ast.Call, ...]:
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def test_no_other_console_is_made() -> None:
    """A new one would pass on what data say; those of these files draw into memory, and what they drew is escaped."""
    root = Path(shardwise.__file__).parent
    made = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for call in calls(path)
        if isinstance(call.func, ast.Name) and call.func.id == "Console"
    }
    assert made <= ALLOWED_CONSOLES, made


def is_safe(value: ast.expr) -> bool:
    """A constant, what was escaped, or JSON, which is ASCII."""
    name = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    return isinstance(value, ast.Constant) or name in ("printable", "printable_lines", "dumps")


# What these print is no quote of data: scripts and files that are asked for, names of the library's own.
FREE = {
    "cli/main.py": 7, "cli/launch.py": 1, "cli/convert.py": 1, "cli/plan.py": 1, "cli/doctor.py": 1,
    "launch/as_deepspeed.py": 1, "launch/local.py": 1,
    "compat/deepspeed/profiler.py": 1, "compat/deepspeed/runtime/zero/estimates.py": 3,
}  # fmt: skip


def test_no_print_shows_a_text_as_it_is() -> None:
    root = Path(shardwise.__file__).parent
    found: dict[str, int] = {}
    for path in root.rglob("*.py"):
        for call in calls(path):
            if isinstance(call.func, ast.Name) and call.func.id == "print" and not all(map(is_safe, call.args)):
                name = path.relative_to(root).as_posix()
                found[name] = found.get(name, 0) + 1
    assert all(number <= FREE.get(name, 0) for name, number in found.items()), found


def test_what_takes_long_is_not_said_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.report.console.EVERY_S", 0.01)
    stream = io.StringIO()
    with progress("reading", stream):
        deadline_s = time.monotonic() + 10
        while "so far" not in stream.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert stream.getvalue().startswith("reading\nreading: 0 s so far\n")
