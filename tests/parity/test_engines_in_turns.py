"""Policy, reference, critic and reward in one script: engines of other sizes and layouts take turns, as if alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import Engine, initialize, token_log_probs
from shardwise.models.decoder import Decoder
from shardwise.models.presets import DecoderConfig

NUM_WORDS: Final = 32
NUM_STEPS: Final = 2
NO_OPTIMIZER: Final = {"name": "none"}
# Size and layout of each; those without an optimizer evaluate only.
ROLES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "critic": (2, {"mesh": {"tp": 2}, "zero": {"stage": 1}}),
    "policy": (4, {"zero": {"stage": 3}}),
    "reference": (4, {"zero": {"stage": 3}, "tiers": {"params": "host"}, "optimizer": NO_OPTIMIZER}),
    "reward": (3, {"zero": {"stage": 3}, "tiers": {"params": "nvme"}, "optimizer": NO_OPTIMIZER}),
}
SETS: Final = (("critic", "policy", "reference"), ("critic", "policy", "reward"))


def build(role: str) -> Decoder:
    torch.manual_seed(len(role))
    shape = DecoderConfig(
        vocab_size=NUM_WORDS,
        num_layers=ROLES[role][0],
        hidden_size=8 * ROLES[role][0],
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        ffn_size=24,
        max_seq_len=8,
    )
    return Decoder(shape)


def make_engine(role: str, folder: Path) -> Engine:
    sections = {name: dict(values) for name, values in ROLES[role][1].items()}
    if "nvme" in sections.get("tiers", {}).values():
        sections["tiers"]["nvme_path"] = str(folder)
    config = make_config(1, {"precision": {"param": "fp32"}, **sections})
    return initialize(build(role), config, loss_fn=loss)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return -token_log_probs(output, batch[1]).log_probs.sum(), batch[1].numel()


def turn(engine: Engine, role: str, step: int) -> list[float]:
    """A step, and what it evaluates; those without an optimizer evaluate alone."""
    mesh = engine.layout.mesh
    generator = torch.Generator().manual_seed(10 * step + mesh.data_index(engine.comm.rank))
    tokens = torch.randint(NUM_WORDS, (2, 8), generator=generator)
    batch = (tokens, tokens.roll(-1, 1))
    seen = engine.log_probs(batch).log_probs.flatten().tolist()
    if "optimizer" not in ROLES[role][1]:
        result = engine.train_step([batch])
        seen += [result.loss, result.grad_norm]
    return [*seen, engine.eval_step([batch]).loss]


def parameters_of(engine: Engine) -> Mapping[str, Tensor | None]:
    return {name: engine.read(name) for name, _ in engine.model.named_parameters()}


def run(rank: int, world_size: int, roles: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Whichever role has its turn, the states of the one before are on the host."""
    found: dict[str, Any] = {role: [] for role in roles}
    with ExitStack() as stack:
        engines = {role: stack.enter_context(make_engine(role, folder)) for role in roles}
        for step in range(NUM_STEPS):
            for number, role in enumerate(roles):
                if len(roles) == 1:
                    found[role].append(turn(engines[role], role, step))
                    continue
                with engines[roles[number - 1]].offloaded() as freed_bytes:
                    found[role].append(turn(engines[role], role, step))
                assert sum(freed_bytes.values()) > 0 or "tiers" in ROLES[roles[number - 1]][1]
        return {role: (found[role], parameters_of(engine)) for role, engine in engines.items()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("roles", SETS, ids=lambda roles: roles[-1])
def test_engines_in_turns_equal_each_alone(ranks: WorkerPool, tmp_path: Path, roles: tuple[str, ...]) -> None:
    together = ranks(2).run(run, roles, tmp_path)
    for role in roles:
        for rank, alone in enumerate(ranks(2).run(run, (role,), tmp_path)):
            (seen, parameters), (wanted, expected) = together[rank][role], alone[role]
            assert seen == wanted
            assert all(torch.equal(parameters[name], each) for name, each in expected.items())
