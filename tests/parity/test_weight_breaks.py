"""What has broken in others' hand-overs of weights, a test for each; and the memory that a walk takes."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise.compat.deepspeed as deepspeed
from harness.hand_over import layer_of
from harness.huggingface import build_model
from harness.live_bytes import LiveBytes
from harness.moe_models import build_moe
from harness.pool import WorkerPool
from harness.zoo import ZOO
from shardwise import Engine, initialize
from shardwise.checkpoint.deltas import VersionWriter, digest_of, read_weights
from shardwise.checkpoint.hf import exporter
from shardwise.checkpoint.manifest import CheckpointError

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

Options = Mapping[str, Any]
STAGE_3: Options = {"zero": {"stage": 3}}


def make_engine(model: nn.Module, options: Options, param: str = "fp32") -> Engine:
    config = {"precision": {"param": param}, "run": {"device": "cpu", "timeout_s": 30.0}, "optimizer": {"lr": 0.01}}
    return initialize(model, {**config, **options})


def drawn(make: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = make()
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.1, 0.3)
    return model


def tokens(rank: int) -> dict[str, Tensor]:
    ids = torch.arange(12).view(2, 6) + 5 + rank
    return {"input_ids": ids, "labels": ids}


# Adapters


def adapted(targets: Mapping[str, Any]) -> Any:
    import peft

    model = drawn(lambda: build_moe("qwen3_moe"))
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, **targets))
    torch.manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, 0.0, 0.3)
    return made


def walk_between_steps(rank: int, world_size: int, options: Options) -> list[dict[str, Tensor]]:
    """Merged, merged again after a step, and the adapters with which that is."""
    model = adapted({"target_modules": ["q_proj", "o_proj"]})
    with make_engine(model, options) as engine:
        source, alone = engine.weights(), engine.weights(adapters="only")
        found = [{name: tensor.clone() for name, tensor in source}]
        losses = [engine.train_step([tokens(rank)]).loss, engine.train_step([tokens(rank)]).loss]
        found.append({name: tensor.clone() for name, tensor in source})
        found.append({name: tensor.clone() for name, tensor in alone})
        found.append({"losses": torch.tensor(losses, dtype=torch.float64)})
    return found


def plain_losses(rank: int, world_size: int, options: Options) -> list[float]:
    with make_engine(adapted({"target_modules": ["q_proj", "o_proj"]}), options) as engine:
        return [engine.train_step([tokens(rank)]).loss for _ in range(2)]


def test_adapters_are_merged_as_they_are_at_each_walk_and_the_model_trains_on_unmerged(ranks: WorkerPool) -> None:
    peft = pytest.importorskip("peft")
    first, second, adapters, losses = ranks(2).run(walk_between_steps, STAGE_3)[0]
    assert losses["losses"].tolist() == pytest.approx(ranks(2).run(plain_losses, STAGE_3)[0], abs=0)
    base = adapted({"target_modules": ["q_proj", "o_proj"]}).unload().state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(first[name], base[name])
    assert not torch.equal(second[name], first[name])
    model = adapted({"target_modules": ["q_proj", "o_proj"]})
    loaded = peft.set_peft_model_state_dict(model, adapters)
    assert not loaded.unexpected_keys  # each adapter binds to a layer
    assert {key for key in loaded.missing_keys if "lora" in key} == set()
    merged = dict(model.merge_and_unload().state_dict())
    torch.testing.assert_close(second[name], merged[name], rtol=0, atol=0)


def walk_experts(rank: int, world_size: int, options: Options) -> dict[str, Tensor]:
    model = adapted({"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]})
    with make_engine(model, options) as engine:
        return {name: tensor.clone() for name, tensor in engine.weights()}


def test_adapters_of_experts_are_merged_into_each_expert(ranks: WorkerPool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    targets = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    adapted(targets).merge_and_unload().save_pretrained(tmp_path)
    for found in ranks(2).run(walk_experts, STAGE_3):
        torch.testing.assert_close(found, load_file(tmp_path / "model.safetensors"), rtol=0, atol=0)


def export_to_failing(rank: int, world_size: int, folder: Path) -> str:
    def fail(*given: Any) -> int:
        raise OSError("the disk is full")

    write = fail if rank == 1 else exporter.write_export
    with make_engine(adapted({"target_modules": ["q_proj"]}), STAGE_3) as engine:
        with patch.object(exporter, "write_export", write), pytest.raises(CheckpointError) as caught:
            engine.export_weights(folder)
        engine.train_step([tokens(rank)])
    return str(caught.value)


def test_no_rank_waits_for_one_that_cannot_write_what_is_merged(ranks: WorkerPool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for text in ranks(2).run(export_to_failing, tmp_path / "out"):
        assert "rank 1" in text
        assert "the disk is full" in text


# Order, names and shapes


def make_family(family: str) -> nn.Module:
    name = family.removeprefix("tied ")
    return drawn(ZOO[name].case().make if name == family else lambda: build_model(name, tie_word_embeddings=True))


def walk_once(rank: int, world_size: int, family: str, options: Options, param: str) -> list[tuple[str, Tensor]]:
    with make_engine(make_family(family), options, param) as engine:
        return [(name, tensor.clone()) for name, tensor in engine.weights()]


def test_the_layers_of_a_picture_and_its_text_are_not_interleaved(ranks: WorkerPool) -> None:
    (pairs,) = ranks(1).run(walk_once, "llava", {}, "fp32")
    layers = [layer_of(name) for name, _ in pairs]
    runs = [layer for layer, before in zip(layers, ["", *layers], strict=False) if layer and layer != before]
    assert len(runs) == len(set(runs)) == 4


def test_tied_heads_padded_words_and_fused_matrices_come_once_and_whole(ranks: WorkerPool, tmp_path: Path) -> None:
    tp = {"mesh": {"tp": 2}, "zero": {"stage": 3}}
    for family in ("tied llama", "tied gpt2", "phi3"):
        make_family(family).save_pretrained(tmp_path / family)
        expected = load_file(tmp_path / family / "model.safetensors")
        for pairs in ranks(2).run(walk_once, family, tp, "fp32"):
            assert len(pairs) == len(expected)  # 41 or 101 words, which 2 does not divide; tied once
            torch.testing.assert_close(dict(pairs), expected, rtol=0, atol=0)


def load_and_walk(rank: int, world_size: int, family: str, folder: Path) -> Any:
    config = {**STAGE_3, "precision": {"param": "fp32"}, "run": {"device": "cpu", "timeout_s": 30.0}}
    with initialize(build_moe(family), config, weights=folder) as engine:
        source = engine.weights()
        return source.metadata(), [(name, tensor.clone()) for name, tensor in source]


@pytest.mark.parametrize(("family", "layer"), [("deepseek_v3", 61), ("glm4_moe", 46)])
def test_layers_that_predict_more_tokens_are_left_in_the_folder(
    ranks: WorkerPool, family: str, layer: int, tmp_path: Path
) -> None:
    """Folders of the hub have them after the model's last layer, and the model's class says that it has none."""
    drawn(lambda: build_moe(family)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    more = {name.replace("layers.1.", f"layers.{layer}."): tensor + 1 for name, tensor in weights.items()}
    more[f"model.layers.{layer}.eh_proj.weight"] = torch.ones(16, 32)
    save_file({**more, **weights}, tmp_path / "model.safetensors", {"format": "pt"})
    for metadata, pairs in ranks(2).run(load_and_walk, family, tmp_path):
        assert [info.name for info in metadata] == [name for name, _ in pairs]
        torch.testing.assert_close(dict(pairs), weights, rtol=0, atol=0)


class Counting(nn.Module):
    """Has buffers that a cast of the weights must leave as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([1.0 + 2**-20]))
        self.register_buffer("count", torch.tensor(2**40))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_buffers_are_not_cast_down() -> None:
    with make_engine(Counting(), {}, "bf16") as engine:
        found = dict(engine.weights(dtype="bf16"))
    assert found["layer.weight"].dtype == torch.bfloat16
    assert found["scale"].item() == 1.0 + 2**-20
    assert found["count"].item() == 2**40


