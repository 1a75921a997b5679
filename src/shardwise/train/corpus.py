"""Reads the data to train on: text, records of text or chats, tokens of Megatron-LM, or Python's own library.

`open_corpus` lists files and reads none; `read_pieces` streams their text, a piece at a time, whatever the
size of a file.

>>> corpus = open_corpus(DataConfig())
>>> tally = CorpusCounts()
>>> first = next(read_pieces(corpus, tally))
>>> len(first.text) <= PIECE_CHARS, corpus.num_bytes <= STDLIB_BYTES
(True, True)
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from shardwise.config.errors import ConfigError
from shardwise.config.near_paths import near
from shardwise.config.resolve import DataConfig
from shardwise.train.chat import is_chat, whole_text

PIECE_CHARS = 1 << 18
STDLIB_BYTES = 12_000_000
STDLIB_FILE_BYTES = 500_000
# Excludes installed packages, tests and their data, generated tables and generated help.
_STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
_ROWS_AT_ONCE = 1000
# A record is parsed at once, into several times its bytes.
_MAX_LINE_BYTES: Final = 1 << 26


_MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
_DTYPES: Final = MappingProxyType({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})
_FIX: Final = "write it again by Megatron-LM's tools/preprocess_data.py"


@dataclass(frozen=True)
class TextFile:
    """Describes a file of the corpus as its folder lists it; messages call it `name`."""

    path: Path
    name: str
    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path, name: str) -> Self:
        """Ask the system about a file."""
        status = path.stat()
        return cls(path, name, status.st_size, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns)


def hash_of_files(files: Iterable[TextFile], text_key: str) -> str:
    """Return a hash of every file's path, size and times of change, and of `text_key`.

    A program that writes to a file may set the time of its content back (mtime), but not that of its entry (ctime).
    """
    digest = hashlib.blake2b(text_key.encode(), digest_size=16)
    for file in files:
        times = f"{file.mtime_ns}\0{file.ctime_ns}"
        digest.update(f"\0{file.path}\0{file.num_bytes}\0{times}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Lists the files to read, in order.

    Attributes:
        skip_binary: files that are not UTF-8 text are skipped, not refused.
        takes_chats: records may be chats, which a model's chat template writes out.
    """

    label: str
    files: tuple[TextFile, ...]
    text_key: str
    skip_binary: bool
    takes_chats: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files on disk."""
        return sum(file.num_bytes for file in self.files)

    def fingerprint(self) -> str:
        """Return a hash that changes with the files and the key."""
        return hash_of_files(self.files, self.text_key)


class Piece(NamedTuple):
    """Holds a document, or a part of a long text file, which ends at a line end where it can.

    Attributes:
        ends_document: whether it is the last part.
        chat: a record that a chat template is to write out, with an empty `text`; None for a text.
        where: the place of a chat, for messages.
    """

    text: str
    ends_document: bool = True
    chat: Mapping[str, Any] | None = None
    where: str = ""


@dataclass
class CorpusCounts:
    """Counts what `read_pieces` has read: documents, bytes of the files, and files skipped."""

    num_documents: int = 0
    num_read_bytes: int = 0
    num_skipped: int = 0


def open_corpus(data: DataConfig, exclude: Collection[Path] = (), takes_chats: bool = False) -> Corpus:
    """List the files of `data.path`, or of the standard library without one; nothing is read.

    Args:
        exclude: folders below `data.path` to leave out, such as the token cache.

    Raises:
        ConfigError: the path is missing, unreadable, empty or neither a file nor a folder.
    """
    if data.path is None:
        return _standard_library(data.text_key)
    path = Path(data.path).expanduser().absolute()
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        in_folder = "" if Path(data.path).expanduser().is_absolute() else f" in {Path.cwd()}"
        fix = near(data.path) or "; give a text file, a folder or a .jsonl file"
        raise ConfigError("data-missing", f"data.path={data.path} does not exist{in_folder}{fix}") from None
    except OSError as error:
        _refuse_unreadable(path, error)
    if stat.S_ISDIR(mode):
        files = _list_folder(path, frozenset(folder.absolute() for folder in exclude))
        if not any(file.num_bytes for file in files):
            contents = f"{len(files)} files, all empty" if files else "no files (hidden ones are left out)"
            raise ConfigError(
                "no-text", f"data.path={data.path} holds {contents}; give a folder with text or .jsonl files"
            )
    elif stat.S_ISREG(mode):
        files = [TextFile.of(path, path.name)]
        if not files[0].num_bytes:
            raise ConfigError("no-text", f"data.path={data.path} is empty; give a file with text")
    else:
        raise ConfigError(
            "data-not-a-file", f"data.path={data.path} is neither a file nor a folder; write the text to a file first"
        )
    return Corpus(data.path, tuple(files), data.text_key, stat.S_ISDIR(mode), takes_chats)


def read_pieces(corpus: Corpus, tally: CorpusCounts) -> Iterator[Piece]:
    """Stream the corpus in order and count in `tally`; empty documents are dropped.

    Raises:
        ConfigError: a file cannot be read, a single file is not UTF-8 text, a record is no object with the key, nor a
            chat where the corpus takes chats, or the whole corpus holds no text.
    """
    for file in corpus.files:
        try:
            for piece in _pieces_of(file, corpus, tally):
                tally.num_documents += piece.ends_document
                yield piece
        except OSError as error:
            _refuse_unreadable(file.path, error)
    if not tally.num_documents:
        binary = f", {tally.num_skipped} of them not UTF-8 text" if tally.num_skipped else ", all without text"
        raise ConfigError(
            "no-text",
            f"data.path={corpus.label} holds no text: {len(corpus.files)} files read{binary}; "
            f"give UTF-8 text or JSONL with data.text_key={corpus.text_key}",
        )


def sample_texts(corpus: Corpus, num_bytes: int) -> Iterator[str]:
    """Yield about `num_bytes` of the corpus in pieces spread evenly over it; all of it where it is smaller."""
    tally, num_taken, num_all = CorpusCounts(), 0, corpus.num_bytes
    for piece in read_pieces(corpus, tally):
        if num_taken * num_all < num_bytes * tally.num_read_bytes:
            num_taken += len(piece.text.encode())
            yield piece.text


def _standard_library(text_key: str) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    listed = _list_folder(root, exclude=_STDLIB_EXCLUDED) if root.is_dir() else []
    sources = [file for file in listed if file.path.suffix == ".py" and 0 < file.num_bytes <= STDLIB_FILE_BYTES]
    if not sources:
        raise ConfigError(
            "no-default-data",
            f"data.path is not given and Python's source is not in {root}; give data.path=FILE or FOLDER",
        )
    # Ordered by a hash of the name: the cap leaves a fair sample, and the order is the same everywhere.
    sources.sort(key=lambda file: hashlib.blake2b(file.name.encode()).digest())
    sampled, num_bytes = [], 0
    for file in sources:
        if num_bytes + file.num_bytes <= STDLIB_BYTES:
            sampled.append(file)
            num_bytes += file.num_bytes
    label = f"the source of Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
    return Corpus(label=label, files=tuple(sampled), text_key=text_key, skip_binary=True)


def _list_folder(root: Path, exclude: Collection[Path | str]) -> list[TextFile]:
    """List every file below `root`, sorted, without hidden ones and folders in `exclude` (by name or path)."""
    files = []
    for folder, subfolders, names in os.walk(root, onerror=lambda error: _refuse_unreadable(root, error)):
        parent = Path(folder)
        subfolders[:] = sorted(
            name
            for name in subfolders
            if not name.startswith(".") and name not in exclude and parent / name not in exclude
        )
        for path in (parent / name for name in sorted(names) if not name.startswith(".")):
            try:
                if path.is_file():
                    files.append(TextFile.of(path, path.relative_to(root).as_posix()))
            except OSError as error:
                _refuse_unreadable(path, error)
    return files


def _pieces_of(file: TextFile, corpus: Corpus, tally: CorpusCounts) -> Iterator[Piece]:
    """Yield the pieces of a text file, or each record of a file of records."""
    read = _RECORDS.get(file.path.suffix.lower())
    if read is not None:
        for record, where in read(file, tally):
            if corpus.text_key in record or not is_chat(record):
                if text := _text_of(record, where, corpus.text_key):
                    yield Piece(text)
            elif corpus.takes_chats:
                yield Piece("", chat=record, where=where)
            else:
                raise ConfigError(
                    "chats-need-model",
                    f"{where} is a chat, which a preset has no template for; give model.path a Hugging Face folder, or "
                    "set data.text_key",
                )
        return
    try:
        if corpus.skip_binary:
            for _ in _text_pieces(file.path):
                pass
        for piece in _text_pieces(file.path):
            tally.num_read_bytes += len(piece.text.encode())
            yield piece
    except UnicodeDecodeError as error:
        if not corpus.skip_binary:
            raise ConfigError(
                "not-utf8", f"data.path={corpus.label} is not UTF-8 text ({error.reason}); convert it to UTF-8 or JSONL"
            ) from None
        tally.num_skipped += 1
        tally.num_read_bytes += file.num_bytes


def _text_pieces(path: Path) -> Iterator[Piece]:
    """Yield the file's text in pieces of at most PIECE_CHARS; a zero byte, valid UTF-8 but never text, is refused."""
    previous, half = "", PIECE_CHARS // 2
    with path.open(encoding="utf-8-sig", newline="") as file:
        while text := file.read(half):
            text += file.readline(half)
            if "\0" in text:
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "it holds zero bytes")
            if previous:
                yield Piece(previous, ends_document=False)
            previous = text
    if previous:
        yield Piece(previous)


