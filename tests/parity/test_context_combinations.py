"""Sequences split over the cp axis beside everything else an engine does in a run equal one plain process, in float64.

Every step has micro-batches of two lengths.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import VOCAB_SIZE, build_model
from harness.models import IGNORED
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.split_sequences import make_case, train_split, train_whole
from harness.states import States, assert_same_bits, whole_states
from harness.tensor import CLIP_NORM, SEED, batches_of, step_batches
from harness.training import make_config, make_optimizer, merge_ranks
from shardwise import Engine, initialize
from shardwise.runtime.float64 import float64_throughout

Overrides = dict[str, Any]

# Of four micro-batches: as many as some schedules need.
NUM_MICRO_BATCHES, NUM_STEPS = 4, 2
HOST = {"params": "host", "optimizer": "host", "activations": "host", "pin_memory": False}
SEQUENCE_PARALLEL = {"tensor": {"sequence_parallel": True}}

# By name: the model, the mesh and what else differs.
CASES: dict[str, tuple[str, dict[str, int], Overrides]] = {
    "all on the host": ("bigbird", {"cp": 2}, {"tiers": HOST, "zero": {"stage": 3}, "recompute": {"mode": "full"}}),
    "optimizer on the host": (
        "dense",
        {"cp": 2, "dp_shard": 2},
        {"tiers": {"optimizer": "host", "pin_memory": False}, "zero": {"stage": 2}},
    ),
    "hybrid shards": ("fixed", {"cp": 2, "dp_replicate": 2}, {"zero": {"stage": 3}}),
    "zero bubble": ("window", {"cp": 2, "pp": 2}, {"pipeline": {"schedule": "zb-h1"}, "zero": {"stage": 1}}),
    "interleaved": (
        "bigbird",
        {"cp": 2, "pp": 2},
        {"pipeline": {"schedule": "interleaved", "virtual_stages": 2}, "zero": {"stage": 3}},
    ),
    "dropping, zigzag x sp": (
        "dropping-dense",
        {"cp": 2, "tp": 2},
        {"context": {"token_layout": "zigzag"}, **SEQUENCE_PARALLEL},
    ),
    "dropping, teams x recomputed": (
        "dropping-bigbird",
        {"cp": 4},
        {"context": {"token_layout": "balanced", "heads_over": 2}, "recompute": {"mode": "full"}},
    ),
    "compiled": (
        "bigbird",
        {"cp": 2},
        {
            "compile": {"enabled": True, "backend": "aot_eager"},
            "context": {"transport": "ulysses"},
            "recompute": {"mode": "selective"},
        },
    ),
    "compiled x sp": (
        "window",
        {"cp": 2, "tp": 2},
        {"compile": {"enabled": True, "backend": "aot_eager"}, "zero": {"stage": 3}, **SEQUENCE_PARALLEL},
    ),
}
SLOW = {"compiled x sp"}


@functools.cache
def reference(name: str, num_data_ranks: int) -> Trace:
    return train_whole(name, num_data_ranks, NUM_MICRO_BATCHES, NUM_STEPS)


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", [pytest.param(each, marks=pytest.mark.full if each in SLOW else ()) for each in CASES])
def test_split_sequences_beside_other_features_equal_one_process(ranks: WorkerPool, case: str) -> None:
    name, mesh, others = CASES[case]
    num_data_ranks = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    num_ranks = num_data_ranks * mesh["cp"] * mesh.get("tp", 1) * mesh.get("pp", 1)
    traces = ranks(num_ranks).run(train_split, name, {"mesh": mesh, **others}, NUM_MICRO_BATCHES, NUM_STEPS)
    check_parity(merge_ranks(traces), reference(name, num_data_ranks))


def freeze(model: nn.Module, names: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))


# A whole layer, keys whose queries are trained, and what is before all attention.
FROZEN = ("blocks.0.attention.key", "blocks.1", "embed")


def train_by_hand(rank: int, world_size: int, overrides: Overrides) -> tuple[Trace, list[float]]:
    """Frozen parameters, backwards of which only the last are reduced, and evaluations between the steps."""
    case = make_case("bigbird")
    model = case.build(torch.float64, seed=rank)
    freeze(model, FROZEN)
    settings = {"optimizer": {"clip_norm": CLIP_NORM}, "run": {"seed": SEED}, **overrides}
    losses, norms, evaluated = [], [], []
    with initialize(model, make_config(NUM_MICRO_BATCHES, settings), loss_fn=case.loss) as engine:
        for step in range(NUM_STEPS):
            batches = batches_of(engine, case, step, NUM_MICRO_BATCHES)
            evaluated.append(engine.eval_step(batches).loss)
            for number, batch in enumerate(batches):
                with engine.no_sync() if number < 2 else nullcontext():
                    engine.backward(engine(batch))
            result = engine.step()
            losses.append(result.loss)
            norms.append(result.grad_norm)
        parameters = {name: engine.read(name) for name, _ in model.named_parameters()}
    return Trace(losses, norms, {}, parameters), evaluated


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_and_late_reduction_equal_one_process(ranks: WorkerPool, stage: int) -> None:
    case = make_case("bigbird")
    model = case.build(torch.float64)
    freeze(model, FROZEN)
    batches = [step_batches(case, step, 1, NUM_MICRO_BATCHES) for step in range(NUM_STEPS)]
    expected = train_reference(model, batches, case.loss, make_optimizer, CLIP_NORM)
    results = ranks(2).run(train_by_hand, {"mesh": {"cp": 2}, "zero": {"stage": stage}})
    trace = merge_ranks([each for each, _ in results])
    check_parity(trace, Trace(expected.losses, expected.grad_norms, {}, expected.parameters))
    for _, evaluated in results:
        assert evaluated == pytest.approx(expected.losses, rel=1e-9)  # of the same batches, before each step


def first_targets(seed: int) -> tuple[Tensor, Tensor]:
    """A batch in which no target of the second half counts, nor any of the second sample."""
    tokens, targets = make_case("dense").batch(seed, 2, torch.float64)  # [B, S]
    targets[:, targets.shape[1] // 2 :] = IGNORED
    targets[1] = IGNORED
    return tokens, targets


def train_on_first_targets(rank: int, world_size: int, token_layout: str) -> Trace:
    case = make_case("dense")
    model = case.build(torch.float64)
    overrides = {"mesh": {"cp": 2}, "context": {"token_layout": token_layout}, "optimizer": {"clip_norm": CLIP_NORM}}
    with initialize(model, make_config(1, overrides), loss_fn=case.loss) as engine:
        results = [engine.train_step([first_targets(seed)]) for seed in range(NUM_STEPS)]
        parameters = {name: engine.read(name) for name, _ in model.named_parameters()}
    return Trace([each.loss for each in results], [each.grad_norm for each in results], {}, parameters)


@pytest.mark.parametrize("token_layout", ["contiguous", "balanced"])
def test_a_rank_none_of_whose_targets_counts(ranks: WorkerPool, token_layout: str) -> None:
    """Its keys are others' all the same, so its gradients are not zero."""
    case = make_case("dense")
    batches = [[first_targets(seed)] for seed in range(NUM_STEPS)]
    expected = train_reference(case.build(torch.float64), batches, case.loss, make_optimizer, CLIP_NORM)
    trace = merge_ranks(ranks(2).run(train_on_first_targets, token_layout))
    check_parity(trace, Trace(expected.losses, expected.grad_norms, {}, expected.parameters))