# Memory, shares of a delta


def measure(rank: int, world_size: int, options: Options, bucket_bytes: int) -> dict[str, int]:
    """The most live bytes of walks beside those before, and the bytes of what is handed over.

    Buffers of a tier are there after a step: a first walk shows them to the count, and must add none to them.
    """
    torch.manual_seed(0)
    model = build_model("llama", num_hidden_layers=4, hidden_size=256, intermediate_size=640)
    engine = make_engine(model, options, "bf16")
    source = engine.weights(to_rank=0, bucket_bytes=bucket_bytes)
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, dtype, shape in source.metadata()}
    units = [sum(sizes[name] for name in group) for group in source.groups()]
    found = {"unit": max(units), "tensor": max(sizes.values()), "all": sum(units)}
    engine.train_step([tokens(0)])
    engine.parts.tiers.wait_idle()
    before = engine.parts.tiers.buffers.reserved_bytes
    for name, walk in (("tensors", lambda: source), ("groups", source.iter_groups)):
        gc.collect()
        with LiveBytes() as live:
            for group in engine.parts.sharding.groups:
                stored = (group.full, group.shard.tensor, group.master.tensor)
                live.mark(tensor for tensor in stored if tensor is not None)
            for _ in range(2):
                at_first = live.live_bytes()
                live.reset_peak()
                for each, tensors in walk():
                    del each, tensors
            found[name] = live.peak_bytes() - at_first
    found["tier"] = engine.parts.tiers.buffers.reserved_bytes - before
    engine.close()
    return found


