"""The cache that holds the tokens: whole or absent, built once, and every way a build can fail."""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.train import corpus, prepare
from shardwise.train.dataset import TokenDataset
from shardwise.train.prepare import open_data, prepare_data, read_index, seal
from shardwise.train.tokenizer import byte_tokenizer

TEXT = "".join(f"line {number} of the text, größer als 世界\n" for number in range(200))


@pytest.fixture
def config(tmp_path) -> Config:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number:02} {TEXT[: 400 + 20 * number]}")
    data = {"path": str(folder), "seq_len": 16, "val_fraction": 0.2}
    return Config.from_dict({"data": data, "model": {"vocab_size": 400}})


def tokens_of(split: TokenDataset) -> np.ndarray:
    return np.asarray(split.tokens)


def decoded(data, dataset) -> list[str]:
    text = data.tokenizer.decode(tokens_of(dataset).tolist())
    return sorted(text.removesuffix("<|endoftext|>").split("<|endoftext|>"))


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_the_splits_hold_every_document_once(config, tmp_path, tokenizer):
    config = config.override([f"data.tokenizer={tokenizer or 'none'}"])
    data = prepare_data(config, tmp_path / "cache")
    files = sorted(Path(config.data.path).iterdir())
    train, val = decoded(data, data.train), decoded(data, data.val)
    assert sorted(train + val) == [file.read_text() for file in files]
    assert data.index.num_documents == len(train) + len(val) == 40
    assert data.val.num_tokens / data.index.num_tokens == pytest.approx(0.2, abs=0.05)
    assert {"1", "2", "3"} <= {text[0] for text in val}, "held-out documents come from the whole corpus"
    assert tokens_of(data.train).max() < data.index.vocab_size == data.tokenizer.vocab_size <= 400


def test_second_run_reads_the_cache(config, tmp_path, monkeypatch):
    first = prepare_data(config, tmp_path / "cache")
    monkeypatch.setattr(prepare, "_build", None)
    monkeypatch.setattr(prepare, "make_tokenizer", None)
    again = prepare_data(config, tmp_path / "cache")
    assert again.path == first.path
    assert np.array_equal(tokens_of(again.train), tokens_of(first.train))
    longer = prepare_data(config.override(["data.seq_len=32"]), tmp_path / "cache")
    assert longer.path == first.path, "another sequence length must not tokenize again"
    assert open_data(first.path, config).val.num_tokens == first.val.num_tokens


@pytest.mark.parametrize("change", ["data.tokenizer=bytes", "model.vocab_size=300", "data.val_fraction=0.3", "file"])
def test_changes_make_another_shard(config, tmp_path, change):
    before = prepare_data(config, tmp_path / "cache")
    if change == "file":
        (Path(config.data.path) / "00.txt").write_text(TEXT)
    else:
        config = config.override([change])
    assert prepare_data(config, tmp_path / "cache").path != before.path


def test_building_twice_gives_the_same_bytes(config, tmp_path):
    shards = [prepare_data(config, tmp_path / name) for name in ("one", "two")]
    assert shards[0].index.tokens_hash == shards[1].index.tokens_hash


def test_config_cache_dir_goes_first(config, tmp_path):
    config = config.override([f"data.cache_dir={tmp_path / 'mine'}"])
    assert prepare_data(config, tmp_path / "cache").path.parent == tmp_path / "mine"


def test_cache_inside_the_data_is_not_read(config):
    cache = Path(config.data.path) / "cache"
    first = prepare_data(config, cache)
    assert prepare_data(config, cache).path == first.path


