"""Round trips, determinism, and each error's words."""

import os
import time

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.train.tokenizer import (
    END_OF_TEXT,
    NUM_BYTE_TOKENS,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    make_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)

TEXTS = ["def forward(self, tokens):\n    return self.head(tokens)\n" * 20, "Grüße, 世界 🌍 " * 10]
TRAINED = train_tokenizer(TEXTS, 300)
BYTES = byte_tokenizer()


@pytest.mark.parametrize("tokenizer", [TRAINED, BYTES], ids=["trained", "bytes"])
def test_a_saved_tokenizer_is_one_of_transformers_too(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "a")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    ids = tokenizer.encode(TEXTS[1])
    assert (loaded(TEXTS[1])["input_ids"], loaded.decode(ids), loaded.eos_token_id) == (ids, TEXTS[1], tokenizer.eot_id)


@pytest.mark.parametrize("tokenizer", [TRAINED, BYTES], ids=["trained", "bytes"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(blacklist_categories=["Cs"])))
def test_round_trip(tokenizer: Tokenizer, text: str):
    """Any text comes back to the character, those unseen in training included."""
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in token_ids)


def test_bytes_are_their_own_ids():
    text = "aé\n\0 🌍"
    assert BYTES.encode(text) == list(text.encode())
    assert (BYTES.vocab_size, BYTES.eot_id) == (257, 256)


def test_training_learns_and_keeps_to_the_size():
    assert NUM_BYTE_TOKENS < TRAINED.vocab_size <= 300
    assert len(TRAINED.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_a_text_without_spaces_is_learned_in_a_time_that_follows_its_length():
    """DNA, say. Trained whole, 200,000 bases take the trainer a minute and a half; in pieces, a moment."""
    bases = np.random.default_rng(0).choice(list("ACGT"), 200_000)
    start_s = time.process_time()
    tokenizer = train_tokenizer(["".join(bases)], 300)
    assert time.process_time() - start_s < 30
    assert len(tokenizer.encode("".join(bases[:1000]))) < 700


def test_training_is_deterministic():
    assert train_tokenizer(iter(TEXTS), 300).to_json() == TRAINED.to_json()


def test_end_of_text_is_one_token():
    assert TRAINED.encode(END_OF_TEXT) == [TRAINED.eot_id]
    assert TRAINED.decode([TRAINED.eot_id]) == END_OF_TEXT


def test_batches_equal_single_texts():
    batch = TRAINED.encode_batch([*TEXTS, ""])
    assert [ids.tolist() for ids in batch] == [TRAINED.encode(text) for text in [*TEXTS, ""]]
    assert batch[0].dtype == np.uint32


def test_saved_and_loaded_from_file_or_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(TRAINED.to_json(), encoding="utf-8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = make_tokenizer(str(path), 0, sample=())
        assert loaded.encode(TEXTS[1]) == TRAINED.encode(TEXTS[1])
        assert (loaded.vocab_size, loaded.eot_id) == (TRAINED.vocab_size, TRAINED.eot_id)


def test_a_loaded_tokenizer_never_truncates(tmp_path):
    """tokenizer.json files carry the maximum length of the model they came with."""
    backend = tokenizers.Tokenizer.from_str(TRAINED.to_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == TRAINED.encode(TEXTS[0])
    assert len(load_tokenizer(tmp_path).encode("a")) == 1


def test_fingerprint_follows_what_decides_the_ids(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("one")
    first = tokenizer_fingerprint(str(file), 300)
    file.write_text("two")
    others = [tokenizer_fingerprint(name, size) for name, size in [("bytes", 300), (None, 300), (None, 301)]]
    assert len({first, tokenizer_fingerprint(str(file), 300), *others}) == 5


def test_vocabulary_smaller_than_the_bytes():
    with refused("vocabulary-without-bytes", "model.vocab_size=256", "257"):
        train_tokenizer(TEXTS, 256)


def test_tokenizer_that_is_not_there(tmp_path):
    with refused("file-unreadable", str(tmp_path / "missing.json"), "No such file"):
        load_tokenizer(tmp_path / "missing.json")
    with refused("file-unreadable", str(tmp_path), "No such file"):
        tokenizer_fingerprint(str(tmp_path), 300)


@pytest.mark.timeout(60)  # nothing ever writes into the pipe
def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").symlink_to("/dev/zero")
    for path, why in (("pipe", "a pipe"), ("/dev/zero", "a device"), ("folder", "/dev/zero")):
        for read in (load_tokenizer, lambda path: tokenizer_fingerprint(str(path), 300)):
            with refused("file-unreadable", "data.tokenizer", path, why) as caught:
                read(tmp_path / path)
            assert str(caught.value).isprintable()


def test_a_file_larger_than_any_tokenizer_is_refused(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(2**40)
    with refused("file-unreadable", str(tmp_path), "bytes"):
        load_tokenizer(tmp_path)


def test_file_that_is_no_tokenizer(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": 1}')
    with refused("not-a-tokenizer", str(file)):
        load_tokenizer(file)


def test_tokenizer_without_an_end(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    backend.save(str(tmp_path / "tokenizer.json"))
    with refused("no-end-of-text", "<|endoftext|>"):
        load_tokenizer(tmp_path)
