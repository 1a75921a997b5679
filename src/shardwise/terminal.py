"""The console that commands print their answer on.

>>> Terminal(width=40).print("as wide as asked")
as wide as asked
"""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class Terminal(Console):
    """Leaves what a closed pipe does to the command line, as `print` does; rich would end the program by itself."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise what the pipe raised."""
        raise BrokenPipeError
