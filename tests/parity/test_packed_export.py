"""Exports with packed weights: what transformers makes of them in a fresh process, their bytes, and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, safe_open
from torch import Tensor

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from shardwise import Config, initialize
from shardwise.checkpoint.hf import packer
from shardwise.checkpoint.hf.packer import Packing, pack_folder, pack_weight
from shardwise.cli import main as cli
from shardwise.models import Decoder, DecoderConfig, lm_loss
from shardwise.models.presets import preset
from shardwise.train.job_model import job_model

transformers = pytest.importorskip("transformers")

VOCAB: Final = 32
PROMPT: Final = [3, 8, 13, 18]
NUM_NEW: Final = 12
SHAPE: Final = replace(
    preset("tiny"),
    num_layers=2,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    ffn_size=96,
    vocab_size=VOCAB,
    max_seq_len=32,
    tie_embeddings=False,
)
# Rows and their elements of a block's layers: query, key, value, out, gate, up, down.
MATRICES: Final = 2 * [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
READ_IN_A_FRESH_PROCESS: Final = """
import json, sys, torch, transformers
prompt = torch.tensor([json.loads(sys.argv[1])])
for folder in sys.argv[3:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(prompt).logits.float().tolist()
        tokens = model.generate(prompt, max_new_tokens=int(sys.argv[2]), do_sample=False, pad_token_id=0)
    print(json.dumps([logits, tokens.tolist()]))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a decoder that has learned to count in fives."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("packed") / "checkpoints"
    config = make_config(1, {"precision": {"param": "fp32"}, "optimizer": {"lr": 3e-3, "weight_decay": 0.0}})
    with initialize(Decoder(SHAPE), config, loss_fn=lambda logits, batch: lm_loss(logits, batch[1])) as engine:
        for _ in range(60):
            tokens = (torch.randint(0, VOCAB, (16, 1)) + 5 * torch.arange(17)) % VOCAB  # [B, S + 1]
            loss = engine.train_step([(tokens[:, :-1], tokens[:, 1:])]).loss
        engine.save(place)
    assert loss < 0.3
    return place


def export(root: Path, folder: Path, *more: str) -> Path:
    assert cli.main(["checkpoint", "export", str(root), str(folder), "--dtype", "bf16", *more]) == 0
    return folder


def read_by_transformers(*folders: Path) -> list[tuple[Tensor, list[int]]]:
    command = [sys.executable, "-c", READ_IN_A_FRESH_PROCESS, json.dumps(PROMPT), str(NUM_NEW), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = [json.loads(line) for line in done.stdout.splitlines()[-len(folders) :]]
    return [(torch.tensor(logits), tokens[0]) for logits, tokens in found]


def packed_bytes(weights: str) -> int:
    """Codes, scales in bf16, for each row or 32 elements of it, and two int64 of the shape."""
    if weights == "int8":
        return sum(rows * numel + 2 * rows + 16 for rows, numel in MATRICES)
    return sum(rows * numel // 2 + 2 * rows * numel // 32 + 16 for rows, numel in MATRICES)


@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 0.02), ("int4", 0.2)])
def test_transformers_reads_packed_weights(root: Path, tmp_path: Path, weights: str, tolerance: float) -> None:
    pytest.importorskip("compressed_tensors")
    folders = export(root, tmp_path / "whole"), export(root, tmp_path / "packed", "--weights", weights)
    (whole, whole_tokens), (logits, tokens) = read_by_transformers(*folders)
    assert whole_tokens == [(PROMPT[0] + 5 * place) % VOCAB for place in range(len(PROMPT) + NUM_NEW)]
    assert tokens == whole_tokens
    assert 0 < (logits - whole).norm() / whole.norm() < tolerance


