"""Folders of Hugging Face's that others made: sizes that no model has, files that are none, and code of their own."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.checkpoints import save, values_of
from harness.hf_folders import make_folder, read_weights
from harness.mutations import ended_after
from harness.refusals import refusal_of, refused
from shardwise.checkpoint.convert import export_checkpoint
from shardwise.cli.verify import read_model as read_verified
from shardwise.config.errors import CodedError
from shardwise.config.resolve import Config
from shardwise.models.shrink import read_huggingface
from shardwise.planner.request import read_model
from shardwise.train.job_model import job_model, open_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("llama", tmp_path_factory.mktemp("hub") / "m")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "m"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def config_of(folder: Path, **model: Any) -> Config:
    return Config.from_dict({"model": {"path": str(folder), **model}})


def train(folder: Path) -> None:
    model: Any = job_model(config_of(folder))
    assert model.words
    assert model.skeleton()
    assert model.flops_per_token(8) > 0


def export(folder: Path) -> None:
    step_folder = save(folder.parent / "saved", values_of())
    export_checkpoint(step_folder, folder.parent / "exported", hf_config=folder / "config.json")


READERS: dict[str, Callable[[Path], object]] = {
    "train": train,
    "tokenizer": lambda folder: open_tokenizer(config_of(folder), folder),
    "plan": lambda folder: read_model(str(folder)),
    "verify": lambda folder: read_huggingface(read_verified(folder)),
    "import": read_weights,
    "export": export,
}
# Values that are refused wherever sizes are read.
WRONG: tuple[tuple[str, Any], ...] = (
    ("num_attention_heads", 0), ("num_attention_heads", -4), ("num_key_value_heads", 0), ("num_key_value_heads", 3),
    ("vocab_size", -5), ("vocab_size", 10**400), ("hidden_size", "32"), ("hidden_size", 32.0), ("hidden_size", [32]),
    ("hidden_size", {"of": 32}), ("num_hidden_layers", 10**9), ("num_hidden_layers", True), ("head_dim", 0),
    ("rms_norm_eps", float("nan")), ("rms_norm_eps", "x"), ("rope_theta", float("nan")), ("rope_theta", 10**400),
    ("max_position_embeddings", 10**12), ("num_labels", 10**9), ("initializer_range", -1), ("attention_dropout", 5.0),
    ("text_config", {"num_hidden_layers": 10**9}), ("vision_config", {"num_hidden_layers": 10**9}),
    ("num_experts", 10**9), ("intermediate_size", ["x"]), ("own_number", float("nan")),
)  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda value: str(value)[:20])
def test_a_value_that_no_model_has_is_refused_by_every_reader(folder: Path, key: str, value: Any) -> None:
    edit(folder / "config.json", **{key: value})
    inner = next(iter(value)) if isinstance(value, dict) and key.endswith("_config") else key
    for name, read in READERS.items():
        with ended_after(10.0), pytest.raises(CodedError) as caught:
            read(folder)
        line = str(caught.value)
        assert caught.value.code in ("hf-config-value", "import-integer"), (name, line)
        assert f"{inner}=" in line
        assert "must" in line
        assert line.isprintable()
        assert len(line) < 400


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "nope"), ("model_type", 5), ("rope_parameters", {"rope_type": "yarn"}), ("rope_parameters", 5),
        ("pad_token_id", 10**6), ("hidden_act", "nope"), ("id2label", 5), ("dtype", "nope"), ("dtype", 5),
        ("layer_types", ["x"]), ("quantization_config", 5), ("attention_bias", "x"), ("intermediate_size", [48]),
        ("num_hidden_layers", None), ("vocab_size", None), ("model_type", "clip"),
    ],
)  # fmt: skip
def test_what_transformers_refuses_is_one_line(folder: Path, key: str, value: Any) -> None:
    edit(folder / "config.json", **{key: value})
    with ended_after(10.0), pytest.raises(CodedError) as caught:
        train(folder)
    assert caught.value.code
    assert str(caught.value).isprintable()
    assert str(folder) in str(caught.value)


def test_what_is_unusual_is_taken(folder: Path) -> None:
    """Sizes that are null, keys of others, a window that is none; a list of widths in the planner's reader."""
    edit(folder / "config.json", sliding_window=None, own={"hidden_size": 7}, num_labels=3, head_dim=None)
    for name, read in READERS.items():
        if name != "export":
            read(folder)


NAMES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


@pytest.mark.parametrize("name", NAMES)
def test_no_pipe_and_no_device_is_waited_for(folder: Path, name: str) -> None:
    path = folder / name
    for kind in ("pipe", "device", "folder"):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        for read in (train, READERS["tokenizer"]):
            with ended_after(10.0), refused("file-unreadable", str(path)):
                read(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 5000, '{"a": ' + "9" * 5000 + "}", "[1]", '{"a": 1, "a": 2}']
)
def test_json_that_is_too_deep_or_none_is_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with ended_after(10.0), pytest.raises(CodedError, match=name):
        READERS["tokenizer"](folder)


# Code of its own.

