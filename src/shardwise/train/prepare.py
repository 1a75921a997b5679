"""Turns the config's data section into two memory-mapped splits, through a cache of token shards on disk.

`prepare_data` is called once, by the launcher or rank 0; the other ranks call `open_data` on the path it
returns. A shard is built in a folder of its own and renamed into place when all of it is on disk, so a reader
sees a whole shard or none, and of two builders one wins. Batches are made in `dataset`.

    data = prepare_data(config, cache_dir=Path("cache"))
    batches_for_step(data.train, first, config.batch, data_rank=0, num_data_ranks=1, seed=0, seq_len=256)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.config.errors import system_code
from shardwise.config.resolve import Config, ConfigError
from shardwise.models.presets import decoder_config
from shardwise.train.corpus import Corpus, CorpusChunk, CorpusCounts, open_corpus, read_pieces, sample_texts
from shardwise.train.dataset import (
    CHECKSUMS_NAME,
    DOCUMENTS_NAME,
    INDEX_NAME,
    SHARD_FORMAT,
    TOKENIZER_NAME,
    TOKENS_NAME,
    ShardIndex,
    TokenDataset,
    damaged,
    hash_file,
    read_index,
    split_point,
    write_checksums,
)
from shardwise.train.tokenizer import SAMPLE_BYTES, Tokenizer, load_tokenizer, make_tokenizer, tokenizer_fingerprint

BATCH_CHARS = 1 << 20
ABANDONED_AFTER_S = 3600.0
_KEY_BYTES = 12
_HEX = "[0-9a-f]"
_TEMPORARY = f".{2 * _KEY_BYTES * _HEX}.{32 * _HEX}.tmp"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PreparedData:
    """Holds the splits of the data and how to read them; `num_bytes` counts the UTF-8 text of both splits together."""

    path: Path
    source: str
    train: TokenDataset
    val: TokenDataset
    tokenizer: Tokenizer
    vocab_size: int
    num_bytes: int
    num_documents: int
    num_skipped: int

    @property
    def num_tokens(self) -> int:
        """Return the tokens of both splits."""
        return self.train.num_tokens + self.val.num_tokens


def prepare_data(config: Config, cache_dir: str | Path, progress: Progress | None = None) -> PreparedData:
    """Tokenize the data unless the cache has it, and open it.

    Args:
        config: `data` says what to read; the model's vocabulary is the size of a trained tokenizer.
        cache_dir: folder of the cache; `data.cache_dir` takes precedence.
        progress: called now and then with bytes read and bytes in all.

    Raises:
        ConfigError: the data cannot be read or is too short, the tokenizer does not fit, or the cache cannot
            be written.
    """
    data = config.data
    if data.val_fraction >= 1:
        raise ConfigError(
            "nothing-to-train-on",
            f"data.val_fraction={data.val_fraction} leaves nothing to train on; use less than 1, such as 0.05",
        )
    cache = Path(data.cache_dir or cache_dir).expanduser().absolute()
    corpus = open_corpus(data, exclude=(cache, Path(config.run.dir)))
    vocab_size = decoder_config(config.model).vocab_size
    decided_by = [
        SHARD_FORMAT,
        corpus.fingerprint(),
        tokenizer_fingerprint(data.tokenizer, vocab_size),
        data.val_fraction,
    ]
    path = cache / hashlib.blake2b(repr(decided_by).encode(), digest_size=_KEY_BYTES).hexdigest()
    if not _is_whole(path):
        tokenizer = make_tokenizer(data.tokenizer, vocab_size, sample_texts(corpus, SAMPLE_BYTES))
        decoder_config(config.model, vocab_size=tokenizer.vocab_size)  # refuses before the work, not after it
        try:
            _build(path, corpus, tokenizer, data.val_fraction, progress)
        except OSError as error:
            raise ConfigError(
                system_code(error, "folder-not-writable"),
                f"cannot write the token cache {path}: {error.strerror}; "
                "set data.cache_dir to a folder with free space that you may write to",
            ) from None
    return open_data(path, config)


def open_data(path: str | Path, config: Config, checks_documents: bool = True) -> PreparedData:
    """Open the shard that `prepare_data` wrote to `path`; the tokens are read when they are needed.

    Args:
        path: the shard's folder.
        config: the run's config.
        checks_documents: as for `read_index`.

    Raises:
        ConfigError: the shard is missing or not whole, too short for `data.seq_len`, or its tokenizer has
            more tokens than `model.vocab_size`.
    """
    path = Path(path)
    index = read_index(path, checks_documents)
    tokenizer = load_tokenizer(path / TOKENIZER_NAME)
    if (index.vocab_size, index.eot_id) != (tokenizer.vocab_size, tokenizer.eot_id):
        raise damaged(path, f"{INDEX_NAME} is of a vocabulary of {index.vocab_size}, {TOKENIZER_NAME} of another")
    decoder_config(config.model, vocab_size=index.vocab_size)  # refuses a model too small for the tokens
    starts = np.memmap(path / DOCUMENTS_NAME, dtype=np.uint64, mode="r")
    val_fraction, seq_len = config.data.val_fraction, config.data.seq_len
    cut = split_point(starts, index.num_tokens, val_fraction=val_fraction, seq_len=seq_len)
    return PreparedData(
        path=path,
        source=index.source,
        train=TokenDataset(path, stop=cut, index=index),
        val=TokenDataset(path, start=cut, index=index),
        tokenizer=tokenizer,
        vocab_size=index.vocab_size,
        num_bytes=index.num_bytes,
        num_documents=index.num_documents,
        num_skipped=index.num_skipped,
    )


def _is_whole(path: Path) -> bool:
    try:
        read_index(path)
    except ConfigError:
        return False
    return True


def _build(path: Path, corpus: Corpus, tokenizer: Tokenizer, val_fraction: float, progress: Progress | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    folder = _temporary(path)
    folder.mkdir()
    try:
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        tally = CorpusCounts()
        encoded = _encode(corpus, tokenizer, dtype, tally, progress)
        num_tokens = _write_tokens(folder, encoded, val_fraction)
        write_checksums(folder)
        (folder / TOKENIZER_NAME).write_text(tokenizer.to_json(), encoding="utf-8")
        index = ShardIndex(
            source=corpus.label,
            dtype="uint16" if dtype == np.uint16 else "uint32",
            vocab_size=tokenizer.vocab_size,
            eot_id=tokenizer.eot_id,
            num_tokens=num_tokens,
            num_documents=tally.num_documents,
            num_bytes=tally.num_text_bytes,
            num_skipped=tally.num_skipped,
            tokens_hash=hash_file(folder / TOKENS_NAME),
            hashes={name: hash_file(folder / name) for name in (CHECKSUMS_NAME, DOCUMENTS_NAME, TOKENIZER_NAME)},
        )
        (folder / INDEX_NAME).write_text(index.to_json(), encoding="utf-8")
        for name in (TOKENS_NAME, CHECKSUMS_NAME, DOCUMENTS_NAME, TOKENIZER_NAME, INDEX_NAME, "."):
            _sync(folder / name)
        _publish(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _encode(
    corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype, tally: CorpusCounts, progress: Progress | None
) -> Iterator[tuple[NDArray, bool]]:
    """Yield the token ids of every piece, and whether it is its document's last one, which gets the end of text."""
    num_all = corpus.num_bytes
    for pieces in _in_batches(read_pieces(corpus, tally)):
        for piece, ids in zip(pieces, tokenizer.encode_batch([piece.text for piece in pieces]), strict=True):
            ids = np.append(ids, tokenizer.eot_id) if piece.ends_document else ids
            yield ids.astype(dtype), piece.ends_document
        if progress is not None:
            progress(tally.num_read_bytes, num_all)


