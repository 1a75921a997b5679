"""Tokens that Megatron-LM's preprocessing wrote are trained on as they are; the writer here follows its format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.config.sections import DataConfig
from shardwise.train.corpus import open_megatron
from shardwise.train.prepare import prepare_data

CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def write(prefix: Path, documents: list[list[list[int]]], dtype: type[np.integer] = np.uint16) -> None:
    """Write documents of sequences as the format says, number after number."""
    sequences = [sequence for document in documents for sequence in document]
    size = np.dtype(dtype).itemsize
    with prefix.with_name(prefix.name + ".bin").open("wb") as file:
        for sequence in sequences:
            file.write(np.array(sequence, dtype=dtype).tobytes())
    with prefix.with_name(prefix.name + ".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00")
        file.write((1).to_bytes(8, "little"))
        file.write(CODES[dtype].to_bytes(1, "little"))
        file.write(len(sequences).to_bytes(8, "little"))
        file.write((len(documents) + 1).to_bytes(8, "little"))
        for sequence in sequences:
            file.write(len(sequence).to_bytes(4, "little"))
        at = 0
        for sequence in sequences:
            file.write(at.to_bytes(8, "little"))
            at += size * len(sequence)
        bound = 0
        for document in [[], *documents]:
            bound += len(document)
            file.write(bound.to_bytes(8, "little"))


def documents(num: int) -> list[list[list[int]]]:
    draw = np.random.default_rng(0)
    return [
        [draw.integers(0, 100, draw.integers(1, 30)).tolist() for _ in range(draw.integers(1, 3))] for _ in range(num)
    ]


def config(tmp_path: Path, path: str, **data: object) -> Config:
    return Config.from_dict(
        {"data": {"path": path, "tokenizer": "bytes", "seq_len": 16, "cache_dir": str(tmp_path / "cache"), **data}}
    )


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("end", ["", ".bin", ".idx"])
def test_documents_are_those_that_were_written(dtype: type[np.integer], end: str, tmp_path: Path) -> None:
    written = [*documents(20), [], [[1, 2]]]
    write(tmp_path / "corpus_text_document", written, dtype)
    corpus = open_megatron(DataConfig(path=f"{tmp_path}/corpus_text_document{end}"), has_tokenizer=True)
    assert corpus is not None
    wanted = [[token for sequence in document for token in sequence] for document in written if document]
    assert [document.tolist() for document in corpus.documents(257)] == wanted


def test_a_run_gets_every_token_once(tmp_path: Path) -> None:
    written = documents(60)
    write(tmp_path / "corpus", written)
    data = prepare_data(config(tmp_path, f"{tmp_path}/corpus"), tmp_path)
    found = np.concatenate([split.tokens for split in (data.train, data.val)])
    wanted = [token for document in written for sequence in document for token in sequence]
    assert sorted(found.tolist()) == sorted(wanted)
    assert (data.index.num_tokens, data.index.num_documents, data.index.vocab_size) == (len(wanted), 60, 257)
    assert data.val.num_tokens > 0
    again = prepare_data(config(tmp_path, f"{tmp_path}/corpus.bin"), tmp_path)
    assert again.path == data.path
    write(tmp_path / "corpus", written[::-1])
    assert prepare_data(config(tmp_path, f"{tmp_path}/corpus"), tmp_path).path != data.path


def test_refusals(tmp_path: Path) -> None:
    write(tmp_path / "corpus", documents(40))
    path, index = f"{tmp_path}/corpus", tmp_path / "corpus.idx"
    with refused("megatron-without-tokenizer", "data.tokenizer"):
        prepare_data(config(tmp_path, path, tokenizer=None), tmp_path)
    whole = index.read_bytes()
    for damaged in (
        b"",
        whole[:30],
        b"X" + whole[1:],
        whole[:17] + b"\x06" + whole[18:],
        whole[:-1],
        whole[:-8] + b"\xff" * 8,
    ):
        index.write_bytes(damaged)
        with refused("megatron-index", "corpus.idx"):
            prepare_data(config(tmp_path, path), tmp_path)
    index.write_bytes(whole)
    (tmp_path / "corpus.bin").write_bytes((tmp_path / "corpus.bin").read_bytes()[:-2])
    with refused("megatron-index", "corpus.idx"):
        prepare_data(config(tmp_path, path), tmp_path)
    write(tmp_path / "corpus", [[[], []], [[]]])
    with refused("no-text", path):
        prepare_data(config(tmp_path, path), tmp_path)
    write(tmp_path / "corpus", [*documents(40), [[300, 1]]])
    with refused("megatron-token-range", "300", "257"):
        prepare_data(config(tmp_path, path), tmp_path)
    index.unlink()
    with refused("data-missing", "corpus"):
        prepare_data(config(tmp_path, path), tmp_path)


@pytest.mark.parametrize(
    ("array", "place", "value"),
    [
        ("pointer", 0, 2**63 - 8),  # which wraps when the sequence's bytes are added
        ("pointer", 3, 2**63 + 7),
        ("pointer", 3, -1),
        ("pointer", 5, 0),
        ("length", 2, -5),
        ("length", 2, 2),
        ("length", 2, 2**31 - 1),
        ("bound", 4, 2**62),
        ("bound", 4, -(2**63)),
        ("bound", 1, 2**63 - 1),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, array: str, place: int, value: int) -> None:
    written = [[[1, 2, 3]]] * 20
    write(tmp_path / "corpus", written)
    index = tmp_path / "corpus.idx"
    data, size = bytearray(index.read_bytes()), 4 if array == "length" else 8
    at = {"length": 34, "pointer": 34 + 4 * 20, "bound": 34 + 12 * 20}[array] + size * place
    data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    index.write_bytes(data)
    with refused("megatron-index", "corpus.idx"):
        prepare_data(config(tmp_path, f"{tmp_path}/corpus"), tmp_path)


def test_bounds_that_wrap_around_are_refused(tmp_path: Path) -> None:
    """Each is larger than the one before by 64-bit differences."""
    write(tmp_path / "corpus", [[[1]]] * 6)
    index = tmp_path / "corpus.idx"
    bounds = np.array([0, 2**62, 2**63 - 1, -(2**63), -(2**62), -1, 6], np.int64)
    index.write_bytes(index.read_bytes()[: -bounds.nbytes] + bounds.tobytes())
    with refused("megatron-index", "corpus.idx"):
        prepare_data(config(tmp_path, f"{tmp_path}/corpus"), tmp_path)


def test_sequences_that_multiply_a_file_are_refused(tmp_path: Path) -> None:
    """A thousand sequences of all of the file would make a cache of a thousand times its size."""
    write(tmp_path / "corpus", [[[1] * 100]] + [[[]]] * 999)
    index = tmp_path / "corpus.idx"
    data = bytearray(index.read_bytes())
    data[34 : 34 + 4000] = np.full(1000, 100, np.int32).tobytes()
    data[34 + 4000 : 34 + 12000] = bytes(8000)
    index.write_bytes(data)
    with refused("megatron-index", "follow each other"):
        prepare_data(config(tmp_path, f"{tmp_path}/corpus"), tmp_path)