@pytest.mark.parametrize(
    ("tier", "bucket_bytes"), [("device", 2**14), ("nvme", 2**14), ("nvme", 2**20), ("nvme", 2**30)]
)
def test_a_walk_takes_the_memory_of_a_unit_and_a_bucket(
    ranks: WorkerPool, tier: str, bucket_bytes: int, tmp_path: Path
) -> None:
    tiers = {"params": tier, "optimizer": tier} | ({"nvme_path": str(tmp_path / "swap")} if tier == "nvme" else {})
    options = {"mesh": {"tp": 2, "pp": 2}, "zero": {"stage": 3}, "tiers": tiers}
    for found in ranks(4).run(measure, options, bucket_bytes):
        bucket = min(max(bucket_bytes, found["tensor"]), found["unit"])
        assert found["all"] > 3 * found["unit"]
        assert found["groups"] <= found["unit"] + bucket
        assert found["tensors"] <= 2 * bucket
        assert found["tier"] <= 0


def consolidate(rank: int, world_size: int) -> dict[str, int]:
    """The most live bytes of the drop-in's whole state dict beside those before."""
    torch.manual_seed(0)
    model = build_model("llama", num_hidden_layers=4, hidden_size=256, intermediate_size=640)
    settings = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    source = engine.inner.weights(None)
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, dtype, shape in source.metadata()}
    units = [sum(sizes[name] for name in group) for group in source.groups()]
    with LiveBytes() as live:
        for group in engine.inner.parts.sharding.groups:
            stored = (group.full, group.shard.tensor, group.master.tensor)
            live.mark(tensor for tensor in stored if tensor is not None)
        before = live.live_bytes()
        state = engine._zero3_consolidated_16bit_state_dict()
        peak = live.peak_bytes() - before
    is_whole = state is not None and state.keys() == dict(model.named_parameters()).keys()
    engine.destroy()
    return {"peak": peak, "unit": max(units), "all": sum(units), "is_whole": is_whole}


def test_the_whole_state_dict_of_the_drop_in_takes_a_unit_on_other_ranks(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(consolidate)
    assert first["is_whole"]
    assert first["peak"] <= first["all"] + first["unit"]
    assert not second["is_whole"]
    assert second["peak"] <= second["unit"] < second["all"] / 3


def write_versions(rank: int, world_size: int, root: Path) -> Any:
    with make_engine(drawn(lambda: build_model("llama")), {**STAGE_3, "optimizer": {"lr": 1e-5}}, "bf16") as engine:
        writer, source, versions = VersionWriter(root), engine.weights(to_rank=0), []
        for _ in range(3):
            versions.append(writer.write(source))
            digests = source.digests()
            engine.train_step([tokens(rank)])
        return versions, digests


def test_a_version_after_a_step_has_what_the_step_has_changed(ranks: WorkerPool, tmp_path: Path) -> None:
    (versions, digests), (others, _) = ranks(2).run(write_versions, tmp_path)
    assert others == [None] * 3
    assert versions[0].num_bytes == versions[0].num_whole_bytes
    assert 0 < versions[1].num_bytes < versions[0].num_bytes / 2
    version, found = read_weights(tmp_path)
    assert version.number == 2
    assert {name: digest_of(tensor) for name, tensor in found.items()} == digests
