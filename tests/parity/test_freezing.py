"""Parameters frozen and unfrozen between steps train as in one plain process, which keeps what a frozen one has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.models import CASES, every_rank, make_batches
from harness.pool import WorkerPool
from harness.reference import call_model, max_error
from harness.refusals import refused
from harness.training import LR, make_config
from shardwise import Engine, backward, initialize
from shardwise.runtime.memory_tracker import Category
from shardwise.zero.sharding_state import ShardingState

CASE = CASES["odd-shapes"]
# What is frozen in each step: a block, parts of blocks and of the root, all but the head, nothing.
FROZEN = (
    ("blocks.0",),
    ("blocks.0",),
    ("blocks.1.up", "embedding"),
    ("embedding", "blocks", "norm"),
    (),
    ("blocks.2",),
)


def freeze(model: nn.Module, prefixes: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes) if prefixes else True)


def own_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Groups that hold frozen parameters too."""
    named = dict(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [parameter for name, parameter in named.items() if name.startswith("blocks")], "lr": 2 * LR},
            {"params": [parameter for name, parameter in named.items() if not name.startswith("blocks")]},
        ],
        lr=LR,
    )


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def train(rank: int, world_size: int, overrides: Mapping[str, Any], is_own: bool) -> tuple[list[float], Any, list[int]]:
    model = CASE.build(torch.float64)
    freeze(model, FROZEN[0])
    engine = initialize(
        model, make_config(2, overrides), loss_fn=CASE.loss, optimizer=own_optimizer(model) if is_own else None
    )
    batches = make_batches(CASE, num_steps=len(FROZEN), world_size=world_size, num_micro_batches=2)
    losses, other_bytes = [], []
    for prefixes, step in zip(FROZEN, batches, strict=True):
        freeze(model, prefixes)
        losses.append(engine.train_step(step[rank]).loss)
        live = engine.memory.snapshot().live_bytes
        states = sum(live[category] for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER))
        other_bytes.append(states - sum(engine.layout.bytes_at_rest(engine.comm.rank).values()))
    with engine.gathered():
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return losses, parameters, other_bytes


def train_plainly(world_size: int, is_own: bool) -> tuple[list[float], dict[str, Tensor]]:
    model = CASE.build(torch.float64)
    optimizer = own_optimizer(model) if is_own else plain_optimizer(model)
    losses = []
    batches = make_batches(CASE, num_steps=len(FROZEN), world_size=world_size, num_micro_batches=2)
    for prefixes, step in zip(FROZEN, every_rank(batches), strict=True):
        freeze(model, prefixes)
        optimizer.zero_grad()
        total, count = 0.0, 0
        for batch in step:
            loss, num = CASE.loss(call_model(model, batch, CASE.loss), batch)
            loss.backward()
            total, count = total + loss.item(), count + int(num)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        optimizer.step()
        losses.append(total / count)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    cover({"stage": [0, 1, 2, 3], "num_ranks": [1, 2, 3], "is_own": [False, True], "is_hybrid": [False, True]}),
)
def test_freezing_and_unfreezing(ranks: WorkerPool, options: dict[str, Any]) -> None:
    num_ranks, is_own = options["num_ranks"], options["is_own"]
    overrides: dict[str, Any] = {"zero": {"stage": options["stage"], "replicate_frozen": is_own}}
    if options["is_hybrid"]:
        overrides["mesh"] = {"dp_shard": num_ranks}
        num_ranks *= 2
    losses, parameters = train_plainly(num_ranks, is_own)
    for actual, found, _ in ranks(num_ranks).run(train, overrides, is_own):
        assert max_error(actual, losses) <= 1e-9
        assert max_error(found, parameters) <= 1e-9


def test_states_go_and_come(ranks: WorkerPool) -> None:
    """After each step the tracker holds what the layout says, and beside it four bytes a step count."""
    for _, _, other_bytes in ranks(2).run(train, {"zero": {"stage": 3}}, False):
        assert all(0 <= num_bytes <= 4 * 32 for num_bytes in other_bytes), other_bytes


