"""Models of all kinds, unmodified, through a pipeline: each equals one plain process, in float64."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from harness.chains import CHAINS
from harness.huggingface import make_case
from harness.live_bytes import LiveBytes
from harness.models import ModelCase, make_batches
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.training import make_config, merge_ranks, reference_of
from shardwise import Config, init, initialize
from shardwise.construction.values import ParamInitializer
from shardwise.runtime.float64 import float64_throughout

NUM_STEPS = 2
CLIP_NORM = 0.05
NUM_MICRO_BATCHES = 3

Options = dict[str, Any]


def train(rank: int, world_size: int, case: ModelCase, overrides: Options) -> Trace:
    """Train a case on one rank of a pipeline; the trace has no gradients, since each rank has those of its stages."""
    mesh = overrides["mesh"]
    tp = mesh.get("tp", 1)
    num_data_ranks = world_size // tp // mesh["pp"]
    settings = {"optimizer": {"clip_norm": CLIP_NORM}, **overrides}
    batches = make_batches(case, num_steps=NUM_STEPS, world_size=num_data_ranks, num_micro_batches=NUM_MICRO_BATCHES)
    model = case.build(torch.float64, seed=rank)  # rank 0's values are everybody's
    names = [name for name, _ in model.named_parameters()]
    losses, norms = [], []
    with initialize(model, make_config(NUM_MICRO_BATCHES, settings), loss_fn=case.loss) as engine:
        for step in range(NUM_STEPS):
            result = engine.train_step(batches[step][rank // tp % num_data_ranks])
            losses.append(result.loss)
            norms.append(result.grad_norm)
        return Trace(losses, norms, {}, {name: engine.read(name) for name in names})


def train_family(rank: int, world_size: int, family: str, options: Options, overrides: Options) -> Trace:
    with float64_throughout():
        return train(rank, world_size, make_case(family, **options), overrides)


@functools.cache
def reference(family: str, options: tuple[tuple[str, Any], ...], num_data_ranks: int) -> Trace:
    case = make_case(family, **dict(options))
    with float64_throughout():
        trace = reference_of(case, num_data_ranks, NUM_MICRO_BATCHES, NUM_STEPS, CLIP_NORM)
    return replace(trace, gradients={})


# What a plain pipeline does not show, which `test_zoo.py` has for many more families.
# name: family, options of the model, of both sides; ranks; what differs from a plain pipeline
FAMILY_RUNS: dict[str, tuple[str, Options, int, Options]] = {
    "llama": ("llama", {}, 2, {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, 2, {"pipeline": {"schedule": "zb-h1"}}),
    "llama, tp": ("llama", {}, 4, {"mesh": {"tp": 2}}),
    "llama, recomputed by itself": ("llama", {"checkpointing": "non-reentrant"}, 2, {}),
    "llama, recomputed, reentrant": ("llama", {"checkpointing": "reentrant"}, 2, {}),
    "llama, adapters": ("llama", {"has_adapters": True}, 2, {}),
    "qwen2": ("qwen2", {"num_hidden_layers": 4}, 2, {"pipeline": {"schedule": "interleaved", "virtual_stages": 2}}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}, 4, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}),
    "mistral": ("mistral", {}, 2, {"pipeline": {"schedule": "gpipe"}}),
    "mistral, recomputed": ("mistral", {"checkpointing": "non-reentrant"}, 2, {"pipeline": {"schedule": "zb-h1"}}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}, 2, {"pipeline": {"schedule": "zb-h2"}}),
    "bert, virtual": ("bert", {"num_hidden_layers": 4}, 2, {"pipeline": {"schedule": "zb-v", "virtual_stages": 2}}),
    "t5, untied": ("t5", {"tie_word_embeddings": False}, 2, {"pipeline": {"schedule": "zb-h1"}}),
    "mixtral": ("mixtral", {}, 2, {}),  # its loss reads what the routers of all layers return
    "mixtral, virtual": (
        "mixtral",
        {"num_hidden_layers": 4},
        2,
        {"pipeline": {"schedule": "zb-v", "virtual_stages": 2}},
    ),
    "mixtral, split backward": ("mixtral", {}, 2, {"pipeline": {"schedule": "zb-h1"}}),
    "switch": ("switch", {}, 2, {}),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", FAMILY_RUNS)
def test_a_family_equals_one_process(ranks: WorkerPool, name: str) -> None:
    pytest.importorskip("transformers")
    family, options, num_ranks, differing = FAMILY_RUNS[name]
    overrides = {**differing, "mesh": {"pp": 2, **differing.get("mesh", {})}}
    traces = ranks(num_ranks).run(train_family, family, options, overrides)
    plain = {key: value for key, value in options.items() if key != "checkpointing"}
    check_parity(merge_ranks(traces), reference(family, (*plain.items(),), overrides["mesh"].get("dp_shard", 1)))


def train_chain(rank: int, world_size: int, name: str, overrides: Options) -> Trace:
    return train(rank, world_size, CHAINS[name], overrides)


PIPELINES: dict[str, tuple[int, Options]] = {
    "1f1b": (2, {}),
    "zb-h1, zero 3": (4, {"pipeline": {"schedule": "zb-h1"}, "zero": {"stage": 3}}),
    "interleaved": (2, {"pipeline": {"schedule": "interleaved", "virtual_stages": 2}}),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_equals_one_process(ranks: WorkerPool, name: str, pipeline: str) -> None:
    num_ranks, overrides = PIPELINES[pipeline]
    traces = ranks(num_ranks).run(train_chain, name, {"mesh": {"pp": 2}, **overrides})
    expected = reference_of(CHAINS[name], num_ranks // 2, NUM_MICRO_BATCHES, NUM_STEPS, CLIP_NORM)
    check_parity(merge_ranks(traces), replace(expected, gradients={}))


WIDE, NUM_WIDE = 128, 12
WIDE_BYTES = 4 * WIDE * WIDE


def build_lazily(rank: int, world_size: int, how: str) -> tuple[int, int, list[float]]:
    """Live and peak bytes of making an engine of a model that has no values yet, and the losses of two steps."""
    config = Config.from_dict(
        {
            "mesh": {"pp": 2},
            "optimizer": {"name": "sgd", "momentum": 0.0, "lr": 0.1},
            "batch": {"accumulation": 2},
            "run": {"device": "cpu", "seed": 3, "timeout_s": 30.0},
        }
    )
    torch.manual_seed(0)
    context = torch.device("meta") if how == "meta" else init(seed=3 if how == "seeded" else None)
    with LiveBytes() as live:
        with context:
            model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(NUM_WIDE)))
        engine = initialize(model, config, loss_fn=lambda output, batch: output.square().mean())
    with engine:
        batch = torch.ones(2, WIDE)
        losses = [engine.train_step([batch, batch]).loss for _ in range(2)]
        return live.live_bytes(), live.peak_bytes(), losses


@pytest.mark.parametrize("how", ["drawn", "seeded", "meta"])
def test_a_rank_never_holds_the_values_of_other_stages(ranks: WorkerPool, how: str) -> None:
    results = ranks(2).run(build_lazily, how)
    for live_bytes, peak_bytes, _ in results:
        assert live_bytes <= NUM_WIDE / 2 * WIDE_BYTES + WIDE_BYTES / 2
        # One parameter more, which is read for the other rank or drawn, and the copy that is sent.
        assert peak_bytes <= (NUM_WIDE / 2 + 3) * WIDE_BYTES
    assert results[0][2] == results[1][2]
    if how != "meta":  # whose values are not drawn
        with nullcontext() if how == "drawn" else init(seed=3):
            torch.manual_seed(0)
            plain = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(NUM_WIDE)))
        source = ParamInitializer(plain, seed=3)
        x = torch.ones(2, WIDE)
        for name, _ in plain.named_parameters():
            x = x @ source.read(name).t()
        assert results[0][2][0] == pytest.approx(x.square().mean().item(), rel=1e-5)
