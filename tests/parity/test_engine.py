"""The engine as its users meet it: explicit loops, optimizers of their own, released parameters, bad numbers."""

from __future__ import annotations

import io
import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.refusals import refusal_of, refused
from harness.training import LR, make_config, merge_ranks, reference_trace, train_engine
from shardwise import Engine, initialize

STAGES = [0, 1, 2, 3]


def single(model: nn.Module, loss_fn: Any = None, **sections: dict[str, Any]) -> Engine:
    return initialize(model, make_config(1, sections), loss_fn=loss_fn)


def mean_square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


# Explicit loops.


def train_with_no_sync(rank: int, world_size: int, stage: int) -> Trace:
    """Three micro-batches whose first two are inside no_sync, and a further backward after the boundary."""
    case = CASES["transformer"]
    batches = make_batches(case, num_steps=3, world_size=world_size, num_micro_batches=4)
    model = case.build(torch.float64, seed=rank)
    engine = initialize(model, make_config(3, {"zero": {"stage": stage}}), loss_fn=case.loss)
    losses, norms = [], []
    for step in batches:
        with engine.no_sync():
            for batch in step[rank][:2]:
                engine.backward(engine(batch))
        for batch in step[rank][2:]:
            engine.backward(engine(batch))
        result = engine.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    with engine.gathered():
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trace(losses, norms, {}, parameters)


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_and_a_backward_past_the_boundary(ranks: WorkerPool, stage: int) -> None:
    actual = merge_ranks(ranks(2).run(train_with_no_sync, stage), num_holders=1)
    expected = reference_trace("transformer", 2, 4, 3, None)
    check_parity(actual, replace(expected, gradients={}))


def train_only_under_no_sync(rank: int, world_size: int, stage: int) -> Trace:
    case = CASES["unused-parameters"]
    batches = make_batches(case, num_steps=2, world_size=world_size, num_micro_batches=2)
    model = case.build(torch.float64)
    engine = initialize(model, make_config(2, {"zero": {"stage": stage}}), loss_fn=case.loss)
    results = []
    for step in batches:
        with engine.no_sync():
            for batch in step[rank]:
                engine.backward(engine(batch))
        results.append(engine.step())
    with engine.gathered():
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trace([each.loss for each in results], [each.grad_norm for each in results], {}, parameters)


@pytest.mark.parametrize("stage", STAGES)
def test_step_reduces_what_no_sync_left(ranks: WorkerPool, stage: int) -> None:
    actual = merge_ranks(ranks(2).run(train_only_under_no_sync, stage), num_holders=1)
    expected = reference_trace("unused-parameters", 2, 2, 2, None)
    check_parity(actual, replace(expected, gradients={}))


def train_two_overlaps(rank: int, world_size: int, stage: int, param: str) -> list[Trace]:
    return [
        train_engine(
            rank,
            world_size,
            "transformer",
            2,
            3,
            {"zero": {"stage": stage, "overlap": overlap}, "precision": {"param": param}},
        )
        for overlap in (True, False)
    ]


