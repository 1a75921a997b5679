"""Encodes and reads headers of safetensors files; such a file is a header in JSON, then the bytes of tensors.

Eight bytes give the length of the header, little-endian; spaces pad it, so that data starts at a multiple of 8.
Tensors follow one another without holes, from the largest elements to the smallest, so that each starts at a multiple
of its element's size: a reader that maps the file into memory can use them in place.

>>> header, offsets = encode_header([TensorHeader("bias", "BF16", (3,)), TensorHeader("weight", "F32", (2, 3))])
>>> len(header), offsets  # the weight comes first
(160, (184, 160))
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shardwise.checkpoint.manifest import ITEM_BYTES, CheckpointError, DamagedError
from shardwise.config.untrusted_files import mismatch, open_regular, parse_json
from shardwise.layout.slicing import Shape

# The most bytes of a header, and for each tensor that is known to be in it. A longer header is refused.
_MAX_HEADER_BYTES: Final = 10_000_000
_MAX_ENTRY_BYTES: Final = 1024

_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
        "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    }
)  # fmt: skip
_NAMES: Final[Mapping[torch.dtype, str]] = MappingProxyType({dtype: name for name, dtype in _DTYPES.items()})


class TensorHeader(NamedTuple):
    """Describes a tensor that a file will have: its name, safetensors' name of its dtype, its shape."""

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Describes a tensor in a file.

    Attributes:
        dtype: safetensors' name of it, such as BF16.
        start: the offset of its first byte from the start of the file.
        stop: the offset after its last byte.
    """

    name: str
    dtype: str
    shape: Shape
    start: int
    stop: int
    file: str


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype.

    >>> dtype_name(torch.bfloat16), named_dtype("F8_E4M3")
    ('BF16', torch.float8_e4m3fn)

    Raises:
        CheckpointError: the dtype has no name there.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            "dtype-has-no-name",
            f"{dtype} has no name in safetensors files; keep this state in one of {', '.join(_DTYPES)}",
        )
    return _NAMES[dtype]


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype that safetensors call by this name.

    Raises:
        CheckpointError: this library does not know it.
    """
    if name not in _DTYPES:
        raise CheckpointError(
            "unknown-dtype",
            f"dtype {name} is none of {', '.join(_DTYPES)}; convert this tensor with a tool that knows it",
        )
    return _DTYPES[name]


def encode_header(entries: Sequence[TensorHeader]) -> tuple[bytes, tuple[int, ...]]:
    """Return the header of a file of these tensors, and where each starts.

    Args:
        entries: in any order; the file has those of the largest elements first, and otherwise keeps their order.

    Returns:
        All bytes before the data; and for each entry, in the order given, the offset of its first byte from the start
        of the file.

    Raises:
        CheckpointError: two entries have one name.
    """
    places = sorted(range(len(entries)), key=lambda place: -ITEM_BYTES[entries[place].dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = [0] * len(entries), 0
    for place in places:
        name, dtype, shape = entries[place]
        if name in header:
            raise CheckpointError("piece-twice", f"{name} would stand twice in one file; give each piece once")
        starts[place], end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[place], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data_start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, tuple(data_start + start for start in starts)


class _EntryJson(TypedDict):
    dtype: str
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(max_length=64)]
    data_offsets: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=2, max_length=2)]


_HEADER: Final = TypeAdapter(dict[str, _EntryJson])


def read_header(path: Path, num_known: int = 0) -> tuple[FileTensor, ...]:
    """Return the tensors of a file, in the order of their bytes.

    Args:
        path: of the file; a link must not lead out of its folder.
        num_known: how many tensors the file must have; many of them allow a longer header.

    Raises:
        DamagedError: the file cannot be read, or is not what its header says: torn, or not of this format.
        CheckpointError: it has a dtype that this library does not know.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        with open(open_regular(path, path.parent), "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            longest = max(_MAX_HEADER_BYTES, num_known * _MAX_ENTRY_BYTES)
            if num_bytes < 8 or length > min(num_bytes - 8, longest):
                raise DamagedError(
                    "file-size-differs",
                    f"{where} has {num_bytes} bytes, which a header of {length} does not fit; fetch or write it again",
                )
            text = file.read(length)
    except OSError as error:
        raise DamagedError(
            "file-unreadable", f"{where} cannot be read: {error.strerror}; fetch or write it again"
        ) from error
    try:
        tensors = list(_file_tensors(text, path))
    except CheckpointError:
        raise
    except (ValueError, AttributeError) as error:
        what = mismatch(error) if isinstance(error, ValidationError) else error
        raise DamagedError(
            "header-malformed", f"{where} has a header that is not of safetensors: {what}; fetch or write it again"
        ) from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    _check_layout(tensors, 8 + length, num_bytes, where)
    return tuple(tensors)


def _file_tensors(header: bytes, path: Path) -> Iterator[FileTensor]:
    found = parse_json(header.decode(), path.name, "fetch or write it again")
    values = {name: value for name, value in found.items() if name != "__metadata__"}
    for name, entry in _HEADER.validate_python(values, strict=True).items():
        named_dtype(entry["dtype"])
        start, stop = (8 + len(header) + each for each in entry["data_offsets"])
        yield FileTensor(name, entry["dtype"], tuple(entry["shape"]), start, stop, path.name)


def _check_layout(tensors: Sequence[FileTensor], data_start: int, num_bytes: int, where: str) -> None:
    end = data_start
    for tensor in tensors:
        needed = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if tensor.start != end or tensor.stop - tensor.start != needed:
            raise DamagedError(
                "tensor-misplaced",
                f"{where}: {tensor.name} is at bytes {tensor.start} to {tensor.stop}, but must start "
                f"at {end} and have {needed} by its shape; fetch or write it again",
            )
        end = tensor.stop
    if end != num_bytes:
        raise DamagedError(
            "file-size-differs", f"{where} has {num_bytes} bytes, its header says {end}; fetch or write it again"
        )
