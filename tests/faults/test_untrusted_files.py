"""Files of others: what is no regular file, too large, too deep or too long is refused at once, in one line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.config.errors import ConfigError, printable
from shardwise.config.resolve import Config
from shardwise.config.untrusted_files import (
    MAX_DEPTH,
    UntrustedFileError,
    open_regular,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_text,
)

FIX = "fetch it again"


def refused_line(error: BaseException) -> str:
    line = str(error)
    assert line.isprintable()
    assert line.endswith(FIX)
    return line


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("[" * 3000, "nested-too-deep", str(MAX_DEPTH)),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested-too-deep", str(MAX_DEPTH)),
        ('{"a":' * 3000, "nested-too-deep", str(MAX_DEPTH)),
        (
            "[" * 70 + '"\\"' + '\\"' * 1_000_000,
            "nested-too-deep",
            str(MAX_DEPTH),
        ),  # no quadratic look for the end of the text
        ("[" + "[]," * 1_000_000 + "1]", "too-many-lists", "1,000,001"),
        ("9" * 5000, "not-json", "4300"),
        ('{"a": 1, "b": 2, "a": 3}', "not-json", "'a'"),
        ('{"\x1b[31m\n": 1', "not-json", "line 1"),
        ("", "not-json", "a\\x1b.json"),
    ],
)
def test_hostile_json_is_refused_in_one_line(text: str, code: str, named: str) -> None:
    with refused(code, named) as caught:
        parse_json(text, "a\x1b.json", FIX)
    refused_line(caught.value)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 3000, "a = " + "9" * 5000, "a." * 30_000 + "a = 1", "a = 1\na = 2", "="]
)
def test_hostile_toml_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UntrustedFileError) as caught:
        parse_toml(text, "my.toml", FIX)
    refused_line(caught.value)


def test_brackets_in_text_are_no_nesting() -> None:
    assert parse_json('["' + "[{" * 500 + '\\"[", 1]', "a", FIX)[1] == 1
    nested = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert str(parse_json(nested, "a", FIX)) == nested


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "pipe", "a pipe"),
        (Path("/dev/zero"), "a device"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
    ):
        with refused("file-unreadable", str(path), why) as caught:
            read_text(path, FIX)
        refused_line(caught.value)
    with refused("file-unreadable", "a pipe"):
        Config.from_toml(tmp_path / "pipe")


def test_sizes_and_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('"' + "x" * 100 + '"')
    assert len(read_json(path, FIX, max_bytes=102)) == 100
    with refused("file-unreadable", "101 bytes"):
        read_json(path, FIX, max_bytes=101)
    path.write_bytes(b'"\xff"')
    with refused("not-utf8", str(path)):
        read_json(path, FIX)


def test_links_stay_in_their_folder(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a" / "snapshots" / "f00", tmp_path / "models--a" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for place in (tmp_path / "secret", blobs / "1", folder / "own"):
        place.write_text(place.name)
    for name, target in {"out": tmp_path / "secret", "hub": Path("../../blobs/1"), "in": Path("own")}.items():
        (folder / name).symlink_to(target)
    assert [read_bytes(folder / name, folder=folder) for name in ("hub", "in", "own")] == [b"1", b"own", b"own"]
    assert read_bytes(folder / "out") == b"secret"  # a file that is named itself is meant
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "secret"))):
        open_regular(folder / "out", folder)
    (tmp_path / "linked").symlink_to(folder)
    assert read_bytes(tmp_path / "linked" / "own", folder=tmp_path / "linked") == b"own"


def test_what_steers_a_terminal_is_written_out() -> None:
    assert printable("weight ü × 2") == "weight ü × 2"
    assert printable("\x1b]0;x\x07\r\n\u202e") == "\\x1b]0;x\\x07\\r\\n\\u202e"
    assert str(ConfigError("a\nb\x1b[0m")) == "a\\nb\\x1b[0m"


@pytest.mark.parametrize("character", ["\x7f", "\u2028", "\u202e", "\u2066", "\ufeff", "\ud800"])
def test_what_a_message_writes_out_a_config_refuses(character: str) -> None:
    with refused("control-character", "run.name"):
        Config.from_dict({"run": {"name": f"a{character}b"}})
    assert not set(character) & set(printable(character))


def test_joiners_are_text() -> None:
    for text in ("می\u200cخواهم", "\U0001f469\u200d\U0001f680"):
        assert Config.from_dict({"run": {"name": text}}).run.name == printable(text) == text