@pytest.mark.quick(2)
@pytest.mark.parametrize("param", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_overlap_changes_no_bit(ranks: WorkerPool, stage: int, param: str) -> None:
    for with_overlap, without in ranks(3).run(train_two_overlaps, stage, param):
        assert with_overlap.losses == without.losses
        assert all(torch.equal(value, without.parameters[name]) for name, value in with_overlap.parameters.items())


def evaluate_and_train(rank: int, world_size: int, stage: int) -> tuple[float, float, float]:
    case = CASES["transformer"]
    batches = make_batches(case, num_steps=1, world_size=world_size, num_micro_batches=2)[0][rank]
    engine = initialize(case.build(torch.float64), make_config(2, {"zero": {"stage": stage}}), loss_fn=case.loss)
    before = engine.eval_step(batches)
    trained = engine.train_step(batches)
    after = engine.eval_step(batches)
    return before.loss, trained.loss, after.loss


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_sees_the_training_loss_and_leaves_no_trace(ranks: WorkerPool, stage: int) -> None:
    for before, trained, after in ranks(2).run(evaluate_and_train, stage):
        assert before == pytest.approx(trained, rel=1e-12)
        assert after < before


# Optimizers, schedules, parameter groups.


def train_own_optimizer(rank: int, world_size: int, stage: int, kind: str) -> Trace:
    case = CASES["residual-mlp"]
    model = case.build(torch.float64)
    optimizer = own_optimizer(model, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    batches = make_batches(case, num_steps=3, world_size=world_size, num_micro_batches=1)
    config = make_config(1, {"zero": {"stage": stage}})
    engine = initialize(model, config, loss_fn=case.loss, optimizer=optimizer, scheduler=scheduler)
    assert engine.optimizer is optimizer
    results = [engine.train_step(step[rank]) for step in batches]
    assert [each.lr for each in results] == [0.1, 0.05, 0.025]
    with engine.gathered():
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trace([each.loss for each in results], [each.grad_norm for each in results], {}, parameters)


def own_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    head = [parameter for name, parameter in model.named_parameters() if name.startswith("head")]
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("head")]
    groups = [{"params": others, "lr": 0.1, "weight_decay": 0.3}, {"params": head, "lr": 0.01, "weight_decay": 0.0}]
    classes = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    return classes[kind](groups, lr=0.1)


@pytest.mark.parametrize(("kind", "stage"), [("sgd", 0), ("adagrad", 1), ("rmsprop", 2), ("sgd", 3)])
def test_groups_of_a_given_optimizer_keep_their_meaning(ranks: WorkerPool, kind: str, stage: int) -> None:
    case = CASES["residual-mlp"]
    model = case.build(torch.float64)
    optimizer = own_optimizer(model, kind)
    batches = make_batches(case, num_steps=3, world_size=2, num_micro_batches=1)
    losses, norms = [], []
    for step in batches:
        for group, lr in zip(optimizer.param_groups, (0.1, 0.01), strict=True):
            group["lr"] = lr * 0.5 ** len(losses)
        trace = train_reference(
            model, [[batch for rank in step for batch in rank]], case.loss, lambda _: optimizer, None
        )
        losses += trace.losses
        norms += trace.grad_norms
    actual = merge_ranks(ranks(2).run(train_own_optimizer, stage, kind), num_holders=1)
    check_parity(actual, replace(trace, losses=losses, grad_norms=norms, gradients={}))


def test_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(3, 3)
    with refused("optimizer-element-wise", "LBFGS"):
        initialize(model, make_config(1, {}), optimizer=torch.optim.LBFGS(model.parameters()))
    with refused("optimizer-element-wise", "optimizer.name='lbfgs'", "adamw"):
        initialize(nn.Linear(3, 3), make_config(1, {"optimizer": {"name": "lbfgs"}}))


def test_optimizer_of_another_model_is_refused() -> None:
    with refused("optimizer-foreign-tensor"):
        initialize(nn.Linear(3, 3), make_config(1, {}), optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))


# Released parameters.


