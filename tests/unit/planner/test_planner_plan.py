"""`shardwise.plan`: the command's search as a function."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import shardwise
from harness.refusals import refused
from shardwise.models.decoder import Decoder
from shardwise.models.presets import preset
from shardwise.models.shape import ModelShape
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.request import model_of, split_as
from shardwise.planner.search import Limits

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
PINS = ["mesh.cp=1", "recompute.mode=full", "tiers.optimizer=device"]
FEW = Limits(num_best=3, max_prices=600)


class Configured:
    """As a config of Hugging Face's: attributes, and a dictionary of them."""

    def to_dict(self) -> dict[str, Any]:
        return dict(GPT2)


def test_the_best_is_a_config_that_resolves_to_it() -> None:
    plan = shardwise.plan("llama-7b", "h100:8", global_batch=16, settings=PINS, limits=FEW)
    config = plan.best.config()
    assert plan.best is plan.choices[0]
    assert plan.best.price is plan.result.winner
    assert config.model.preset == "llama-7b"
    assert config.batch.global_size == 16
    assert config.recompute.mode == "full"
    assert split_as(plan.asked.job.base, config.resolve(8)) == plan.best.price.config
    times = [choice.price.time.step_s for choice in plan.choices]
    assert len(times) == 3
    assert times == sorted(times)


def test_it_is_printed_as_the_command_prints_it() -> None:
    plan = shardwise.plan("llama-7b", "h100:8", global_batch=16, settings=PINS, limits=FEW)
    text = str(plan)
    assert "llama-7b, 6.74 B parameters" in text
    assert plan.reasons.wins.split(":")[0].split(" than ")[0] in text
    assert "\x1b" not in text
    assert " a step, " in repr(plan.best)


def test_what_is_given_goes_into_the_config() -> None:
    settings = [*PINS, "optimizer.lr=0.5", "mesh.tp=2"]
    plan = shardwise.plan("llama-7b", "h100:8", global_batch=16, seq_len=2048, settings=settings, limits=FEW)
    config = plan.best.config()
    assert (config.optimizer.lr, config.mesh.tp, config.data.seq_len) == (0.5, 2, 2048)


def test_where_nothing_fits_the_best_is_refused_with_a_fix() -> None:
    cluster = parse_cluster("h100:1")
    small = replace(cluster, gpu=replace(cluster.gpu, memory_bytes=2**30), host=replace(cluster.host, memory_bytes=1.0))
    plan = shardwise.plan("llama-7b", small, global_batch=1, limits=FEW)
    assert plan.choices == ()
    assert "nothing fits" in str(plan)
    with refused("nothing-fits", "1 GPU"):
        _ = plan.best


def test_models_are_read_from_what_has_their_shape() -> None:
    decoder = preset("tiny")
    with torch.device("meta"):
        module = Decoder(decoder)
    shape = ModelShape.of_decoder(decoder)
    assert model_of(module).shape == model_of(decoder).shape == model_of(shape).shape == shape
    assert model_of(module).longest == decoder.max_seq_len
    assert model_of(GPT2).shape.num_params == 124_439_808
    for model in (Configured(), SimpleNamespace(config=Configured())):
        assert model_of(model).shape == model_of(GPT2).shape
        assert model_of(model).longest == 1024
    assert model_of("llama-2-7b").shape.name == "llama-7b"
    with refused("not-a-model", "int"):
        model_of(3)
