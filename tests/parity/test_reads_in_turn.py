"""Parameters that a script of DeepSpeed's reads one at a time, as TRL does to hand them over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn

import shardwise.compat.deepspeed as deepspeed
from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import Engine, initialize
from shardwise.layout.param_groups import ROOT
from shardwise.models.decoder import Decoder
from shardwise.models.presets import DecoderConfig

NUM_WORDS: Final = 32


def make_engine() -> Engine:
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=NUM_WORDS,
        num_layers=3,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        ffn_size=24,
        max_seq_len=8,
    )
    return initialize(Decoder(shape), make_config(1, {"zero": {"stage": 3}}), loss_fn=loss)


def loss(output: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
    return output.log_softmax(-1)[..., 0].sum(), tokens.numel()


def step(engine: Engine, number: int, rank: int) -> float:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return engine.train_step([torch.randint(NUM_WORDS, (2, 8), generator=generator)]).loss


def read_each(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As TRL's GRPOTrainer walks over what it sends to vLLM."""
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            yield name, parameter.data


def gathered_bytes(engine: Engine) -> int:
    counts = engine.comm.comm_log.counts
    return sum(count.wire_bytes for (_, op), count in counts.items() if op == "all_gather")


def walk(rank: int, world_size: int) -> dict[str, Any]:
    engine = make_engine()
    step(engine, 0, rank)
    expected = {name: engine.read(name) for name, _ in engine.model.named_parameters()}
    before = gathered_bytes(engine)
    found = {name: value.clone() for name, value in read_each(engine.model)}
    by_walk = gathered_bytes(engine) - before
    with engine.gathered():
        by_unit = gathered_bytes(engine) - before - by_walk
    group_bytes = {group.spec.unit: group.spec.padded_numel * 8 // 2 for group in engine.parts.sharding.groups}
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    engine.close()
    return {"by_walk": by_walk, "by_unit": by_unit, "root": group_bytes[ROOT]}


def test_a_unit_is_gathered_once_for_all_its_parameters(ranks: WorkerPool) -> None:
    """The root's twice: before the blocks and after them."""
    for found in ranks(2).run(walk):
        assert 0 < found["by_walk"] <= found["by_unit"] + found["root"]


def stop_midway(rank: int, world_size: int, how: str) -> list[float]:
    engine = make_engine()
    losses = [step(engine, 0, rank)]
    for number, (name, value) in enumerate(read_each(engine.model)):
        if number != 4:
            continue
        if how == "evaluate":
            engine.eval_step([torch.zeros(1, 8, dtype=torch.int64)])
        if how == "other unit":
            with deepspeed.zero.GatheredParameters(engine.model.blocks[2].parameters()):
                pass
        if how == "write":
            value.add_(0.0)
        assert not value.isnan().any()
        assert name.startswith("blocks.0")
        if how != "go on":
            break
    losses += [step(engine, number, rank) for number in range(1, 3)]
    engine.close()
    return losses


def test_a_walk_that_stops_midway_changes_nothing(ranks: WorkerPool) -> None:
    expected = [value for (value,) in ranks(2).run(train_alone)]
    for how in ("break", "evaluate", "go on", "other unit", "write"):
        assert ranks(2).run(stop_midway, how) == expected


def train_alone(rank: int, world_size: int) -> list[list[float]]:
    engine = make_engine()
    losses = [step(engine, number, rank) for number in range(3)]
    engine.close()
    return [losses]


def write_in_turn(rank: int, world_size: int) -> None:
    engine = make_engine()
    weight = engine.model.blocks[1].ffn.down.weight
    with deepspeed.zero.GatheredParameters([weight]), torch.no_grad():
        weight.fill_(0.5)
    value = engine.read("blocks.1.ffn.down.weight", "master")
    assert value is not None
    assert torch.equal(value, torch.full_like(value, 0.5))
    with suppress(ValueError), deepspeed.zero.GatheredParameters([weight]), torch.no_grad():
        weight.fill_(2.0)
        raise ValueError
    value = engine.read("blocks.1.ffn.down.weight")
    assert value is not None
    assert torch.equal(value, torch.full_like(value, 0.5))
    engine.close()


def test_what_all_ranks_write_is_kept_and_after_an_exception_it_is_not(ranks: WorkerPool) -> None:
    ranks(2).run(write_in_turn)
