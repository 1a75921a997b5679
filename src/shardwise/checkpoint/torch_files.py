"""Reads files of `torch.save` that others made, within bounds; nothing that such a file contains is executed.

It is the one reader of foreign pickles. Before torch's weights-only loader sees a pickle, the archive around it is
checked, and its operations are counted: a few bytes may ask for gigabytes, for a billion leaves that share lists, or
for a nesting that no function of C survives. None of this can be interrupted once it has begun.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import CheckpointError, DamagedError
from shardwise.checkpoint.shared_values import TooDeepError, TooManyValuesError, ValueCounter
from shardwise.config.untrusted_files import open_regular
from shardwise.runtime.torch_private import fake_tensors, file_offset

_FIX: Final = "use an older checkpoint, or get the file again"
_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = "data.pkl"
# A tensor takes some 200 bytes of a pickle.
_MOST_PICKLE_BYTES: Final = 64 * 2**20
_MOST_RECORDS: Final = 1_000_000
# Values, where one that occurs several times counts each time.
_MOST_VALUES: Final = 1 << 24
_MOST_DEPTH: Final = 200
# An empty list takes one byte, and sixty of memory.
_BYTES_A_CONTAINER: Final = 12
_MANY_CONTAINERS: Final = 100_000
# How text becomes bytes in a pickle; others of Python's codecs take a time that is quadratic in the text.
_ENCODINGS: Final = frozenset({"latin1", "latin-1"})


def read_torch_file(path: Path, folder: Path, stand_ins: Sequence[Any], *, with_values: bool = False) -> Any:
    """Return what a file of `torch.save` has.

    Args:
        folder: that it must be in, or in a folder of it.
        stand_ins: classes that may stand in the pickle, as `torch.serialization.safe_globals` takes them.
        with_values: map the file into memory for the values of tensors; otherwise tensors are fake, and only say where
            they are in the file.

    Raises:
        CheckpointError: the file wants to run code, which was refused.
        DamagedError: it is no whole file of `torch.save`, or would take more than any checkpoint needs.
        OSError: it cannot be opened.
    """
    with open(open_regular(path, folder), "rb") as file, torch.serialization.safe_globals([*stand_ins]):
        if file.read(len(_ZIP)) != _ZIP:
            raise DamagedError("deepspeed-malformed", f"{path} is no file of torch.save; {_FIX}")
        data, records = _opened(file, path)
        _Operations(path).check(data)
        file.seek(0)
        try:
            if with_values:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            else:
                with fake_tensors():
                    content = torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            file.seek(0)
            raise CheckpointError(
                "pickle-refused",
                f"{path} wants {_wanted(file) or 'more than values'}, which is none of the tensors and values that a "
                "checkpoint needs, so none of it was executed; where you trust it, save it again without that",
            ) from error
    tensors = _tensors_in(content, path)
    if not with_values:
        _check_places(tensors, records, path)
    return content


def _opened(file: BinaryIO, path: Path) -> tuple[bytes, list[zipfile.ZipInfo]]:
    """Return the pickle of an archive, and its records in order, after a check that it is as torch writes it."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.header_offset)
            packed = next((record for record in records if record.compress_type != zipfile.ZIP_STORED), None)
            if packed is not None:
                raise DamagedError(
                    "pickle-compressed",
                    f"{path} has {packed.filename} compressed, {packed.file_size:,} bytes in {packed.compress_size:,}, "
                    f"which torch.save never does; {_FIX}",
                )
            # Torch compares names without case, and takes the folder of the first.
            names = {record.filename.lower() for record in records}
            found = [record for record in records if record.filename.rpartition("/")[2].lower() == _PICKLE]
            is_plain = len(names) == len(records) <= _MOST_RECORDS and not archive.comment and len(found) == 1
            if not is_plain or any(each.file_size != each.compress_size or each.flag_bits & 1 for each in records):
                raise DamagedError("deepspeed-malformed", f"{path} is no archive of torch.save; {_FIX}")
            if found[0].file_size > _MOST_PICKLE_BYTES:
                raise DamagedError(
                    "pickle-too-large",
                    f"{path} has a pickle of {found[0].file_size:,} bytes; at most {_MOST_PICKLE_BYTES:,} are read; "
                    f"{_FIX}",
                )
            return archive.read(found[0]), records
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError("file-unreadable", f"{path} is no whole file of torch.save: {error}; {_FIX}") from None


class _Made:
    """Stands for a value that a pickle makes: how many values are in it, and how deep."""

    __slots__ = ("depth", "name", "parts", "size")

    def __init__(self, parts: Iterable[Any] = (), name: str = "") -> None:
        self.size, self.depth, self.name, self.parts = 1, 0, name, tuple(parts)
        self.add(self.parts)

    def add(self, parts: Iterable[Any]) -> None:
        for part in parts:
            if isinstance(part, _Made):
                self.size += part.size
                self.depth = max(self.depth, part.depth + 1)
            else:
                self.size += 1


_SCALARS: Final = frozenset(
    (
        *("NONE", "NEWFALSE", "NEWTRUE", "BININT", "BININT1", "BININT2", "LONG1"),
        *("BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"),
    )
)
# How many values an operation takes from the stack.
_TAKEN: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), 0),
        **dict.fromkeys(("TUPLE1", "APPEND", "BUILD", "BINPERSID"), 1),
        **dict.fromkeys(("TUPLE2", "SETITEM", "REDUCE", "NEWOBJ"), 2),
        "TUPLE3": 3,
    }
)


