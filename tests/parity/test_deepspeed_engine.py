"""A script of DeepSpeed's calls: the same losses and parameters as one process of plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.compat.deepspeed as deepspeed
from harness.pool import WorkerPool
from harness.refusals import refused
from shardwise.compat.deepspeed.runtime.zero import ZeroParamStatus
from shardwise.config.errors import EngineError

STEPS, MICRO, LR = 4, 2, 0.05


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"logits": self.head(x)}


def tower() -> Tower:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        return Tower()
    finally:
        torch.set_default_dtype(torch.float32)


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
    x = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 2 * 2 * MICRO,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        **more,
    }


def loss_of(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return (output["logits"] - target).square().mean()


def expected(num_steps: int = STEPS, num_engines: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    model = tower()
    losses = []
    for step in range(num_steps * num_engines):
        if step % num_steps == 0:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
            schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=LR, warmup_num_steps=3)
        total = torch.zeros((), dtype=torch.float64)
        for rank in range(2):
            for micro in range(MICRO):
                x, target = batch(step % num_steps, micro, rank)
                total = total + loss_of(model(x), target) / (2 * MICRO)
        total.backward()
        losses.append(total.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def steps(engine: Any, rank: int, first: int, last: int, by_tensor: bool = False) -> list[float]:
    losses = []
    for step in range(first, last):
        total = 0.0
        for micro in range(MICRO):
            x, target = batch(step, micro, rank)
            loss = loss_of(engine(x), target)
            total += loss.item() / MICRO
            if by_tensor:
                loss.backward()
            else:
                engine.backward(loss)
            assert engine.is_gradient_accumulation_boundary() == (micro == MICRO - 1)
            engine.step()
        losses.append(total)
    return losses


def train(rank: int, world_size: int, stage: int, by_tensor: bool, more: dict[str, Any]) -> tuple[list[float], Any]:
    config = settings(stage, **more)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = tower()
    before = getattr(model.blocks[0][0].weight, "ds_shape", None)
    engine, optimizer, _, schedule = deepspeed.initialize(model=model, config=config)
    if stage == 3:
        weight, bias = model.blocks[0][0].weight, model.head.bias
        assert before == weight.ds_shape == (6, 6)
        assert (weight.ds_tensor.numel(), weight.ds_persist, bias.ds_persist) == (18, False, True)
        assert (weight.ds_status, bias.ds_status) == (ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE)
    losses = steps(engine, rank, 0, STEPS, by_tensor)
    assert engine.global_steps == STEPS
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == engine.get_lr()[0]
    assert engine.get_global_grad_norm() > 0
    assert model.cpu() is model  # frameworks move what has trained; shards stay where they are
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert shapes == {name: parameter.shape for name, parameter in model.named_parameters()}
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert torch.equal(model.state_dict()["head.weight"], model.head.weight)
    state = engine._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (rank > 0)
    return losses, state


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_a_loop_equals_plain_torch(ranks: WorkerPool, stage: int, by_tensor: bool) -> None:
    losses, parameters = expected()
    results = ranks(2).run(train, stage, by_tensor, {})
    assert [sum(each) / 2 for each in zip(*(found for found, _ in results), strict=True)] == pytest.approx(losses)
    for name, parameter in parameters.items():
        torch.testing.assert_close(results[0][1][name], parameter, rtol=1e-9, atol=1e-12)


def step_by(rank: int, world_size: int, op: str, stage: int, by_tensor: bool) -> tuple[float, Tensor]:
    """Take a step of plain SGD; return its norm, and by how much the parameters have moved."""
    sgd = {"type": "SGD", "params": {"lr": LR}}
    config = settings(stage, gradient_allreduce_op=op, gradient_clipping=0, optimizer=sgd, scheduler={})
    engine, _, _, _ = deepspeed.initialize(model=tower(), config=config)
    steps(engine, rank, 0, 1, by_tensor)
    after = engine.module_state_dict()
    moved = [(after[name] - before).flatten() for name, before in tower().state_dict().items()]
    return engine.get_global_grad_norm(), torch.cat(moved)


def add_gradients(rank: int, world_size: int) -> None:
    for stage in range(4):
        for by_tensor in (False, True):
            norm, moved = step_by(rank, world_size, "mean", stage, by_tensor)
            added_norm, added = step_by(rank, world_size, "SUM", stage, by_tensor)
            assert added_norm == pytest.approx(world_size * norm, rel=1e-12)
            torch.testing.assert_close(added, world_size * moved, rtol=1e-12, atol=1e-15)


def test_gradients_of_data_ranks_may_be_added(ranks: WorkerPool) -> None:
    ranks(2).run(add_gradients)


class Project(torch.autograd.Function):
    """A product whose backward gathers the weight that it has saved, as fused losses of public libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        with deepspeed.zero.GatheredParameters([weight], enabled=weight.ds_status != ZeroParamStatus.AVAILABLE):
            return gradient @ weight, gradient.t() @ x


