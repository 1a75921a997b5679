"""Wherever states are stored, training computes the same bits as on the device alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover, pairwise
from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import Engine, initialize
from shardwise.optim.rules import RULES
from shardwise.zero import stored_step as streamed

NUM_STEPS = 4
PRECISIONS = {
    "fp64": {"param": "fp64"},
    "fp32": {"param": "fp32"},
    "bf16": {"param": "bf16"},
    "bf16-thin": {"param": "bf16", "accumulate": "param", "reduce": "param"},
    "fp16": {"param": "fp16"},
}
OPTIMIZERS = {
    **{rule.name: {"name": rule.name} for rule in RULES if rule.kernel and not rule.matrix_states},
    "adam": {"name": "adam", "weight_decay": 0.1},
    "sgd": {"name": "sgd", "momentum": 0.9},
    "plain sgd": {"name": "sgd"},
}
TIERS = ["device", "host", "nvme"]


class Wide(nn.Module):
    """Two blocks of some 20,000 elements, so that a slice is several blocks of a file; the sizes are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(10, 97)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(97, 103), nn.Tanh(), nn.Linear(103, 97)) for _ in range(2))
        self.head = nn.Linear(97, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # [B, 10]


WIDE = replace(CASES["residual-mlp"], name="wide", make=Wide)


@dataclass(frozen=True)
class Outcome:
    """What a rank has seen: losses and norms of every step, and all states at the end."""

    results: list[tuple[float, float, bool]]
    states: dict[tuple[str, str], Tensor | None]


def train(rank: int, world_size: int, case_name: str, overrides: Mapping[str, Mapping[str, Any]]) -> Outcome:
    case = WIDE if case_name == WIDE.name else CASES[case_name]
    config = make_config(overrides.get("batch", {}).get("accumulation", 1), overrides)
    dtype = torch.float64 if config.precision.param == "fp64" else torch.float32
    batches = make_batches(
        case, num_steps=NUM_STEPS, world_size=world_size, num_micro_batches=config.batch.accumulation or 1
    )
    with initialize(case.build(dtype), config, loss_fn=case.loss) as engine:
        results = []
        for step in batches:
            result = engine.train_step(step[rank])
            results.append((result.loss, result.grad_norm, result.skipped))
        return Outcome(results, all_states(engine))


def all_states(engine: Engine) -> dict[tuple[str, str], Tensor | None]:
    names = [place.name for group in engine.layout.groups for place in group.params]
    kept = {name: [state for state in engine.states_of(name) if state != "grad"] for name in names}
    return {(name, state): engine.read(name, state) for name in names for state in kept[name]}


def check_close(actual: Outcome, expected: Outcome) -> None:
    """To rounding: the step on the host cuts parameters elsewhere, and kernels round a vector's tail otherwise."""
    found, wanted = (torch.tensor(each.results, dtype=torch.float64) for each in (actual, expected))
    is_double = all(value is None or value.dtype == torch.float64 for value in expected.states.values())
    bound = 1e-12 if is_double else 1e-3  # a master's last bit may round a bf16 parameter the other way
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound, equal_nan=True)
    assert actual.states.keys() == expected.states.keys()
    for key, value in expected.states.items():
        assert actual.states[key] is not None, key
        assert value is not None, key
        torch.testing.assert_close(actual.states[key], value, rtol=bound, atol=bound, equal_nan=True)


WHERE = cover(
    {
        "params": TIERS,
        "grads": TIERS,
        "optimizer": TIERS,
        "stage": [1, 2, 3],
        "ranks": [1, 2, 3],
        "method": list(OPTIMIZERS),
    }
)
# The full product of all would be millions: what else there is goes along in turn.
HOW = pairwise(
    {
        "precision": list(PRECISIONS),
        "accumulation": [1, 3],
        "clip": [None, 0.05],
        "case": ["odd-shapes", "transformer", "frozen-parameters", "unused-parameters", "reused-blocks"],
        "overlap": [True, False],
        "share": [0.0, 0.4],
    }
)


def with_turns(where: list[Any]) -> list[Any]:
    """Each combination with the next of `HOW`, those of `make test` and the others counted apart."""
    turns = {is_full: itertools.cycle(HOW) for is_full in (True, False)}
    return [
        pytest.param({**each.values[0], **next(turns[bool(each.marks)])}, id=each.id, marks=each.marks)
        for each in where
    ]


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", with_turns(WHERE))
def test_every_tier_computes_the_same_numbers(ranks: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    stage = 3 if options["params"] != "device" else options["stage"]
    tiers = {state: options[state] for state in ("params", "grads", "optimizer")}
    tiers |= {f"{state}_on_device": options["share"] for state, tier in list(tiers.items()) if tier != "device"}
    if "nvme" in tiers.values():
        tiers["nvme_path"] = str(tmp_path)
    precision, accumulation = options["precision"], options["accumulation"]
    if precision == "bf16-thin" and tiers["grads"] != "device":
        accumulation = 1  # with more, a sum is rounded on its way to the host, and once more where it is added
    common = {
        "precision": PRECISIONS[precision],
        "batch": {"accumulation": accumulation},
        "optimizer": {**OPTIMIZERS[options["method"]], "clip_norm": options["clip"]},
    }
    # Gradients off the device are reduced in each backward.
    plain_stage = 2 if stage == 1 and tiers["grads"] != "device" else stage
    zero = {"overlap": options["overlap"]}
    pool = ranks(options["ranks"])
    expected = pool.run(train, options["case"], {**common, "zero": {**zero, "stage": plain_stage}})
    actual = pool.run(train, options["case"], {**common, "zero": {**zero, "stage": stage}, "tiers": tiers})
    for found, wanted in zip(actual, expected, strict=True):
        check_close(found, wanted)
    assert not list(tmp_path.iterdir())


def train_in_chunks(rank: int, world_size: int, case_name: str, overrides: Mapping[str, Mapping[str, Any]]) -> Outcome:
    """With chunks of as few elements as a file's blocks allow, so that there are many of each group."""
    numel, streamed.CHUNK_NUMEL = streamed.CHUNK_NUMEL, 2048
    try:
        return train(rank, world_size, case_name, overrides)
    finally:
        streamed.CHUNK_NUMEL = numel


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("stage", [2, 3])
def test_chunks_compute_the_same_numbers(
    ranks: WorkerPool, tmp_path: Path, stage: int, tier: str, clip: float | None
) -> None:
    params = tier if stage == 3 else "device"
    tiers = {"params": params, "grads": tier, "optimizer": tier}
    if tier == "nvme":
        tiers["nvme_path"] = str(tmp_path)
    common = {"precision": {"param": "bf16"}, "zero": {"stage": stage}, "optimizer": {"clip_norm": clip}}
    expected = ranks(2).run(train, WIDE.name, common)
    actual = ranks(2).run(train_in_chunks, WIDE.name, {**common, "tiers": tiers})
    for found, wanted in zip(actual, expected, strict=True):
        check_close(found, wanted)