def bf16_masters(rank: int, world_size: int) -> list[bool]:
    """Unfreeze one parameter of a unit: the master of its other ones must not be rounded to bf16 on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].bias.requires_grad_(False)
    engine = initialize(
        model, make_config(1, {"precision": {"param": "bf16"}}), loss_fn=lambda output, _: output.square().mean()
    )
    engine.train_step([torch.ones(2, 8)])
    before = masters(engine)
    model[0].bias.requires_grad_(True)
    engine(torch.ones(2, 8))
    after = masters(engine)
    assert set(after) - set(before) == ({"0.bias"} if rank == 1 else set())
    return [torch.equal(before[name], after[name]) for name in before if before[name].shape == after[name].shape]


def masters(engine: Engine) -> dict[str, Tensor]:
    return {piece.name: piece.view.detach().clone() for piece in engine.parts.sharded.pieces}


def test_masters_are_kept_bit_for_bit(ranks: WorkerPool) -> None:
    for equal in ranks(2).run(bf16_masters):
        assert equal
        assert all(equal)


def test_unfreezing_what_the_optimizer_does_not_know_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    engine = initialize(
        model,
        make_config(1, {}),
        loss_fn=lambda y, _: y.mean(),
        optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1),
    )
    model[0].requires_grad_(True)
    with refused("parameter-without-optimizer", "0."):
        engine(torch.ones(1, 4, dtype=torch.float64))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_unfrozen_between_a_backward_and_its_step_is_trained_from_the_next_one(stage: int) -> None:
    x = torch.ones(1, 4, dtype=torch.float64)
    plain, model = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    config = make_config(1, {"zero": {"stage": stage}})
    engine = initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda y, _: y)
    for number in range(3):
        for each in (plain, model):
            each[number % 2].requires_grad_(False)
        plain(x).backward()
        engine.backward(engine(x))
        for each in (plain, model):
            each.requires_grad_(True)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(engine.read(name), parameter.detach(), rtol=1e-12, atol=0)
    engine.close()


def test_unfreezing_between_the_backwards_of_a_step_is_refused() -> None:
    x = torch.ones(1, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    engine = initialize(model, make_config(1, {"batch": {"accumulation": 2}}), loss_fn=lambda y, _: y.mean())
    engine.backward(engine(x))
    model[0].requires_grad_(True)
    engine.backward(engine(x))
    with refused("frozen-within-step"):
        engine.step()
    engine.zero_grad()
    assert model[0].weight.grad is None
    engine.close()


# A generator and a discriminator, which is frozen around the other's step.

Networks = tuple[nn.Module, nn.Module]
NUM_DUELS = 4


def freeze_half_way(rank: int, world_size: int) -> bool:
    """The second of the two groups that a unit is to have cannot be made."""
    model = CASE.build(torch.float64)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = initialize(model, make_config(2, {"zero": {"stage": 3}}), loss_fn=CASE.loss)
    (batches,) = make_batches(CASE, num_steps=1, world_size=world_size, num_micro_batches=2)
    freeze(model, ("blocks.1.up",))
    make_group, made = ShardingState._make_group, []

    def make(*args: Any) -> Any:
        made.append(args)
        if len(made) == 2:
            raise MemoryError("no space for the second group")
        return make_group(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardingState, "_make_group", make)
        with pytest.raises((MemoryError, torch.OutOfMemoryError), match="no space for the second"):
            engine.train_step(batches[rank])
    engine.close()
    return all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())


def test_a_regrouping_that_fails_half_way_leaves_a_model_that_can_be_given_back(ranks: WorkerPool) -> None:
    """What was read of a group that was released already was freed memory: the process died."""
    assert ranks(2).run(freeze_half_way) == [True, True]


def networks() -> Networks:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).double(), nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)
    ).double()


def noise(step: int, num_ranks: int) -> Tensor:
    return torch.randn(num_ranks, 3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def telling(discriminator: nn.Module, made: Tensor) -> Tensor:
    return (discriminator(made.detach()) + 1).square().mean() + (
        discriminator(torch.ones_like(made)) - 1
    ).square().mean()


def fooling(discriminator: nn.Module, made: Tensor) -> Tensor:
    return (discriminator(made) - 1).square().mean()


def duel(rank: int, world_size: int, stage: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Saved, loaded into new engines and gone on with while the discriminator is frozen."""
    losses = []

    def engines() -> tuple[Networks, tuple[Engine, Engine]]:
        models = networks()
        config = make_config(1, {"zero": {"stage": stage}})
        made = initialize(models[0], config, loss_fn=lambda output, _: fooling(models[1], output))
        return models, (made, initialize(models[1], config, loss_fn=lambda output, _: output))

    (generator, discriminator), (g, d) = engines()
    for step in range(NUM_DUELS):
        z = noise(step, world_size)[rank]
        loss = telling(discriminator, generator(z).detach())
        backward(loss, [d])
        losses.append(d.step().loss)
        discriminator.requires_grad_(False)
        losses.append(g.train_step([z]).loss)
        if step == 1:
            g.save(f"{folder}/g")
            d.save(f"{folder}/d")
            (generator, discriminator), (g, d) = engines()
            g.load(f"{folder}/g")
            d.load(f"{folder}/d")
        discriminator.requires_grad_(True)
    found = {}
    for name, engine in (("g", g), ("d", d)):
        with engine.gathered() as model:
            found |= {f"{name}.{key}": each.detach().clone() for key, each in model.named_parameters()}
    return losses, found


def duel_plainly(num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    generator, discriminator = networks()
    optimizers = [plain_optimizer(each) for each in (generator, discriminator)]
    losses = []
    for step in range(NUM_DUELS):
        for which in (1, 0):
            discriminator.requires_grad_(which == 1)
            loss_of = (fooling, telling)[which]
            loss = torch.stack([loss_of(discriminator, generator(z)) for z in noise(step, num_ranks)]).mean()
            optimizers[which].zero_grad()
            loss.backward()
            optimizers[which].step()
            losses.append(loss.item())
    both = (("g", generator), ("d", discriminator))
    return losses, {f"{name}.{key}": each.detach() for name, model in both for key, each in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_frozen_for_a_while_keeps_its_states(ranks: WorkerPool, stage: int, tmp_path: Path) -> None:
    losses, parameters = duel_plainly(2)
    for actual, found in ranks(2).run(duel, stage, str(tmp_path)):
        assert max_error(actual, losses) <= 1e-9
        assert max_error(found, parameters) <= 1e-9
