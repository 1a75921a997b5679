"""Small parameters that stage 3 keeps whole: the same training, no gathers for use, the bytes of stage 2's row."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.combinations import cover
from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.reference import check_parity
from harness.states import Net, assert_same_bits, engine_of, take_steps, whole_states
from harness.training import make_config, merge_ranks, reference_trace, train_engine
from shardwise import initialize

BELOW = 100
TIERS = {
    "device": {},
    "optimizer": {"optimizer": "host"},
    "host": {"params": "host", "grads": "host", "optimizer": "host"},
}


@pytest.mark.parametrize(
    "options",
    cover(
        {
            "case": ["transformer", "odd-shapes", "frozen-parameters", "unused-parameters"],
            "mesh": [(2, 2), (4, 4), (4, 2)],
            "accumulation": [1, 3],
            "tiers": list(TIERS),
            "clip_norm": [None, 0.05],
            "lockstep": [False, True],
        }
    ),
)
def test_training_equals_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    (num_ranks, num_shards), accumulation, clip_norm = options["mesh"], options["accumulation"], options["clip_norm"]
    overrides = {
        "zero": {"stage": 3, "keep_whole_below": BELOW, "lockstep": options["lockstep"]},
        "mesh": {"dp_shard": num_shards},
        "tiers": TIERS[options["tiers"]],
        "optimizer": {"clip_norm": clip_norm},
    }
    traces = ranks(num_ranks).run(train_engine, options["case"], accumulation, 3, overrides)
    actual = merge_ranks(traces, num_holders=num_shards)  # replicas hold the same gradients
    check_parity(actual, reference_trace(options["case"], num_ranks, accumulation, 3, clip_norm))


@pytest.mark.parametrize("gather", ["batch", "micro-batch"])
def test_training_in_a_pipeline_equals_one_process(ranks: WorkerPool, gather: str) -> None:
    zero = {"stage": 3, "keep_whole_below": BELOW}
    overrides = {"zero": zero, "mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"gather": gather}}
    found = ranks(4).run(train_in_pipeline, overrides)
    expected = ranks(4).run(train_in_pipeline, {**overrides, "zero": {"stage": 3}})
    for losses, others in zip(found, expected, strict=True):
        assert losses == pytest.approx(others, rel=1e-12)


def train_in_pipeline(rank: int, world_size: int, overrides: dict[str, Any]) -> list[float]:
    case = CASES["transformer"]
    batches = make_batches(case, num_steps=3, world_size=2, num_micro_batches=4)
    with initialize(case.build(torch.float64), make_config(4, overrides), loss_fn=case.loss) as engine:
        data_rank = engine.parts.comms.data.rank
        return [engine.train_step(step[data_rank]).loss for step in batches]


def read_between_steps(rank: int, world_size: int, tiers: dict[str, str]) -> list[tuple[float, float]]:
    """Ranks read one after the other, as one that logs alone does."""
    case = CASES["transformer"]
    model, pairs = case.build(torch.float64), []
    batches = make_batches(case, num_steps=3, world_size=world_size, num_micro_batches=1)
    overrides = {"zero": {"stage": 3, "keep_whole_below": BELOW}, "tiers": tiers}
    with initialize(model, make_config(1, overrides), loss_fn=case.loss) as engine:
        for number, step in enumerate(batches):
            engine.train_step(step[rank])
            found = model.norm.weight.sum().item() if number % world_size == rank else None
            with engine.gathered():
                pairs.append((model.norm.weight.sum().item() if found is None else found, model.norm.weight.sum()))
    return [(found, expected.item()) for found, expected in pairs]


@pytest.mark.parametrize("tiers", TIERS)
def test_any_rank_reads_them_at_any_time(ranks: WorkerPool, tiers: str) -> None:
    for pairs in ranks(2).run(read_between_steps, TIERS[tiers]):
        assert all(found == expected for found, expected in pairs)
        assert len(set(pairs)) == 3, "each step has changed them"


def gathers_of_a_step(rank: int, world_size: int, below: int) -> tuple[Counter[str], Counter[str]]:
    case = CASES["odd-shapes"]
    batches = make_batches(case, num_steps=2, world_size=world_size, num_micro_batches=1)
    overrides = {"zero": {"stage": 3, "keep_whole_below": below}}
    with initialize(case.build(torch.float64), make_config(1, overrides), loss_fn=case.loss) as engine:
        engine.train_step(batches[0][rank])
        log = engine.comm.comm_log
        log.recent = deque()
        engine.backward(engine(*batches[1][rank]))
        in_use = Counter(call.name for call in log.recent if call.op == "all_gather")
        log.recent = deque()
        engine.step()
        return in_use, Counter(call.name for call in log.recent if call.op == "all_gather")


def test_a_unit_of_small_parameters_is_gathered_only_after_the_step(ranks: WorkerPool) -> None:
    """All parameters of the blocks have fewer elements; two of the root's have more."""
    blocks = [f"unshard blocks.{index}:whole" for index in range(3)]
    for in_use, after_step in ranks(2).run(gathers_of_a_step, BELOW):
        assert in_use == {"unshard root": 1}
        assert after_step == dict.fromkeys(["unshard root:whole", *blocks], 1)


def save_under(rank: int, world_size: int, root: Path, below: int, num_steps: int) -> Any:
    zero = {"stage": 3, "keep_whole_below": below}
    with engine_of(zero=zero, tiers={"optimizer": "host"}) as engine:
        take_steps(engine, 2)
        engine.save(root)
        saved = whole_states(engine)
        return saved, take_steps(engine, num_steps)


def load_under(rank: int, world_size: int, root: Path, below: int, num_steps: int) -> Any:
    with engine_of(seed=5, zero={"stage": 3, "keep_whole_below": below}) as engine:
        engine.load(root)
        loaded = whole_states(engine)
        return loaded, take_steps(engine, num_steps)


@pytest.mark.parametrize(("saved_below", "loaded_below"), [(0, 5), (5, 0)])
def test_checkpoints_load_with_and_without_the_key(
    ranks: WorkerPool, tmp_path: Path, saved_below: int, loaded_below: int
) -> None:
    assert {name for name, each in Net().named_parameters() if each.numel() < 5} == {"up.bias", "down.bias", "scale"}
    saves = ranks(2).run(save_under, tmp_path, saved_below, 2)
    loads = ranks(2).run(load_under, tmp_path, loaded_below, 2)
    for (saved, losses), (loaded, others) in zip(saves, loads, strict=True):
        assert_same_bits(
            {key: value for key, value in loaded.items() if key[1] != "master"},
            {key: value for key, value in saved.items() if key[1] != "master"},
        )
        assert others == pytest.approx(losses, rel=1e-6)
