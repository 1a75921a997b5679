"""What users do to an engine that a demonstration never does."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from shardwise import Engine, backward, initialize

PLAIN_SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}


def make(model: nn.Module, stage: int = 2, loss_fn: Any = None, **sections: dict[str, Any]) -> Engine:
    loss_fn = loss_fn or (lambda output, batch: output.square().mean())
    overrides = {"zero": {"stage": stage, "blocks": None}, "optimizer": PLAIN_SGD, **sections}
    return initialize(model, make_config(1, overrides), loss_fn=loss_fn)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def plain_losses(model: nn.Module, batches: list[list[Tensor]]) -> list[float]:
    """Plain SGD on the mean over ranks."""
    losses = []
    for step in batches:
        loss = torch.stack([model(batch).square().mean() for batch in step]).mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        losses.append(loss.item())
    return losses


class Branching(nn.Module):
    """Each block uses its second layer only for inputs of one sign, as routing does."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.always(x))
            return y + self.sometimes(y) if bool(x.sum() > 0) else y

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Branching.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skip = x.sign().mean()
        x = self.stem(x)
        for block in self.blocks:
            x = block(x.abs() * skip)
        return x


class Adapted(nn.Module):
    """Frozen blocks with small trainable layers inside; one block takes a parameter as an argument."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.adapter, self.second = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.first.requires_grad_(False)
            self.second.requires_grad_(False)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return x + self.second(torch.tanh(self.adapter(self.first(x)) + shift))

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(Adapted.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.shift)
        return x


class Viewing(nn.Module):
    """A block that returns a view of its parameter."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self) -> Tensor:
            return self.weight.view(1, 4)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Viewing.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(x * block())
        return x


def train(rank: int, world_size: int, kind: type[nn.Module], stage: int) -> list[float]:
    model = build(kind)
    engine = make(model, stage, run={"device": "cpu", "timeout_s": 60.0})
    losses = [engine.train_step([inputs(step, rank)]).loss for step in range(3)]
    engine.close()
    return losses


