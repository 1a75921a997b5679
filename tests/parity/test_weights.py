"""Weights handed over by engines of every layout, against what `save_pretrained` of one process writes."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import build_model
from harness.moe_models import build_moe
from harness.pool import WorkerPool
from harness.zoo import ZOO
from shardwise import Engine, initialize

pytest.importorskip("transformers")
from safetensors.torch import load_file

Options = Mapping[str, Any]
Walked = tuple[list[Any], list[list[str]], list[tuple[str, Tensor | None]]]


def make_model(family: str) -> nn.Module:
    """A model whose values differ everywhere, and its name in one of three tables."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table, name = family.split(":")
        model = build_moe(name) if table == "moe" else build_model(name) if table == "hf" else ZOO[name].case().make()
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.1, 0.3)
    return model


def make_engine(model: nn.Module, options: Options) -> Engine:
    return initialize(model, {"precision": {"param": "fp32"}, "run": {"device": "cpu", "timeout_s": 30.0}, **options})


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What `save_pretrained` writes of a model."""
    make_model(family).to(dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def walk(rank: int, world_size: int, families: Sequence[str], options: Options, arguments: Sequence[Options]) -> Any:
    """What sources of each family's model yield, by family and arguments; the error where they raise one."""
    found: dict[tuple[str, int], Walked | str] = {}
    for family in families:
        try:
            with make_engine(make_model(family), options) as engine:
                for index, each in enumerate(arguments):
                    source = engine.weights(**each)
                    pairs = [(name, None if tensor is None else tensor.clone()) for name, tensor in source]
                    found[family, index] = source.metadata(), source.groups(), pairs
        except Exception:
            found[family, -1] = traceback.format_exc()
    return found


def check(found: Walked | str, expected: Mapping[str, Tensor], is_given: bool) -> None:
    assert not isinstance(found, str), found
    metadata, groups, pairs = found
    names = [name for name, _ in pairs]
    assert set(names) == expected.keys()
    assert names == [info.name for info in metadata] == [name for group in groups for name in group]
    for info, (name, tensor) in zip(metadata, pairs, strict=True):
        assert (info.dtype, info.shape) == (expected[name].dtype, tuple(expected[name].shape)), name
        assert (tensor is not None) == is_given
        if tensor is not None:
            assert tensor.dtype == info.dtype
            assert torch.equal(tensor, expected[name]), name


