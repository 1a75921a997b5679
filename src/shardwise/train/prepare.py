"""Turns the config's data section into two memory-mapped splits, through a cache of token shards on disk.

`prepare_data` is called once, by the launcher or rank 0; the other ranks call `open_data` on the path it
returns. A shard is built in a folder of its own and renamed into place, so a reader sees a whole shard or none, and of
two builders one wins.

    data = prepare_data(config, cache_dir=Path("cache"))
    batches_for_step(data.train, first, config.batch, data_rank=0, num_data_ranks=1, seed=0, seq_len=256)
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shardwise.config.errors import system_code
from shardwise.config.resolve import Config, ConfigError
from shardwise.train.chat import ChatEncoder
from shardwise.train.corpus import (
    Corpus,
    CorpusChat,
    CorpusChunk,
    CorpusCounts,
    MegatronCorpus,
    open_corpus,
    open_megatron,
    read_pieces,
    sample_texts,
)
from shardwise.train.dataset import (
    COUNTS_NAME,
    DOCUMENTS_NAME,
    SHARD_FORMAT,
    TOKENIZER_NAME,
    TOKENS_NAME,
    PackedDataset,
    ShardIndex,
    TokenDataset,
    read_index,
    seal,
    split_point,
)
from shardwise.train.job_model import JobModel, job_model, model_folder, open_tokenizer
from shardwise.train.tokenizer import SAMPLE_BYTES, Tokenizer, load_tokenizer, make_tokenizer, tokenizer_fingerprint

BATCH_CHARS = 1 << 20
# A guess, by which progress is shown as often for chats as for text.
_CHAT_CHARS = 1000
_KEY_BYTES = 12

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PreparedData:
    """Holds the splits of the data and how to read them; `num_bytes` counts the UTF-8 text of both splits together."""

    path: Path
    source: str
    train: TokenDataset | PackedDataset
    val: TokenDataset | PackedDataset
    tokenizer: Tokenizer
    vocab_size: int
    num_bytes: int
    num_documents: int
    num_skipped: int

    @property
    def num_tokens(self) -> int:
        """Return the tokens of both splits."""
        return self.train.num_tokens + self.val.num_tokens

    @property
    def words(self) -> str:
        """Return what the data are in a few words."""
        kind = "chats" if isinstance(self.train, PackedDataset) else "documents"
        text = f"{self.source}: {self.num_documents:,} {kind}, {self.num_tokens:,} tokens of {self.vocab_size:,} kinds"
        splits = [each for each in (self.train, self.val) if isinstance(each, PackedDataset)]
        num_cut = sum(each.num_cut for each in splits)
        return f"{text}; {num_cut:,} longer than data.seq_len lose their end" if num_cut else text


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
    model = job_model(config)
    chats = _chat_encoder(config, model)
    theirs = None if chats is None else Tokenizer.of_transformers(chats.tokenizer, model.name)
    corpus = open_megatron(data, data.tokenizer is not None or chats is not None) or open_corpus(
        data, exclude=(cache, Path(config.run.dir)), takes_chats=chats is not None
    )
    tokens_by = _tokenizer_fingerprint(config, model, chats, theirs)
    decided_by = [SHARD_FORMAT, corpus.fingerprint(), tokens_by, data.val_fraction]
    path = cache / hashlib.blake2b(repr(decided_by).encode(), digest_size=_KEY_BYTES).hexdigest()
    if not _is_whole(path):
        tokenizer = theirs
        if tokenizer is None:
            texts = () if isinstance(corpus, MegatronCorpus) else sample_texts(corpus, SAMPLE_BYTES)
            tokenizer = make_tokenizer(data.tokenizer, model.vocab_size, texts)
        model.for_tokens(tokenizer.vocab_size)  # refuses before the work, not after it
        try:
            tally = CorpusCounts()
            encoded = _encode(corpus, tokenizer, chats, tally, progress)
            _build(path, encoded, tally, corpus.label, tokenizer, data.val_fraction)
        except OSError as error:
            raise ConfigError(
                system_code(error, "folder-not-writable"),
                f"cannot write the token cache {path}: {error.strerror}; "
                "set data.cache_dir to a folder with free space that you may write to",
            ) from None
    return open_data(path, config)


def open_data(path: str | Path, config: Config) -> PreparedData:
    """Open the shard that `prepare_data` wrote to `path`; the tokens are read when they are needed.

    Raises:
        ConfigError: the shard is missing or not whole, too short for `data.seq_len`, or its tokenizer has more tokens
            than the model.
    """
    path = Path(path)
    index = read_index(path)
    tokenizer = load_tokenizer(path / TOKENIZER_NAME, index.eot_id)
    job_model(config).for_tokens(index.vocab_size)  # refuses a model too small for the tokens
    starts = np.memmap(path / DOCUMENTS_NAME, dtype=np.uint64, mode="r")
    val_fraction, seq_len = config.data.val_fraction, config.data.seq_len
    splits: tuple[TokenDataset | PackedDataset, TokenDataset | PackedDataset]
    if index.has_chats:
        splits = _packed_splits(path, index, starts, config)
    else:
        cut = split_point(starts, index.num_tokens, val_fraction=val_fraction, seq_len=seq_len)
        splits = TokenDataset(path, stop=cut, index=index), TokenDataset(path, start=cut, index=index)
    return PreparedData(
        path=path,
        source=index.source,
        train=splits[0],
        val=splits[1],
        tokenizer=tokenizer,
        vocab_size=index.vocab_size,
        num_bytes=index.num_bytes,
        num_documents=index.num_documents,
        num_skipped=index.num_skipped,
    )


def _packed_splits(
    path: Path, index: ShardIndex, starts: NDArray, config: Config
) -> tuple[PackedDataset, PackedDataset]:
    """Split whole chats, at least one for each side; those to hold out are the last."""
    if len(starts) < 2:
        raise ConfigError(
            "data-too-short", f"data.path={config.data.path} holds one chat, and one is held out; give more"
        )
    wanted = np.searchsorted(starts, round((1 - config.data.val_fraction) * index.num_tokens))
    number = min(max(1, int(wanted)), len(starts) - 1)
    cut, seq_len = int(starts[number]), config.data.seq_len
    counts = np.memmap(path / COUNTS_NAME, dtype=np.uint8, mode="r")
    train = PackedDataset(TokenDataset(path, stop=cut, index=index), counts, starts[:number], seq_len)
    return train, PackedDataset(TokenDataset(path, start=cut, index=index), counts, starts[number:], seq_len)


def _chat_encoder(config: Config, model: JobModel) -> ChatEncoder | None:
    """Return what encodes chats; None for a preset, which has no chat template."""
    if config.model.path is None:
        return None
    tokenizer = open_tokenizer(config, model_folder(config.model.path))
    return ChatEncoder(tokenizer, config.data.train_on, model.name)


def _tokenizer_fingerprint(config: Config, model: JobModel, chats: ChatEncoder | None, own: Tokenizer | None) -> str:
    """Return what decides the tokens besides the corpus."""
    if chats is None or own is None:
        return tokenizer_fingerprint(config.data.tokenizer, model.vocab_size)
    parts = [own.to_json(), str(chats.tokenizer.chat_template), chats.train_on, str((own.bos_id, own.eot_id))]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _is_whole(path: Path) -> bool:
    try:
        read_index(path)
    except ConfigError:
        return False
    return True


class _Encoded(NamedTuple):
    """Holds the token ids of a piece, which tokens count where it is a chat, and whether its document ends."""

    ids: NDArray
    counts: NDArray | None
    ends_document: bool


def _build(
    path: Path,
    encoded: Iterable[_Encoded],
    tally: CorpusCounts,
    label: str,
    tokenizer: Tokenizer,
    val_fraction: float,
) -> None:
    """Write a shard and rename it to `path`; `tally` counts what has been encoded."""
    folder = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    folder.mkdir(parents=True)
    try:
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        num_tokens, has_chats = _write_tokens(folder, encoded, val_fraction, dtype)
        (folder / TOKENIZER_NAME).write_text(tokenizer.to_json(), encoding="utf-8")
        seal(
            folder,
            source=label,
            dtype=dtype.name,
            vocab_size=tokenizer.vocab_size,
            eot_id=tokenizer.eot_id,
            num_tokens=num_tokens,
            num_documents=tally.num_documents,
            num_bytes=tally.num_text_bytes,
            num_skipped=tally.num_skipped,
            has_chats=has_chats,
        )
        _publish(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _encode(
    corpus: Corpus | MegatronCorpus,
    tokenizer: Tokenizer,
    chats: ChatEncoder | None,
    tally: CorpusCounts,
    progress: Progress | None,
) -> Iterator[_Encoded]:
    """Yield the tokens of every piece; a document's last one gets the end of text, and its first what begins one."""
    at_start = True
    if isinstance(corpus, MegatronCorpus):
        for tally.num_documents, ids in enumerate(corpus.documents(tokenizer.vocab_size), 1):
            yield _Encoded(ids, None, True)
        return
    for pieces in _in_batches(read_pieces(corpus, tally)):
        texts = iter(tokenizer.encode_batch([piece.text for piece in pieces if isinstance(piece, CorpusChunk)]))
        for piece in pieces:
            if isinstance(piece, CorpusChat):
                assert chats is not None, "a corpus yields chats only where it takes them"
                yield _Encoded(*chats.encode(piece.record, piece.where), True)
                continue
            begin = [tokenizer.bos_id] if at_start and tokenizer.bos_id is not None else []
            end = [tokenizer.eot_id] if piece.ends_document else []
            ids = np.concatenate([np.array(begin, np.uint32), next(texts), np.array(end, np.uint32)])
            yield _Encoded(ids, None, piece.ends_document)
            at_start = piece.ends_document
        if progress is not None:
            progress(tally.num_read_bytes, corpus.num_bytes)


