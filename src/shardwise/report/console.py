"""Print the output of commands safely: text from a foreign file cannot control the terminal.

>>> Terminal(width=40).print("as wide as asked", "\\x1b[31m")
as wide as asked \\x1b[31m
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from rich.console import Console
from rich.segment import Segment

from shardwise.config.errors import with_code
from shardwise.config.untrusted_files import printable


class Terminal(Console):
    """Escape control characters, and raise on a closed pipe, as `print` does, so that the command line handles it.

    Rich itself would end the program, and pass the control characters on.
    """

    def render(self, *arguments: Any, **named: Any) -> Iterator[Segment]:
        """Render as rich does, with only rich's own escapes."""
        for segment in super().render(*arguments, **named):
            text = segment.text
            if segment.control is None and not text.isprintable():
                text = "\n".join(map(printable, text.split("\n")))
            yield segment._replace(text=text)

    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError; rich would exit."""
        raise BrokenPipeError


def refuse(error: Exception, exit_code: int = 2) -> int:
    """Print in a line why a command refuses, with the error's code in brackets; return the exit code."""
    lines = map(printable, with_code(error).split("\n"))
    print("shardwise:", "\n".join(lines), file=sys.stderr)
    return exit_code
