"""Files of others: what is no regular file, too large, too deep or too long is refused at once, in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.config.resolve import Config, ConfigError
from shardwise.config.untrusted_files import (
    MAX_DEPTH,
    UntrustedFileError,
    open_regular,
    parse_json,
    parse_toml,
    printable,
    read_bytes,
    read_json,
    read_text,
)

CURE = "fetch it again"


def refused_line(error: BaseException) -> str:
    line = str(error)
    assert line.isprintable()
    assert line.endswith(CURE)
    return line


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[" * 3000, "deeper than"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "deeper than"),
        ('{"a":' * 3000, "deeper than"),
        ("[" * 70 + '"\\"' + '\\"' * 1_000_000, "deeper than"),  # no quadratic look for the end of the text
        ("[" + "[]," * 1_000_000 + "1]", "lists and tables"),
        ("9" * 5000, "4300"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' stands twice"),
        ('{"\x1b[31m\n": 1', "line 1"),
        ("", "not valid JSON"),
    ],
)
def test_hostile_json_is_refused_in_one_line(text: str, rule: str) -> None:
    with pytest.raises(UntrustedFileError, match=rule) as caught:
        parse_json(text, "a\x1b.json", CURE)
    refused_line(caught.value)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 3000, "a = " + "9" * 5000, "a." * 30_000 + "a = 1", "a = 1\na = 2", "="]
)
def test_hostile_toml_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UntrustedFileError) as caught:
        parse_toml(text, "my.toml", CURE)
    refused_line(caught.value)


def test_brackets_in_text_are_no_nesting() -> None:
    assert parse_json('["' + "[{" * 500 + '\\"[", 1]', "a", CURE)[1] == 1
    nested = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert str(parse_json(nested, "a", CURE)) == nested


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, rule in (
        (tmp_path / "pipe", "a pipe"),
        (Path("/dev/zero"), "a device"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(UntrustedFileError, match=rule) as caught:
            read_text(path, CURE)
        refused_line(caught.value)
    with pytest.raises(ConfigError, match="a pipe"):
        Config.from_toml(tmp_path / "pipe")


def test_sizes_and_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('"' + "x" * 100 + '"')
    assert len(read_json(path, CURE, max_bytes=102)) == 100
    with pytest.raises(UntrustedFileError, match="more than 101 bytes"):
        read_json(path, CURE, max_bytes=101)
    path.write_bytes(b'"\xff"')
    with pytest.raises(UntrustedFileError, match="not UTF-8"):
        read_json(path, CURE)


def test_links_stay_in_their_folder(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a" / "snapshots" / "f00", tmp_path / "models--a" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for place in (tmp_path / "secret", blobs / "1", folder / "own"):
        place.write_text(place.name)
    for name, target in {"out": tmp_path / "secret", "hub": Path("../../blobs/1"), "in": Path("own")}.items():
        (folder / name).symlink_to(target)
    assert [read_bytes(folder / name, folder=folder) for name in ("hub", "in", "own")] == [b"1", b"own", b"own"]
    assert read_bytes(folder / "out") == b"secret"  # whoever names the file itself means it
    with pytest.raises(OSError, match="out of its folder"):
        open_regular(folder / "out", folder)
    (tmp_path / "linked").symlink_to(folder)
    assert read_bytes(tmp_path / "linked" / "own", folder=tmp_path / "linked") == b"own"


def test_what_steers_a_terminal_is_written_out() -> None:
    assert printable("weight ü × 2") == "weight ü × 2"
    assert printable("\x1b]0;x\x07\r\n\u202e") == "\\x1b]0;x\\x07\\r\\n\\u202e"
    assert str(ConfigError("a\nb\x1b[0m")) == "a\\nb\\x1b[0m"


@pytest.mark.parametrize("character", ["\x7f", "\u2028", "\u202e", "\u2066", "\ufeff", "\ud800"])
def test_what_a_message_writes_out_a_config_refuses(character: str) -> None:
    with pytest.raises(ConfigError, match="control character"):
        Config.from_dict({"run": {"name": f"a{character}b"}})
    assert not set(character) & set(printable(character))


def test_joiners_are_letters() -> None:
    for text in ("می\u200cخواهم", "\U0001f469\u200d\U0001f680"):
        assert Config.from_dict({"run": {"name": text}}).run.name == printable(text) == text