def _in_batches(pieces: Iterator[CorpusChunk | CorpusChat]) -> Iterator[list[CorpusChunk | CorpusChat]]:
    batch: list[CorpusChunk | CorpusChat] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text) if isinstance(piece, CorpusChunk) else _CHAT_CHARS
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _write_tokens(folder: Path, encoded: Iterable[_Encoded], val_fraction: float, dtype: np.dtype) -> tuple[int, bool]:
    """Write the files of tokens, documents and counts, the documents to hold out last.

    A document is held out when less than `val_fraction` of the tokens before it is: that spreads the held-out
    ones over the whole corpus in one pass, and favours neither short nor long ones.

    Returns:
        the number of tokens, and whether the documents are chats.

    Raises:
        ConfigError: some are chats, and others texts.
    """
    num_tokens, starts = [0, 0], (array("Q"), array("Q"))
    held_out, at_start = 0, True
    has_chats: bool | None = None
    with ExitStack() as files:
        all_ids, all_counts = (files.enter_context(_Halves(folder / name)) for name in (TOKENS_NAME, COUNTS_NAME))
        for ids, counts, ends_document in encoded:
            if has_chats not in (None, counts is not None):
                raise ConfigError(
                    "chats-beside-text", "some of the data are chats and some texts; give them to runs of their own"
                )
            has_chats = counts is not None
            if at_start:
                held_out = int(num_tokens[1] < val_fraction * sum(num_tokens))
                starts[held_out].append(num_tokens[held_out])
            all_ids.write(held_out, ids.astype(dtype))
            if counts is not None:
                all_counts.write(held_out, counts)
            num_tokens[held_out] += len(ids)
            at_start = ends_document
    if not has_chats:
        (folder / COUNTS_NAME).unlink()
    all_starts = [np.array(starts[0], dtype=np.uint64), np.array(starts[1], dtype=np.uint64) + np.uint64(num_tokens[0])]
    (folder / DOCUMENTS_NAME).write_bytes(np.concatenate(all_starts).tobytes())
    return sum(num_tokens), bool(has_chats)


class _Halves:
    """Writes a file whose held-out half is known only at its end: that goes to a file of its own until then."""

    def __init__(self, path: Path) -> None:
        self._path, self._second = path, path.with_suffix(".held_out")

    def __enter__(self) -> Self:
        self._files = self._path.open("wb"), self._second.open("w+b")
        return self

    def write(self, half: int, values: NDArray) -> None:
        """Append to the first half, or with 1 to the second."""
        self._files[half].write(values.tobytes())

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._files[0] as kept, self._files[1] as held_out:
            held_out.seek(0)
            shutil.copyfileobj(held_out, kept)
        self._second.unlink()


def _publish(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`; keep a whole shard that another process put there, and delete a broken one."""
    if path.exists() and not _is_whole(path):
        shutil.rmtree(path, ignore_errors=True)
    try:
        folder.rename(path)
    except OSError:
        if not _is_whole(path):
            raise
