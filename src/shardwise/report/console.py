"""Print the output of commands safely: text from a foreign file cannot control the terminal.

>>> Terminal(width=40).print("as wide as asked", "\\x1b[31m")
as wide as asked \\x1b[31m
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, NoReturn, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shardwise.config.errors import printable, printable_lines, with_code

EVERY_S: Final = 5.0
_FIRST_SHARE: Final = 0.4

log = logging.getLogger("shardwise")


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


class LastingStream:
    """Writes text to a stream, and nothing more once that fails: a run is worth more than what is shown of it.

    A full disk that stdout goes to, or a closed pipe, ends no run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_failed = False

    def write(self, text: str) -> int:
        """Write as the stream does."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush as the stream does."""
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[[], object]) -> None:
        if not self._has_failed:
            try:
                call()
            except OSError as error:
                self._has_failed = True
                log.warning("nothing more is shown on stdout: %s", error.strerror)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def progress(doing: str, stream: IO[str] | None = None) -> Iterator[Callable[[str], None]]:
    """Say what is being done, first `doing`: in place on a terminal, elsewhere by a line now and then.

    What takes less than two seconds writes no line; what takes long writes one for each thing done, and how long it
    lasts.

    Args:
        stream: for lines, on a terminal too: a rank that is killed would leave its cursor hidden. None for stderr.
    """
    console = Terminal(file=sys.stderr)  # this one, even if another takes its place meanwhile
    if stream is None and console.is_terminal:
        with console.status(Text(doing)) as status:
            yield lambda words: status.update(Text(words))
        return
    doing_now, is_over = [doing], threading.Event()
    thread = threading.Thread(target=_say_now_and_then, args=(doing_now, is_over, stream or sys.stderr), daemon=True)
    thread.start()
    try:
        yield doing_now.append
    finally:
        is_over.set()
        thread.join()


def _say_now_and_then(words: Sequence[str], is_over: threading.Event, stream: IO[str]) -> None:
    """Print the newest words when they have changed, and after ever longer times when they have not."""
    start_s, said, wait_s = time.monotonic(), "", _FIRST_SHARE * EVERY_S
    while not is_over.wait(min(wait_s, threading.TIMEOUT_MAX)):
        newest = words[-1]
        wait_s = EVERY_S if newest != said else 2 * wait_s
        lasting = "" if newest != said else f": {time.monotonic() - start_s:.0f} s so far"
        said = newest
        with suppress(OSError):
            print(printable(f"{newest}{lasting}"), file=stream, flush=True)


def refuse(error: Exception, exit_code: int = 2) -> int:
    """Print in a line why a command refuses, with the error's code in brackets; return the exit code."""
    write_line(f"shardwise: {with_code(error)}", to_stderr=True)
    return exit_code
