"""Print the output of commands safely: text from a foreign file cannot control the terminal.

>>> Terminal(width=40).print("as wide as asked", "\\x1b[31m")
as wide as asked \\x1b[31m
"""

from __future__ import annotations

import errno
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shardwise.config.errors import with_code
from shardwise.config.untrusted_files import printable, printable_lines

EVERY_S: Final = 5.0


class Terminal(Console):
    """Escape control characters, and raise on a closed pipe, as `print` does, so that the command line handles it.

    Rich itself would end the program, pass the control characters on, and take `[red]` or `:bomb:` in a text for more
    than text.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, *arguments: Any, **named: Any) -> Iterator[Segment]:
        """Render as rich does, with only rich's own escapes."""
        return _escaped(super().render(*arguments, **named))

    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError; rich would exit."""
        raise BrokenPipeError(errno.EPIPE, "who reads the output has closed it")


class Escaped:
    """Draws on any console, such as the caller's own, what a `Terminal` would."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        return _escaped(console.render(self._inner, options.update(markup=False)))


class LogFormatter(logging.Formatter):
    """Formats records of a log, which people read in a terminal, with the control characters in them escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines."""
        return printable_lines(super().format(record))


def write_line(text: str, *, to_stderr: bool = False) -> None:
    """Print a text, which may quote data, names of files and errors."""
    print(printable_lines(text), file=sys.stderr if to_stderr else sys.stdout, flush=to_stderr)


def _escaped(segments: Iterable[Segment]) -> Iterator[Segment]:
    for segment in segments:
        yield segment if segment.control is not None else segment._replace(text=printable_lines(segment.text))


@contextmanager
def progress(doing: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr what is being done, first `doing`: in place on a terminal, elsewhere by a line every few seconds.

    Of what takes less than that no line is written.
    """
    console = Terminal(file=sys.stderr)  # this one, even if another takes its place meanwhile
    if console.is_terminal:
        with console.status(Text(doing)) as status:
            yield lambda words: status.update(Text(words))
        return
    last_s = time.monotonic()

    def say(words: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= EVERY_S:
            last_s = time.monotonic()
            print(printable(words), file=sys.stderr, flush=True)

    yield say


def refuse(error: Exception, exit_code: int = 2) -> int:
    """Print in a line why a command refuses, with the error's code in brackets; return the exit code."""
    write_line(f"shardwise: {with_code(error)}", to_stderr=True)
    return exit_code
