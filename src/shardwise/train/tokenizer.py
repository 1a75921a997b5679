"""Turns text into token ids, with a byte-level BPE trained on the spot, plain bytes, or a tokenizer.json.

All three are a `tokenizers.Tokenizer`, so they are saved, loaded and decoded in the same way.

>>> tokenizer = byte_tokenizer()
>>> tokenizer.encode("né")
[110, 195, 169]
>>> tokenizer.decode([110, 195, 169]), tokenizer.vocab_size, tokenizer.eot_id
('né', 257, 256)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from shardwise.config.errors import ConfigError
from shardwise.config.near_paths import near
from shardwise.config.untrusted_files import MAX_TOKENIZER_BYTES, read_bytes
from shardwise.config.written_files import write_whole

END_OF_TEXT = "<|endoftext|>"
NUM_BYTE_TOKENS = 257
SAMPLE_BYTES = 4_000_000
_LONG_WORD = re.compile(r"\S{256}(?=\S)")
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


@dataclass(frozen=True)
class Tokenizer:
    """Holds a `tokenizers.Tokenizer`.

    Attributes:
        eot_id: the id that ends a document.
        vocab_size: one more than the largest id.
        bos_id: the id that begins a document; None where none does.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    eot_id: int
    vocab_size: int
    bos_id: int | None = None

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, source: str) -> Tokenizer:
        """Wrap `backend`; raise ConfigError where it has no token that ends a text."""
        vocab = backend.get_vocab()
        for end in _KNOWN_ENDS:
            if end in vocab:
                return cls(backend=backend, eot_id=vocab[end], vocab_size=max(vocab.values()) + 1)
        raise ConfigError(
            "no-end-of-text",
            f"data.tokenizer={source} has no token that ends a text ({', '.join(_KNOWN_ENDS)}); "
            f"add {END_OF_TEXT} to it",
        )

    @classmethod
    def of_transformers(cls, tokenizer: Any, source: str) -> Tokenizer:
        """Wrap one of transformers, with what begins and ends its texts; raise ConfigError where that is unknown."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or tokenizer.eos_token_id is None:
            what = "is not of the tokenizers library" if backend is None else "has no token that ends a text"
            raise ConfigError("not-a-tokenizer", f"the tokenizer of {source} {what}; give another as data.tokenizer")
        begin = tokenizer.bos_token_id
        has_begin = begin is not None and tokenizer("a")["input_ids"][:1] == [begin]
        size = max(tokenizer.get_vocab().values()) + 1
        fast_tokenizer = tokenizers.Tokenizer.from_str(backend.to_str())
        fast_tokenizer.no_truncation()
        fast_tokenizer.no_padding()
        return cls(fast_tokenizer, tokenizer.eos_token_id, size, begin if has_begin else None)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with nothing added; a literal end-of-text token in it becomes that token."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the token ids of each text, computed on every core that the `tokenizers` library takes."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def to_json(self) -> str:
        """Return the text of a tokenizer.json, which `load_tokenizer` and other libraries read."""
        text: str = self.backend.to_str()
        return text

    def save(self, folder: Path) -> None:
        """Write a folder that `AutoTokenizer` loads."""
        folder.mkdir(exist_ok=True)
        write_whole(folder / "tokenizer.json", self.to_json())
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.backend.id_to_token(self.eot_id)}
        write_whole(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")


def make_tokenizer(name: str | None, vocab_size: int, sample: Iterable[str]) -> Tokenizer:
    """Return the tokenizer of that `name`, or without one train one of at most `vocab_size` tokens on a `sample`."""
    if name == "bytes":
        return byte_tokenizer()
    if name is not None:
        return load_tokenizer(name)
    return train_tokenizer(sample, vocab_size)


def tokenizer_fingerprint(name: str | None, vocab_size: int) -> str:
    """Return what decides the token ids besides the corpus: a hash of the file, or the settings of the training."""
    if name == "bytes":
        return "bytes"
    if name is not None:
        return hashlib.blake2b(_read(name), digest_size=16).hexdigest()
    return f"bpe {vocab_size} on {SAMPLE_BYTES} bytes by tokenizers {tokenizers.__version__}"


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token a byte, whose id is the byte's value, and 256 for the end of a text."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    # ByteLevel writes a printable byte as itself and the others, in order, as the characters from 256 on.
    stand_ins = iter(sorted(character for character in alphabet if ord(character) > 255))
    vocab = {chr(byte) if chr(byte) in alphabet else next(stand_ins): byte for byte in range(256)}
    backend = _byte_level(models.BPE(vocab=vocab, merges=[]), split_words=False)
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer.of(backend, "bytes")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE; the same texts give the same tokenizer.

    Raises:
        ConfigError: `vocab_size` is less than the 256 bytes and the end of text.
    """
    if vocab_size < NUM_BYTE_TOKENS:
        raise ConfigError(
            "vocabulary-without-bytes",
            f"model.vocab_size={vocab_size} is less than the {NUM_BYTE_TOKENS} tokens of a byte-level "
            f"tokenizer (256 bytes and the end of text); nearest legal: {NUM_BYTE_TOKENS}",
        )
    backend = _byte_level(models.BPE(), split_words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # The trainer takes a time that is quadratic in a word's length, and a text without spaces is one word.
    backend.train_from_iterator((_LONG_WORD.sub(r"\g<0>\n", text) for text in texts), trainer)
    return Tokenizer.of(backend, "a trained one")


def load_tokenizer(path: str | Path, eot_id: int | None = None) -> Tokenizer:
    """Read a tokenizer.json, or the one in a folder; raise ConfigError where there is none or it is not one."""
    text = _read(path)
    try:
        backend = tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            "not-a-tokenizer", f"data.tokenizer={path} is not a tokenizer.json ({error}); {_FIX}"
        ) from None
    backend.no_truncation()
    backend.no_padding()
    if eot_id is not None:
        return Tokenizer(backend, eot_id, max(backend.get_vocab().values()) + 1)
    return Tokenizer.of(backend, str(path))


_FIX = 'give the path of a tokenizer.json, "bytes", or leave data.tokenizer out to train one'


def _read(path: str | Path) -> bytes:
    folder = Path(path).expanduser()
    file = folder / "tokenizer.json" if os.path.isdir(folder) else folder
    try:
        return read_bytes(file, MAX_TOKENIZER_BYTES, folder if file != folder else None)
    except OSError as error:
        raise ConfigError(
            "file-unreadable",
            f"data.tokenizer={file} cannot be read: {error.strerror or error}{near(file) or f'; {_FIX}'}",
        ) from None


def _byte_level(model: models.Model, split_words: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    backend.decoder = decoders.ByteLevel()
    return backend
