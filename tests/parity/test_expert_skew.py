"""Uneven choices of experts, as `experts.skew` says: a verification forces them, and simulated ranks get the rows."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.huggingface import build_model
from harness.pool import WorkerPool
from shardwise import Config, simulate
from shardwise.experts import routers
from shardwise.verify.compare import TrainingTrace
from shardwise.verify.job import VerifyJob, make_job, small_layout
from shardwise.verify.model import ExpertSizes, ModelSpec, build_skeleton, skewed_routing
from shardwise.verify.run import judge, train_layout, train_reference

pytest.importorskip("transformers")

MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "architectures": ["MixtralForCausalLM"],
    "tie_word_embeddings": False,
}


def train(rank: int, world_size: int, text: str, folder: Path, follows: bool) -> TrainingTrace:
    own_choice = mock.patch.object(routers.Routers, "following", return_value=nullcontext())
    with nullcontext() if follows else own_choice:
        return train_layout(VerifyJob.from_json(text), rank, folder)


def verify_job(mesh: dict[str, int], **sections: Any) -> VerifyJob:
    values = {"mesh": mesh, "zero": {"stage": 3}, "experts": {"skew": 8.0}, "optimizer": {"name": "sgd"}, **sections}
    return make_job(Config.from_dict(values), None, huggingface=MIXTRAL, num_steps=2)


@pytest.mark.parametrize(
    "mesh",
    [
        {"pp": 2, "dp_shard": 2, "ep": 2},
        pytest.param({"dp_shard": 8, "ep": 8}, marks=pytest.mark.full),
        pytest.param({"dp_shard": 2, "tp": 4, "ep": 8}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_verify_proves_a_mixture_with_a_forced_skew(ranks: WorkerPool, tmp_path: Path, mesh: dict[str, int]) -> None:
    job = verify_job(mesh)
    assert "experts.skew 8.0 -> 2.0" in job.replaced  # 2 of 4 experts: no expert can get more than twice the mean
    assert job.config.experts.replay
    expected = train_reference(job)
    traces = ranks(job.world_size).run(train, job.to_json(), tmp_path, True)
    outcome = judge(small_layout(job), traces[0], expected, 0.0)
    assert (outcome.exit_code, outcome.difference) == (0, None)


def test_verify_proves_our_own_mixture(ranks: WorkerPool, tmp_path: Path) -> None:
    sections = {"mesh": {"dp_shard": 2, "ep": 2}, "experts": {"skew": 2.0}, "model": {"preset": "tiny-moe"}}
    job = make_job(Config.from_dict(sections), None, num_steps=2)
    assert (job.config.experts.skew, job.config.experts.replay) == (2.0, True)
    traces = ranks(2).run(train, job.to_json(), tmp_path, True)
    outcome = judge(small_layout(job), traces[0], train_reference(job), 0.0)
    assert (outcome.exit_code, outcome.difference) == (0, None)


def test_verify_finds_ranks_that_choose_for_themselves(ranks: WorkerPool, tmp_path: Path) -> None:
    job = verify_job({"dp_shard": 2, "ep": 2})
    traces = ranks(2).run(train, job.to_json(), tmp_path, False)
    assert judge(small_layout(job), traces[0], train_reference(job), 0.0).exit_code == 1


def test_a_model_without_experts_has_no_skew() -> None:
    job = make_job(Config.from_dict({"experts": {"skew": 2.0}, "mesh": {"dp_shard": 2}}), 2)
    assert (job.config.experts.skew, job.config.experts.replay) == (1.0, False)
    assert "experts.skew 2.0 -> 1.0" in job.replaced


@pytest.mark.parametrize("skew", [1.0, 1.5, 4.0])
def test_the_first_expert_gets_so_many_times_the_mean(skew: float) -> None:
    sizes, generator = ExpertSizes(3, 8, 2), torch.Generator().manual_seed(0)
    routing = skewed_routing(sizes, (4, 16), skew, generator)
    assert routing.shape == (4, 16, 3, 2)
    assert (routing[..., 0] != routing[..., 1]).all()
    counts = torch.stack([layer.flatten().bincount(minlength=8) for layer in routing.unbind(2)])
    assert (counts[:, 0] == round(skew * 16)).all()  # of 128 choices 16 are each expert's mean
    assert len({tuple(layer.flatten().tolist()) for layer in routing.unbind(2)}) == 3


def simulate_mixture(skew: float) -> tuple[int, int]:
    """What one of 4,096 ranks sends between experts, and the most bytes that it holds."""
    values = {**MIXTRAL, "num_hidden_layers": 8, "num_local_experts": 64, "hidden_size": 512, "intermediate_size": 64}
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    simulation = simulate(
        build_skeleton(ModelSpec("huggingface", values)).to(torch.bfloat16),
        {
            "mesh": {"pp": 4, "dp_shard": 256, "tp": 4, "ep": 64},
            "experts": {"skew": skew},
            "batch": {"micro_size": 2, "accumulation": 2},
            "precision": {"param": "bf16"},
        },
        lambda: {"input_ids": tokens, "labels": tokens},
        rank=0,
        world_size=4096,
    )
    return simulation.wire_bytes["ep", "exchange"], simulation.peak.peak_bytes


def test_simulated_ranks_of_4096_get_the_rows_of_a_skew() -> None:
    # Of 256 tokens each of 4 ranks sends 64 to 2 experts, all but a 64th away; a row has 512 numbers of 2 bytes.
    row_bytes = 64 * 2 * 63 // 64 * 1024
    num_calls, count_bytes = 2 * 2, 63 * 4  # layers of a stage, by micro-batches
    (even, peak), (skewed, higher) = simulate_mixture(1.0), simulate_mixture(4.0)
    # There and back, and the same for gradients; what comes in fours is sent back in fours.
    assert even == num_calls * (count_bytes + (1 + 1 + 1 + 1) * row_bytes)
    assert skewed == num_calls * (count_bytes + (1 + 4 + 4 + 1) * row_bytes)
    assert higher > peak


def test_a_simulated_pipeline_needs_no_choices_of_experts() -> None:
    """Eager experts, which look for theirs in the index, exchange what others do."""
    wire_bytes = []
    for experts in ("eager", "grouped_mm"):
        tokens = torch.zeros(2, 8, dtype=torch.long)
        simulation = simulate(
            lambda name=experts: build_model("mixtral", experts=name, output_router_logits=False),
            {"mesh": {"pp": 2, "ep": 2}, "batch": {"micro_size": 2, "global_size": 8}},
            lambda tokens=tokens: {"input_ids": tokens, "labels": tokens},
            rank=3,
            world_size=4,
        )
        wire_bytes.append(simulation.wire_bytes)
    assert wire_bytes[0] == wire_bytes[1]
    assert wire_bytes[0]["ep", "exchange"] > 0
