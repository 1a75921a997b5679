"""Files in the format of safetensors: a header in JSON, then the bytes of tensors. Headers and dtypes only.

Eight bytes give the length of the header, little-endian; spaces pad it, so that data starts at a multiple of 8.
Tensors follow one another without holes, from the largest elements to the smallest, so that each starts at a multiple
of its element's size: who maps the file into memory may use them where they are.

>>> header, offsets = encode_header([Entry("bias", "BF16", (3,)), Entry("weight", "F32", (2, 3))])
>>> len(header), offsets  # the weight comes first
(160, (184, 160))
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from shardwise.checkpoint.manifest import ITEM_BYTES, CheckpointError, DamagedError
from shardwise.layout.pieces import Shape

# The public library refuses longer headers, too.
MAX_HEADER_BYTES: Final = 100_000_000

_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
        "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    }
)  # fmt: skip
_NAMES: Final[Mapping[torch.dtype, str]] = MappingProxyType({dtype: name for name, dtype in _DTYPES.items()})


class Entry(NamedTuple):
    """A tensor that a file shall have: its name, safetensors' name of its dtype, its shape."""

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file.

    Attributes:
        name: as in the file.
        dtype: safetensors' name of it, such as BF16.
        shape: of it.
        start: of its first byte, from the start of the file.
        stop: behind its last.
    """

    name: str
    dtype: str
    shape: Shape
    start: int
    stop: int


def dtype_name(dtype: torch.dtype) -> str:
    """Safetensors' name of a dtype.

    >>> dtype_name(torch.bfloat16), named_dtype("F8_E4M3")
    ('BF16', torch.float8_e4m3fn)

    Raises:
        CheckpointError: it has none.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{dtype} has no name in safetensors files; keep this state in one of {', '.join(_DTYPES)}"
        )
    return _NAMES[dtype]


def named_dtype(name: str) -> torch.dtype:
    """The dtype that safetensors call by this name.

    Raises:
        CheckpointError: this library does not know it.
    """
    if name not in _DTYPES:
        raise CheckpointError(
            f"dtype {name} is none of {', '.join(_DTYPES)}; convert this tensor with a tool that knows it"
        )
    return _DTYPES[name]


def encode_header(entries: Sequence[Entry]) -> tuple[bytes, tuple[int, ...]]:
    """The header of a file of these tensors, and where each starts.

    Args:
        entries: in any order; the file has those of the largest elements first, and otherwise keeps their order.

    Returns:
        All bytes before the data; and of each of the entries, in the order given, the offset of its first byte from the
        start of the file.

    Raises:
        CheckpointError: two entries have one name.
    """
    places = sorted(range(len(entries)), key=lambda place: -ITEM_BYTES[entries[place].dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = [0] * len(entries), 0
    for place in places:
        name, dtype, shape = entries[place]
        if name in header:
            raise CheckpointError(f"{name} would stand twice in one file; give each piece once")
        starts[place], end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[place], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data_start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, tuple(data_start + start for start in starts)


def read_header(path: Path) -> tuple[FileTensor, ...]:
    """The tensors of a file, in the order of their bytes.

    Raises:
        DamagedError: the file cannot be read, or is not what its header says: torn, or not of this format.
        CheckpointError: it has a dtype that this library does not know.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or length > min(num_bytes - 8, MAX_HEADER_BYTES):
                raise DamagedError(
                    f"{where} has {num_bytes} bytes, which a header of {length} does not fit; fetch or write it anew"
                )
            text = file.read(length)
    except OSError as error:
        raise DamagedError(f"{where} cannot be read: {error.strerror}; fetch or write it anew") from error
    try:
        header = json.loads(text)
        tensors = [_file_tensor(name, values, 8 + length) for name, values in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedError(
            f"{where} has a header that is not of safetensors: {error}; fetch or write it anew"
        ) from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    _check_layout(tensors, 8 + length, num_bytes, where)
    return tuple(tensors)


def _file_tensor(name: str, values: Mapping[str, Any], data_start: int) -> FileTensor:
    start, stop = values["data_offsets"]
    named_dtype(values["dtype"])
    return FileTensor(name, values["dtype"], tuple(map(int, values["shape"])), data_start + start, data_start + stop)


def _check_layout(tensors: Sequence[FileTensor], data_start: int, num_bytes: int, where: str) -> None:
    end = data_start
    for tensor in tensors:
        needed = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if tensor.start != end or tensor.stop - tensor.start != needed or min(tensor.shape, default=0) < 0:
            raise DamagedError(
                f"{where}: {tensor.name} lies at bytes {tensor.start} to {tensor.stop}, but must start "
                f"at {end} and have {needed} by its shape; fetch or write it anew"
            )
        end = tensor.stop
    if end != num_bytes:
        raise DamagedError(f"{where} has {num_bytes} bytes, its header says {end}; fetch or write it anew")
