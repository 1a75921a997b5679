"""Pickles of DeepSpeed's checkpoints that were made to hurt: they are refused before anything is made of them."""

from __future__ import annotations

import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.make_deepspeed import FOLDER
from harness.mutations import ended_after, replace_file
from harness.refusals import refused
from shardwise.checkpoint.commit import candidates
from shardwise.checkpoint.deepspeed import describe, read_run_state
from shardwise.checkpoint.manifest import DamagedError

PROTO, STOP = b"\x80\x02", b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def nodes(first: bytes, wrap: Callable[[bytes, bytes], bytes], depth: int) -> bytes:
    """A value, and `depth` times a container that has the one before twice: 2 ** depth leaves."""
    made = first + b"q\x00"
    for level in range(depth):
        made += wrap(b"h" + bytes([level]), b"q" + bytes([level + 1]))
    return made


def shared_lists(get: bytes, put: bytes) -> bytes:
    return b"]" + put + b"(" + get + get + b"e"


def shared_tuples(get: bytes, put: bytes) -> bytes:
    return get + get + b"\x86" + put


# A list of the same list a thousand times, which afterwards gets the next list a thousand times, and so on.
LATE = b"".join(b"]q" + bytes([level]) for level in range(4)) + b"".join(
    b"h" + bytes([level]) + b"(" + (b"h" + bytes([level + 1])) * 1000 + b"e" for level in range(3)
)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "lists that share lists": (nodes(b"](K\x01K\x02e", shared_lists, 40), "pickle-too-large"),
    "tuples that share tuples": (nodes(b"K\x01K\x02\x86", shared_tuples, 40), "pickle-too-large"),
    "a key that shares tuples": (b"}" + nodes(b"K\x01K\x02\x86", shared_tuples, 40) + b"K\x01s", "pickle-too-large"),
    "a set of tuples that share tuples": (
        b"c__builtin__\nset\n](" + nodes(b"K\x01K\x02\x86", shared_tuples, 40) + b"e\x85R",
        "pickle-too-large",
    ),
    "lists that are filled later": (LATE + b"h\x00", "pickle-too-large"),
    "a list in itself": (b"]q\x00h\x00a", "nested-too-deep"),
    "a dict in itself": (b"}q\x00K\x01h\x00s", "nested-too-deep"),
    "100,000 lists in one another": (b"]" * 100_000 + b"a" * 99_999, "nested-too-deep"),
    "100,000 tuples in one another": (b")" + b"\x85" * 100_000, "nested-too-deep"),
    "a tuple of 100,000 levels as a key": (b"})" + b"\x85" * 100_000 + b"K\x01s", "nested-too-deep"),
    "empty lists only": (b"](" + b"]" * 500_000 + b"e", "pickle-too-large"),
    "a bytearray of a terabyte": (b"c__builtin__\nbytearray\n\x8a\x06" + (2**40).to_bytes(6, "little") + b"\x85R",
                                  "deepspeed-malformed"),
    "text in a codec of quadratic time": (
        b"c_codecs\nencode\n" + text("\u00e4" * 4) + text("idna") + b"\x86R", "deepspeed-malformed"
    ),
    "an object that fills itself": (b"ccollections\nOrderedDict\n)Rq\x00}" + text("a") + b"h\x00sb", "nested-too-deep"),
    "nothing on the stack": (b"a", "deepspeed-malformed"),
    "no end": (b"](", "deepspeed-malformed"),
    "unknown operations": (b"\xfe\xfe", "deepspeed-malformed"),
    "code": (b"cos\nsystem\n" + text("true") + b"\x85R", "pickle-refused"),
}  # fmt: skip


def archive(path: Path, pickle: bytes, **how: Any) -> None:
    with zipfile.ZipFile(path, "w", **how) as file:
        file.writestr("archive/data.pkl", pickle)
        file.writestr("archive/version", "3\n")


def copied(tmp_path: Path, kind: str = "zero1-fp32") -> Path:
    shutil.copytree(FOLDER / kind, tmp_path, dirs_exist_ok=True)
    return candidates(tmp_path)[0]


def check(folder: Path, code: str) -> None:
    for read in (describe, read_run_state):
        with ended_after(10.0), refused(code) as caught:
            read(folder)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_at_once(tmp_path: Path, name: str) -> None:
    pickle, code = HOSTILE[name]
    folder = copied(tmp_path)
    (path,) = folder.glob("mp_rank_00_model_states.pt")
    archive(path, PROTO + pickle + STOP)
    check(folder, code)


def compressed(path: Path) -> None:
    archive(path, PROTO + b"](" + b"K\x01" * 50_000_000 + b"e.", compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**20


def two_pickles(path: Path) -> None:
    archive(path, PROTO + b"}.")
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("archive/DATA.PKL", PROTO + b"](" + b"K\x01" * 100 + b"e.")


def other_bytes(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(b"\x80\x02}")
    path.write_bytes(data[: at + 9] + bytes([data[at + 9] ^ 1]) + data[at + 10 :])


ARCHIVES: dict[str, tuple[Callable[[Path], object], str]] = {
    "compressed": (compressed, "pickle-compressed"),
    "with two pickles": (two_pickles, "deepspeed-malformed"),
    "with another pickle than its checksum says": (other_bytes, "file-unreadable"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "file-unreadable"),
    "of no zip": (lambda path: path.write_bytes(b"PK\x03\x04" + b"x" * 1000), "file-unreadable"),
    "as a pipe": (lambda path: replace_file(path, Draw(1)), "file-unreadable"),
    "as a folder": (lambda path: replace_file(path, Draw(2)), "file-unreadable"),
    "as a link": (lambda path: replace_file(path, Draw(3)), "file-unreadable"),
    "as a device": (lambda path: replace_file(path, Draw(4)), "file-unreadable"),
}


class Draw(random.Random):
    def __init__(self, number: int) -> None:
        super().__init__(0)
        self.number = number

    def randrange(self, *_: Any) -> int:
        return self.number


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_torch_does_not_write_is_refused_at_once(tmp_path: Path, name: str) -> None:
    change, code = ARCHIVES[name]
    folder = copied(tmp_path)
    (path,) = folder.glob("mp_rank_00_model_states.pt")
    change(path)
    check(folder, code)


@pytest.mark.parametrize("place", ["zero", "zero/mix.bias", "zero/mix.bias/exp_avg.pt", "zero/optimizer_state.pt"])
def test_a_part_of_a_universal_checkpoint_that_is_a_link_out_of_it_is_refused(tmp_path: Path, place: str) -> None:
    folder = copied(tmp_path / "a", "universal-of-zero2-bf16")
    path = folder / place
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match="elsewhere"):
        describe(folder)
    path.unlink()
    (tmp_path / "elsewhere").rename(folder / "inside")
    path.symlink_to(folder / "inside")
    assert describe(folder).tensors


def test_a_tensor_beyond_its_record_is_refused(tmp_path: Path) -> None:
    """Its bytes would be those of the next one."""
    folder = copied(tmp_path)
    (path,) = folder.glob("zero_pp_rank_0*optim_states.pt")
    with zipfile.ZipFile(path) as file:
        names = [name for name in file.namelist() if "/data/" in name]
        sizes = {name.rpartition("/")[2]: file.getinfo(name).file_size for name in names}
        records = {name: file.read(name) for name in file.namelist()}
    first = max(sizes, key=lambda name: sizes[name])
    records[next(name for name in records if name.endswith(f"/data/{first}"))] = b"\0" * (sizes[first] - 4)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in records.items():
            file.writestr(name, data)
    with refused("deepspeed-malformed", path.name, "one record"):
        describe(folder)
