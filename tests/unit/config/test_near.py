"""What a user who has mistyped a path, or is used to another tool, is shown."""

import pytest

from harness.refusals import refused
from shardwise.checkpoint.commit import begin, commit
from shardwise.checkpoint.manifest import Manifest
from shardwise.cli import main as cli
from shardwise.config.errors import ConfigError
from shardwise.config.near_paths import near
from shardwise.config.other_tools import SETTING_OF
from shardwise.config.resolve import Config, all_keys, read_toml
from shardwise.train.corpus import open_corpus
from shardwise.train.job_model import model_folder
from shardwise.train.setup import resolve_job
from shardwise.train.tokenizer import make_tokenizer


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("chat.jsonl", "my.toml", "runs/a/config.json", "tiny-llama/tokenizer.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    root = tmp_path / "runs" / "a" / "checkpoints"
    commit(begin(root, 1), root, Manifest(step=1, tensors=(), files={}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("chats.jsonl", "chat.jsonl"),
        ("Chat.jsonl", "chat.jsonl"),
        ("run/a/config.json", "runs/a/config.json"),  # the folder is what is wrong
        ("runs/a/confg.json", "runs/a/config.json"),
        ("./tiny-lama", "tiny-llama"),
        ("run/b/config.json", ""),
        ("something else", ""),
        ("chat.jsonl", ""),
        ("chat.jsonl/chat.jsonl", ""),
    ],
)
def test_the_existing_path_that_is_most_like_a_missing_one(place, path, found):
    assert near(path) == (f"; did you mean {found}?" if found else "")
    assert near(place / path) == (f"; did you mean {place / found}?" if found else "")


def weights(path):
    resolve_job(Config.from_dict({"model": {"weights": path}, "run": {"device": "cpu"}}), 1, 1)


@pytest.mark.parametrize(
    ("read", "path", "found"),
    [
        (read_toml, "may.toml", "my.toml"),
        (read_toml, "runs/a/config.jsn", "runs/a/config.json"),
        (lambda path: open_corpus(Config.from_dict({"data": {"path": path}}).data), "chats.jsonl", "chat.jsonl"),
        (model_folder, "tiny-lama", "tiny-llama"),
        (lambda path: make_tokenizer(path, 300, ()), "tiny-lama", "tiny-llama"),
        (weights, "run", "runs"),
    ],
    ids=["config", "json", "data", "model", "tokenizer", "weights"],
)
def test_every_path_that_a_user_gives_has_its_near_one_named(place, read, path, found):
    with pytest.raises(ConfigError) as refusal:
        read(path)
    assert path in str(refusal.value)
    assert f"did you mean {found}?" in str(refusal.value)


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--bf16", "precision.param=bf16"),
        ("--output", "run.dir=..."),
        ("--output_dir", "run.dir=..."),
        ("--batch-size", "batch.micro_size=... or batch.global_size=..."),
        ("--epochs", "run.epochs=..."),
        ("--num_train_epochs", "run.epochs=..."),
        ("--lr", "optimizer.lr=..."),
        ("--resume_from_checkpoint", "--resume PATH"),
    ],
)
def test_an_option_of_another_tool_names_the_key(capsys, option, setting):
    assert cli.main(["train", option, "3"]) == 2
    assert f"Did you mean {setting}?" in capsys.readouterr().err


def test_a_key_of_another_tool_names_ours():
    with refused("unknown-key", "did you mean precision.param=bf16?"):
        Config().override(["bf16=true"])
    with refused("unknown-key", "did you mean data.seq_len=...?"):
        Config.from_dict({"data": {"max_length": 3}})


def test_what_is_named_exists():
    settings = [word for text in SETTING_OF.values() for word in text.replace(",", " ").split() if "=" in word]
    keys = {word.partition("=")[0] for word in settings}
    assert keys <= set(all_keys())
    for word in settings:
        if not word.endswith("=...") and "[" not in word:
            key, _, value = word.partition("=")
            Config().override([f"{key}={value}"])
