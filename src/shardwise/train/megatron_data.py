"""Reads token data that Megatron-LM's preprocessing wrote: `PREFIX.bin` holds the tokens, `PREFIX.idx` says where.

The index is little-endian: nine bytes `MMIDIDX\\0\\0`, a version (uint64, 1), the code of the tokens' type (uint8), the
numbers of sequences and of document bounds (uint64 each); then for each sequence its length (int32) and its first byte
in the other file (int64), and the documents' bounds as numbers of sequences (int64), from 0 to the last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardwise.config.resolve import ConfigError, DataConfig
from shardwise.train.corpus import TextFile, hash_of_files

_MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
_DTYPES: Final = MappingProxyType({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})
_FIX: Final = "write it again by Megatron-LM's tools/preprocess_data.py"


@dataclass(frozen=True)
class MegatronCorpus:
    """Describes a pair of files, tokens and index; the arrays are memory maps of the index.

    Attributes:
        label: as the user gave it.
        dtype: of the tokens.
        lengths: tokens of each sequence.
        pointers: bytes before each sequence.
        bounds: sequences before each document, and in all.
    """

    label: str
    files: tuple[TextFile, TextFile]
    dtype: str
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tokens."""
        return int(self.lengths.sum(dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def fingerprint(self) -> str:
        """Return a hash that changes with the files."""
        return hash_of_files(self.files, "")

    def documents(self, vocab_size: int) -> Iterator[NDArray]:
        """Yield the tokens of each document that has any.

        Raises:
            ConfigError: a token is not one of the tokenizer's.
        """
        tokens = np.memmap(self.files[0].path, dtype=np.uint8, mode="r")
        itemsize = np.dtype(self.dtype).itemsize
        for first, last in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            spans = zip(self.pointers[first:last].tolist(), self.lengths[first:last].tolist(), strict=True)
            parts = [tokens[start : start + length * itemsize].view(self.dtype) for start, length in spans if length]
            if not parts:
                continue
            document = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if document.min() < 0 or document.max() >= vocab_size:
                raise ConfigError(
                    "megatron-token-range",
                    f"{self.label} has token {document.max()}, and data.tokenizer has {vocab_size}; give the tokenizer "
                    "that the data were written with",
                )
            yield document


def open_megatron(data: DataConfig, has_tokenizer: bool) -> MegatronCorpus | None:
    """Open the pair of files that `data.path` names, with `.bin`, `.idx` or neither; None where it names none.

    Raises:
        ConfigError: the index is not one of Megatron-LM's or does not fit the tokens, or the tokenizer is missing.
    """
    path = Path(data.path or "").expanduser().absolute()
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = [prefix.with_name(prefix.name + end) for end in (".bin", ".idx")]
    if data.path is None or not all(each.is_file() for each in pair):
        return None
    if not has_tokenizer:
        raise ConfigError(
            "megatron-without-tokenizer",
            f"data.path={data.path} holds tokens of Megatron-LM's; name their tokenizer by data.tokenizer",
        )
    try:
        return _read_index(data.path, TextFile.of(pair[0], pair[0].name), TextFile.of(pair[1], pair[1].name))
    except (struct.error, ValueError) as error:
        raise ConfigError("megatron-index", f"{pair[1]}: {error}; {_FIX}") from None


def _read_index(label: str, tokens: TextFile, indices: TextFile) -> MegatronCorpus:
    index = np.memmap(indices.path, dtype=np.uint8, mode="r")
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack(index[: _HEADER.size].tobytes())
    if magic != _MAGIC or version != 1:
        raise ValueError("it is not an index of version 1")
    if code not in _DTYPES:
        raise ValueError(f"tokens of type {code} are no whole numbers")
    ends = np.cumsum([_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_bounds], dtype=object)
    if len(index) < ends[-1]:  # data of several kinds have one more byte a sequence
        raise ValueError(f"it has {len(index):,} bytes where {ends[-1]:,} belong")
    lengths, pointers, bounds = (
        index[ends[part] : ends[part + 1]].view(dtype) for part, dtype in enumerate(("<i4", "<i8", "<i8"))
    )
    corpus = MegatronCorpus(label, (tokens, indices), _DTYPES[code], lengths, pointers, bounds)
    stops = pointers + lengths.astype(np.int64) * np.dtype(corpus.dtype).itemsize
    if not num_bounds or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise ValueError(f"its documents do not take up its {num_sequences:,} sequences")
    if num_sequences and (min(lengths.min(), pointers.min()) < 0 or stops.max() > tokens.num_bytes):
        raise ValueError(f"its sequences end at byte {stops.max():,} of {tokens.num_bytes:,}")
    return corpus