def inputs(step: int, rank: int) -> Tensor:
    """Positive on even ranks, negative on odd ones."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.rand(2, 4, generator=generator, dtype=torch.float64) * (1 - 2 * (rank % 2)) + (0.5 - rank % 2)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", [Branching, Adapted, Viewing])
def test_unusual_models_equal_plain_training(ranks: WorkerPool, kind: type[nn.Module], stage: int) -> None:
    expected = plain_losses(build(kind), [[inputs(step, rank) for rank in range(2)] for step in range(3)])
    for losses in ranks(2).run(train, kind, stage):
        assert losses == pytest.approx(expected, rel=1e-9)


def two_forwards(rank: int, world_size: int) -> tuple[float, float]:
    """Two forwards, an evaluation, then two backwards; against one forward of both."""
    norms = []
    for is_interleaved in (True, False):
        model = build(Adapted)
        engine = initialize(
            model, make_config(2, {"zero": {"stage": 3}}), loss_fn=lambda output, _: output.square().mean()
        )
        first, second = inputs(0, rank), inputs(1, rank)
        if is_interleaved:
            losses = [engine(first), engine(second)]
            engine.eval_step([first])
            for loss in losses:
                engine.backward(loss)
        else:
            engine.backward(engine(first))
            engine.backward(engine(second))
        norms.append(engine.step().grad_norm)
        engine.close()
    return norms[0], norms[1]


def test_backwards_may_follow_several_forwards_and_an_evaluation(ranks: WorkerPool) -> None:
    for interleaved, plain in ranks(2).run(two_forwards):
        assert interleaved == pytest.approx(plain, rel=1e-12)


def generate_on_rank_0(rank: int, world_size: int) -> float:
    model = build(Adapted)
    engine = make(model, 3)
    with engine.gathered():
        for _ in range(2):
            with torch.no_grad():
                output = model(inputs(0, 0)) if rank == 0 else torch.zeros(1)
        weight = model.blocks[0].adapter.weight.sum()
    return float(output.sum() * 0 + weight)


def test_gathered_parameters_stay_through_forwards_of_one_rank(ranks: WorkerPool) -> None:
    expected = build(Adapted).blocks[0].adapter.weight.sum().item()
    assert ranks(2).run(generate_on_rank_0) == pytest.approx([expected] * 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_dropped_engine_is_collected(ranks: WorkerPool, stage: int) -> None:
    assert ranks(2).run(drop, stage) == [(True, True)] * 2


def drop(rank: int, world_size: int, stage: int) -> tuple[bool, bool]:
    model = build(Adapted)
    engine = make(model, stage)
    engine.train_step([inputs(0, rank)])
    references = weakref.ref(engine), weakref.ref(engine.parts.sharding.groups[0].full.untyped_storage())
    del engine, model
    gc.collect()
    return references[0]() is None, references[1]() is None


def test_close_restores_forward_and_frees_the_buffers() -> None:
    model = build(Adapted)
    forward = model.blocks[0].forward
    engine = make(model, recompute={"mode": "full"})
    full = weakref.ref(engine.parts.sharding.groups[0].full.untyped_storage())
    engine.close()
    assert model.blocks[0].forward == forward
    gc.collect()
    assert full() is None
    make(model).close()


def test_model_of_a_live_engine_is_refused() -> None:
    model = nn.Linear(4, 4)
    engine = make(model)
    with refused("model-has-engine", "engine.close()"):
        make(model)
    engine.close()
    with refused("unknown-optimizer", "admw"):
        make(model, optimizer={"name": "admw"})
    make(model).train_step([torch.ones(1, 4)])


def test_failed_backward_must_be_forgotten() -> None:
    model = nn.Linear(4, 4)
    engine = make(model)
    loss = engine(torch.ones(1, 4))
    loss.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    with refused("gradients-incomplete", "engine.zero_grad()"):
        engine.train_step([torch.ones(1, 4)])
    engine.zero_grad()
    assert engine.train_step([torch.ones(1, 4)]).step == 1


def test_gradient_from_before_is_not_counted() -> None:
    model, fresh = nn.Linear(4, 4), nn.Linear(4, 4)
    fresh.load_state_dict(model.state_dict())
    model(torch.ones(1, 4)).sum().backward()
    norms = [make(each).train_step([torch.ones(1, 4)]).grad_norm for each in (model, fresh)]
    assert norms[0] == norms[1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_written_later_are_trained(stage: int) -> None:
    models = nn.Linear(4, 4), nn.Linear(4, 4)
    engines = [make(model, stage) for model in models]
    written = nn.Linear(4, 4).state_dict()
    models[0].load_state_dict(written)
    for engine in engines:  # one is read first, the other steps at once
        engine.model.load_state_dict(written)
        if engine is engines[0]:
            assert torch.equal(engine.read("weight"), written["weight"])
        with engine.gathered():  # which takes nothing over of itself
            pass
        engine.train_step([torch.ones(1, 4)])
    assert torch.equal(engines[0].read("weight"), engines[1].read("weight"))
    assert not torch.equal(engines[0].read("weight"), written["weight"])


def test_fp16_does_not_skip_a_loss_that_is_nan() -> None:
    engine = make(nn.Linear(4, 1), precision={"param": "fp16"})
    with refused("loss-not-finite", "Linear"):
        engine.train_step([torch.full((1, 4), float("nan"))])


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(4))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.norm(x + self.positions))


def train_positioned(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(rank)
    model = Positioned()
    engine = make(model, 3, precision={"param": "bf16", "buffers": "param"})
    batch = UserDict({"x": torch.randn(3, 4), "mask": torch.ones(3)})
    engine.train_step([batch])
    return model.positions.tolist()


def test_buffers_follow_the_parameters_and_rank_0(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(train_positioned)
    assert first == second


def test_the_loss_sees_the_batch_uncast() -> None:
    seen = []
    engine = make(
        nn.Linear(4, 1),
        loss_fn=lambda output, batch: seen.append(batch[1].dtype) or output.sum(),
        precision={"param": "bf16"},
    )
    engine.train_step([(torch.ones(1, 4), torch.ones(3))])
    assert seen == [torch.float32]


def test_counts_may_be_fractions() -> None:
    def half(output: Tensor, batch: Tensor) -> tuple[Tensor, float]:
        return output.square().sum() / 2, 0.5

    model, same = nn.Linear(4, 1), nn.Linear(4, 1)
    same.load_state_dict(model.state_dict())
    halved = make(model, loss_fn=half).train_step([torch.ones(1, 4)])
    plain = make(same).train_step([torch.ones(1, 4)])
    assert (halved.loss, halved.grad_norm) == pytest.approx((plain.loss, plain.grad_norm), rel=1e-6)


def test_evaluation_keeps_each_modules_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].eval()
    make(model).eval_step([torch.ones(2, 4)])
    assert [module.training for module in model] == [False, True]


def test_given_optimizer_keeps_its_learning_rate() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = make_config(1, {"scheduler": {"name": None}, "run": {"device": "cpu", "steps": 2}})
    engine = initialize(model, config, loss_fn=lambda output, _: output.mean(), optimizer=optimizer)
    assert [engine.train_step([torch.ones(1, 4)]).lr for _ in range(4)] == [0.1] * 4


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_a_script_does_to_gradients_is_done_or_refused(ranks: WorkerPool, stage: int) -> None:
    for warnings in ranks(2).run(touch_gradients, stage):
        assert warnings == ["clip"]


def touch_gradients(rank: int, world_size: int, stage: int) -> list[str]:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append("clip" * ("clip_norm" in record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    engine = make(model, stage, loss_fn=lambda output, _: (output.square().sum(), output.numel()))
    x = torch.ones(2, 4, dtype=torch.float64)
    try:
        refuse_changes(engine, stage, x)
        clear_in_all_ways(engine, x)
        return warnings
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
        engine.close()
        assert not {"add_param_group", "zero_grad"} & vars(engine.optimizer).keys()


def refuse_changes(engine: Engine, stage: int, x: Tensor) -> None:
    """Change the gradients that the engine has, and those that it has no more."""
    model = engine.model
    engine.backward(engine(x))
    engine(x)  # an evaluation, or the next micro-batch: the engine still has them
    copied = copy.deepcopy(model) if stage < 3 else model
    assert stage == 3 or {type(each) for each in copied.parameters()} == {nn.Parameter}
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        with refused("gradients-clipped-outside", "optimizer.clip_norm"):
            clip(model.parameters(), 1.0)
    weight = model.get_parameter("0.weight")
    with refused("gradient-assigned", "0.weight", "engine.write"):
        weight.grad = torch.zeros(4, 4, dtype=torch.float64)
    with refused("gradient-assigned", "0.weight", "engine.zero_grad()"):
        weight.grad = None
    with refused("gradients-cleared-partly", "Linear"):
        model[1].zero_grad()  # type: ignore[operator]
    for _ in range(2):
        assert all(each.grad is None for each in model.parameters())  # which warns once
    engine.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    weight.grad = None
    engine.zero_grad()


def clear_in_all_ways(engine: Engine, x: Tensor) -> None:
    """Clear the gradients of a backward, and find that only those of the next one are there."""
    model = engine.model
    engine.backward(engine(x))
    expected = engine.read("0.weight", "grad")
    engine.zero_grad()
    for clear in (model.zero_grad, engine.optimizer.zero_grad, nn.ModuleList([model]).zero_grad, engine.zero_grad):
        for is_late in (False, True):  # after the forward whose gradients are kept
            engine.backward(engine(9 * x))
            loss = engine(x) if is_late else None
            clear()
            assert engine.parts.state.num_backwards == 0
            engine.backward(engine(x) if loss is None else loss)
            assert torch.equal(engine.read("0.weight", "grad"), expected)
            engine.zero_grad()


class ReentrantTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


def test_reentrant_checkpointing_of_a_module_used_twice_is_refused() -> None:
    engine = make(ReentrantTwice())
    with refused("gradient-twice", "block.", "use_reentrant=False"):
        engine.backward(engine(torch.ones(1, 4)))


def test_backward_after_a_failed_one_is_refused() -> None:
    engine = make(nn.Linear(4, 4))
    first, second = engine(torch.ones(1, 4)), engine(torch.ones(1, 4))
    first.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(first)
    with refused("gradients-incomplete", "engine.zero_grad()"):
        engine.backward(second)
    engine.zero_grad()
    assert engine.train_step([torch.ones(1, 4)]).count == 1


def keep_graph_of_gathered(rank: int, world_size: int, stage: int) -> tuple[float, float]:
    """A penalty computed while all parameters are whole, and its backward outside."""
    model = build(Adapted)
    engine = make(model, stage)
    with engine.gathered():
        penalty = sum((parameter.pow(3).sum() for parameter in model.parameters()), torch.zeros(()))
    backward(model(inputs(0, 0)).square().mean() + penalty, [engine])
    plain = build(Adapted)
    loss = plain(inputs(0, 0)).square().mean()
    (loss + sum((parameter.pow(3).sum() for parameter in plain.parameters()), torch.zeros(()))).backward()
    squares = [parameter.grad.square().sum() for parameter in plain.parameters() if parameter.grad is not None]
    return engine.step().grad_norm, float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize("stage", [2, 3])
def test_graph_built_while_gathered_may_be_used_outside(ranks: WorkerPool, stage: int) -> None:
    for found, expected in ranks(2).run(keep_graph_of_gathered, stage):
        assert found == pytest.approx(expected, rel=1e-9)


def copy_after_a_step(rank: int, world_size: int) -> tuple[str, float]:
    """As for a moving average of the weights; the gather after the step is still under way."""
    model = build(Adapted)
    engine = make(model, 2)
    engine.train_step([inputs(0, 0)])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        return type(copied.shift).__name__, float((copied(inputs(1, 0)) - model(inputs(1, 0))).abs().max())


def test_copy_right_after_a_step_is_plain(ranks: WorkerPool) -> None:
    assert ranks(2).run(copy_after_a_step) == [("Parameter", 0.0)] * 2
