"""What an engine does beside training, where sequences are split, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models import ModelCase
from harness.pool import WorkerPool
from harness.reference import PARITY
from harness.refusals import refused
from harness.simulated import Measured, measure_steps, simulated
from harness.split_sequences import MODELS, make_case
from harness.states import States, assert_same_bits, whole_states
from harness.tensor import batches_of
from harness.training import make_config
from shardwise import Config, ConfigError, Engine, initialize, simulate
from shardwise.models import Decoder
from shardwise.train.setup import check_job

CP2 = {"mesh": {"cp": 2}, "zero": {"stage": 3}}


def make_engine(case: ModelCase, overrides: dict[str, Any], num_micro_batches: int = 1, seed: int = 0) -> Engine:
    model = case.build(torch.float64, seed=seed)
    return initialize(model, make_config(num_micro_batches, overrides), loss_fn=case.loss)


def evaluate(rank: int, world_size: int) -> tuple[float, float, Tensor]:
    case = make_case("bigbird")
    with make_engine(case, CP2) as engine:
        result = engine.eval_step(batches_of(engine, case, 0, 2))
        with engine.gathered(), torch.no_grad():
            logits = engine.model(case.batch(0, 2, torch.float64)[0])
        return result.loss, result.count, logits


def test_evaluations_and_direct_calls_equal_one_process(ranks: WorkerPool) -> None:
    """The model called by itself computes whole sequences, as for samples of its text."""
    case = make_case("bigbird")
    model = case.build(torch.float64)
    batches = [case.batch(seed, 2, torch.float64) for seed in range(2)]
    with torch.no_grad():
        outputs = [model(batch[0]) for batch in batches]
        sums = [case.loss(output, batch) for output, batch in zip(outputs, batches, strict=True)]  # type: ignore[misc]
    count = sum(int(each[1]) for each in sums)
    loss = sum(float(each[0]) for each in sums) / count
    for found_loss, found_count, logits in ranks(2).run(evaluate):
        assert found_count == count
        assert found_loss == pytest.approx(loss, rel=PARITY)
        torch.testing.assert_close(logits, outputs[0], rtol=PARITY, atol=PARITY)


def save(rank: int, world_size: int, root: Path) -> States:
    case = make_case("dense")
    with make_engine(case, CP2) as engine:
        engine.train_step(batches_of(engine, case, 0, 1))
        engine.save(root, wait=True)
        return whole_states(engine)


def load(rank: int, world_size: int, root: Path) -> States:
    with make_engine(make_case("dense"), {"mesh": {"cp": world_size}, "zero": {"stage": 2}}, seed=1) as engine:
        engine.load(root)
        return whole_states(engine)


def test_other_sizes_of_the_axis_load_a_checkpoint_bit_for_bit(ranks: WorkerPool, tmp_path: Path) -> None:
    saved = ranks(2).run(save, tmp_path)[0]
    for num_ranks in (1, 4):
        for loaded in ranks(num_ranks).run(load, tmp_path):
            assert_same_bits(loaded, saved)


def train_on_means(rank: int, world_size: int, cp: int) -> tuple[float, float, float]:
    case = make_case("dense")
    config = make_config(1, {"mesh": {"cp": cp}})

    def mean_loss(logits: Tensor, batch: Any) -> Tensor:  # [B, S, V]
        return F.cross_entropy(logits.flatten(0, 1), batch[0].flatten())

    with initialize(case.build(torch.float64), config, loss_fn=mean_loss) as engine:
        result = engine.train_step(batches_of(engine, case, 0, 1))
        return result.loss, result.count, result.grad_norm


def test_a_scalar_loss_counts_once_for_all_ranks_of_a_sequence(ranks: WorkerPool) -> None:
    expected = ranks(1).run(train_on_means, 1)[0]
    assert expected[1] == 1
    for found in ranks(2).run(train_on_means, 2):
        assert found == pytest.approx(expected, rel=PARITY)


def measure(rank: int, world_size: int, overrides: dict[str, Any]) -> Measured:
    case = make_case("bigbird")
    with torch.random.fork_rng(devices=[]):
        engine = make_engine(case, overrides)
    batch = case.batch(0, 2, torch.float64)
    return measure_steps(engine, [[batch]] * 4)


@pytest.mark.parametrize("overrides", [CP2, {"mesh": {"cp": 2, "pp": 2}}], ids=["cp", "cp x pp"])
def test_simulated_ranks_are_real_ones(ranks: WorkerPool, overrides: dict[str, Any]) -> None:
    case = make_case("bigbird")
    num_ranks = overrides["mesh"].get("pp", 1) * 2
    for rank, real in enumerate(ranks(num_ranks).run(measure, overrides)):
        simulation = simulate(
            case.build(torch.float64),
            make_config(1, overrides),
            lambda: case.batch(0, 2, torch.float64),
            loss_fn=case.loss,
            rank=rank,
            world_size=num_ranks,
        )
        assert simulated(simulation) == real


def error_of(rank: int, world_size: int, kind: str) -> list[str]:
    """Return the code and the message of a step's error."""
    case = make_case("dense")
    tokens, targets = case.batch(0, 2, torch.float64)
    batches: dict[str, Any] = {
        "other": case.batch(2 * rank, 2, torch.float64),
        "odd": (tokens[:, :31], targets[:, :31]),
        "long": (torch.cat([tokens, tokens], 1), torch.cat([targets, targets], 1)),
        "mask": (tokens, targets, torch.ones(32, 32).tril()),
        "positions": ({"tokens": tokens, "positions": torch.arange(32)}, targets),
        "none": ({"scale": 1.0}, targets),
    }
    with make_engine(case, CP2) as engine:
        try:
            engine.train_step([batches[kind]])
        except ConfigError as error:
            return [error.code, str(error)]
    return []


