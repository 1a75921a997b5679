"""GRPO and DPO, with a reference model and our own sampling: two ranks equal one process in fp32."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.pool import WorkerPool
from harness.reference import max_error
from harness.training import make_config
from shardwise import Engine, initialize, token_log_probs
from shardwise.models.decoder import Decoder, generate
from shardwise.models.presets import DecoderConfig

IGNORED: Final = -100
NUM_WORDS: Final = 24
NUM_STEPS: Final = 2
NUM_SHARES: Final = 2  # of the prompts of a step: one a rank, or two micro-batches of one process
GROUP: Final = 4
STAGES: Final = (0, 2, 3)


def make_engine(loss_fn: Any, world_size: int, stage: int, name: str) -> Engine:
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=NUM_WORDS,
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        ffn_size=24,
        max_seq_len=16,
    )
    sections = {"precision": {"param": "fp32"}, "zero": {"stage": stage}, "optimizer": {"name": name, "lr": 1e-3}}
    return initialize(Decoder(shape), make_config(NUM_SHARES // world_size, sections), loss_fn=loss_fn)


def sample(policy: Engine, step: int, share: int) -> tuple[Tensor, Tensor]:
    """Answers to a prompt, longer for the other share, and the targets that are theirs."""
    generator = torch.Generator().manual_seed(10 * step + share)
    prompt = torch.randint(NUM_WORDS, (1, 3), generator=generator).expand(GROUP, 3)
    with policy.gathered() as model:
        tokens = generate(model, prompt, 2 + 5 * share, max_seq_len=16, generator=generator)
    targets = tokens.roll(-1, 1)
    targets[:, :2] = targets[:, -1] = IGNORED
    return tokens, targets


def grpo(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    others = batch[1]
    ours = token_log_probs(output, others["targets"]).log_probs
    ratio, distance = (ours - others["old"]).exp(), others["reference"] - ours
    gain = torch.minimum(ratio * others["advantages"], ratio.clamp(0.8, 1.2) * others["advantages"])
    mask = others["targets"] != IGNORED
    return ((0.1 * (distance.exp() - distance - 1) - gain) * mask).sum(), mask.sum()


def dpo(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """The first half of the answers is preferred to the second."""
    others = batch[1]
    ours = token_log_probs(output, others["targets"]).log_probs
    chosen, rejected = (ours - others["reference"]).sum(1).chunk(2)
    return -F.logsigmoid(0.5 * (chosen - rejected)).sum(), len(chosen)


LOSSES: Final = {"dpo": dpo, "grpo": grpo}


def run(rank: int, world_size: int, algorithm: str, stage: int) -> dict[str, Any]:
    policy = make_engine(LOSSES[algorithm], world_size, stage, "adamw")
    reference = make_engine(None, world_size, stage, "none")
    with policy, reference:
        shares = range(rank, NUM_SHARES, world_size)
        losses, lengths = [], set()
        for step in range(NUM_STEPS):
            batches = []
            for share in shares:
                tokens, targets = sample(policy, step, share)
                rewards = (tokens[:, 3:] % 2).float().mean(1, keepdim=True)
                others = {
                    "targets": targets,
                    "advantages": (rewards - rewards.mean()).expand(targets.shape),
                    "old": policy.log_probs((tokens, targets)).log_probs,
                    "reference": reference.log_probs((tokens, targets)).log_probs,
                }
                batches.append((tokens, others))
                lengths.add(tokens.shape[1])
            losses.append(policy.train_step(batches).loss)
        parameters = {name: policy.read(name) for name, _ in policy.model.named_parameters()}
    return {"losses": losses, "parameters": parameters, "lengths": lengths}


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("algorithm", sorted(LOSSES))
def test_two_ranks_equal_one_process(ranks: WorkerPool, algorithm: str, stage: int) -> None:
    (expected,) = ranks(1).run(run, algorithm, 0)
    results = ranks(2).run(run, algorithm, stage)
    assert results[0]["lengths"] != results[1]["lengths"]
    assert len({round(loss, 6) for loss in expected["losses"]}) == NUM_STEPS
    for found in results:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
        assert max_error(found["parameters"], expected["parameters"]) <= 1e-6
