"""Weights handed over by an engine, against what one process and `save_pretrained` have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import build_model
from harness.moe_models import build_moe
from harness.pool import WorkerPool
from shardwise import Engine, initialize

pytest.importorskip("transformers")

SPLIT = {"mesh": {"tp": 2, "pp": 2}, "zero": {"stage": 3}}
Options = Mapping[str, Any]


def make_model(family: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_moe(family) if family in ("mixtral", "gpt_oss", "qwen3_moe") else build_model(family)
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.1, 0.3)
    return model


def make_engine(model: nn.Module, options: Options) -> Engine:
    return initialize(model, {"precision": {"param": "bf16"}, "run": {"device": "cpu", "timeout_s": 30.0}, **options})


def saved(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What `save_pretrained` writes of a model in bf16."""
    from safetensors.torch import load_file

    model.to(torch.bfloat16).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def walk(rank: int, world_size: int, family: str, options: Options, arguments: Options) -> tuple[Any, ...]:
    with make_engine(make_model(family), options) as engine:
        source = engine.weights(**arguments)
        metadata, groups = source.metadata(), source.groups()
        pairs = [(name, None if tensor is None else tensor.clone()) for name, tensor in source]
        again = [name for names, tensors in source.iter_groups() for name in names]
        assert again == [name for name, _ in pairs]
        return metadata, groups, pairs


LAYOUTS: dict[str, tuple[int, Options]] = {
    "stage 0": (1, {}),
    "stage 2 of 2": (2, {"zero": {"stage": 2}}),
    "stage 3 of 2": (2, {"zero": {"stage": 3}}),
    "replicas": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero": {"stage": 3}}),
    "split": (4, {"mesh": {"tp": 2, "dp_shard": 2}, "zero": {"stage": 3}}),
    "stages": (4, SPLIT),
    "nvme": (4, {**SPLIT, "tiers": {"params": "nvme", "optimizer": "nvme", "grads": "host", "nvme_path": "."}}),
}


@pytest.mark.parametrize("to_rank", [None, 0])
@pytest.mark.parametrize("bucket_bytes", [2**30, 2000])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_hands_over_what_save_pretrained_writes(
    ranks: WorkerPool, layout: str, family: str, bucket_bytes: int, to_rank: int | None, tmp_path: Path
) -> None:
    num_ranks, options = LAYOUTS[layout]
    if "tiers" in options:
        options = {**options, "tiers": {**options["tiers"], "nvme_path": str(tmp_path / "swap")}}
    expected = saved(make_model(family), tmp_path)
    arguments = {"bucket_bytes": bucket_bytes, "to_rank": to_rank}
    for rank, (metadata, groups, pairs) in enumerate(ranks(num_ranks).run(walk, family, options, arguments)):
        assert {name for name, _ in pairs} == expected.keys()
        assert (
            [info.name for info in metadata]
            == [name for name, _ in pairs]
            == [name for each in groups for name in each]
        )
        for info, (name, tensor) in zip(metadata, pairs, strict=True):
            assert (info.dtype, info.shape) == (expected[name].dtype, tuple(expected[name].shape))
            if to_rank in (None, rank):
                assert tensor is not None and tensor.dtype == info.dtype
                assert torch.equal(tensor, expected[name]), name
            else:
                assert tensor is None
