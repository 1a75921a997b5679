"""Snapshots: what commands print, kept in a text file each; `pytest --update-snapshots` writes them again."""

from __future__ import annotations

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
            return
        kept = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "printed", lineterm="", n=1)
        hint = f"{path.name} differs; if that is meant, run pytest --update-snapshots and read the diff"
        assert text == kept, "\n".join([hint, *lines])


def transcript(
    commands: Sequence[str], capsys: pytest.CaptureFixture[str], placeholders: Mapping[str, str] | None = None
) -> str:
    """Run commands, and return what they print and their exit codes where these are not 0.

    Args:
        commands: each as typed after `shardwise`.
        capsys: of the test.
        placeholders: what stands in the text for a pattern of machines, times or paths.
    """
    parts = []
    for command in commands:
        try:
            code = cli.main(shlex.split(command))
        except SystemExit as ended:  # argparse's way out
            code = ended.code
        out, err = capsys.readouterr()
        if code == 2:
            assert not out, f"shardwise {command}"
            assert not command or (err.startswith("shardwise: ") and err.count("\n") == 1), err
        # How argparse breaks the lines of a usage differs between versions of Python.
        out = re.sub(r"\Ausage: .*?\n\n", lambda usage: " ".join(usage[0].split()) + "\n\n", out, flags=re.DOTALL)
        parts.append(f"$ shardwise {command}".rstrip() + f"\n{out}{err}" + (f"[exit code {code}]\n" if code else ""))
    text = "\n".join(line.rstrip() for line in "\n".join(parts).splitlines()) + "\n"
    for pattern, placeholder in (placeholders or {}).items():
        text = re.sub(pattern, placeholder, text)
    return text
