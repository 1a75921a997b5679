"""Every odd model and every odd use of an engine equals one plain process; `test_odd_errors` has the uses
that end in an error.

What does not yet is a strict xfail: its reason says what should happen.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from harness.models import every_rank
from harness.odd_models import CASES, Block, Buffers, LossFn, OddCase, Stack, make_batches, regression_loss
from harness.odd_training import (
    NUM_STEPS,
    SGD,
    VARIANTS,
    all_ranks,
    batch_of,
    engine_of,
    plain_losses,
    sgd_engine,
    train_odd,
    whole_parameters,
)
from harness.pool import RankError, WorkerPool
from harness.reference import check_parity, train_reference
from harness.training import make_optimizer, merge_ranks
from shardwise import Engine

STAGES = [0, 1, 2, 3]

# Of what some of the cases use on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
]

# What torch's own checkpoint gets wrong too: by then the parameters, the cache or the inputs are others.
NOT_RECOMPUTED = {"FunctionalCall", "Parametrized", "ChangedInPlace"}

_LEAKED = (
    "a view of a parameter outlives its block's forward: say so, naming the block, instead of reading freed memory"
)
DEFECTS: Final[Mapping[str, tuple[set[str], str]]] = {
    "ViewKeptByBlock": ({"3", "recompute", "interleaved"}, _LEAKED),
}


def later(reason: str) -> Any:
    return pytest.mark.xfail(strict=True, reason=reason, raises=(AssertionError, RankError))


def check(ranks: WorkerPool, name: str, variants: list[str]) -> None:
    case = CASES[name]
    model = case.build()
    batches = every_rank(make_batches(NUM_STEPS, case.num_ranks))
    expected = train_reference(model, batches, case.make_loss(model), make_optimizer)
    results = ranks(case.num_ranks).run(train_odd, name, variants)
    for variant, traces in zip(variants, zip(*results, strict=True), strict=True):
        try:
            check_parity(merge_ranks(traces, num_holders=1 if variant == "0" else None), expected)
        except AssertionError as error:
            raise AssertionError(f"{name}, {variant}: {error}") from error


def sound_variants(name: str) -> list[str]:
    broken, _ = DEFECTS.get(name, (set(), ""))
    excluded = {"recompute"} if name in NOT_RECOMPUTED else set()
    return [variant for variant in VARIANTS if variant not in broken | excluded]


def some_variants(name: str) -> list[str]:
    """Stages 2 and 3, and by turns one of 0 and 1, and one or none of the others; `--full` has them all."""
    index = list(CASES).index(name)
    chosen = {"2", "3", str(index % 2), ("recompute", "interleaved", "")[index // 2 % 3]}
    return [variant for variant in sound_variants(name) if variant in chosen]


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [name for name in CASES if some_variants(name)])
def test_odd_model_equals_one_process(ranks: WorkerPool, name: str) -> None:
    check(ranks, name, some_variants(name))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if sound_variants(name)])
def test_odd_model_in_every_variant(ranks: WorkerPool, name: str) -> None:
    check(ranks, name, sound_variants(name))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=later(reason)) for name, (_, reason) in DEFECTS.items()],
)
def test_odd_model_that_is_wrong_yet(ranks: WorkerPool, name: str) -> None:
    check(ranks, name, ["3"])


# Odd uses that must work: each returns what it got, and what plain training gets


Pair = tuple[list[float], list[float]]


def inference_mode(rank: int, world_size: int, stage: int) -> Pair:
    """Forwards under inference_mode before the first step and between steps."""
    engine, losses = sgd_engine(stage), []
    for step in range(3):
        with torch.inference_mode():
            engine(batch_of(step, rank, 5))
            engine.eval_step([batch_of(0, rank)])
        losses.append(engine.train_step([batch_of(step, rank)]).loss)
    return losses, plain_losses(0, all_ranks(world_size))


def changing_lengths(rank: int, world_size: int, stage: int) -> Pair:
    """Every micro-batch, and every evaluation between, has another size."""
    model = OddCase(Stack).build()
    engine, losses = engine_of(model, {"zero": {"stage": stage}, "optimizer": SGD}, accumulation=2), []

    def micro_batches(step: int, rank: int) -> list[dict[str, Any]]:
        return [batch_of(step, rank, 1 + step + rank), batch_of(step + 1, rank, 3)]

    for step in range(3):
        for batch in micro_batches(step, rank):
            engine.eval_step([batch_of(0, 0, 5), batch_of(0, 0, 1)])
            engine.backward(engine(batch))
        losses.append(engine.step().loss)
    steps = [[batch for each in range(world_size) for batch in micro_batches(step, each)] for step in range(3)]
    return losses, plain_losses(0, steps)


def exceptions(rank: int, world_size: int, stage: int) -> Pair:
    """A forward and a loss raise on all ranks, and training goes on."""
    model, losses, does_fail = OddCase(Stack).build(0), [], False
    regression = regression_loss(model)

    def loss_fn(output: Any, batch: Any) -> tuple[Tensor, int]:
        if does_fail:
            raise KeyError("y")
        return regression(output, batch)

    engine = engine_of(model, {"zero": {"stage": stage}, "optimizer": SGD}, loss_fn)
    for step in range(3):
        handle = engine.model.blocks[step].down.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine(batch_of(step, rank))
        handle.remove()
        does_fail = True
        with pytest.raises(KeyError):
            engine(batch_of(step, rank))
        does_fail = False
        losses.append(engine.train_step([batch_of(step, rank)]).loss)
    return losses, plain_losses(0, all_ranks(world_size))


def two_engines(rank: int, world_size: int, stage: int) -> Pair:
    """Forwards, backwards and steps of two engines alternate, in both orders."""
    first, second = sgd_engine(stage, 0), sgd_engine(stage, 5)
    losses = []
    for step in range(3):
        batch = batch_of(step, rank)
        pending = first(batch), second(batch)
        for engine, loss in [(first, pending[0]), (second, pending[1])][:: 1 if step % 2 else -1]:
            engine.backward(loss)
        taken = second.step(), first.step()
        losses += [taken[1].loss, taken[0].loss]
    expected = [plain_losses(seed, all_ranks(world_size)) for seed in (0, 5)]
    return losses, [loss for pair in zip(*expected, strict=True) for loss in pair]


def dropped_engine(rank: int, world_size: int, stage: int) -> Pair:
    """Of three engines the middle one is dropped after a step."""
    engines: list[Engine] = [sgd_engine(stage, seed) for seed in range(3)]
    losses = []
    for step in range(3):
        losses += [engine.train_step([batch_of(step, rank)]).loss for engine in (engines[0], engines[-1])]
        if step == 0:
            engines[1].train_step([batch_of(step, rank)])
            del engines[1]
            gc.collect()
    expected = [plain_losses(seed, all_ranks(world_size)) for seed in (0, 2)]
    return losses, [loss for pair in zip(*expected, strict=True) for loss in pair]


def adversaries(rank: int, world_size: int, stage: int) -> Pair:
    """A generator's loss goes through a discriminator that is another engine's."""

    def fooling(discriminator: nn.Module) -> LossFn:
        return lambda output, batch: (discriminator(output, 0, 0).square().sum(), output.numel())

    def plain_step(model: nn.Module, loss_fn: LossFn, batches: list[Any]) -> float:
        model.zero_grad()
        sums = [loss_fn(model(**batch), batch) for batch in batches]
        loss = torch.stack([total for total, _ in sums]).sum() / sum(count for _, count in sums)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        return loss.item()

    models = [OddCase(Stack).build(seed) for seed in (1, 2)]
    copies = [OddCase(Stack).build(seed) for seed in (1, 2)]
    overrides = {"zero": {"stage": stage}, "optimizer": SGD}
    generator = engine_of(models[0], overrides, fooling(models[1]))
    discriminator = engine_of(models[1], overrides)
    losses, expected = [], []
    for step in range(3):
        losses.append(generator.train_step([batch_of(step, rank)]).loss)
        discriminator.zero_grad()
        losses.append(discriminator.train_step([batch_of(step, rank)]).loss)
        batches = [batch_of(step, each) for each in range(world_size)]
        expected.append(plain_step(copies[0], fooling(copies[1]), batches))
        expected.append(plain_step(copies[1], regression_loss(copies[1]), batches))
    return losses, expected


def gathered_between(rank: int, world_size: int, stage: int) -> Pair:
    """`gathered` between forward and backward, and between two steps."""
    engine, losses = sgd_engine(stage), []
    for step in range(3):
        loss = engine(batch_of(step, rank))
        with engine.gathered() as model:
            float(model.blocks[0].up.weight.sum())
        engine.backward(loss)
        with engine.gathered():
            losses.append(engine.step().loss)
    return losses, plain_losses(0, all_ranks(world_size))


def copies(rank: int, world_size: int, stage: int) -> Pair:
    """A copy keeps its values, runs on one rank alone, and may have an engine of its own."""
    engine = sgd_engine(stage, recompute={"mode": "full"})
    with engine.gathered():
        copied = copy.deepcopy(engine.model)
    expected = plain_losses(0, all_ranks(world_size))
    losses = [engine.train_step([batch_of(0, rank)]).loss]
    original = OddCase(Stack).build()
    outputs = [float(model(**batch_of(0, 0)).sum()) if rank == 0 else 0.0 for model in (copied, original)]
    losses += [engine.train_step([batch_of(step, rank)]).loss for step in (1, 2)]
    second = engine_of(copied, {"zero": {"stage": stage}, "optimizer": SGD})
    losses += [second.train_step([batch_of(step, rank)]).loss for step in range(3)]
    return [*losses, outputs[0]], [*expected, *expected, outputs[1]]


def mixed_dtypes(rank: int, world_size: int, stage: int) -> Pair:
    """Whatever dtypes the parameters have, all are of `precision.param` from then on."""
    mixed, rounded = OddCase(Stack).build(), OddCase(Stack).build()
    for model in (mixed, rounded):
        model.blocks[0].float()
        model.blocks[1].bfloat16()
        model.head.half()
    rounded.double()
    engines = [engine_of(model, {"zero": {"stage": stage}, "optimizer": SGD}) for model in (mixed, rounded)]
    assert {parameter.dtype for parameter in mixed.parameters()} == {torch.float64}
    found = [[engine.train_step([batch_of(step, rank)]).loss for step in range(3)] for engine in engines]
    return found[0], found[1]


def optimizer_groups(rank: int, world_size: int, stage: int) -> Pair:
    """A given optimizer with an empty group, a group per layer, a learning rate of 0 and parameters left out."""

    def make(model: Any) -> torch.optim.Optimizer:
        per_layer = [
            {"params": list(block.parameters()), "lr": 0.1 * index} for index, block in enumerate(model.blocks)
        ]
        stem = [{"params": [model.stem.weight], "lr": 0.0, "weight_decay": 0.1}]
        return torch.optim.SGD([{"params": []}, *per_layer, *stem], lr=0.1, momentum=0.9)

    model, plain = OddCase(Stack).build(), OddCase(Stack).build()
    optimizer = make(model)
    engine = engine_of(model, {"zero": {"stage": stage}}, optimizer=optimizer)
    losses = [engine.train_step([batch_of(step, rank)]).loss for step in range(3)]
    trace = train_reference(plain, all_ranks(world_size), regression_loss(plain), make)
    parameters = whole_parameters(engine)
    differences = [float((parameters[name] - value).abs().max()) for name, value in trace.parameters.items()]
    return [*losses, 1 + max(differences)], [*trace.losses, 1.0]


def statistics_of_each_rank(rank: int, world_size: int, stage: int) -> Pair:
    """Running statistics and counters are those of this rank's own batches, as in plain data parallelism."""
    engine, plain = sgd_engine(stage, kind=Buffers), OddCase(Buffers).build()
    engine.train_step([batch_of(0, rank)])
    plain(**batch_of(0, rank))
    names = ["blocks.0.norm.running_mean", "blocks.0.count", "blocks.1.cache", "blocks.2.norm.num_batches_tracked"]
    found = [float(model.get_buffer(name).sum()) for model in (engine.model, plain) for name in names]
    return found[:4], found[4:]


