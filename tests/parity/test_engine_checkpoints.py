"""`engine.save` and `engine.load` beside the engine's other features: precision, freezing, what does not fit, when."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.states import Net, assert_same_bits, engine_of, options, take_steps, whole_states
from shardwise import Engine, LoadReport, init
from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.manifest import Manifest

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def copy_of(engine: Engine) -> tuple[Any, str]:
    return whole_states(engine), options(engine)


def assert_unchanged(engine: Engine, before: tuple[Any, str]) -> None:
    assert_same_bits(whole_states(engine), before[0])
    assert options(engine) == before[1]


def states_named(engine: Engine, name: str) -> set[str]:
    return set(engine.states_of(name)) - {"param", "master", "grad"}


# Precision.


@pytest.mark.parametrize("saved_in", DTYPES)
def test_masters_take_the_saved_values_under_any_precision(tmp_path: Path, saved_in: str) -> None:
    with engine_of(precision={"param": saved_in}) as engine:
        take_steps(engine, 2)
        engine.save(tmp_path)
        saved = whole_states(engine)
    for loaded_in, dtype in DTYPES.items():
        with engine_of(seed=1, precision={"param": loaded_in}) as engine:
            take_steps(engine, 1)
            engine.load(tmp_path)
            loaded = whole_states(engine)
            assert loaded.keys() == saved.keys()
            wide = torch.float64 if loaded_in == "fp64" else torch.float32
            for (name, state), value in loaded.items():
                if state == "param" or name == "scale":
                    best = saved[name, "master"].to(wide)
                    assert torch.equal(value, best.to(dtype)), (name, state)
                    assert value.dtype == dtype
                elif value.dim():
                    assert torch.equal(value, saved[name, state].to(wide)), (name, state)
                    assert value.dtype == wide
                else:
                    assert value == saved[name, state]
            assert take_steps(engine, 1)[0] > 0


def scales_of(engine: Engine, num_steps: int = 1) -> list[float]:
    return [engine.train_step([torch.ones(2, 3)]).loss_scale for _ in range(num_steps)]


def test_loss_scales_are_taken_over_between_dynamic_ones_only(tmp_path: Path) -> None:
    fp16 = {"param": "fp16", "initial_loss_scale": 16.0, "loss_scale_window": 2}
    with engine_of(precision=fp16) as engine:
        take_steps(engine, 4)
        engine.save(tmp_path / "fp16")
        assert scales_of(engine) == [32]
    with engine_of() as engine:
        take_steps(engine, 1)
        engine.save(tmp_path / "fp32")
        engine.load(tmp_path / "fp16")
        assert scales_of(engine) == [1]
    with engine_of(precision=fp16) as engine:
        engine.load(tmp_path / "fp32")
        assert scales_of(engine) == [16]
        engine.load(tmp_path / "fp16")
        assert scales_of(engine, 3) == [32, 64, 64]  # one good step of two was in the checkpoint
    with engine_of(precision={**fp16, "loss_scale": 4.0}) as engine:
        engine.load(tmp_path / "fp16")
        assert scales_of(engine) == [4]


# Freezing, adapters.


def freeze(engine: Engine, *names: str) -> None:
    for name, parameter in engine.model.named_parameters():
        parameter.requires_grad_(name not in names)


def test_other_parameters_may_be_frozen_after_the_load(tmp_path: Path) -> None:
    for optimizer in ("adamw", "adagrad"):
        section = {"name": optimizer, "lr": 0.05}
        root = tmp_path / optimizer
        with engine_of(optimizer=section) as engine:
            take_steps(engine, 2)
            engine.save(root)
            saved = whole_states(engine)
        net = Net()
        net.scale.requires_grad_(True)
        net.up.weight.requires_grad_(False)
        with engine_of(net, optimizer=section) as engine:
            take_steps(engine, 1)
            engine.load(root)
            fresh = {"sum", "step"} if optimizer == "adagrad" else set()
            assert states_named(engine, "scale") == fresh
            assert states_named(engine, "up.weight") == set()
            if fresh:
                assert engine.read("scale", "step") == engine.read("scale", "sum") == 0
            same = {key: value for key, value in saved.items() if key[0] in ("up.bias", "down.weight", "down.bias")}
            loaded = whole_states(engine)
            assert_same_bits({key: loaded[key] for key in same}, same)
            take_steps(engine, 1)
            assert engine.read("scale", "step") == 1


@pytest.mark.parametrize("stage", [0, 3])
def test_freezing_since_the_last_step_counts_in_a_save_and_in_a_load(
    ranks: WorkerPool, tmp_path: Path, stage: int
) -> None:
    ranks(2).run(freeze_and_save, tmp_path, stage)


def freeze_and_save(rank: int, world_size: int, root: Path, stage: int) -> None:
    zero = {"stage": stage, "replicate_frozen": True}
    with engine_of(zero=zero, seed=rank) as engine:
        take_steps(engine, 2)
        freeze(engine, "up.weight")  # the scale trains from now on
        engine.save(root, contents="trainable")
        saved = whole_states(engine)
        assert engine.num_steps == 2
    by_name = {each.name: each for each in read_manifest(root / "step-00000002").tensors}
    assert by_name["scale"].trainable
    assert by_name["up.weight"].trainable, "it was trained, so its base has other values"
    with engine_of(zero=zero, seed=5) as engine:
        freeze(engine, "up.weight")  # the engine has grouped for another one
        engine.load(root)
        names = {"up.bias", "down.weight", "down.bias", "scale"}
        loaded = whole_states(engine)
        expected = {key: value for key, value in saved.items() if key[0] in names}
        assert_same_bits({key: value for key, value in loaded.items() if key[0] in names}, expected)
        take_steps(engine, 1)  # which would regroup
        assert engine.read("up.bias", "step") == 3
        assert engine.read("scale", "step") == 1
        freeze(engine)
        take_steps(engine, 1)
        assert engine.read("up.bias", "step") == 4


def test_adapters_alone_are_small_and_load_onto_a_base(tmp_path: Path) -> None:
    net = Net()
    for parameter in (net.up.weight, net.up.bias, net.down.weight):
        parameter.requires_grad_(False)
    with engine_of(net) as engine:
        take_steps(engine, 2)
        engine.save(tmp_path, contents="trainable")
        saved = whole_states(engine)
    manifest = read_manifest(tmp_path / "step-00000002")
    assert [each.name for each in manifest.tensors if each.kind != "rank"] == ["down.bias"]
    assert sum(held_bytes(manifest, kind="parameter")) == 3 * 2 * 4  # values and two averages of two numbers

    base = Net()
    for parameter in (base.up.weight, base.up.bias, base.down.weight):
        parameter.requires_grad_(False)
    with engine_of(base, seed=1) as engine:
        before = whole_states(engine)
        report = engine.load(tmp_path)
        assert report == LoadReport(tmp_path / "step-00000002", 2, num_read_bytes=report.num_read_bytes)
        loaded = whole_states(engine)
        for key, value in loaded.items():
            expected = saved if key[0] == "down.bias" else before
            assert torch.equal(value, expected[key]), key
    with engine_of(Net().requires_grad_(False)) as engine:  # to generate with
        engine.load(tmp_path)
        assert torch.equal(engine.read("down.bias"), saved["down.bias", "param"])
    with engine_of() as engine, refused("model-misfit", "missing", "up.weight, up.bias, down.weight", "strict=False"):
        engine.load(tmp_path)


def held_bytes(manifest: Manifest, kind: str) -> list[int]:
    sizes = {"F32": 4, "BF16": 2, "U8": 1}
    return [
        piece.rect.numel * sizes[state.dtype]
        for tensor in manifest.tensors
        if tensor.kind == kind
        for state in tensor.states.values()
        for piece in state.pieces
    ]


def test_weights_alone_leave_the_optimizer_as_it_is(tmp_path: Path) -> None:
    with engine_of() as engine:
        take_steps(engine, 2)
        engine.save(tmp_path, contents="weights")
        saved = whole_states(engine)
    manifest = read_manifest(tmp_path / "step-00000002")
    assert manifest.trajectory == {}
    assert {state for tensor in manifest.tensors for state in tensor.states} == {"param"}
    with engine_of(seed=1) as engine:
        take_steps(engine, 1)
        before, own = whole_states(engine), options(engine)
        engine.load(tmp_path)
        after = whole_states(engine)
        assert options(engine) == own
        for key, value in after.items():
            assert torch.equal(value, (saved if key[1] in ("param", "master") else before)[key]), key


# What does not fit.


class Other(nn.Module):
    """A `Net` whose layers have one other name, one other shape, one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.upp = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.rand(()), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.upp(x))) * self.scale  # [b, 3]