class _Operations:
    """Goes through the operations of a pickle without doing them; it counts what they would make."""

    def __init__(self, path: Path) -> None:
        self.num_made = self.num_values = 0
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def check(self, data: bytes) -> None:
        """Refuse a pickle that would not end or not fit; only operations that torch's loader knows are followed.

        Raises:
            DamagedError: it is one of these, or no pickle.
        """
        most_made = _MANY_CONTAINERS + len(data) // _BYTES_A_CONTAINER
        try:
            for operation, argument, _ in pickletools.genops(data):
                if not self._follow(operation.name, argument):
                    return  # where torch's loader raises
                last = self._stack[-1] if self._stack else None
                if self.num_made > most_made or max(self.num_values, _size(last)) > _MOST_VALUES:
                    raise _too_many(self._path)
                if isinstance(last, _Made) and last.depth > _MOST_DEPTH:
                    raise _too_deep(self._path)
        except DamagedError:
            raise
        except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
            raise DamagedError(
                "deepspeed-malformed", f"{self._path} has a pickle that cannot be read: {error}; {_FIX}"
            ) from None

    def _follow(self, name: str, argument: Any) -> bool:
        stack = self._stack
        if name in _SCALARS:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[int(argument)])
            self.num_values += _size(stack[-1])
        elif name == "MARK":
            self._marks.append(stack)
            self._stack = []
        elif name == "GLOBAL":
            stack.append(_Made(name=str(argument)))
        elif name in _TAKEN:
            taken = [stack.pop() for _ in range(_TAKEN[name])][::-1]
            self._make(name, taken)
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            self._stack = self._marks.pop()
            self._make(name, stack)
        else:
            return name == "PROTO"
        return True

    def _make(self, name: str, taken: Sequence[Any]) -> None:
        """Make a value of those that are taken from the stack, or add them to the value there."""
        if name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"):
            self._stack[-1].add(taken)
            return
        if name in ("REDUCE", "NEWOBJ"):
            _check_call(*taken)
            self.num_values += _size(taken[1])
        self.num_made += not name.startswith("TUPLE")
        self._stack.append(None if name == "BINPERSID" else _Made(taken))


def _size(value: Any) -> int:
    return value.size if isinstance(value, _Made) else 1


def _check_call(called: Any, given: Any) -> None:
    """Refuse a call of a function that torch allows, whose arguments ask for any memory or time."""
    name = called.name if isinstance(called, _Made) else ""
    parts = given.parts if isinstance(given, _Made) else ()
    if name.endswith(" bytearray") and any(isinstance(part, int) for part in parts):
        raise ValueError("it wants a bytearray of a given size")
    if name == "_codecs encode" and not (len(parts) == 2 and parts[1] in _ENCODINGS):
        raise ValueError("it wants text in another encoding than latin1")


def _too_many(path: Path) -> DamagedError:
    return DamagedError(
        "pickle-too-large",
        f"{path} has a pickle of more than {_MOST_VALUES:,} values, those that occur repeatedly counted each time, or "
        f"of empty ones only; {_FIX}",
    )


def _too_deep(path: Path) -> DamagedError:
    return DamagedError("nested-too-deep", f"{path} has a pickle nested deeper than {_MOST_DEPTH} levels; {_FIX}")


def _tensors_in(content: Any, path: Path) -> list[Tensor]:
    """Return the tensors in what was read, once for each place; what it unpacks to is bounded."""
    tensors: list[Tensor] = []

    def parts(value: Any) -> Iterable[Any]:
        if not isinstance(value, Tensor):
            return _parts(value)
        tensors.append(value)
        return ()

    try:
        ValueCounter(parts, _MOST_VALUES, _MOST_DEPTH).count(content)
    except TooManyValuesError:
        raise _too_many(path) from None
    except TooDeepError:
        raise _too_deep(path) from None
    return tensors


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    if not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).values()


def _check_places(tensors: Sequence[Tensor], records: Sequence[zipfile.ZipInfo], path: Path) -> None:
    """Refuse a fake tensor that is not within one record of its file: it would have the values of another."""
    starts = [record.header_offset for record in records]
    for tensor in tensors:
        if not tensor.numel():
            continue
        first, num_bytes = file_offset(tensor), tensor.untyped_storage().nbytes()
        start = first - int(tensor.storage_offset()) * tensor.itemsize
        place = bisect_right(starts, start) - 1
        last = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        is_within = (
            start > 0
            and place >= 0
            and num_bytes <= records[place].file_size
            and (place + 1 == len(starts) or start + num_bytes <= starts[place + 1])
            and first + last * tensor.itemsize <= start + num_bytes
        )
        if not is_within:
            raise DamagedError(
                "deepspeed-malformed",
                f"{path} has a tensor of shape {tuple(tensor.shape)} at byte {first}, which is not all in one record; "
                f"{_FIX}",
            )


def _wanted(file: BinaryIO) -> str:
    """Return the names that a pickle wants and that are not allowed; "" where there are none, or it is not readable."""
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    except Exception:  # whatever a broken pickle does to its reader
        return ""
