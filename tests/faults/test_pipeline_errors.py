"""What a pipeline cannot do ends in one line that names value and fix, on every rank, and in no hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.pool import RankError, WorkerPool
from harness.refusals import refusal_of
from harness.waiting import PATIENCE_S
from shardwise import initialize

WIDTH = 6
TIMEOUT_S = 60.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loss = 0.0

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        return torch.tanh(self.linear(x)) if skip is None else torch.tanh(self.linear(x + skip))


class Chain(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SkipOverTheCut(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = first = self.blocks[0](self.embed(x))
        x = self.blocks[2](self.blocks[1](x))
        return self.head(self.blocks[3](x, skip=first))


class KeptOnABlock(Chain):
    """Each block leaves a loss on itself, and the model adds them up."""

    class Block(Block):
        def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
            self.loss = self.linear(x).square().mean()
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeptOnABlock.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.loss for block in self.blocks)


class KeptOnTheModel(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.kept = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.kept


class ReadByABlock(Chain):
    """The last block reads what the model has kept of the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.embed(x)
        for block in self.blocks[:3]:
            x = block(x)
        last = self.blocks[3]
        handle = last.register_forward_hook(lambda module, args, output: output + kept)
        x = last(x)
        handle.remove()
        return self.head(x)


class ForeignParameter(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return F.linear(x, self.embed.weight)


class RunsTwice(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[1](self.embed(x)))


class DropsLayers(Chain):
    """Skips the block after which the second stage begins."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index in (0, 2, 3):
            x = self.blocks[index](x)
        return self.head(x)


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class OpaqueOutput(Chain):
    class Block(Block):
        def forward(self, state: Any, skip: Tensor | None = None) -> Any:
            return Opaque(super().forward(state.x if isinstance(state, Opaque) else state))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OpaqueOutput.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.x)


class EndsWithoutParameters(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh())


NEVER_OVER = {"device": "cpu", "timeout_s": 600.0}


def config_of(**overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        "mesh": {"pp": 2},
        "batch": {"accumulation": 2},
        "optimizer": {"name": "sgd", "momentum": 0.0, "lr": 0.1},
        "run": {"device": "cpu", "timeout_s": TIMEOUT_S},
        **overrides,
    }


def mean_square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


Refusal = tuple[str, str]


def start(rank: int, world_size: int, model: type[nn.Module], config: dict[str, Any]) -> Refusal:
    return refusal_of(lambda: initialize(model(), config, loss_fn=mean_square).close())


def train(rank: int, world_size: int, model: type[nn.Module], config: dict[str, Any]) -> Refusal:
    def work() -> None:
        engine = initialize(model(), config, loss_fn=mean_square)
        engine.train_step([torch.ones(2, WIDTH)] * 2)

    return refusal_of(work)


Values = tuple[str, ...]
BAD_STARTS: dict[str, tuple[dict[str, Any], str, Values]] = {
    "more stages than units": (
        {"pipeline": {"schedule": "interleaved", "virtual_stages": 4}},
        "too-many-stages",
        ("8 pipeline stages", "6 units", "from embed to head", "from 1 to 6"),
    ),
    "virtual stages of a schedule without": (
        {"pipeline": {"virtual_stages": 2}},
        "schedule-virtual-stages",
        ("pipeline.virtual_stages=2", "1f1b", "use 1"),
    ),
    "virtual stages of a schedule of two": (
        {"pipeline": {"schedule": "zb-v", "virtual_stages": 3}},
        "schedule-virtual-stages",
        ("pipeline.virtual_stages=3", "zb-v", "use 2"),
    ),
    "a cut that is misspelt": ({"pipeline": {"cut": ["block.2"]}}, "unknown-unit", ("'block.2'", "blocks.2?")),
    "two cuts for two stages": ({"pipeline": {"cut": ["blocks.1", "blocks.2"]}}, "cut-count", ("2 units", "2 stages")),
    "cuts out of order": (
        {"pipeline": {"cut": ["blocks.2", "blocks.1", "blocks.3"], "schedule": "interleaved", "virtual_stages": 2}},
        "cut-order",
        ("blocks.1", "blocks.2"),
    ),
    "a cut at the first unit": ({"pipeline": {"cut": ["embed"]}}, "cut-not-allowed", ("'embed'", "blocks.0")),
    "units that are misspelt": (
        {"pipeline": {"units": ["blok.*"]}},
        "no-module-matches",
        ("pipeline.units='blok.*'", "Block, Chain, Linear, ModuleList"),
    ),
    "a world that does not fit": ({"mesh": {"pp": 3}}, "mesh-size", ("world size 2", "pp 3", "= 3")),
    "compiled, with split backwards": (
        {"compile": {"enabled": True}, "pipeline": {"schedule": "zb-h1"}},
        "compile-with-zero-bubble",
        ("zb-h1",),
    ),
    "lockstep": ({"zero": {"lockstep": True}}, "lockstep-in-pipeline", ("zero.lockstep=true",)),
    "the keys without the mesh": (
        {"mesh": {"pp": 1}, "pipeline": {"cut": ["blocks.1"]}},
        "pipeline-needs-stages",
        ("pipeline.cut=('blocks.1',)", "mesh.pp=1"),
    ),
}


def assert_refused_on_all(refusals: list[Refusal], code: str, values: Values) -> None:
    first, second = refusals
    assert first == second
    assert first[0] == code, first[1]
    assert "\n" not in first[1]
    assert [value for value in values if value not in first[1]] == [], first[1]


@pytest.mark.parametrize("name", BAD_STARTS)
def test_what_does_not_fit_is_refused_before_the_start(ranks: WorkerPool, name: str) -> None:
    overrides, code, values = BAD_STARTS[name]
    assert_refused_on_all(ranks(2).run(start, Chain, config_of(**overrides)), code, values)


def test_a_stage_without_parameters_is_refused(ranks: WorkerPool) -> None:
    config = config_of(pipeline={"cut": ["2"]})
    refusals = ranks(2).run(start, EndsWithoutParameters, config)
    assert_refused_on_all(refusals, "stage-without-parameters", ("stage 1", "2 to 3"))


# The rank whose stage cannot run says so, and the other quotes it.
CROSSINGS: dict[type[nn.Module], tuple[int, str, Values]] = {
    SkipOverTheCut: (1, "cut-value-not-sent", ("argument skip of blocks.3", "blocks.1")),
    KeptOnABlock: (1, "cut-value-not-sent", ("the loss", "blocks.1")),
    KeptOnTheModel: (1, "cut-value-not-sent", ("the loss", "blocks.1")),
    ReadByABlock: (1, "cut-value-not-sent", ("the output of blocks.3", "blocks.1")),
    ForeignParameter: (1, "parameter-used-off-stage", ("embed.weight", "pipeline stage 0", "stage 1")),
    RunsTwice: (1, "cut-unit-repeats", ("blocks.1",)),
    DropsLayers: (0, "cut-unit-not-run", ("blocks.1",)),
    OpaqueOutput: (0, "boundary-value-type", (f"{Opaque.__module__}.Opaque",)),
}


@pytest.mark.parametrize("model", CROSSINGS)
def test_what_crosses_the_cut_unsent_is_named(ranks: WorkerPool, model: type[nn.Module]) -> None:
    """At once, though no rank ends."""
    culprit, code, values = CROSSINGS[model]
    refusals = ranks(2).run(train, model, config_of(run=NEVER_OVER))
    found, message = refusals[culprit]
    assert found == code, message
    assert "\n" not in message
    assert [value for value in values if value not in message] == [], message
    other, quote = refusals[1 - culprit]
    assert other == "collective-failed", quote
    assert f"rank {culprit} has failed: " in quote
    assert message in quote


def fail_alone(rank: int, world_size: int) -> Refusal:
    model = Chain()
    engine = initialize(model, config_of(mesh={"pp": world_size}, run=NEVER_OVER), loss_fn=mean_square)

    def fail(module: nn.Module, args: object) -> None:
        if rank == world_size - 1:
            raise ValueError("this sample is odd")

    model.head.register_forward_pre_hook(fail)
    return refusal_of(lambda: engine.train_step([torch.ones(2, WIDTH)] * 2))


@pytest.mark.full
def test_all_stages_hear_at_once_of_an_error_in_one(ranks: WorkerPool) -> None:
    *others, culprit = ranks(4).run(fail_alone)
    assert culprit == ("ValueError", "this sample is odd")
    for code, message in others:
        assert code == "collective-failed"
        assert "rank 3 has failed: ValueError: this sample is odd" in message


def refuse_on_one(rank: int, world_size: int) -> Refusal:
    config = {"batch": {"global_size": 7 if rank == 1 else 8}, "run": NEVER_OVER}
    return refusal_of(lambda: initialize(Chain(), config, loss_fn=mean_square).close())


def test_what_one_rank_refuses_at_the_start_ends_all_at_once(ranks: WorkerPool) -> None:
    (code, quote), (refusal, message) = ranks(2).run(refuse_on_one)
    assert (code, refusal) == ("other-rank-start", "batch-multiple")
    assert "rank 1 failed" in quote
    assert message in quote


def use_directly(rank: int, world_size: int) -> list[Refusal]:
    batch = torch.ones(2, WIDTH)
    with initialize(Chain(), config_of(), loss_fn=mean_square) as engine:

        def run_gathered() -> None:
            with engine.gathered():
                assert engine.model.blocks[0 if rank == 0 else 3].linear.weight.sum().isfinite()
                engine.model(batch)

        uses: list[Callable[[], object]] = [
            lambda: engine(batch),
            lambda: engine.backward(batch.sum()),
            engine.step,
            lambda: engine.model(batch),
            run_gathered,
            lambda: engine.train_step([batch]),
        ]
        refusals = [refusal_of(use) for use in uses]
        assert engine.train_step([batch] * 2).step == 1
        return refusals


def step_apart(rank: int, world_size: int) -> tuple[list[Refusal], float, float]:
    torch.manual_seed(0)
    batches = [torch.ones(2, WIDTH), torch.full((2, WIDTH), 2.0)]
    with initialize(Chain(), config_of(), loss_fn=mean_square) as engine:
        before = engine.eval_step(batches).loss
        engine.forward_backward(batches)
        refusals = [refusal_of(lambda: engine.eval_step(batches))]
        engine.zero_grad()
        refusals.append(refusal_of(engine.step))
        engine.forward_backward(batches)
        apart = engine.step().loss
        assert engine.eval_step(batches).loss < before
        return refusals, before, apart


def test_a_pipelines_step_may_come_apart_from_its_backwards(ranks: WorkerPool) -> None:
    for refusals, before, apart in ranks(2).run(step_apart):
        assert [code for code, _ in refusals] == ["pipeline-awaits-step", "pipeline-rank-alone"]
        assert apart == pytest.approx(before)


def test_calls_that_need_all_layers_say_what_to_call(ranks: WorkerPool) -> None:
    for refusals in ranks(2).run(use_directly):
        assert [code for code, _ in refusals] == ["pipeline-rank-alone"] * 5 + ["micro-batch-count"]
        for (_, message), call in zip(refusals, ("engine(batch)", "engine.backward", "engine.step"), strict=False):
            assert message.startswith(call)
        assert all("engine.train_step(batches)" in message for _, message in refusals[:5])
        assert "batch.accumulation=2" in refusals[5][1]


def die_in_a_step(rank: int, world_size: int, report: Path) -> None:
    """Rank 1 is killed in its second forward; the other writes down what it says."""
    model = Chain()
    run = {"device": "cpu", "timeout_s": TIMEOUT_S, "watchdog_s": 2.0}
    engine = initialize(model, config_of(run=run), loss_fn=mean_square)
    num_forwards = 0

    def die(module: nn.Module, args: object) -> None:
        nonlocal num_forwards
        num_forwards += 1
        if rank == 1 and num_forwards == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    model.blocks[3].register_forward_pre_hook(die)
    report.write_text(" ".join(refusal_of(lambda: engine.train_step([torch.ones(2, WIDTH)] * 2))))


def test_a_rank_that_dies_in_a_step_is_named(ranks: WorkerPool, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with pytest.raises(RankError) as caught:
        ranks(2).run(die_in_a_step, report, grace_s=PATIENCE_S)
    assert (caught.value.rank, caught.value.kind) == (1, "died")
    assert report.read_text().startswith("collective-failed rank 0 failed in receive #")
    assert "rank 1" in report.read_text()