def padded_batch(seed: int) -> dict[str, Any]:
    """Rows whose last 7 and 5 tokens of 16 are real, so that the first half is padding alone."""
    tokens = torch.randint(4, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(seed))  # [B, S]
    starts = torch.tensor([[9], [11]])
    has_target = torch.arange(16) > starts  # the first real token is no target: a token that sees nothing precedes it
    mask = (torch.arange(16) >= starts).long()  # [B, S]
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(has_target, IGNORED)}


def llama() -> nn.Module:
    torch.manual_seed(3)
    return build_model("llama").double()


def train_on_padding(rank: int, world_size: int, transport: str) -> Trace:
    model, context = llama(), {"token_layout": "contiguous", "transport": transport}
    overrides = {"mesh": {"cp": 2}, "context": context, "optimizer": {"clip_norm": CLIP_NORM}, "zero": {"stage": 3}}
    with float64_throughout(), initialize(model, make_config(1, overrides)) as engine:
        results = [engine.train_step([padded_batch(seed)]) for seed in range(NUM_STEPS)]
        parameters = {name: engine.read(name) for name, _ in model.named_parameters()}
    return Trace([each.loss for each in results], [each.grad_norm for each in results], {}, parameters)


@pytest.mark.parametrize("transport", ["ring", "ulysses"])
def test_a_rank_all_of_whose_tokens_are_padding(ranks: WorkerPool, transport: str) -> None:
    pytest.importorskip("transformers")
    model = llama()
    with float64_throughout():
        batches = [[padded_batch(seed)] for seed in range(NUM_STEPS)]
        expected = train_reference(model, batches, None, make_optimizer, CLIP_NORM)
    trace = merge_ranks(ranks(2).run(train_on_padding, transport))
    check_parity(trace, Trace(expected.losses, expected.grad_norms, {}, expected.parameters))


def make_engine(mesh: dict[str, int], stage: int, seed: int, **others: Any) -> Engine:
    case = make_case("fixed")
    config = make_config(1, {"mesh": mesh, "zero": {"stage": stage}, **others})
    return initialize(case.build(torch.float64, seed=seed), config, loss_fn=case.loss)


def save(rank: int, world_size: int, root: Path) -> tuple[States, float]:
    """What is saved, and the loss of the step after it."""
    case = make_case("fixed")
    with make_engine({"cp": 2}, 3, 0) as engine:
        engine.train_step(batches_of(engine, case, 0, 1))
        engine.save(root, wait=True)
        return whole_states(engine), engine.train_step(batches_of(engine, case, 1, 1)).loss


def load(rank: int, world_size: int, root: Path) -> tuple[States, float]:
    case = make_case("fixed")
    with make_engine({"cp": 2, "tp": 2}, 1, 1, context={"transport": "ulysses"}, **SEQUENCE_PARALLEL) as engine:
        engine.load(root)
        return whole_states(engine), engine.train_step(batches_of(engine, case, 1, 1)).loss


def test_a_checkpoint_goes_on_over_other_axes_and_by_another_transport(ranks: WorkerPool, tmp_path: Path) -> None:
    saved, loss = ranks(2).run(save, tmp_path)[0]
    for loaded, found in ranks(4).run(load, tmp_path):
        assert_same_bits(loaded, saved)
        assert found == pytest.approx(loss, rel=1e-9)