CODE = """
import os
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
open(os.path.join(os.path.dirname({place!r}), "ran"), "w").close()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder: Path, kind: str) -> None:
    (folder / "own.py").write_text(CODE.format(place=str(folder / "own.py")))
    if kind == "model":
        names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        edit(folder / "config.json", model_type="own", architectures=["OwnModel"], auto_map=names)
    elif kind == "tokenizer":
        edit(
            folder / "tokenizer_config.json",
            tokenizer_class="OwnTokenizer",
            auto_map={"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
        )
    else:  # a model that transformers knows, but no causal one
        edit(folder / "config.json", model_type="clip", auto_map={"AutoModelForCausalLM": "own.OwnModel"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked on the terminal, and answered with yes."""
    questions: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda text="": questions.append(text) or "y")
    return questions


@pytest.mark.parametrize("kind", ["model", "tokenizer", "of another kind"])
def test_code_of_a_folder_never_runs_unasked_and_nothing_asks(folder: Path, kind: str, asked: list[str]) -> None:
    with_code(folder, kind)
    with ended_after(30.0):
        found = {name: refusal_of(lambda read=read: read(folder)) for name, read in READERS.items()}  # type: ignore[misc]
    assert not asked
    assert not (folder / "ran").exists()
    refusing = {"model": "train", "tokenizer": "tokenizer", "of another kind": "train"}[kind]
    code, line = found[refusing]
    if kind == "of another kind":
        assert code in ("model-size-unknown", "custom-code"), line
    else:
        assert code == "custom-code", line
        assert "model.trust_remote_code = true" in line


def test_code_runs_where_the_config_allows_it(folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder.parent / "modules"))
    with_code(folder, "model")
    config = config_of(folder, trust_remote_code=True)
    model: Any = job_model(config)
    assert type(model.skeleton()).__name__ == "OwnModel"
    assert (folder / "ran").exists()
    assert not asked


# Weights.


def shards(folder: Path, **changes: dict[str, torch.Tensor]) -> None:
    """Split the weights into two files and an index; more tensors for the first, the second, or out of the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    files = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for number, (file, own) in enumerate(files.items()):
        save_file(
            {name: tensors[name] for name in own} | changes.get(f"more_{number}", {}), folder / file, {"format": "pt"}
        )
    weight_map = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, "metadata": {}}))


def load_ways(folder: Path) -> dict[str, tuple[str, str]]:
    """What every way to the weights of a folder says: a checkpoint of it, an engine's own import, a training."""
    from transformers import AutoModelForCausalLM

    from shardwise import initialize

    model: Any = job_model(config_of(folder))

    def into_engine() -> None:
        engine = initialize(AutoModelForCausalLM.from_config(model.theirs), Config.from_dict({}))
        with engine:
            engine.import_weights(folder)

    ways: dict[str, Callable[[], object]] = {
        "import_weights": into_engine,
        "train": lambda: model.initialize(Config.from_dict({"model": {"path": str(folder)}})).close(),
    }
    return {name: refusal_of(way) for name, way in ways.items()}


@pytest.mark.parametrize("listed", [False, True])
def test_a_tensor_in_two_files_is_taken_only_if_both_are_equal(folder: Path, listed: bool) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(iter(tensors))
    value = tensors[name]
    shards(folder, more_1={name: value.clone()})
    index = folder / "model.safetensors.index.json"
    if not listed:
        values = json.loads(index.read_text())
        del values["weight_map"][name]
        index.write_text(json.dumps(values))
    assert set(load_ways(folder).values()) == {("", "")}
    second = load_file(folder / "two.safetensors")
    second[name] = value + 1
    save_file(second, folder / "two.safetensors", {"format": "pt"})
    found = load_ways(folder)
    if listed:  # the index says which counts; another library may read the other one
        assert {way for way, (code, _) in found.items() if code} == {"train"}
    for code, line in [found["train"]] if listed else found.values():
        assert code == "tensor-in-two-files"
        assert all(part in line for part in ("one.safetensors", "two.safetensors", name))
    with nullcontext() if listed else refused("tensor-in-two-files", name):
        read_weights(folder)


def test_a_name_that_is_twice_in_the_index_is_refused(folder: Path) -> None:
    shards(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('{"weight_map": {', '{"weight_map": {"model.norm.weight": "one.safetensors", ')
    )
    for code, line in load_ways(folder).values():
        assert code == "not-json"
        assert "model.norm.weight" in line


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64, torch.uint8, torch.bool])
def test_integers_for_a_parameter_of_floating_numbers_are_refused(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file(
        tensors | {name: torch.ones(tensors[name].shape).to(dtype)}, folder / "model.safetensors", {"format": "pt"}
    )
    found = load_ways(folder)
    assert found["import_weights"][0] == "model-misfit"
    assert found["train"][0] == "numbers-of-another-kind"
    for _, line in found.values():
        assert name in line
        assert str(folder) in line


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a" * 300, "x\0y"]
)
def test_an_index_names_files_of_its_folder(folder: Path, file: str) -> None:
    shards(folder)
    (folder.parent / "x.safetensors").write_bytes((folder / "one.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(values))
    for code, line in load_ways(folder).values():
        assert code in ("index-names-foreign-file", "index-names-absent-file")
        assert line.isprintable()


@pytest.mark.parametrize("name", ["one.safetensors", "model.safetensors.index.json"])
def test_a_link_out_of_the_folder_is_no_part_of_it(folder: Path, name: str) -> None:
    shards(folder)
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    for code, line in load_ways(folder).values():
        assert code == "file-unreadable"
        assert "elsewhere" in line