def _jsonl_records(file: TextFile, tally: CorpusCounts) -> Iterator[tuple[Mapping[str, Any], str]]:
    with file.path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE_BYTES), b""), start=1):
            tally.num_read_bytes += len(line)
            if line.strip():
                where = f"{file.name} line {number}"
                if len(line) == _MAX_LINE_BYTES:
                    raise ConfigError(
                        "jsonl-line-long",
                        f"{where} has {_MAX_LINE_BYTES:,} bytes or more; write one JSON object of less on each line",
                    )
                yield _parse_line(line, where), where


def _parquet_records(file: TextFile, tally: CorpusCounts) -> Iterator[tuple[Mapping[str, Any], str]]:
    if find_spec("pyarrow") is None:
        raise ConfigError("extra-missing", f"{file.name} needs pyarrow to be read; pip install 'shardwise[data]'")
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(file.path)
        num_before = 0
        for rows in table.iter_batches(_ROWS_AT_ONCE):
            tally.num_read_bytes += file.num_bytes * rows.num_rows // max(1, table.metadata.num_rows)
            for number, row in enumerate(rows.to_pylist(), start=num_before + 1):
                yield {key: value for key, value in row.items() if value is not None}, f"{file.name} row {number}"
            num_before += rows.num_rows
    except ArrowException as error:
        line = str(error).partition("\n")[0]
        raise ConfigError("not-parquet", f"{file.name} is not Parquet ({line}); write it again") from None


