"""Full states by name: what is read equals one plain process's, and training after a write equals plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.models import CASES, every_rank, make_batches
from harness.pool import RankError, WorkerPool
from harness.reference import call_model, max_error
from harness.refusals import refused
from harness.training import make_config, make_optimizer
from shardwise import Engine, initialize
from shardwise.zero import state_access as access

STAGES = [0, 1, 2, 3]
MESHES = {"one": (1, {}), "three": (3, {}), "hybrid": (4, {"mesh": {"dp_shard": 2}})}
States = dict[str, dict[str, Tensor | None]]


def make_engine(case_name: str, stage: int, num_micro_batches: int = 2, **overrides: dict[str, Any]) -> Engine:
    case = CASES[case_name]
    config = make_config(num_micro_batches, {"zero": {"stage": stage}, **overrides})
    return initialize(case.build(torch.float64), config, loss_fn=case.loss)


def batches_of(case_name: str, world_size: int, num_steps: int) -> list[list[list[Any]]]:
    return make_batches(CASES[case_name], num_steps=num_steps, world_size=world_size, num_micro_batches=2)


def backward(model: nn.Module, step: list[list[Any]], case_name: str) -> None:
    """The mean gradient of one step's batches, in one plain process."""
    case, count = CASES[case_name], 0.0
    for batch in every_rank([step])[0]:
        output = call_model(model, batch, case.loss)
        batch_sum, batch_count = case.loss(output, batch) if case.loss else (output["loss"], 1)
        batch_sum.backward()
        count += float(batch_count)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= count


def plain_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    return {
        name: {"param": p, "master": p, **({"grad": p.grad} if p.requires_grad else {}), **optimizer.state.get(p, {})}
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def read_all(engine: Engine, to_rank: int | None = None) -> States:
    names = [name for name, _ in engine.model.named_parameters(remove_duplicate=False)]
    return {
        name: {state: engine.read(name, state, to_rank=to_rank) for state in engine.states_of(name)} for name in names
    }


def check_states(actual: States, expected: States) -> None:
    assert actual.keys() == expected.keys()
    for name, states in expected.items():
        assert actual[name].keys() == states.keys(), name
        assert [actual[name][state] is None for state in states] == [value is None for value in states.values()], name
    for state in ("param", "master", "grad", "exp_avg", "exp_avg_sq", "step"):
        flat = [
            {name: value.detach() for name in side if (value := side[name].get(state)) is not None}
            for side in (actual, expected)
        ]
        assert {name: value.shape for name, value in flat[0].items()} == {n: v.shape for n, v in flat[1].items()}
        assert not flat[1] or max_error(*flat) <= 1e-9, state


# Reading.


def read_after_step_and_backward(
    rank: int, world_size: int, case_name: str, stage: int, overrides: dict[str, Any]
) -> tuple[States, States]:
    engine = make_engine(case_name, stage, **overrides)
    first, second = batches_of(case_name, world_size, 2)
    before = read_all(engine)
    engine.train_step(first[rank])
    for batch in second[rank]:
        engine.backward(engine(batch))
    states = read_all(engine)
    engine.close()
    return before, states


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    cover(
        {
            "stage": STAGES,
            "mesh": list(MESHES),
            "case": ["transformer", "odd-shapes", "unused-parameters", "frozen-parameters"],
        }
    ),
)
def test_read_equals_plain_training(ranks: WorkerPool, options: dict[str, Any]) -> None:
    name, (world_size, overrides) = options["case"], MESHES[options["mesh"]]
    model = CASES[name].build(torch.float64)
    optimizer = make_optimizer(model)
    first, second = batches_of(name, world_size, 2)
    untrained = {
        key: {state: value.clone() if value is not None else None for state, value in states.items()}
        for key, states in plain_states(model, optimizer).items()
    }
    backward(model, first, name)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, second, name)
    results = ranks(world_size).run(read_after_step_and_backward, name, options["stage"], overrides)
    for before, states in results:
        assert all(value is None for each in before.values() for state, value in each.items() if state == "grad")
        assert max_error(*({key: each["param"] for key, each in side.items()} for side in (before, untrained))) == 0
        check_states(states, plain_states(model, optimizer))