def _in_batches(pieces: Iterator[CorpusChunk]) -> Iterator[list[CorpusChunk]]:
    batch: list[CorpusChunk] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _write_tokens(folder: Path, encoded: Iterator[tuple[NDArray, bool]], val_fraction: float) -> int:
    """Write the token and document files, the documents to hold out last, and return the number of tokens.

    A document is held out when less than `val_fraction` of the tokens before it is: that spreads the held-out
    ones over the whole corpus in one pass, and favours neither short nor long ones.
    """
    num_tokens, starts = [0, 0], (array("Q"), array("Q"))
    held_out, at_start = 0, True
    kept_path, held_out_path = folder / TOKENS_NAME, folder / "held_out.bin"
    with kept_path.open("wb") as kept_file, held_out_path.open("w+b") as held_out_file:
        for ids, ends_document in encoded:
            if at_start:
                held_out = int(num_tokens[1] < val_fraction * sum(num_tokens))
                starts[held_out].append(num_tokens[held_out])
            (kept_file, held_out_file)[held_out].write(ids.tobytes())
            num_tokens[held_out] += len(ids)
            at_start = ends_document
        held_out_file.seek(0)
        shutil.copyfileobj(held_out_file, kept_file)
    held_out_path.unlink()
    held_out_starts = np.array(starts[1], dtype=np.uint64) + np.uint64(num_tokens[0])
    all_starts = np.concatenate([np.array(starts[0], dtype=np.uint64), held_out_starts])
    (folder / DOCUMENTS_NAME).write_bytes(all_starts.tobytes())
    return sum(num_tokens)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`; keep a whole shard that another process put there, and delete a broken one."""
    if path.exists() and not _is_whole(path):
        broken = path.rename(_temporary(path))
        shutil.rmtree(broken, ignore_errors=True)
    try:
        folder.rename(path)
    except OSError:
        if not _is_whole(path):
            raise
    _sync(path.parent)


def _temporary(path: Path) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"


def _remove_abandoned(cache: Path) -> None:
    """Delete the folders of killed builds; a build that is still running writes to its folder all the time."""
    for folder in cache.glob(_TEMPORARY):
        try:
            newest = max(entry.stat().st_mtime for entry in (folder, *folder.iterdir()))
        except OSError:
            continue
        if time.time() - newest > ABANDONED_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)