@pytest.mark.parametrize(
    ("kind", "code", "values"),
    [
        ("other", "batches-differ", ["rank 1", "rank 0"]),
        ("odd", "cp-divides-tokens", ["31 tokens", "30, 32"]),
        ("long", "sequence-too-long", ["64 tokens", "max_seq_len=32"]),
        ("mask", "cp-pair-mask", ["(32, 32)", "32 tokens"]),
        ("positions", "cp-own-positions", []),
        ("none", "cp-no-input", []),
    ],
)
def test_batches_that_cannot_be_split_are_refused_on_every_rank(
    ranks: WorkerPool, kind: str, code: str, values: list[str]
) -> None:
    first, second = ranks(2).run(error_of, kind)
    assert first[0] == code
    assert not [value for value in values if value not in first[1]], first
    assert first == second


def give_plain_model(rank: int, world_size: int) -> str:
    try:
        initialize(nn.Linear(4, 4), make_config(1, {"mesh": {"cp": 2}}))
    except ConfigError as error:
        return error.code
    return ""


def test_a_model_without_such_attention_is_refused(ranks: WorkerPool) -> None:
    assert ranks(2).run(give_plain_model) == ["cp-model"] * 2


@pytest.mark.parametrize(
    ("assignments", "refusal"),
    [
        (["mesh.cp=4", "data.seq_len=100", "context.token_layout=zigzag"], ["cp-divides-tokens", "96, 104"]),
        (
            ["mesh.cp=4", "mesh.tp=2", "tensor.sequence_parallel=true", "data.seq_len=132"],
            ["tp-divides-tokens", "data.seq_len=132", "tp=2 x cp=4", "128, 136", "tensor.sequence_parallel=false"],
        ),
        (["mesh.cp=8", "mesh.tp=4", "context.transport=ulysses"], ["cp-query-heads", "mesh.cp=8"]),
    ],
)
def test_a_job_that_cannot_be_split_is_refused_before_it_starts(assignments: list[str], refusal: list[str]) -> None:
    config = Config.from_dict({"model": {"preset": "tiny"}}).override(assignments)
    with refused(*refusal):
        check_job(config, 32)


def test_the_models_see_other_keys() -> None:
    """What the parity stands on: the layouts leave pairs out."""
    attends = [make_case(name).make().blocks[0].attention.attend for name in MODELS]
    densities = {round(attend.layout(32, 0, 4).density, 6) for attend in attends}
    assert len(densities) == len(MODELS)
    assert isinstance(make_case("dense").make(), Decoder)
