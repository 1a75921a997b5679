"""Qwen3-VL-MoE, with pictures: experts of the text beside a vision tower whose features are added after some blocks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.hf_folders import read_weights
from harness.models import IGNORED, ModelCase
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.refusals import refusal_of
from harness.tensor import CLIP_NORM, train_on_mesh, train_plainly
from harness.training import Overrides, merge_ranks
from shardwise import initialize

pytest.importorskip("transformers")

NUM_STEPS = 2
PICTURE, NUM_PATCHES = 5, 16  # of a picture; four make a token
REPLICATED = {"pipeline": {"replicate": ["model.visual"]}}
LAYOUTS: dict[str, Overrides] = {
    "ep": {"mesh": {"ep": 2}, "zero": {"stage": 3}},
    "tp x ep": {"mesh": {"tp": 2, "ep": 2}, "zero": {"stage": 2}},
    "pp": {"mesh": {"pp": 2}, **REPLICATED},
}
REFUSED: dict[str, tuple[Overrides, str]] = {
    "features of another stage": ({"mesh": {"pp": 2}}, "cut-value-not-sent"),
    "features of all tokens": (
        {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}},
        "tp-tokens-apart",
    ),
}


def make_model() -> nn.Module:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24, "initializer_range": 0.2}
    text = {
        **sizes,
        "vocab_size": 41,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4},
    }
    vision = {
        **sizes,
        "depth": 2,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    tokens = {"image_token_id": PICTURE, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    model: Any = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **tokens))
    model.set_experts_implementation("eager")  # the default knows no float64
    return model


def batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A picture, and text of which the loss is."""
    generator = torch.Generator().manual_seed(seed)
    picture = torch.tensor([[7, *[PICTURE] * (NUM_PATCHES // 4), 8]]).expand(num_samples, -1)
    text = torch.randint(10, 41, (num_samples, 10), generator=generator)
    tokens = torch.cat([picture, text], 1)  # [B, S]
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.cat([torch.full_like(picture, IGNORED), text], 1),
        "pixel_values": torch.randn(num_samples * NUM_PATCHES, 3 * 2 * 4 * 4, generator=generator).to(dtype),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * num_samples),
        "mm_token_type_ids": (tokens == PICTURE).long(),
    }


CASE = ModelCase("qwen3_vl_moe", make_model, batch, None)


def train(rank: int, world_size: int, overrides: Overrides) -> Trace:
    return train_on_mesh(rank, CASE, overrides, None, 1, NUM_STEPS)


@functools.cache
def reference(num_data_ranks: int) -> Trace:
    return train_plainly(CASE, num_data_ranks, 1, NUM_STEPS, CLIP_NORM)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_qwen3_vl_moe_equals_one_process(ranks: WorkerPool, layout: str) -> None:
    overrides = LAYOUTS[layout]
    check_parity(
        merge_ranks(ranks(2).run(train, overrides)), reference(1 if {"tp", "pp"} & {*overrides["mesh"]} else 2)
    )


def train_refused(rank: int, world_size: int, overrides: Overrides) -> tuple[str, str]:
    return refusal_of(functools.partial(train, rank, world_size, overrides))


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_features_do_not_reach_is_refused(ranks: WorkerPool, name: str) -> None:
    overrides, code = REFUSED[name]
    assert code in {found for found, _ in ranks(2).run(train_refused, overrides)}


def pass_through(rank: int, world_size: int, folder: Path, out: Path, overrides: Overrides) -> dict[str, Tensor]:
    """Import into other weights, hand over, and export."""
    torch.manual_seed(1)
    config = {**overrides, "precision": {"param": "fp32"}, "run": {"device": "cpu", "timeout_s": 30.0}}
    with initialize(make_model(), config) as engine:
        engine.import_weights(folder)
        engine.export_weights(out)
        return {name: tensor.clone() for name, tensor in engine.weights() if tensor is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_qwen3_vl_moe_reads_and_writes_the_folder_of_transformers(
    ranks: WorkerPool, layout: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source: Any = make_model()
    source.save_pretrained(tmp_path / "theirs")
    walks = ranks(2).run(pass_through, tmp_path / "theirs", tmp_path / "ours", LAYOUTS[layout])
    theirs = read_weights(tmp_path / "theirs")
    for found in ({name: value.flatten() for name, value in walks[0].items()}, read_weights(tmp_path / "ours")):
        torch.testing.assert_close(found, theirs, rtol=0, atol=0)
    again = type(source).from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(dict(again.state_dict()), dict(source.state_dict()), rtol=0, atol=0)
