"""What a pipeline cannot do ends in one line that names value and cure, on every rank, and in no hang."""

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
    """Skips the block behind which the second stage begins."""

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


def first_line(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return str(error).splitlines()[0]
    return ""


def start(rank: int, world_size: int, model: type[nn.Module], config: dict[str, Any]) -> str:
    return first_line(lambda: initialize(model(), config, loss_fn=mean_square).close())


def train(rank: int, world_size: int, model: type[nn.Module], config: dict[str, Any]) -> str:
    def work() -> None:
        engine = initialize(model(), config, loss_fn=mean_square)
        engine.train_step([torch.ones(2, WIDTH)] * 2)

    return first_line(work)


ELSE = "use mesh.dp_shard with zero.stage=3 in place of mesh.pp"
UNSENT = (
    "is computed from a value of another stage, which is not the output of blocks.1 and so is not sent; return it from "
    "there, move pipeline.cut, name the modules that compute it from the inputs alone in pipeline.replicate, or " + ELSE
)
BAD_STARTS: dict[str, tuple[dict[str, Any], str]] = {
    "more stages than units": (
        {"pipeline": {"schedule": "interleaved", "virtual_stages": 4}},
        "8 pipeline stages, but the model has 6 units with parameters that may begin one, from embed to head; "
        "pp x virtual_stages may be from 1 to 6",
    ),
    "virtual stages of a schedule without": (
        {"pipeline": {"virtual_stages": 2}},
        "pipeline.virtual_stages=2 for schedule 1f1b, which has one stage a rank; use 1, or schedule interleaved",
    ),
    "virtual stages of a schedule of two": (
        {"pipeline": {"schedule": "zb-v", "virtual_stages": 3}},
        "pipeline.virtual_stages=3 for schedule zb-v, which has two stages a rank, in a V; use 2, or schedule "
        "interleaved",
    ),
    "a cut that is misspelt": (
        {"pipeline": {"cut": ["block.2"]}},
        "pipeline.cut='block.2' is no unit of the model; did you mean blocks.2?",
    ),
    "two cuts for two stages": (
        {"pipeline": {"cut": ["blocks.1", "blocks.2"]}},
        "pipeline.cut names 2 units, but of 2 stages 1 begin with a named one, the first with embed; name 1",
    ),
    "cuts out of order": (
        {"pipeline": {"cut": ["blocks.2", "blocks.1", "blocks.3"], "schedule": "interleaved", "virtual_stages": 2}},
        "pipeline.cut names blocks.1 behind blocks.2, which does not run before it; name each unit once, in the order "
        "in which they run",
    ),
    "a cut at the first unit": (
        {"pipeline": {"cut": ["embed"]}},
        "pipeline.cut='embed' is no place to cut: the first stage begins there; the next is blocks.0",
    ),
    "units that are misspelt": (
        {"pipeline": {"units": ["blok.*"]}},
        "pipeline.units='blok.*' matches no module; classes in this model: Block, Chain, Linear, ModuleList",
    ),
    "a world that does not fit": (
        {"mesh": {"pp": 3}},
        "world size 2 is not a multiple of pp 3 x dp_replicate 1 x cp 1 x tp 1 = 3; start a multiple of 3 ranks",
    ),
    "compiled, with split backwards": (
        {"compile": {"enabled": True}, "pipeline": {"schedule": "zb-h1"}},
        "compile.enabled=true compiles backwards whole, and pipeline.schedule=zb-h1 splits them; "
        "set compile.enabled=false, or pipeline.schedule=1f1b",
    ),
    "lockstep": (
        {"zero": {"lockstep": True}},
        "zero.lockstep=true gathers every block once a forward, and in a pipeline each rank has some of them; "
        "set zero.lockstep=false",
    ),
    "the keys without the mesh": (
        {"mesh": {"pp": 1}, "pipeline": {"cut": ["blocks.1"]}},
        "pipeline.cut=('blocks.1',) says how stages lie on the ranks of a pipeline, and mesh.pp=1 has none; "
        "set mesh.pp to 2 or more, or leave the key out",
    ),
}


@pytest.mark.parametrize("name", BAD_STARTS)
def test_what_does_not_fit_is_refused_before_the_start(ranks: WorkerPool, name: str) -> None:
    overrides, message = BAD_STARTS[name]
    assert ranks(2).run(start, Chain, config_of(**overrides)) == [message] * 2


def test_a_stage_without_parameters_is_refused(ranks: WorkerPool) -> None:
    config = config_of(pipeline={"cut": ["2"]})
    message = "pipeline.cut: stage 1 (2 to 3) would have no parameters; move a cut so that every stage has some"
    assert ranks(2).run(start, EndsWithoutParameters, config) == [message] * 2


# The rank whose stage cannot run says so, and the other quotes it.
CROSSINGS: dict[type[nn.Module], tuple[int, str]] = {
    SkipOverTheCut: (1, f"argument skip of blocks.3 {UNSENT}"),
    KeptOnABlock: (1, f"the loss {UNSENT}"),
    KeptOnTheModel: (1, f"the loss {UNSENT}"),
    ReadByABlock: (1, f"the output of blocks.3 {UNSENT}"),
    ForeignParameter: (
        1,
        "parameter embed.weight is of pipeline stage 0, but used on a rank with stage 1; use it in a module of its own "
        "stage, tie it to a parameter of a module that runs here, or name its module in pipeline.replicate",
    ),
    RunsTwice: (
        1,
        "blocks.1 runs more than once in one forward, so no stage can end with it; move pipeline.cut, or name a module "
        "that holds it and the loop in pipeline.units, or " + ELSE,
    ),
    DropsLayers: (
        0,
        "the forward ended without blocks.1, with which its stage ends; cut between units that run in every forward "
        "(pipeline.cut), or " + ELSE,
    ),
    OpaqueOutput: (
        0,
        "value, which stages of the pipeline pass on, is a test_pipeline_errors.Opaque; pass tensors, plain values, "
        "and containers that torch's pytree knows, or register the type there",
    ),
}


@pytest.mark.parametrize("model", CROSSINGS)
def test_what_crosses_the_cut_unsent_is_named(ranks: WorkerPool, model: type[nn.Module]) -> None:
    """At once, though no rank ends."""
    culprit, message = CROSSINGS[model]
    lines = ranks(2).run(train, model, config_of(run=NEVER_OVER))
    assert lines[culprit] == message
    assert f"rank {culprit} has failed: " in lines[1 - culprit]
    assert message in lines[1 - culprit]


def fail_alone(rank: int, world_size: int) -> str:
    model = Chain()
    engine = initialize(model, config_of(mesh={"pp": world_size}, run=NEVER_OVER), loss_fn=mean_square)

    def fail(module: nn.Module, args: object) -> None:
        if rank == world_size - 1:
            raise ValueError("this sample is odd")

    model.head.register_forward_pre_hook(fail)
    return first_line(lambda: engine.train_step([torch.ones(2, WIDTH)] * 2))


@pytest.mark.full
def test_all_stages_hear_at_once_of_an_error_in_one(ranks: WorkerPool) -> None:
    *others, culprit = ranks(4).run(fail_alone)
    assert culprit == "this sample is odd"
    assert all("rank 3 has failed: ValueError: this sample is odd" in line for line in others), others


def refuse_on_one(rank: int, world_size: int) -> str:
    config = {"batch": {"global_size": 7 if rank == 1 else 8}, "run": NEVER_OVER}
    return first_line(lambda: initialize(Chain(), config, loss_fn=mean_square).close())


def test_what_one_rank_refuses_at_the_start_ends_all_at_once(ranks: WorkerPool) -> None:
    lines = ranks(2).run(refuse_on_one)
    assert lines[0].startswith("rank 1 failed in shardwise.initialize: ConfigError: "), lines
    assert lines[1] in lines[0]


def use_directly(rank: int, world_size: int) -> list[str]:
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
        lines = [first_line(use) for use in uses]
        assert engine.train_step([batch] * 2).step == 1
        return lines


def test_calls_that_need_all_layers_say_what_to_call(ranks: WorkerPool) -> None:
    cannot = (
        "cannot run alone under mesh.pp=2, where each rank has some of the layers; call engine.train_step(batches) or "
        "engine.eval_step(batches)"
    )
    whole_model = (
        "the model cannot run alone under mesh.pp, where each rank has some of the layers, also inside "
        "engine.gathered(); call engine.train_step(batches) or engine.eval_step(batches), or, to generate, "
        "engine.export_weights(folder) and load it without mesh.pp"
    )
    expected = [f"{call} {cannot}" for call in ("engine(batch)", "engine.backward", "engine.step")]
    expected += [whole_model, whole_model]
    expected.append(
        "train_step takes a list of batch.accumulation=2 micro-batches and got 1; give 2 or set batch.accumulation=1"
    )
    assert ranks(2).run(use_directly) == [expected] * 2


def die_in_a_step(rank: int, world_size: int, told: Path) -> None:
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
    told.write_text(first_line(lambda: engine.train_step([torch.ones(2, WIDTH)] * 2)))


def test_a_rank_that_dies_in_a_step_is_named(ranks: WorkerPool, tmp_path: Path) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankError, match="rank 1 of 2 died"):
        ranks(2).run(die_in_a_step, told, grace_s=PATIENCE_S)
    assert told.read_text().startswith("rank 0 failed in receive #")
    assert "rank 1" in told.read_text()