def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    with engine_of() as engine:
        take_steps(engine, 2)
        engine.save(tmp_path)
        saved = whole_states(engine)
    with engine_of(Other, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}) as engine:
        take_steps(engine, 1)
        before = copy_of(engine)
        with refused(
            "model-misfit",
            "missing upp.weight, upp.bias, count (is up.weight meant?)",
            "unexpected up.weight, up.bias",
            "down.weight ((2, 4) there, (3, 4) in the model)",
            "states of AdamW, but the optimizer is SGD",
            "strict=False",
            "weights_only=True",
        ):
            engine.load(tmp_path)
        assert_unchanged(engine, before)
        report = engine.load(tmp_path, strict=False)
        assert report.missing == ("upp.weight", "upp.bias", "count")
        assert len(report.skipped) == 5
        assert torch.equal(engine.read("scale"), saved["scale", "param"])
        after, expected = whole_states(engine), before[0] | {("scale", "param"): saved["scale", "param"]}
        expected["scale", "master"] = saved["scale", "master"]
        assert_same_bits(after, expected)
        assert options(engine) == before[1]
    with engine_of(Other) as engine:
        take_steps(engine, 1)
        engine.load(tmp_path, strict=False)
        assert states_named(engine, "upp.weight") == states_named(engine, "down.weight") == set()
        assert engine.num_steps == 2
        take_steps(engine, 1)
        assert engine.read("down.weight", "step") == 1