class Headless(Tower):
    """A tower whose head the script applies."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def headless() -> Headless:
    torch.manual_seed(3)
    return Headless().double()


def train_headless(rank: int, world_size: int) -> list[float]:
    engine, _, _, _ = deepspeed.initialize(
        model=headless(), config=settings(3, gradient_accumulation_steps=1, train_batch_size=4)
    )
    weight, losses = engine.module.head.weight, []
    for step in range(STEPS):
        x, target = batch(step, 0, 0)
        hidden = engine(x)
        with deepspeed.zero.GatheredParameters([weight]):
            loss = (Project.apply(hidden, weight) - target).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_a_function_gathers_in_its_backward_what_it_saved(ranks: WorkerPool) -> None:
    model = headless()
    weights = [each for name, each in model.named_parameters() if name != "head.bias"]
    optimizer = torch.optim.AdamW(weights, lr=0.0, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        x, target = batch(step, 0, 0)
        loss = (model(x) @ model.head.weight.t() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 0.5)
        # The warm-up's rates: the first two steps have none.
        optimizer.param_groups[0]["lr"] = (0.0, 0.0, LR * math.log(2) / math.log(3), LR)[step]
        optimizer.step()
        losses.append(loss.item())
    assert ranks(2).run(train_headless) == [pytest.approx(losses)] * 2


def train_twice(rank: int, world_size: int, destroys: bool) -> tuple[list[float], Any]:
    model = tower()
    losses = []
    for _ in range(2):
        engine, _, _, _ = deepspeed.initialize(model=model, config=settings(3))
        losses += steps(engine, rank, 0, STEPS)
        if destroys:
            engine.destroy()
            with pytest.raises(EngineError, match="initialize again"):
                engine(batch(0, 0, rank)[0])
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("destroys", [False, True])
def test_a_second_engine_goes_on_with_the_model(ranks: WorkerPool, destroys: bool) -> None:
    losses, weights = expected(num_engines=2)
    found = ranks(2).run(train_twice, destroys)
    assert [sum(each) / 2 for each in zip(*(losses for losses, _ in found), strict=True)] == pytest.approx(losses)
    for name, value in weights.items():
        torch.testing.assert_close(found[1][1][name], value)


def keep_graph(rank: int, world_size: int) -> float:
    engine, _, _, _ = deepspeed.initialize(model=tower(), config=settings(2))
    x, target = batch(0, 0, rank)
    loss = loss_of(engine(x), target)
    engine.backward(loss, retain_graph=True)
    engine.step()
    engine.backward(loss)
    engine.step()
    return float(engine.get_global_grad_norm())


class Trainer:
    """Destroys its engine by another's call before it trains again, as that of transformers does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = self.model_wrapped = model

    def train(self, rank: int, stage: int) -> list[float]:
        if self.model_wrapped is not self.model:
            self.free_memory()
        if self.model_wrapped is self.model:  # or it would go on with the engine
            self.model_wrapped = deepspeed.initialize(model=self.model, config=settings(stage))[0]
        return steps(self.model_wrapped, rank, 0, STEPS)

    def free_memory(self) -> None:
        self.model_wrapped.destroy()


def train_in_turns(rank: int, world_size: int, stage: int) -> tuple[list[float], Any, bool]:
    model = tower()
    first, second = Trainer(model), Trainer(model)
    losses = first.train(rank, stage) + first.train(rank, stage) + second.train(rank, stage)
    engine = second.model_wrapped
    shape = model.head.weight.shape
    model.head = nn.Linear(*shape[::-1], dtype=torch.float64)  # as resized embeddings are
    with torch.no_grad():
        model.head.weight.fill_(rank), model.head.bias.zero_()
    saved = engine._zero3_consolidated_16bit_state_dict()
    are_new = saved is None or not saved["head.weight"].any()
    before = saved and {name: value for name, value in saved.items() if "head" not in name}
    first.train(rank, stage)
    return losses, before, are_new


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_trainer_trains_again(ranks: WorkerPool, stage: int) -> None:
    losses, parameters = expected(num_engines=3)
    found = ranks(2).run(train_in_turns, stage)
    assert [sum(both) / 2 for both in zip(*(one for one, _, _ in found), strict=True)] == pytest.approx(losses, 1e-9)
    assert all(are_new for _, _, are_new in found)
    assert found[0][1].keys() == {name for name in parameters if "head" not in name}
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, parameters[name], rtol=1e-9, atol=1e-9)


def test_a_graph_can_be_used_again(ranks: WorkerPool) -> None:
    model = tower()
    sum(loss_of(model(x), target) / 2 for x, target in (batch(0, 0, rank) for rank in range(2))).backward()  # type: ignore[union-attr]
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()  # type: ignore[union-attr]
    assert ranks(2).run(keep_graph) == pytest.approx([norm, norm])


def start_with_stages(rank: int, world_size: int) -> int:
    model = tower()
    model.num_stages = 2  # as vision models have, which are no pipelines
    engine, _, _, _ = deepspeed.initialize(model=model, config=settings(2, train_micro_batch_size_per_gpu=2))
    return int(engine.train_batch_size())


def test_a_model_with_stages_of_its_own_is_no_pipeline(ranks: WorkerPool) -> None:
    assert ranks(2).run(start_with_stages) == [8, 8]