@pytest.mark.quick(2)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_folder_has_the_bytes_of_the_formula(
    root: Path, tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(export(root, tmp_path / "packed", "--weights", weights) / "model.safetensors")
    whole = {name: each for name, each in tensors.items() if "proj.weight" not in name}
    assert sorted(name for name in whole if "norm" not in name) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert {each.dtype for each in whole.values()} == {torch.bfloat16}
    written = sum(each.nbytes for each in tensors.values())
    assert written - sum(each.nbytes for each in whole.values()) == packed_bytes(weights)
    assert f"BF16 and {weights}" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["packed"]


def unpacked(codes: Tensor, num_bits: int) -> Tensor:
    """Return the numbers of codes that lie one after the other, the first in the lowest bits."""
    found = codes.contiguous().view(torch.uint8).int()
    if num_bits == 4:
        found = torch.stack([found & 15, found >> 4], dim=-1).flatten(-2)
    return found - 2 ** (num_bits - 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize("packing", [Packing(8, None), Packing(4, 32), Packing(4, 128)])
def test_codes_are_the_nearest(packing: Packing) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 256)
    weight[1] = 0
    weight[2, 7] = 1e4
    weight[3] *= 1e-30
    codes, scales, shape = pack_weight(weight, packing)
    found = unpacked(codes, packing.num_bits).view(6, -1, packing.group_numel or 256)
    error = (found * scales.unsqueeze(-1) - weight.view_as(found)).abs()
    assert (error <= 0.5001 * scales.unsqueeze(-1)).all()
    assert shape.tolist() == [6, 256]
    assert (found[1] == 0).all()


def test_a_folder_of_several_files_is_packed_file_by_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain", max_shard_size="40KB")
    num_bytes = pack_folder(tmp_path / "plain", tmp_path / "packed", "int4")
    index = json.loads((tmp_path / "packed" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == num_bytes
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "packed" / file, "pt") as opened:
            assert name in set(opened.keys())
    described = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    # Rows of 40 elements stay as they are; so does the head.
    assert described["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert described["ignore"] == ["lm_head", *(f"model.layers.{index}.mlp.down_proj" for index in range(2))]
    if packer.find_spec("compressed_tensors"):
        assert read_by_transformers(tmp_path / "packed")[0].isfinite().all()


def test_experts_of_a_folder_are_named_as_not_packed(tmp_path: Path) -> None:
    """A server has a linear layer for each of them, and takes all that it is not spared for packed ones."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 12}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=12)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "plain")
    pack_folder(tmp_path / "plain", tmp_path / "packed", "int4")
    described = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    exact = {name for name in described["ignore"] if not name.startswith("re:")}
    patterns = [re.compile(name[3:]) for name in described["ignore"] if name.startswith("re:")]
    names = load_file(tmp_path / "packed" / "model.safetensors").keys()
    plain = {name.removesuffix(".weight") for name in names if name.endswith(".weight")} - {"model.embed_tokens"}
    matrices = {name for name in plain if "norm" not in name}
    assert len(patterns) < 8
    assert {name for name in matrices if name not in exact and not any(each.match(name) for each in patterns)} == set()
    packed = {name.removesuffix(".weight_packed") for name in names if name.endswith("_packed")}
    assert len(packed) == 12 * 4
    assert not [name for name in packed if name in exact or any(each.match(name) for each in patterns)]


def held_out_loss(rank: int, world_size: int, folder: str) -> float:
    """Open a folder as `shardwise train` does, and evaluate."""
    given = {"model": {"path": folder}, "zero": {"stage": 3}, "run": {"device": "cpu"}, "precision": {"param": "fp32"}}
    config = Config.from_dict(given)
    tokens = (torch.arange(2).view(2, 1) + 5 * torch.arange(16)) % VOCAB
    with job_model(config).initialize(config) as engine:
        return engine.eval_step([{"input_ids": tokens[rank % 2, None], "labels": tokens[rank % 2, None]}]).loss


def test_a_run_reads_packed_weights_and_shards_them(root: Path, tmp_path: Path, ranks: WorkerPool) -> None:
    pytest.importorskip("compressed_tensors")
    folder = export(root, tmp_path / "packed", "--weights", "int4")
    tensors = load_file(folder / "model.safetensors")
    whole = {name: each for name, each in tensors.items() if "proj.weight" not in name}
    for name in [name for name in tensors if name.endswith("_packed")]:
        name = name.removesuffix("_packed")
        scales = tensors[f"{name}_scale"].unsqueeze(-1)
        numbers = unpacked(tensors[f"{name}_packed"], 4).view(*scales.shape[:2], -1)
        whole[name] = (numbers * scales).flatten(-2)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder)).float()
    model.load_state_dict(whole)
    tokens = (torch.arange(2).view(2, 1) + 5 * torch.arange(16)) % VOCAB
    with torch.no_grad():
        expected = model(input_ids=tokens, labels=tokens).loss.item()
    for loss in ranks(2).run(held_out_loss, str(folder)):
        assert loss == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_packed_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = DecoderConfig.from_values(SHAPE.values() | {"hidden_size": 48, "head_dim": 24, "ffn_size": 40})
    plain = tmp_path / "plain"
    with initialize(Decoder(narrow), make_config(1, {})) as engine:
        engine.export_weights(plain)
    with refused("nothing-to-pack", "--weights"):
        pack_folder(plain, tmp_path / "packed", "int8")
    (plain / "config.json").write_text('{"model_type": "unheard-of"}')
    with refused("not-a-causal-model", "--weights"):
        pack_folder(plain, tmp_path / "packed", "int8")
    with refused("export-exists"):
        pack_folder(root, plain, "int8")
    monkeypatch.setattr(packer, "find_spec", lambda name: None)
    with refused("extra-missing", "shardwise[hf]"):
        pack_folder(plain, tmp_path / "packed", "int8")
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packer, "save_file", refuse)


@pytest.mark.usefixtures("full_disk")
def test_nothing_is_left_where_the_disk_is_full(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "export", str(root), str(tmp_path / "packed"), "--weights", "int8"]) == 1
    assert "[disk-full]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
