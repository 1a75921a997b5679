"""Hosts, ports, counts, words, times and images of a launch are checked here, once, where they come in.

Each function returns what it was given, or raises a ConfigError that says where the value came from. A value that
passed may be written into any text: what a text's language would read in it is left to the writer of the text.

>>> host("me@n1", "--hosts"), port(29500, "--port"), count(4, "--nodes", 1, MOST_NODES)
('me@n1', 29500, 4)
>>> host("-oProxyCommand=id", "--hosts")
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: --hosts: '-oProxyCommand=id' is no host; write NAME, USER@NAME or an address, \
of A-Z, a-z, 0-9, '.', '_' and '-', with no '-' first
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import shown_value

MOST_NODES: Final = 100_000
MOST_RANKS: Final = 9_999
"""How many ranks a node may have."""
MOST_RESTARTS: Final = 1_000_000

# Of a domain's user too, as DOMAIN\name or name@realm.
_USER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@\\-]{0,63}")
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_ADDRESS_6: Final = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME: Final = re.compile(
    r"\d{1,7}|\d{1,7}:\d{1,2}(?::\d{1,2})?|\d{1,4}-\d{1,2}(?::\d{1,2}){0,2}|(?i:UNLIMITED|INFINITE)", re.ASCII
)
_PART: Final = r"[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*"
_IMAGE: Final = re.compile(
    rf"{_PART}(?::\d{{1,5}}(?=/))?(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?:@[A-Za-z0-9.+_-]{1,32}:[0-9a-fA-F]{32,128})?"
)
_LONGEST_IMAGE: Final = 512
_SECRET: Final = re.compile(
    r"PASSW|PASSPHRASE|SECRET|CREDENTIAL|API_?KEY|TOKENS?(?=_|\d|$)|(?:^|_)(?:PASS|PWD|KEYS?|AUTH)(?=_|\d|$)", re.I
)
_PASSWORD_IN_ADDRESS: Final = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def host(text: str, given: str, *, has_user: bool = True) -> str:
    """Check the name of a machine, `NAME` or `USER@NAME`, or its address, as ssh and torchrun take it.

    Args:
        given: where it came from, such as a flag.
        has_user: False where a user makes no sense.
    """
    user, at, name = text.rpartition("@")
    if (not at or (has_user and _USER.fullmatch(user))) and (_NAME.fullmatch(name) or _is_address_6(name)):
        return text
    forms = "NAME, USER@NAME or an address" if has_user else "a name or an address"
    raise ConfigError(
        "host-name",
        f"{given}: {shown_value(text)} is no host; write {forms}, of A-Z, a-z, 0-9, '.', '_' and '-', with no "
        "'-' first",
    )


def _is_address_6(text: str) -> bool:
    if not _ADDRESS_6.fullmatch(text):
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def port(number: int, given: str, code: str = "master-port") -> int:
    """Check a port.

    Args:
        given: where it came from, such as a flag.
    """
    if not 1 <= number <= 65_535:
        raise ConfigError(code, f"{_joined(given, number)} is not a port; choose one from 1024 to 65535")
    return number


def count(number: int, given: str, least: int, most: int) -> int:
    """Check that a number of things is from `least` to `most`.

    Args:
        given: where it came from, such as a flag.
    """
    if number < least:
        raise ConfigError("launch-number", f"{_joined(given, number)} is below {least}; give at least {least}")
    if number > most:
        raise ConfigError("launch-number", f"{_joined(given, number)} is above {most:,}; give at most {most:,}")
    return number


def _joined(given: str, number: int) -> str:
    return f"{given}{'' if given.endswith('=') else ' '}{shown_value(number)}"


def word(text: str, given: str) -> str:
    """Check a word of a command: a program can get it, and a file of UTF-8 can have it.

    Args:
        given: what it is, such as a flag.
    """
    if not is_text(text):
        raise ConfigError(
            "word-not-text", f"{given} {shown_value(text)} has a NUL or is not UTF-8; write it as UTF-8 without NUL"
        )
    return text


def is_text(text: str) -> bool:
    """Say whether a text can be an argument of a program and part of a file of UTF-8."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def is_variable(name: str) -> bool:
    """Say whether a shell can set a variable of this name."""
    return _VARIABLE.fullmatch(name) is not None


def is_secret(name: str, value: str) -> bool:
    """Say whether a variable looks like one that others must not read.

    >>> is_secret("MLFLOW_TRACKING_TOKEN", "x"), is_secret("MLFLOW_TRACKING_URI", "https://me:x@h"), is_secret("A", "x")
    (True, True, False)
    """
    return bool(_SECRET.search(name) or _PASSWORD_IN_ADDRESS.search(value))


def time_limit(text: str, given: str) -> str:
    """Check a limit of time as Slurm writes it: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]].

    Args:
        given: where it came from, such as a flag.
    """
    if not _TIME.fullmatch(text):
        raise ConfigError(
            "time-limit", f"{given} {shown_value(text)} is no time of Slurm's; write D-HH:MM:SS, HH:MM:SS or minutes"
        )
    return text


def image(text: str, given: str) -> str:
    """Check the name of a container's image, `[REGISTRY[:PORT]/]NAME[:TAG][@DIGEST]`.

    Args:
        given: where it came from, such as a flag.
    """
    if len(text) > _LONGEST_IMAGE or not _IMAGE.fullmatch(text):
        raise ConfigError(
            "image-name", f"{given} {shown_value(text)} is no image; write REGISTRY/NAME:TAG, as ghcr.io/me/train:1"
        )
    return text


def folder_here() -> str:
    """Return the folder that this process is in, which may have been deleted."""
    try:
        return word(os.getcwd(), "the current folder")
    except OSError as error:
        raise ConfigError(
            "no-current-folder", f"the current folder cannot be found ({error.strerror}); cd to one that is there"
        ) from None


def python_file(words: tuple[str, ...]) -> tuple[str, ...]:
    """Check that words are `SCRIPT.py ...` or `-m MODULE ...`, which torchrun would not take for options of its own."""
    if words[0] == "-m" and (len(words) < 2 or not words[1].strip() or words[1].startswith("-")):
        setting = shown_value(words[1]) if len(words) > 1 else "nothing"
        raise ConfigError("module-name", f"-m is followed by {setting}, which is no module; write -m my.module")
    if words[0] != "-m" and (not words[0].endswith(".py") or words[0].startswith("-")):
        fix = f"./{words[0]}" if Path(words[0]).suffix == ".py" else "-- train.py, -m module or shardwise train"
        raise ConfigError("program-not-python", f"{shown_value(words[0])} is no script of Python; write {fix}")
    return words