FAMILIES = [
    *("zoo:llama", "zoo:llama/tied", "zoo:gpt2", "zoo:mistral", "zoo:qwen2", "zoo:qwen3", "zoo:gemma", "zoo:gemma2"),
    *("zoo:phi", "zoo:phi3", "zoo:gpt_neox", "zoo:opt", "zoo:bloom", "zoo:falcon", "zoo:olmo2", "zoo:mamba"),
    *("zoo:bert", "zoo:t5", "zoo:vit", "zoo:clip", "zoo:llava", "zoo:qwen2_5_vl", "zoo:whisper"),
    *("moe:mixtral", "moe:qwen3_moe", "moe:gpt_oss", "moe:deepseek_v3", "moe:olmoe", "moe:granitemoe", "moe:glm4_moe"),
    *("moe:qwen2_moe", "moe:ernie4_5_moe"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "share", [slice(number, None, 3) for number in range(3)], ids=["a third", "another", "the last"]
)
def test_thirty_families_are_handed_over_as_save_pretrained_writes_them(
    ranks: WorkerPool, tmp_path: Path, share: slice
) -> None:
    assert len(FAMILIES) >= 30
    by_rank = ranks(2).run(walk, FAMILIES[share], {"zero": {"stage": 3}}, [{}])
    for index, family in enumerate(FAMILIES[share]):
        expected = saved(family, tmp_path / str(index))
        for found in by_rank:
            check(found.get((family, -1)) or found[family, 0], expected, is_given=True)


SPLIT: Options = {"mesh": {"tp": 2, "pp": 2}, "zero": {"stage": 3}}
LAYOUTS: dict[str, tuple[int, Options]] = {
    "one rank": (1, {}),
    "stage 2": (2, {"zero": {"stage": 2}}),
    "replicas": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero": {"stage": 3}}),
    "tp": (4, {"mesh": {"tp": 2, "dp_shard": 2}, "zero": {"stage": 3}}),
    "tp of stage 1": (4, {"mesh": {"tp": 2, "dp_shard": 2}, "zero": {"stage": 1}}),
    "stages": (4, SPLIT),
    "nvme": (4, {**SPLIT, "tiers": {"params": "nvme", "optimizer": "nvme", "grads": "host"}}),
    "experts": (4, {"mesh": {"dp_shard": 4, "ep": 2}, "zero": {"stage": 3}}),
    "experts of tp": (4, {"mesh": {"dp_shard": 2, "tp": 2, "ep": 4}, "zero": {"stage": 2}}),
    "tokens": (2, {"mesh": {"cp": 2}, "zero": {"stage": 3}}),
    "encoded": (2, {"zero": {"stage": 2}, "precision": {"param": "fp32", "gather": "int8"}}),
}
ARGUMENTS: list[Options] = [
    {},
    {"bucket_bytes": 3000, "to_rank": 0},
    {"dtype": "bf16", "to_rank": 1},
    {"dtype": "fp64"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_tier_hands_the_same_over(ranks: WorkerPool, layout: str, tmp_path: Path) -> None:
    num_ranks, options = LAYOUTS[layout]
    if "tiers" in options:
        options = {**options, "tiers": {**options["tiers"], "nvme_path": str(tmp_path / "swap")}}
    families = ["hf:gpt2", "zoo:llama", "zoo:llama/tied", "moe:mixtral"]
    if "experts" in layout:
        families = ["moe:mixtral", "moe:gpt_oss"]
    elif layout == "tokens":
        families = ["zoo:llama"]
    arguments = [each for each in ARGUMENTS if each.get("to_rank", 0) < num_ranks]
    by_rank = ranks(num_ranks).run(walk, families, options, arguments)
    for family in families:
        for index, each in enumerate(arguments):
            dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(each.get("dtype", ""), torch.float32)
            expected = saved(family, tmp_path / f"{family}-{index}", dtype)
            for rank, found in enumerate(by_rank):
                is_given = each.get("to_rank", rank) == rank
                check(found.get((family, -1)) or found[family, index], expected, is_given)


LORA = {
    "linear": {"target_modules": ["q_proj", "down_proj"]},
    "all": {"target_modules": "all-linear", "use_rslora": True, "modules_to_save": ["lm_head"]},
    "dora": {"target_modules": ["v_proj", "up_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
}


def make_adapted(name: str) -> Any:
    import peft

    model = make_model("zoo:llama").to(torch.bfloat16)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **LORA[name]), autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, 0.0, 0.3)
    return adapted


def walk_adapted(rank: int, world_size: int, names: Sequence[str], options: Options, folder: Path) -> Any:
    found: dict[tuple[str, Any], Any] = {}
    for name in names:
        model = make_adapted(name)
        engine = make_engine(model, {"precision": {"param": "bf16"}, **options})
        for adapters in ("merge", "only", None):
            source = engine.weights(adapters=adapters)
            pairs = [(key, tensor.clone()) for key, tensor in source]
            found[name, adapters] = source.metadata(), source.groups(), pairs
        engine.export_weights(folder / name)
        engine.close()
    return found


@pytest.mark.parametrize(("num_ranks", "options"), [(2, {"zero": {"stage": 3}}), (4, SPLIT)], ids=["stage 3", "split"])
def test_adapters_are_handed_over_merged_and_alone_as_peft_saves_them(
    ranks: WorkerPool, num_ranks: int, options: Options, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    names = [name for name in LORA if num_ranks == 2 or name == "linear"]
    by_rank = ranks(num_ranks).run(walk_adapted, names, options, tmp_path / "exported")
    for name in names:
        make_adapted(name).merge_and_unload().save_pretrained(tmp_path / name / "merge")
        make_adapted(name).unload().save_pretrained(tmp_path / name / "base")
        make_adapted(name).save_pretrained(tmp_path / name / "only")
        merged = load_file(tmp_path / name / "merge" / "model.safetensors")
        for found in by_rank:
            check(found[name, "merge"], merged, is_given=True)
            check(found[name, None], load_file(tmp_path / name / "base" / "model.safetensors"), is_given=True)
            check(found[name, "only"], load_file(tmp_path / name / "only" / "adapter_model.safetensors"), is_given=True)
        exported = load_file(tmp_path / "exported" / name / "model.safetensors")
        torch.testing.assert_close(exported, merged, rtol=0, atol=0)