# Micro-batches a step at the start, then by the number of the backward.
BATCHES = [{}, {2: 3}, {2: 1}, {4: 4, 8: 2}]


def change_batch(rank: int, world_size: int, stage: int, by_tensor: bool) -> list[list[Tensor]]:
    found = []
    for changes in BATCHES:
        engine, *_ = deepspeed.initialize(model=tower(), config=settings(stage))
        for number in range(9):
            if number in changes:
                engine.set_train_batch_size(2 * 2 * changes[number])
            x, target = batch(number, 0, rank)
            loss = loss_of(engine(x), target)
            engine.scale(loss).backward() if by_tensor else engine.backward(loss)
            is_within_step = not engine.is_gradient_accumulation_boundary()
            engine.step()
        if is_within_step:
            with refused("batch-set-within-step", "set_train_batch_size(40)"):
                engine.set_train_batch_size(40)
        found.append(list(engine.module_state_dict().values()))
        engine.destroy()
    return found


def changed_batches() -> list[list[Tensor]]:
    found = []
    for changes in BATCHES:
        model, steps = tower(), MICRO
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
        schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=LR, warmup_num_steps=3)
        for number in range(9):
            steps = changes.get(number, steps)
            for rank in range(2):
                x, target = batch(number, 0, rank)
                (loss_of(model(x), target) / (2 * steps)).backward()
            if (number + 1) % steps == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        found.append([parameter.detach() for parameter in model.parameters()])
    return found


@pytest.mark.parametrize(("stage", "by_tensor"), [(0, False), (1, True), (2, False), (3, True)])
def test_the_batch_changes_between_steps(ranks: WorkerPool, stage: int, by_tensor: bool) -> None:
    expected = changed_batches()
    for found in ranks(2).run(change_batch, stage, by_tensor):
        for ours, plain in zip(found, expected, strict=True):
            for one, other in zip(ours, plain, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def transform(rank: int, world_size: int, stage: int, tiers: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    config = settings(stage, gradient_accumulation_steps=1, train_batch_size=4)
    config["zero_optimization"].update(tiers)
    engine, *_ = deepspeed.initialize(model=tower(), config=config)
    found = transforms(engine.module, rank)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found += transforms(engine.module, rank)
    x, target = batch(0, 0, rank)
    output, change = torch.func.jvp(lambda y: engine.module(y)["logits"], (x,), (x.cos(),))
    engine.backward((output - target).square().mean() + change.square().mean())
    engine.step()
    return found, engine.module_state_dict()


def transforms(model: nn.Module, rank: int) -> list[Tensor]:
    x, _ = batch(1, 0, rank)

    def energy(row: Tensor) -> Tensor:
        return model(row[None])["logits"].square().sum()

    return [torch.func.grad(energy)(x[0]), torch.func.hessian(energy)(x[0]), torch.vmap(energy)(x)]


@pytest.mark.parametrize(
    ("stage", "tiers"),
    [(0, {}), (2, {}), (3, {}), (3, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}})],
)
def test_transforms_of_torch_gather_what_they_use(ranks: WorkerPool, stage: int, tiers: dict[str, Any]) -> None:
    model = tower()
    expected = [transforms(model, rank) for rank in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=LR, warmup_num_steps=3)
    for rank in range(2):
        x, target = batch(0, 0, rank)
        output, change = torch.func.jvp(lambda y: model(y)["logits"], (x,), (x.cos(),))
        ((output - target).square().mean() / 2 + change.square().mean() / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    for rank, (found, state) in enumerate(ranks(2).run(transform, stage, tiers)):
        torch.testing.assert_close(found, expected[rank] * 2, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-9, atol=1e-12)


def inner_step(call: Any, model: nn.Module, number: int, rank: int) -> Tensor:
    """The loss after a step of plain gradient descent, as of a function of the parameters before it."""
    (x, target), (later, other) = batch(number, 0, rank), batch(number, 1, rank)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss_of(call(x), target), parameters, create_graph=True)
    moved = [parameter - 0.1 * gradient for parameter, gradient in zip(parameters, gradients, strict=True)]
    return loss_of(torch.func.functional_call(model, dict(zip(names, moved, strict=True)), (later,)), other)


def learn_to_step(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    config = settings(stage, gradient_accumulation_steps=1, train_batch_size=4)
    engine, *_ = deepspeed.initialize(model=tower(), config=config)
    for number in range(3):
        engine.backward(inner_step(engine, engine.module, number, rank))
        engine.step()
    state = engine.module_state_dict()
    engine.module.late = nn.Linear(2, 2)
    with refused("model-parameters-changed", "late.weight"):
        engine(batch(0, 0, rank)[0])
    return state


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensors_stand_for_parameters_in_a_functional_call(ranks: WorkerPool, stage: int) -> None:
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=LR, warmup_num_steps=3)
    for number in range(3):
        for rank in range(2):
            (inner_step(model, model, number, rank) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for state in ranks(2).run(learn_to_step, stage):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-9, atol=1e-12)