class Experts(Stack):
    """Experts in a container of their own, of which each rank uses another one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        return self.head(self.experts[rank](self.through(self.stem(x), step)))  # [B, D]


def experts_outside_blocks(rank: int, world_size: int, stage: int) -> Pair:
    """`zero.blocks` leaves the experts to the root, which all ranks gather."""
    engine = sgd_engine(stage, kind=Experts, zero={"stage": stage, "blocks": ["blocks.?"]})
    losses = [engine.train_step([batch_of(step, rank)]).loss for step in range(3)]
    return losses, plain_losses(0, all_ranks(world_size), Experts)


def as_they_were(rank: int, world_size: int, stage: int) -> Pair:
    """Attributes of a parameter stay, transposed ones keep their values, `.to` where they are changes nothing."""
    model = OddCase(Stack).build()
    model.head.weight = nn.Parameter(model.head.weight.detach().T)
    model.head.weight.tag = 3
    expected = model.head.weight.detach().clone()
    engine = engine_of(model, {"zero": {"stage": stage}, "optimizer": SGD})
    with engine.gathered():
        model.to("cpu").double()
        found = model.head.weight.detach().clone()
    return [*found.flatten().tolist(), model.head.weight.tag], [*expected.flatten().tolist(), 3]


def whole_after_a_step(rank: int, world_size: int, stage: int) -> Pair:
    """Inside `gathered` parameters stay whole, through a step too, and have its values."""
    engine = sgd_engine(stage)
    with engine.gathered() as model:
        engine.train_step([batch_of(0, rank)])
        found = float(model.blocks[0].up.weight.sum())
    return [found], [float(whole_parameters(engine)["blocks.0.up.weight"].sum())]


def moved_where_they_are(rank: int, world_size: int, stage: int) -> Pair:
    """`.to` and a cast that change nothing are allowed outside `gathered`."""
    engine = sgd_engine(stage)
    engine.model.to("cpu").double()
    losses = [engine.train_step([batch_of(step, rank)]).loss for step in range(3)]
    return losses, plain_losses(0, all_ranks(world_size))


def class_comes_back(rank: int, world_size: int, stage: int) -> Pair:
    """A parameter of a subclass is of that class whenever it is whole, and after the engine is closed."""

    class Tagged(nn.Parameter):
        tag = 1

    model = OddCase(Stack).build()
    model.head.weight = Tagged(model.head.weight.detach())
    engine = engine_of(model, {"zero": {"stage": stage}})
    engine.close()
    return [float(type(model.head.weight) is Tagged)], [1.0]


def buffer_views_stay_views(rank: int, world_size: int, stage: int) -> Pair:
    """A buffer that is a view of another is one in the parameters' dtype too."""
    engine = sgd_engine(stage, kind=Buffers, precision={"param": "bf16"})
    block = engine.model.blocks[0]
    block.base.fill_(3)
    return block.view.tolist(), block.base[1].tolist()


USES: list[Any] = [
    whole_after_a_step,
    pytest.param(moved_where_they_are, marks=later("a released parameter's `.to` that changes nothing must return it")),
    class_comes_back,
    pytest.param(buffer_views_stay_views, marks=later("Engine._adopt_buffers must cast a shared storage once")),
    inference_mode,
    changing_lengths,
    exceptions,
    two_engines,
    dropped_engine,
    adversaries,
    gathered_between,
    copies,
    mixed_dtypes,
    optimizer_groups,
    statistics_of_each_rank,
    experts_outside_blocks,
    as_they_were,
]


def use_all_stages(rank: int, world_size: int, use: Callable[[int, int, int], Pair]) -> list[Pair]:
    return [use(rank, world_size, stage) for stage in STAGES]


@pytest.mark.quick(2)
@pytest.mark.parametrize("use", USES)
def test_odd_use_changes_no_number(ranks: WorkerPool, use: Callable[[int, int, int], Pair]) -> None:
    for results in ranks(2).run(use_all_stages, use):
        for stage, (actual, expected) in zip(STAGES, results, strict=True):
            assert actual == pytest.approx(expected, rel=1e-9), f"stage {stage}"