class Pair(nn.Module):
    """Two equal layers, tied or not."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))  # [b, 3]


def test_tied_parameters_load_untied_and_the_other_way_round(tmp_path: Path) -> None:
    saved = {}
    for is_tied in (True, False):
        with engine_of(lambda is_tied=is_tied: Pair(is_tied)) as engine:
            take_steps(engine, 2)
            engine.save(tmp_path / str(is_tied))
            saved[is_tied] = whole_states(engine)
    with engine_of(lambda: Pair(False), seed=1) as engine:
        engine.load(tmp_path / "True")
        for name in ("embed.weight", "head.weight"):
            for state in ("param", "exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(engine.read(name, state), saved[True]["embed.weight", state])
        take_steps(engine, 1)
        assert not torch.equal(engine.read("embed.weight"), engine.read("head.weight"))
    with engine_of(lambda: Pair(True), seed=1) as engine:
        before = copy_of(engine)
        with refused("model-misfit", "unexpected head.weight (tied to embed.weight in the model)"):
            engine.load(tmp_path / "False")
        assert_unchanged(engine, before)
        engine.load(tmp_path / "False", strict=False)
        assert torch.equal(engine.read("head.weight"), saved[False]["embed.weight", "param"])


class Odd(nn.Module):
    """0-d, empty and strided parameters, in a block and out of it, tied across."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.turned = nn.Parameter(torch.rand(3, 3).t())
        self.strided = nn.Parameter(torch.rand(6)[::2])
        self.empty = nn.Parameter(torch.rand(0, 3))
        self.single = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))  # [b, 3]
        return x @ self.turned * self.strided * self.single + self.empty.sum()


@pytest.mark.parametrize("stages", [(0, 3), (3, 1)], ids=str)
def test_odd_parameters_come_back(ranks: WorkerPool, tmp_path: Path, stages: tuple[int, int]) -> None:
    ranks(2).run(save_odd_parameters, tmp_path, stages)