class OutsideUse(nn.Module):
    """The head multiplies by a weight that belongs to a block, kept in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.kept = [self.blocks[0].weight]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x @ self.blocks[1].weight * 2 + (self.kept[0] * 0.5).sum()


def train_outside_use(rank: int, world_size: int) -> tuple[float, tuple[str, str], tuple[Any, ...]]:
    torch.manual_seed(0)
    model = OutsideUse().double()
    plain = OutsideUse().double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 6, dtype=torch.float64)
    engine = single(
        model,
        mean_square,
        zero={"stage": 3},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    )
    for _ in range(2):
        engine.train_step([x])
        plain.zero_grad()
        plain(x).square().mean().backward()
        for parameter in plain.parameters():
            parameter.data -= 0.1 * parameter.grad
    weight = model.blocks[2].weight
    error = max(
        (weight * 2 - plain.blocks[2].weight * 2).abs().max().item(),
        abs(torch.linalg.norm(weight).item() - torch.linalg.norm(plain.blocks[2].weight).item()),
    )
    plain_state = plain.state_dict()
    if rank == 0:  # often one rank asks for names and shapes alone
        for module, prefix in ((model, ""), (model.blocks[2], "blocks.2.")):
            state = module.state_dict()
            assert all(value.shape == plain_state[prefix + name].shape for name, value in state.items())
            assert len(state) == sum(name.startswith(prefix) for name in plain_state)
    refusal = refusal_of(lambda: torch.save(model.state_dict(), io.BytesIO()))
    readable = (
        tuple(weight.shape),
        weight.dtype,
        weight.numel(),
        weight.requires_grad,
        isinstance(weight, nn.Parameter),
    )
    with engine.gathered():
        error = max(
            error, *((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        )
    return error, refusal, readable


def test_parameter_used_outside_its_module(ranks: WorkerPool) -> None:
    for error, (code, text), readable in ranks(2).run(train_outside_use):
        assert error < 1e-12
        assert code == "parameter-released"
        assert "with engine.gathered():" in text
        assert readable == ((6, 6), torch.float64, 36, True, True)


def close_and_use(rank: int, world_size: int) -> tuple[float, int, int]:
    model = CASES["transformer"].build(torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    num_threads = threading.active_count()
    engine = single(model, zero={"stage": 3})
    engine.close()
    error = max((value - before[name]).abs().max().item() for name, value in model.state_dict().items())
    hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    return error, hooks, threading.active_count() - num_threads


def test_close_gives_the_model_back(ranks: WorkerPool) -> None:
    assert ranks(2).run(close_and_use) == [(0.0, 0, 0)] * 2


class CheckpointedByUser(nn.Module):
    """Recomputes blocks around their call, hooks included, as Hugging Face's models do."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


def train_checkpointed(rank: int, world_size: int, stage: int) -> list[list[float]]:
    losses = []
    for recompute in (True, False):
        torch.manual_seed(0)
        model = CheckpointedByUser(recompute).double()
        engine = single(model, mean_square, zero={"stage": stage, "blocks": ["blocks.?"]})
        losses.append([engine.train_step([torch.ones(2, 6) * (rank + 1)]).loss for _ in range(3)])
        engine.close()
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpointing_around_a_blocks_call(ranks: WorkerPool, stage: int) -> None:
    for recomputed, plain in ranks(2).run(train_checkpointed, stage):
        assert recomputed == plain


def fail_and_go_on(rank: int, world_size: int, stage: int) -> tuple[float, float]:
    """A forward and a backward that raise leave the engine able to train on."""
    losses = []
    for is_interrupted in (True, False):
        torch.manual_seed(0)
        model = CheckpointedByUser(recompute=False).double()
        engine = single(model, mean_square, zero={"stage": stage, "blocks": ["blocks.?"]})
        batch = torch.ones(2, 6)
        if is_interrupted:
            for module, hook in ((model.blocks[1], "forward"), (model.blocks[1], "backward")):
                handle = _raise_in(module, hook)
                with pytest.raises(ZeroDivisionError):
                    engine.backward(engine(batch))
                handle.remove()
                engine.zero_grad()
        losses.append(engine.train_step([batch]).loss + engine.train_step([batch]).loss)
        engine.close()
    return losses[0], losses[1]


def _raise_in(module: nn.Module, where: str) -> Any:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    if where == "forward":
        return module[1].register_forward_hook(fail)
    return module[1].register_full_backward_hook(fail)


@pytest.mark.parametrize("stage", STAGES)
def test_exceptions_leave_the_engine_usable(ranks: WorkerPool, stage: int) -> None:
    for interrupted, plain in ranks(2).run(fail_and_go_on, stage):
        assert interrupted == plain


# Numbers that are not finite.


