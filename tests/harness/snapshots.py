"""Snapshots: what commands print, kept in a text file each; `pytest --update-snapshots` writes them again."""

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.cli import main as cli


@dataclass(frozen=True)
class Snapshots:
    """Compares a text with the file of its name, or writes the file."""

    folder: Path
    is_updating: bool

    def check(self, name: str, text: str) -> None:
        path = self.folder / f"{name}.txt"
        if self.is_updating:
            path.write_text(text, encoding="utf-8")
        kept = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "printed", lineterm="", n=1)
        hint = f"{path.name} differs; if that is meant, run pytest --update-snapshots and read the diff"
        assert text == kept, "\n".join([hint, *lines])


def transcript(
    commands: Sequence[str], capsys: pytest.CaptureFixture[str], placeholders: Mapping[str, str] | None = None
) -> str:
    """Run commands, as typed after `shardwise`; return what they print, and their exit codes where these are not 0.

    A command that refuses must print one line on stderr. `placeholders` has what stands for a pattern of the text.
    """
    text = ""
    for command in commands:
        code = cli.main(shlex.split(command))
        out, err = capsys.readouterr()
        if code == 2 and not err.startswith("Usage: "):
            assert (out, err.count("\n"), err[:11]) == ("", 1, "shardwise: "), f"{command}: {out}{err}"
        end = f"[exit code {code}]\n" if code else ""
        text += "\n" * bool(text) + f"$ shardwise {command}\n{out}{err}{end}"
    for pattern, placeholder in {r" +(?=\n)": "", **(placeholders or {})}.items():
        text = re.sub(pattern, placeholder, text)
    return text