def read_to_rank_1(rank: int, world_size: int, stage: int) -> tuple[bool, bool]:
    engine = make_engine("transformer", stage)
    engine.train_step(batches_of("transformer", world_size, 1)[0][rank])
    states = [value for each in read_all(engine, to_rank=1).values() for key, value in each.items() if key != "grad"]
    return all(value is None for value in states), all(value is not None for value in states)


@pytest.mark.parametrize("stage", [0, 3])
def test_only_one_rank_gets_it(ranks: WorkerPool, stage: int) -> None:
    assert ranks(2).run(read_to_rank_1, stage) == [(True, False), (False, True)]


def grad_norm(rank: int, world_size: int, stage: int, overrides: dict[str, Any], reads: bool) -> float:
    """Of a step between whose backwards a gradient was read, or not."""
    engine = make_engine("transformer", stage, **overrides)
    for batch in batches_of("transformer", world_size, 1)[0][rank]:
        engine.backward(engine(batch))
        if reads:
            engine.read("head.weight", "grad")
    return engine.step().grad_norm


@pytest.mark.parametrize("stage", STAGES)
def test_reading_a_gradient_between_backwards_changes_nothing(ranks: WorkerPool, stage: int) -> None:
    world_size, overrides = MESHES["hybrid"]
    expected = ranks(world_size).run(grad_norm, stage, overrides, False)
    assert ranks(world_size).run(grad_norm, stage, overrides, True) == pytest.approx(expected, rel=1e-12)


# Writing.

VALUES = {"param": 0.3, "exp_avg": -0.01, "exp_avg_sq": 0.02, "grad": 0.05}