def save_odd_parameters(rank: int, world_size: int, root: Path, stages: tuple[int, int]) -> None:
    with engine_of(Odd, zero={"stage": stages[0]}) as engine:
        take_steps(engine, 2)
        engine.save(root)
        saved = whole_states(engine)
    with engine_of(Odd, seed=1, zero={"stage": stages[1]}) as engine:
        engine.load(root)
        assert_same_bits(whole_states(engine), saved)


class Counting(torch.optim.Optimizer):
    """Counts the steps of each parameter in numbers and in tensors of other shapes than the parameter's."""

    def __init__(self, params: Any, lr: float = 0.1, is_element_wise: bool = True) -> None:
        super().__init__(params, {"lr": lr})
        self.is_element_wise = is_element_wise

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"calls": 0, "one": torch.zeros(1), "table": torch.zeros(2, 2)}
                for name in state:
                    state[name] += 1
                size = 1.0 if self.is_element_wise else parameter.grad.norm()
                parameter.data.add_(parameter.grad / size, alpha=-group["lr"] / state["calls"])


def element_wise(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": Counting(model.parameters())}


def of_matrices(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": Counting(model.parameters(), is_element_wise=False)}


def of_factors(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.Adafactor(model.parameters(), lr=0.05)}


@pytest.mark.parametrize("make", [element_wise, of_matrices, of_factors], ids=lambda make: make.__name__)
def test_states_of_other_shapes_than_the_parameter_come_back_on_every_rank(
    ranks: WorkerPool, tmp_path: Path, make: Any
) -> None:
    ranks(2).run(save_counted, tmp_path / "two", make)
    save_counted(0, 1, tmp_path / "one", make)
    for stage in (1, 3):  # in the other number of ranks, whose samples are others
        load_counted(0, 1, tmp_path / "two" / str(stage), make, stage)
        ranks(2).run(load_counted, tmp_path / "one" / str(stage), make, stage)


def save_counted(rank: int, world_size: int, root: Path, make: Any) -> None:
    """Save in each stage, and load in the next one: the steps that follow are the same."""
    stages = (0, 1, 2, 3)
    for stage, following in zip(stages, (*stages[1:], 0), strict=True):
        with engine_of(arguments=make, zero={"stage": stage}) as engine:
            take_steps(engine, 3)
            engine.save(root / str(stage))
            found = take_steps(engine, 2)
        assert load_counted(rank, world_size, root / str(stage), make, following) == pytest.approx(found, rel=1e-6)


def load_counted(rank: int, world_size: int, root: Path, make: Any, stage: int) -> list[float]:
    with engine_of(seed=1, arguments=make, zero={"stage": stage}) as engine:
        engine.load(root)
        for state in engine.optimizer.state.values():
            for name, value in state.items():
                if name in ("calls", "one", "table", "step"):
                    assert torch.equal(torch.as_tensor(value), torch.full_like(torch.as_tensor(value), 3)), name
            assert len(state) > 1
        return take_steps(engine, 2)


# The moment.


def test_before_the_first_step_and_right_after_a_load(tmp_path: Path) -> None:
    with engine_of() as engine:
        engine.save(tmp_path / "first")
        take_steps(engine, 2)
        engine.load(tmp_path / "first")  # into one that has trained
        assert engine.num_steps == 0
        assert {state for _, state in whole_states(engine)} == {"param", "master"}
        losses = take_steps(engine, 3)
        engine.save(tmp_path / "third")
        engine.load(tmp_path / "first")
        engine.load(tmp_path / "third")  # two in a row
        engine.save(tmp_path / "again")
        third, again = (read_manifest(tmp_path / name / "step-00000003") for name in ("third", "again"))
        assert third.tensors == again.tensors  # their checksums too
        assert third.trajectory == again.trajectory
        engine.load(tmp_path / "first")
        assert take_steps(engine, 3) == losses


def test_gradients_since_the_last_step_are_in_no_checkpoint(tmp_path: Path) -> None:
    with engine_of(batch={"accumulation": 2}) as engine:
        engine.save(tmp_path)
        before = copy_of(engine)
        x = torch.ones(2, 3)
        with engine.no_sync():
            engine.backward(engine(x))
        with refused("save-before-step"):
            engine.save(tmp_path / "other")
        engine.load(tmp_path)
        assert_unchanged(engine, before)
        with refused("step-without-backward"):
            engine.step()
        result = engine.train_step([x, x])
    with engine_of(batch={"accumulation": 2}) as engine:
        assert engine.train_step([x, x]) == result


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("in the middle")


def test_a_load_makes_an_engine_usable_after_a_failed_backward(tmp_path: Path) -> None:
    with engine_of() as engine:
        take_steps(engine, 1)
        engine.save(tmp_path)
        before = copy_of(engine)
        handle = engine.model.up.register_forward_hook(lambda module, args, output: FailsInBackward.apply(output))
        with pytest.raises(ArithmeticError):
            take_steps(engine, 1)
        handle.remove()
        with refused("gradients-incomplete", "zero_grad"):
            engine.save(tmp_path / "other")
        engine.load(tmp_path)
        assert_unchanged(engine, before)
        take_steps(engine, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_inside_gathered_and_while_states_are_away(ranks: WorkerPool, tmp_path: Path, stage: int) -> None:
    ranks(2).run(load_inside_gathered, tmp_path, stage)


def load_inside_gathered(rank: int, world_size: int, root: Path, stage: int) -> None:
    with engine_of(zero={"stage": stage}, precision={"param": "bf16"}) as engine:
        take_steps(engine, 1)
        engine.save(root)
        saved = whole_states(engine)
        take_steps(engine, 1)
        for write in (False, True):
            with engine.gathered(write=write) as model:
                engine.load(root)
                for name, parameter in model.named_parameters():
                    assert torch.equal(parameter, saved[name, "param"]), name
                engine.save(root / f"gathered {write}", wait=False)
            assert_same_bits(whole_states(engine), saved)
        with engine.offloaded():
            for act in (engine.save, engine.load):
                with refused("states-offloaded", "reload"):
                    act(root / "away")
        take_steps(engine, 1)
        after = whole_states(engine)
        assert engine.load(root / "gathered True").step == 1
        take_steps(engine, 1)
        assert_same_bits(whole_states(engine), after)


def test_what_was_written_is_saved_or_refused(tmp_path: Path) -> None:
    with engine_of(precision={"param": "bf16"}) as engine:
        take_steps(engine, 1)
        value = torch.rand(2, 4)
        engine.write("down.weight", value)
        engine.write("down.weight", 2 * value, "exp_avg")
        engine.save(tmp_path)
        with torch.no_grad():
            engine.model.up.bias.zero_()  # its master follows
        engine.save(tmp_path / "other")
        assert not engine.read("up.bias", "master").any()
        with torch.no_grad(), engine.gathered():
            engine.model.up.bias.fill_(1.0)  # its master knows nothing of it
        with refused("parameter-written", "up.bias", "engine.gathered(write=True)"):
            engine.save(tmp_path / "third")
        engine.load(tmp_path)
        assert torch.equal(engine.read("down.weight", "master"), value)
        assert torch.equal(engine.read("down.weight", "exp_avg"), 2 * value)
        assert engine.read("up.bias").any()
        take_steps(engine, 1)


def test_several_engines_keep_apart(tmp_path: Path) -> None:
    with engine_of() as first, engine_of(seed=1) as second:
        take_steps(first, 2)
        take_steps(second, 2)
        for name, engine in (("a", first), ("b", second)):
            engine.save(tmp_path / name, wait=False)
        saved = copy_of(first), copy_of(second)
        with refused("checkpoint-exists", "step-00000002"):
            first.finish_saves()
            second.save(tmp_path / "a")
        second.finish_saves()
        take_steps(first, 1)
        second.load(tmp_path / "a")
        first.load(tmp_path / "b")
        assert_unchanged(second, saved[0])
        assert_unchanged(first, saved[1])


@pytest.mark.parametrize("number", [-1, 0])
def test_choices_are_checked_before_anything_is_written(tmp_path: Path, number: int) -> None:
    with engine_of() as engine:
        for name in ("keep_last", "keep_every"):
            with refused("keep-positive", f"{name}={number}"):
                engine.save(tmp_path / "root", **{name: number})
        with refused("argument-choice", "contents='weight'", "'trainable'"):
            engine.save(tmp_path / "root", contents="weight")
    assert not (tmp_path / "root").exists()


def test_a_simulated_rank_has_nothing_to_save_or_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        engine.save(tmp_path)
        monkeypatch.setattr(engine.comm, "world_size", 4)
        monkeypatch.setattr(engine.parts.comm_factory, "store", None)
        for act in (engine.save, engine.load, engine.import_weights, engine.export_weights):
            with refused("simulated-rank"):
                act(tmp_path)
        monkeypatch.undo()


# Ways to build and to run a model.


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.up(x)))  # [b, 4]


class Augmented(nn.Module):
    """Blocks, with noise from every generator that a user may draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + random.random() + float(np.random.rand())) + torch.rand(4)  # [b, 4]
        for block in self.blocks:
            x = block(x)
        return x


WAYS: dict[str, dict[str, Any]] = {
    "lockstep": {"zero": {"stage": 3, "lockstep": True}},
    "recompute": {"zero": {"stage": 2}, "recompute": {"mode": "full"}},
    "hybrid": {"zero": {"stage": 3}, "mesh": {"dp_replicate": 2}},
    "compiled": {"zero": {"stage": 3}, "compile": {"enabled": True, "backend": "aot_eager"}},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.full if way == "compiled" else ()) for way in WAYS]
)
def test_a_run_goes_on_with_the_random_numbers_that_it_would_have_drawn(
    ranks: WorkerPool, tmp_path: Path, way: str
) -> None:
    ranks(2).run(go_on_drawing, tmp_path, WAYS[way])
    ranks(1).run(leave_generators_alone, tmp_path)


def go_on_drawing(rank: int, world_size: int, root: Path, sections: dict[str, Any]) -> None:
    torch.manual_seed(10 + rank)
    random.seed(rank)
    np.random.seed(rank)
    with engine_of(Augmented, **sections) as engine:
        take_steps(engine, 2, (2, 4))
        engine.save(root, wait=False)
        losses, saved = take_steps(engine, 2, (2, 4)), whole_states(engine)
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    with init():
        model = Augmented()
    with engine_of(model, **sections) as engine:
        engine.load(root)
        assert take_steps(engine, 2, (2, 4)) == losses
        assert_same_bits(whole_states(engine), saved)


def leave_generators_alone(rank: int, world_size: int, root: Path) -> None:
    random.seed(3)
    np.random.seed(3)
    with engine_of(Augmented) as engine:
        torch.manual_seed(3)
        engine.load(root)
        found = random.random(), float(np.random.rand()), torch.rand(1).item()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert found == (random.random(), float(np.random.rand()), torch.rand(1).item())


def test_models_on_meta(tmp_path: Path) -> None:
    with engine_of(Augmented) as engine:
        take_steps(engine, 1, (2, 4))
        engine.save(tmp_path)
        saved = whole_states(engine)
    with torch.device("meta"):
        model = Augmented()
    with engine_of(model, zero={"stage": 3}) as engine:
        engine.load(tmp_path)
        assert_same_bits(whole_states(engine), saved)


class Nosy(Net):
    """Reads its parameters when its state is asked for, and has a state beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self._register_state_dict_hook(lambda module, state, prefix, _: state.update(norm=module.up.weight.norm()))

    def get_extra_state(self) -> int:
        self.asked += 1
        return self.asked


def test_hooks_of_state_dict_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(Nosy, zero={"stage": 3}) as engine:
        take_steps(engine, 1)
        engine.save(tmp_path / "a")
        engine.save(tmp_path / "b")
        engine.load(tmp_path / "a")
        assert engine.model.asked == 0
    assert not caplog.records  # what is given and never taken is no state


class Seen(nn.Module):
    """Has as its state what it was given."""

    def __init__(self, noted: Any) -> None:
        super().__init__()
        self.noted = noted

    def get_extra_state(self) -> Any:
        return self.noted

    def set_extra_state(self, state: Any) -> None:
        self.noted = state


def test_extra_states_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def noting(*noted: Any) -> Net:
        net = Net()
        net.seen = nn.ModuleList(Seen(each) for each in noted)
        return net

    noted = {"shape": (1, 2), "mean": torch.arange(3.0)}
    with engine_of(noting(noted, print), zero={"stage": 3}) as engine:
        take_steps(engine, 1)
        engine.save(tmp_path / "all")
        engine.save(tmp_path / "weights", contents="weights")
    assert ["the extra state of seen.1 is a builtin_function_or_method" in each.message for each in caplog.records] == [
        True,
        True,
    ]
    for contents in ("all", "weights"):
        with engine_of(noting(None, 7), zero={"stage": 1}) as engine:
            engine.load(tmp_path / contents)
            first, second = (each.noted for each in engine.model.seen)
        assert first["shape"] == (1, 2)
        assert torch.equal(first["mean"], noted["mean"])
        assert second == 7
    assert "has no extra state of seen.1, which keeps its own" in caplog.records[-1].message


def test_a_config_that_json_does_not_keep_does_not_stand_in_the_way(tmp_path: Path) -> None:
    net = Net()
    net.config = type("Config", (), {"to_dict": lambda self: {(1, 2): 3}})()
    with engine_of(net) as engine:
        engine.save(tmp_path)
    assert read_manifest(tmp_path / "step-00000000").model == {"class": "Net"}


# Ranks hear of each other's failures.


def test_a_rank_that_cannot_save_or_load_tells_the_others(ranks: WorkerPool, tmp_path: Path) -> None:
    ranks(2).run(fail_on_one_rank, tmp_path)


def fail_on_one_rank(rank: int, world_size: int, root: Path) -> None:
    with engine_of(zero={"stage": 2}) as engine:
        take_steps(engine, 1)
        with refused("extra-not-json"):
            engine.save(root, extra=[object()] if rank == 1 else None)
        engine.save(root)
        if rank == 1:
            engine.parts.sharded.prepare_states = None  # something unforeseen
        with pytest.raises(TypeError, match="not callable") if rank == 1 else refused("rank-failed", "rank 1"):
            engine.load(root)
        with refused("states-mixed"):
            engine.save(root / "half")
        if rank == 1:
            del engine.parts.sharded.prepare_states
        engine.load(root)
        take_steps(engine, 1)


def test_foreign_manifests_are_damaged_not_a_key_error() -> None:
    text = Manifest(3, (), {}).to_text()
    other = '{"format":"other-checkpoint","version":2}'
    for body in ('{"weight_map":{}}', "[1,2]", "not JSON", other):
        each = with_body(text, body)
        with refused("not-json" if body == "not JSON" else "not-a-manifest", "manifest.json"):
            Manifest.from_text(each, "manifest.json")
    torn = with_body(text, '{"format":"shardwise-checkpoint","version":1,"tensors":[{}]}')
    with refused("manifest-malformed", "manifest.json", "step: Field required"):
        Manifest.from_text(torn, "manifest.json")
    newer = with_body(text, '{"format":"shardwise-checkpoint","version":2}')
    with refused("newer-version", "version 2"):
        Manifest.from_text(newer, "manifest.json")


def with_body(text: str, body: str) -> str:
    """A manifest of another body with a checksum that fits."""
    head, middle = text[: text.index('"crc32":"') + 9], text[text.index('","manifest":') :]
    return f"{head}{zlib.crc32(body.encode()):08x}{middle[: middle.index(chr(10)) + 1]}{body}}}\n"
