"""Hold what all commands share: the settings argument, kinds of values, and examples that are printed as written."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from shardwise.config.resolve import ConfigError, all_keys

FILE: Final = click.Path(path_type=Path)
# Python refuses to read a number of thousands of digits.
_MAX_DIGITS: Final = 18
_LONG: Final = 80


class _Count(click.ParamType):
    """Read a whole number from 1, with commas or underscores between its digits, such as 1,024."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        digits = str(value).replace(",", "").replace("_", "")
        if not is_number(digits) or int(digits) < 1:
            flag = param.opts[0] if param is not None else "it"
            raise ConfigError(
                "flag-whole-number", f"{flag} {shown(str(value))} must be a whole number >= 1, such as {flag} 1024"
            )
        return int(digits)


class _Amount(click.ParamType):
    """Read a positive amount, such as 300e9 or 1,000,000."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            found = float(str(value).replace(",", "").replace("_", ""))
        except ValueError:
            found = 0.0
        if not 0 < found < math.inf:
            flag = param.opts[0] if param is not None else "it"
            raise ConfigError("flag-amount", f"{flag} {shown(str(value))} must be more than 0, such as {flag} 300e9")
        return found


class _OutputFile(click.ParamType):
    """Read the path of a file to write; refuse one that cannot be written, before the work whose result it holds."""

    name = "file"

    def __init__(self, *, takes_dash: bool = False) -> None:
        self.takes_dash = takes_dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path, flag = Path(value), param.opts[0] if param is not None else "it"
        if str(path) == "-" and self.takes_dash:
            return path
        place = path if path.exists() else path.parent
        if str(path) == "-" or path.is_dir() or not os.access(place, os.W_OK):
            raise ConfigError("output-not-writable", f"{flag} {path} names no file that can be written; give another")
        return path


COUNT: Final = _Count()
AMOUNT: Final = _Amount()
OUTPUT: Final = _OutputFile()
OUTPUT_OR_DASH: Final = _OutputFile(takes_dash=True)


def is_number(text: str) -> bool:
    """Say whether a text is a whole number in decimal digits that Python reads quickly."""
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def shown(text: str) -> str:
    """Return a text as an error shows it: only the beginning of a long one."""
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def as_written(text: str) -> str:
    r"""Mark each paragraph of a help text so that click does not wrap it.

    >>> as_written("a\n\nb")
    '\x08\na\n\n\x08\nb'
    """
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip("\n").split("\n\n"))


def write_file(path: Path, text: str) -> None:
    """Write a text file; an error of the disk names the file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    keys = [CompletionItem(f"{key}=") for key in all_keys() if key.startswith(incomplete)]
    return [*keys, CompletionItem(incomplete, type="file")]


def settings(metavar: str = "[CONFIG.TOML] [KEY=VALUE]...") -> Any:
    """Return the argument that takes a config file and keys to set; a shell completes both."""
    return click.argument("settings", nargs=-1, metavar=metavar, shell_complete=_complete)


def split(settings: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the config file, if there is one, and the assignments.

    >>> split(["my.toml", "mesh.tp=2"])
    ('my.toml', ['mesh.tp=2'])
    """
    files = [text for text in settings if "=" not in text]
    if missing := next((text for text in files if text in all_keys()), None):
        raise ConfigError("setting-without-value", f"{missing} has no value; write {missing}=...")
    if len(files) > 1:
        raise ConfigError(
            "two-config-files",
            f"{' and '.join(files)} are two config files; give one, and settings as section.key=value",
        )
    return (files[0] if files else None), [text for text in settings if "=" in text]