def value_for(state: str, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(len(state))
    return VALUES[state] * torch.rand(shape, generator=generator, dtype=torch.float64)


def write_and_train(rank: int, world_size: int, stage: int, overrides: dict[str, Any], from_rank: int | None) -> States:
    engine = make_engine("transformer", stage, **overrides)
    first, second, third = batches_of("transformer", world_size, 3)

    def write(name: str, state: str, shape: torch.Size) -> None:
        is_giver = from_rank in (None, rank)
        engine.write(name, value_for(state, shape) if is_giver else None, state, from_rank=from_rank)

    engine.train_step(first[rank])
    for name, parameter in engine.model.named_parameters():
        if name.startswith(("blocks.1", "positions")):
            for state in ("param", "exp_avg", "exp_avg_sq"):
                write(name, state, parameter.shape)
            engine.write(name, 7.0, "step")
    engine.write("positions", value_for("exp_avg", engine.model.positions.shape), "master")
    engine.backward(engine(second[rank][0]))
    engine.backward(engine(second[rank][1]))
    write("head.weight", "grad", engine.model.head.weight.shape)
    write("blocks.2.up.bias", "grad", engine.model.blocks[2].up.bias.shape)
    engine.step()
    engine.train_step(third[rank])
    states = read_all(engine)
    with engine.gathered():
        for name, parameter in engine.model.named_parameters():
            states[name]["param"] = parameter.detach().clone()
    engine.close()
    return states


def plain_write_and_train(world_size: int) -> States:
    model = CASES["transformer"].build(torch.float64)
    optimizer = make_optimizer(model)
    for number, step in enumerate(batches_of("transformer", world_size, 3)):
        optimizer.zero_grad()
        backward(model, step, "transformer")
        if number == 1:
            for parameter in (model.head.weight, model.blocks[2].up.bias):
                parameter.grad = value_for("grad", parameter.shape)
        optimizer.step()
        for name, parameter in model.named_parameters() if number == 0 else ():
            if name.startswith(("blocks.1", "positions")):
                write_plainly(parameter, optimizer.state[parameter])
        if number == 0:
            with torch.no_grad():
                model.positions.copy_(value_for("exp_avg", model.positions.shape))
    optimizer.zero_grad()
    return plain_states(model, optimizer)


def write_plainly(parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        parameter.copy_(value_for("param", parameter.shape))
        state["exp_avg"].copy_(value_for("exp_avg", parameter.shape))
        state["exp_avg_sq"].copy_(value_for("exp_avg_sq", parameter.shape))
        state["step"].fill_(7.0)


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", cover({"stage": STAGES, "mesh": list(MESHES), "from_rank": [None, 0, "last"]}))
def test_training_after_a_write_equals_plain_training(ranks: WorkerPool, options: dict[str, Any]) -> None:
    world_size, overrides = MESHES[options["mesh"]]
    from_rank = world_size - 1 if options["from_rank"] == "last" else options["from_rank"]
    expected = plain_write_and_train(world_size)
    for states in ranks(world_size).run(write_and_train, options["stage"], overrides, from_rank):
        check_states(states, expected)


def write_in_bf16(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    engine = make_engine("transformer", stage, precision={"param": "bf16"})
    value = torch.full((11, 12), 1 / 3)
    engine.write("positions", value if rank == 0 else None, "param", from_rank=0)
    found = {state: engine.read("positions", state) for state in ("param", "master")}
    with engine.gathered():
        found["gathered"] = engine.model.positions.detach().clone()
    untouched = engine.read("blocks.0.up.weight", "master")
    with torch.no_grad(), engine.gathered(write=True):
        engine.model.positions[0] = 2 / 3 if rank == 0 else 5.0
    found["untouched"] = torch.equal(untouched, engine.read("blocks.0.up.weight", "master"))
    found |= {f"{state} later": engine.read("positions", state) for state in ("param", "master")}
    engine.train_step(batches_of("transformer", world_size, 1)[0][rank])
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_master_is_exact_and_parameter_rounded(ranks: WorkerPool, stage: int) -> None:
    third, two_thirds = torch.tensor(1 / 3), torch.tensor(2 / 3)
    for found in ranks(2).run(write_in_bf16, stage):
        assert found["param"].dtype == torch.bfloat16
        assert (found["master"] == third).all()
        assert (found["param"] == third.bfloat16()).all()
        assert torch.equal(found["gathered"], found["param"])
        assert found["untouched"]
        assert (found["master later"][0] == two_thirds.bfloat16().float()).all()
        assert (found["master later"][1:] == third).all()
        assert (found["param later"][0] == two_thirds.bfloat16()).all()


def write_gathered(rank: int, world_size: int, stage: int, overrides: dict[str, Any]) -> States:
    """Load other weights on rank 0 after a step; the other ranks write nonsense."""
    engine = make_engine("transformer", stage, **overrides)
    first, second = batches_of("transformer", world_size, 2)
    engine.train_step(first[rank])
    with engine.gathered(write=True) as model:
        if rank == 0:
            model.load_state_dict(CASES["transformer"].build(torch.float64, seed=1).state_dict())
        else:
            nn.init.zeros_(model.positions)
            model.head.weight.data.mul_(2)
    engine.train_step(second[rank])
    states = read_all(engine)
    engine.close()
    return states


@pytest.mark.parametrize(("stage", "mesh"), [(0, "three"), (1, "hybrid"), (2, "one"), (3, "hybrid")])
def test_what_rank_0_writes_when_gathered_is_trained_on(ranks: WorkerPool, stage: int, mesh: str) -> None:
    world_size, overrides = MESHES[mesh]
    model = CASES["transformer"].build(torch.float64)
    optimizer = make_optimizer(model)
    first, second = batches_of("transformer", world_size, 2)
    backward(model, first, "transformer")
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(CASES["transformer"].build(torch.float64, seed=1).state_dict())
    backward(model, second, "transformer")
    optimizer.step()
    optimizer.zero_grad()
    for states in ranks(world_size).run(write_gathered, stage, overrides):
        check_states(states, plain_states(model, optimizer))


def move(rank: int, world_size: int, stage: int, other_stage: int) -> tuple[float, float]:
    """The norm of a third step, after all states have moved to a new engine, and without that."""
    first, second, third = batches_of("odd-shapes", world_size, 3)
    engine = make_engine("odd-shapes", stage)
    engine.train_step(first[rank])
    engine.train_step(second[rank])
    names = [name for name, _ in engine.model.named_parameters()]
    states = engine.parts.states()
    moved = {name: (engine.read(name, "master"), access.read_optimizer_states(states, name)) for name in names}
    other = make_engine("odd-shapes", other_stage)
    for name, (master, of_optimizer) in moved.items():
        other.write(name, master, "master")
        access.write_optimizer_states(other.parts.states(), name, of_optimizer)
    engine.train_step(third[rank])
    other.train_step(third[rank])
    differences = [(engine.read(name) - other.read(name)).abs().max().item() for name in names]
    changes = [(engine.read(name) - master).abs().max().item() for name, (master, _) in moved.items()]
    return max(differences), min(changes)


@pytest.mark.parametrize(("stage", "other_stage"), [(0, 3), (3, 1)])
def test_states_move_to_another_layout(ranks: WorkerPool, stage: int, other_stage: int) -> None:
    for difference, change in ranks(2).run(move, stage, other_stage):
        assert difference < 1e-12
        assert change > 1e-4


# Mistakes.


def single(**overrides: dict[str, Any]) -> Engine:
    return make_engine("transformer", 2, 1, **overrides)


def test_unknown_names_are_refused() -> None:
    engine = single()
    with refused("unknown-parameter", "'blocks.1.up.weigth'", "blocks.1.up.weight"):
        engine.read("blocks.1.up.weigth")
    with refused("unknown-parameter", "'x'"):
        engine.write("x", torch.zeros(1))
    with refused("unknown-state", "'parm'", "param, master, grad"):
        engine.read("positions", "parm")
    assert engine.read("positions", "exp_avg") is None
    with refused("unknown-state", "'exp_avg'", "param, master, grad"):
        engine.write("positions", torch.zeros(11, 12), "exp_avg")
    engine.train_step(batches_of("transformer", 1, 1)[0][0][:1])
    with refused("unknown-state", "'momentum'", "param, master, grad", "exp_avg"):
        engine.read("positions", "momentum")
    with refused("no-gradient", "positions", "engine.backward"):
        engine.write("positions", torch.zeros(11, 12), "grad")
    with refused("rank-out-of-range", "to_rank=1", "0 to 0"):
        engine.read("positions", to_rank=1)


def test_frozen_parameters_have_fewer_states() -> None:
    engine = make_engine("frozen-parameters", 2, 1)
    assert engine.states_of("positions") == ("param", "master")
    assert engine.read("positions", "grad") is None
    with refused("parameter-frozen", "positions"):
        engine.write("positions", torch.zeros(11, 12), "grad")
    engine.write("positions", torch.ones(11, 12))
    engine.train_step(batches_of("transformer", 1, 1)[0][0][:1])
    assert (engine.read("positions") == 1).all()


def write_wrong_shape(rank: int, world_size: int, from_rank: int | None) -> None:
    shape = (12, 11) if rank == 1 else (11, 12)
    make_engine("transformer", 2).write("positions", torch.zeros(shape), from_rank=from_rank)


@pytest.mark.parametrize("from_rank", [None, 1])
def test_wrong_shape_is_refused(ranks: WorkerPool, from_rank: int | None) -> None:
    with pytest.raises(RankError) as raised:
        ranks(2).run(write_wrong_shape, from_rank)
    assert raised.value.code == "written-shape"
    assert all(value in str(raised.value) for value in ("positions", "(11, 12)", "rank 1"))


def zero_and_raise(engine: Engine) -> None:
    with torch.no_grad(), engine.gathered(write=True) as model:
        model.positions.zero_()
        raise ZeroDivisionError


def test_changes_of_a_context_that_raises_are_refused() -> None:
    engine = single()
    with pytest.raises(ZeroDivisionError):
        zero_and_raise(engine)
    batches = batches_of("transformer", 1, 1)[0][0][:1]
    with refused("parameter-written", "positions", "gathered(write=True)"):
        engine.train_step(batches)
    engine.zero_grad()
    with engine.gathered(write=True):
        pass
    engine.train_step(batches)


def test_a_written_gradient_counts_where_there_was_none() -> None:
    """As in plain torch, a parameter without a gradient is left alone by the step."""
    engine = make_engine("unused-parameters", 2, 1, optimizer={"lr": 0.1, "weight_decay": 0.0, "clip_norm": None})
    batch = batches_of("unused-parameters", 1, 1)[0][0][0]
    before = engine.read("unused")
    engine.train_step([batch])
    assert torch.equal(engine.read("unused"), before)
    engine.backward(engine(batch))
    assert engine.read("unused", "grad") is None
    engine.write("unused", torch.ones(5), "grad")
    assert (engine.read("unused", "grad") - 1).abs().max() < 1e-12
    engine.step()
    assert (engine.read("unused") - (before - 0.1)).abs().max() < 1e-6