_RECORDS: Final = MappingProxyType({".jsonl": _jsonl_records, ".ndjson": _jsonl_records, ".parquet": _parquet_records})


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError("not-utf8", f"{where} is not UTF-8 ({error.reason}); convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("not-json", f"{where} is not JSON ({error}); write one JSON object on each line") from None
    if not isinstance(record, dict):
        raise ConfigError(
            "jsonl-not-object",
            f"{where} is a JSON {type(record).__name__}, not an object; write one JSON object on each line",
        )
    return record


def _text_of(record: Mapping[str, Any], where: str, text_key: str) -> str:
    if text_key not in record:
        keys = ", ".join(list(record)[:8]) or "none"
        raise ConfigError(
            "jsonl-key-missing", f"{where} has no key {text_key} (its keys: {keys}); set data.text_key to one of them"
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise ConfigError(
            "jsonl-text-type",
            f"{where}: {text_key} is {type(text).__name__}, not text; set data.text_key to one that is text",
        )
    return whole_text(text)


def _refuse_unreadable(path: Path, error: OSError) -> NoReturn:
    name = error.filename or path
    raise ConfigError(
        "file-unreadable", f"cannot read {name}: {error.strerror}; make it readable or move it away"
    ) from None


@dataclass(frozen=True)
class MegatronCorpus:
    """Describes tokens that Megatron-LM's preprocessing wrote: a pair of files, of tokens and of their index.

    The index is little-endian: nine bytes `MMIDIDX\\0\\0`, a version (uint64, 1), the code of the tokens' type (uint8),
    the numbers of sequences and of document bounds (uint64 each); then the arrays, of which these are memory maps.

    Attributes:
        lengths: tokens of each sequence; `pointers` are the bytes before each.
        bounds: sequences before each document, and in all.
    """

    label: str
    files: tuple[TextFile, TextFile]
    dtype: str
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def fingerprint(self) -> str:
        """Return a hash that changes with the files."""
        return hash_of_files(self.files, "")

    def documents(self, vocab_size: int) -> Iterator[NDArray]:
        """Yield the tokens of each document that has any, as a memory map: its sequences follow each other.

        Raises:
            ConfigError: a token is not one of the tokenizer's, or there are no tokens.
        """
        if not self.lengths.any():
            raise ConfigError(
                "no-text", f"data.path={self.label} holds no tokens in its {len(self.lengths):,} sequences; give text"
            )
        tokens = np.memmap(self.files[0].path, dtype=np.uint8, mode="r")
        itemsize = np.dtype(self.dtype).itemsize
        for first, last in pairwise(self.bounds.tolist()):
            starts, sizes = (
                self.pointers[first:last].tolist(),
                (self.lengths[first:last].astype(np.int64) * itemsize).tolist(),
            )
            spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True) if size]
            if not spans:
                continue
            if all(stop == start for (_, stop), (start, _) in pairwise(spans)):
                spans = [(spans[0][0], spans[-1][1])]
            parts = [tokens[start:stop].view(self.dtype) for start, stop in spans]
            document = parts[0] if len(parts) == 1 else np.concatenate(parts)
            for wrong in (document.min(), document.max()):
                if not 0 <= wrong < vocab_size:
                    raise ConfigError(
                        "megatron-token-range",
                        f"{self.label} has token {wrong}, and data.tokenizer has {vocab_size}; give the tokenizer "
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
    if data.path is None or not all(file.is_file() for file in pair):
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
        index[ends[column] : ends[column + 1]].view(dtype) for column, dtype in enumerate(("<i4", "<i8", "<i8"))
    )
    corpus = MegatronCorpus(label, (tokens, indices), _DTYPES[code], lengths, pointers, bounds)
    # No sum or difference of two values of the file is taken before both are in range: it might wrap.
    if not num_bounds or bounds[0] != 0 or bounds[-1] != num_sequences or (bounds[1:] < bounds[:-1]).any():
        raise ValueError(f"its documents do not take up its {num_sequences:,} sequences")
    if num_sequences and min(lengths.min(), pointers.min()) < 0:
        raise ValueError(f"a sequence has {lengths.min():,} tokens or begins at byte {pointers.min():,}")
    sizes = lengths.astype(np.int64) * np.dtype(corpus.dtype).itemsize
    if num_sequences and (pointers > tokens.num_bytes - sizes).any():
        raise ValueError(f"its sequences end beyond the {tokens.num_bytes:,} bytes of {tokens.name}")
    if num_sequences and (pointers[0] != 0 or (pointers[1:] != pointers[:-1] + sizes[:-1]).any()):
        raise ValueError(f"its sequences do not follow each other in {tokens.name}")
    if sizes.sum() != tokens.num_bytes:
        raise ValueError(f"its sequences have {sizes.sum():,} of the {tokens.num_bytes:,} bytes of {tokens.name}")
    return corpus