class Poison(nn.Module):
    """Divides by zero in its second block where an input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(2, 2), Reciprocal(), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) + x.sum()


class Reciprocal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x > -1e6).to(x.dtype) * self.weight


def train_poisoned(rank: int, world_size: int, stage: int) -> tuple[tuple[str, str], bool, float]:
    torch.manual_seed(0)
    model = Poison().double()
    engine = single(model, mean_square, zero={"stage": stage})
    good = torch.ones(3, 2, dtype=torch.float64)
    engine.train_step([good])
    with engine.gathered():
        before = {name: value.clone() for name, value in model.state_dict().items()}
    sign = math.copysign(1.0, before["blocks.0.weight"].sum(1)[0].item())
    bad = good * -1e9 * sign if rank == 1 else good
    refusal = refusal_of(lambda: engine.train_step([bad]))
    with engine.gathered():
        unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return refusal, unchanged, engine.train_step([good]).loss


@pytest.mark.parametrize("stage", STAGES)
def test_nonfinite_loss_names_the_module_and_keeps_the_state(ranks: WorkerPool, stage: int) -> None:
    for (code, message), unchanged, next_loss in ranks(2).run(train_poisoned, stage):
        assert code == "loss-not-finite"
        assert "step 2" in message
        assert "blocks.1 on rank 1" in message
        assert unchanged
        assert math.isfinite(next_loss)


def train_fp16(rank: int, world_size: int, stage: int) -> list[tuple[bool, float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = single(
        model,
        lambda output, batch: (output.float() * batch[1]).sum(),
        zero={"stage": stage},
        precision={"param": "fp16", "loss_scale_window": 2, "initial_loss_scale": 4096.0},
    )
    results = []
    for factor in (1e-3, 1e4, 1e-3, 1e-3, 1e-3, 1e-3):
        result = engine.train_step([(torch.ones(2, 4), factor)])
        results.append((result.skipped, result.loss_scale))
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_skips_an_overflow_and_adapts_the_scale(ranks: WorkerPool, stage: int) -> None:
    expected = [(False, 4096.0), (True, 4096.0), *[(False, 2048.0)] * 3, (False, 4096.0)]
    assert ranks(2).run(train_fp16, stage) == [expected] * 2


# Mistakes.


def test_loss_from_elsewhere_is_refused() -> None:
    engine = single(nn.Linear(2, 1), mean_square)
    loss = engine(torch.ones(1, 2))
    with refused("loss-not-from-engine"):
        engine.backward(loss * 2)
    engine.backward(loss)
    with refused("loss-not-from-engine"):
        engine.backward(loss)


def test_output_without_a_loss_is_refused() -> None:
    with refused("no-scalar-loss", "(1, 3)"):
        single(nn.Linear(2, 3))(torch.ones(1, 2))


def test_step_without_backward_is_refused() -> None:
    with refused("step-without-backward"):
        single(nn.Linear(2, 1), mean_square).step()


@pytest.mark.parametrize("batch", [{"x": torch.ones(2, 4).double(), "y": torch.ones(2, 1).double()}, torch.ones(1, 4)])
def test_a_batch_that_is_no_list_is_one_micro_batch(batch: Any) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor, y: Tensor | float = 1.0) -> Tensor:
            return (super().forward(x) - y).square().mean()

    in_list, bare = (single(Model(4, 1).double()) for _ in range(2))
    bare.write("weight", in_list.read("weight"))
    bare.write("bias", in_list.read("bias"))
    assert bare.train_step(batch) == in_list.train_step([batch])
    assert bare.eval_step(batch) == in_list.eval_step([batch])
    several = initialize(Model(4, 1), make_config(2, {}))
    with refused("micro-batch-count", "batch.accumulation=2", "got 1"):
        several.train_step(batch)


def test_step_before_the_last_micro_batch_is_refused() -> None:
    """DeepSpeed's idiom, a step after each backward, would take a step for each micro-batch."""
    engine = initialize(nn.Linear(4, 1), make_config(2, {}), loss_fn=mean_square)
    batches = [torch.ones(1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)]
    engine.backward(engine(batches[0]))
    with refused("accumulation-unfinished", "1 of batch.accumulation=2"):
        engine.step()
    engine.backward(engine(batches[1]))
    assert engine.step().count == 2, "the gradients stayed"
    engine.backward(engine(batches[0]))
    assert engine.step(partial=True).count == 1


def test_number_of_micro_batches_must_fit() -> None:
    with refused("micro-batch-count", "batch.accumulation=1", "got 2"):
        single(nn.Linear(2, 1), mean_square).train_step([torch.ones(1, 2)] * 2)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    engine = single(model, mean_square, optimizer={"lr": LR})
    with refused("sparse-gradient", "0.weight", "sparse=False"):
        engine.train_step([torch.tensor([1, 2])])


def test_model_without_parameters_is_refused() -> None:
    with refused("no-parameters", "ReLU"):
        single(nn.ReLU())