def test_two_builders_at_once(config, tmp_path, monkeypatch):
    """Both have built before either publishes: one wins, both read a whole shard, nothing is left."""
    barrier = threading.Barrier(2, timeout=100)
    publish = prepare._publish

    def publish_together(folder, path):
        barrier.wait()
        publish(folder, path)

    monkeypatch.setattr(prepare, "_publish", publish_together)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(prepare_data(config, tmp_path / "cache"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert np.array_equal(tokens_of(results[0].train), tokens_of(results[1].train))
    assert list((tmp_path / "cache").iterdir()) == [results[0].path]


def test_killed_build_leaves_nothing_that_is_read(config, tmp_path, monkeypatch):
    """A kill before the rename leaves its folder; the next build is whole."""
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_publish", lambda folder, path: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(prepare.shutil, "rmtree", lambda *args, **kwargs: None)
        with pytest.raises(KeyboardInterrupt):
            prepare_data(config, tmp_path / "cache")
    (leftover,) = (tmp_path / "cache").iterdir()
    assert leftover.name.endswith(".tmp")

    data = prepare_data(config, tmp_path / "cache")
    assert data.index.num_documents == 40
    assert leftover.exists(), "a build that may be alive is left alone"


def test_failed_build_cleans_up(config, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_publish", lambda folder, path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare_data(config, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_trained_vocabulary_follows_the_model(config, tmp_path):
    assert prepare_data(config.override(["model.vocab_size=300"]), tmp_path / "cache").index.vocab_size == 300
    config = config.override(["model.vocab_size=none", "model.preset=tiny"])
    assert 300 < prepare_data(config, tmp_path / "cache").index.vocab_size <= 4096


@pytest.mark.parametrize("name", ["tokens.bin", "index.json", "tokenizer.json"])
def test_broken_shard_is_built_again(config, tmp_path, name):
    before = prepare_data(config, tmp_path / "cache")
    (before.path / name).unlink()
    after = prepare_data(config, tmp_path / "cache")
    assert after.index.tokens_hash == before.index.tokens_hash
    assert sorted(file.name for file in after.path.iterdir()) == [
        "index.json",
        "tokenizer.json",
        "tokens.bin",
    ]
    assert list((tmp_path / "cache").iterdir()) == [after.path]


def harm(file: Path, how: str) -> None:
    """Damage a file of the cache without changing its size, or put something else in its place."""
    content = file.read_bytes()
    file.unlink()
    if how == "FIFO":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "empty":
        file.touch()
    else:
        at = len(content) // 2
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@pytest.mark.parametrize("how", ["flipped bit", "FIFO", "folder", "empty"])
@pytest.mark.parametrize("name", ["index.json", "tokenizer.json", "tokens.bin"])
def test_damaged_shard_is_named_and_built_again(config, tmp_path, name, how):
    before, said = prepare_data(config, tmp_path / "cache"), []
    harm(before.path / name, how)
    with refused("token-shard-damaged", str(before.path)):
        open_data(before.path, config)
    after = prepare_data(config, tmp_path / "cache", say=said.append)
    assert len(said) == 1
    assert str(before.path) in said[0]
    assert said[0].endswith("built again")
    assert after.index.tokens_hash == before.index.tokens_hash
    assert tokens_of(after.train).tolist() == tokens_of(before.train).tolist()


def test_a_shard_of_other_data_is_not_taken(config, tmp_path):
    """As where a person has copied folders of a cache over each other."""
    first = prepare_data(config, tmp_path / "cache").path
    other = config.override(["data.tokenizer=bytes"])
    second = prepare_data(other, tmp_path / "cache").path
    shutil.rmtree(second)
    shutil.copytree(first, second)
    with refused("token-shard-damaged", str(second), "another tokenizer"):
        open_data(second, other)
    assert prepare_data(other, tmp_path / "cache").index.vocab_size == 257


@pytest.mark.parametrize("facts", [{"vocab_size": 100}, {"num_kept": 2**40}, {"eot_id": 257}, {"num_documents": 3}])
def test_facts_that_contradict_the_tokens_are_refused(config, tmp_path, facts):
    """The index has the right hashes; `num_documents` counts chats, which there are none of."""
    path = prepare_data(config.override(["data.tokenizer=bytes"]), tmp_path / "cache").path
    fields = read_index(path).model_dump(exclude={"tokens_hash", "block_hashes"})
    if "num_documents" in facts:
        facts = {**facts, "has_chats": True, "dtype": "uint32", "num_tokens": fields["num_tokens"] // 2}
        np.array([0, 7, 5], np.uint64).tofile(path / "chats.bin")
        os.truncate(path / "tokens.bin", 4 * facts["num_tokens"])
    seal(path, **{**fields, **facts})
    with refused("token-shard-damaged", str(path)):
        open_data(path, config)


def test_index_with_other_facts_is_refused(config, tmp_path):
    """Facts that are possible but not those of the build, each with the hash of the old ones."""
    path = prepare_data(config, tmp_path / "cache").path
    fields = json.loads((path / "index.json").read_text())
    for key, value in {"dtype": "uint32", "vocab_size": 10, "eot_id": 1, "num_kept": 7, "format": 1}.items():
        (path / "index.json").write_text(json.dumps(fields | {key: value}))
        with refused("token-shard-damaged", str(path)):
            open_data(path, config)


def test_one_long_text_is_held_out_at_its_end(tmp_path, monkeypatch):
    """It is one document however many pieces it is read in, so it ends once."""
    monkeypatch.setattr(corpus, "PIECE_CHARS", 500)
    monkeypatch.setattr(prepare, "BATCH_CHARS", 1200)
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    config = Config.from_dict({"data": {"path": str(file), "tokenizer": "bytes", "val_fraction": 0.1}})
    data = prepare_data(config, tmp_path / "cache")
    size = len(TEXT.encode())
    assert data.index.num_tokens == size + 1
    assert data.val.num_tokens == round(0.1 * (size + 1))
    assert TEXT.encode().endswith(bytes(tokens_of(data.val)[:-1].tolist()))


def test_large_vocabularies_take_four_bytes(config, tmp_path):
    values = json.loads(byte_tokenizer().to_json())
    values["model"]["vocab"]["the last"] = (1 << 17) - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    config = config.override([f"data.tokenizer={tmp_path}", "model.vocab_size=200000"])
    data = prepare_data(config, tmp_path / "cache")
    assert tokens_of(data.train).dtype == np.uint32
    assert data.tokenizer.decode(tokens_of(data.train)[:2].tolist()) == "00"


def test_progress_ends_at_all_bytes(config, tmp_path):
    calls = []
    prepare_data(config, tmp_path / "cache", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0


def test_errors_of_prepare(config, tmp_path):
    cases = {
        "data.val_fraction=1.0": ("nothing-to-train-on",),
        "model.vocab_size=100": ("vocabulary-without-bytes", "257"),
        "data.seq_len=1000000": ("data-too-short", "1000001", "seq_len <= "),
    }
    for assignment, (code, *values) in cases.items():
        with refused(code, assignment, *values):
            prepare_data(config.override([assignment]), tmp_path / "cache")


def test_model_smaller_than_the_tokenizer(config, tmp_path, monkeypatch):
    """Refused before the tokens are made, and for a shard that is there already."""
    data = prepare_data(config.override(["data.tokenizer=bytes"]), tmp_path / "cache")
    small = config.override(["model.vocab_size=100", "data.tokenizer=bytes"])
    with refused("vocabulary-too-small", "model.vocab_size=100", "257"):
        open_data(data.path, small)
    monkeypatch.setattr(prepare, "_build", None)
    with refused("vocabulary-too-small", "model.vocab_size=100", "257"):
        prepare_data(small, tmp_path / "empty")


def test_cache_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").touch()
    with refused("folder-not-writable", str(tmp_path / "file"), "data.cache_dir"):
        prepare_data(config, tmp_path / "file")


def test_full_disk_is_named_and_leaves_nothing(config, tmp_path, monkeypatch):
    def full(path, **facts):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(prepare, "seal", full)
    with refused("disk-full", "No space left on device", "data.cache_dir"):
        prepare_data(config, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_open_data_without_a_shard(config, tmp_path):
    with refused("token-shard-damaged", "data.cache_dir"):
        open_data(tmp_path / "nowhere", config)
