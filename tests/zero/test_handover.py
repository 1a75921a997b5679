"""States handed over to host memory come back bit for bit, and the device is empty in between."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from harness.combinations import cover
from harness.live_bytes import LiveBytes, storage_bytes
from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import ConfigError, Engine, ReleasedParameterError, initialize
from shardwise.memory import Category, Ledger
from shardwise.zero import handover

STAGES = [0, 1, 2, 3]
NUM_MICRO_BATCHES = 2


def make_engine(stage: int, param: str = "fp32", case_name: str = "transformer") -> Engine:
    case = CASES[case_name]
    config = make_config(NUM_MICRO_BATCHES, {"zero": {"stage": stage}, "precision": {"param": param}})
    return initialize(case.build(torch.float32), config, loss_fn=case.loss)


def batches_of(world_size: int, num_steps: int = 4) -> list[list[list[Any]]]:
    case = CASES["transformer"]
    return make_batches(case, num_steps=num_steps, world_size=world_size, num_micro_batches=NUM_MICRO_BATCHES)


def device_bytes(engine: Engine) -> int:
    """What the ledger knows of beside the model's buffers, once gloo's threads have let go of theirs."""
    readings: list[int] = []
    while len(readings) < 5 or len(set(readings[-5:])) > 1:
        time.sleep(0.01)
        live = engine.memory.snapshot().live_bytes
        readings.append(sum(num_bytes for category, num_bytes in live.items() if category is not Category.OTHER))
    return readings[-1]


def tensors_of(engine: Engine) -> list[torch.Tensor]:
    """Everything whose identity users and the optimizer rely on."""
    views = [each for group in engine.optimizer.param_groups for each in group["params"]]
    states = [engine.optimizer.state[view][key] for view in views for key in sorted(engine.optimizer.state[view])]
    return [*engine.model.parameters(), *views, *states]


def train(rank: int, world_size: int, stage: int, param: str, hands_over: bool) -> dict[str, Any]:
    """Four steps; before the second, the third and between the backwards of the fourth, states go and come."""
    engine = make_engine(stage, param)
    found: dict[str, Any] = {"empty": [], "same": [], "released": [], "freed": []}
    losses = []

    def hand_over(include: tuple[str, ...] = handover.STATES) -> None:
        if not hands_over:
            return
        before, live_bytes = tensors_of(engine), device_bytes(engine)
        with engine.offloaded(include) as freed_bytes:
            found["freed"].append(sum(freed_bytes.values()) == live_bytes - device_bytes(engine))
            if include == handover.STATES:
                found["empty"].append(device_bytes(engine))
                storages = [
                    *(p.master.tensor for p in parameter_groups(engine)),
                    *(p.full for p in parameter_groups(engine)),
                ]
                found["released"].append(storage_bytes(storages))
        after = tensors_of(engine)
        found["same"].append(len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True)))

    for number, step in enumerate(batches_of(world_size)):
        if number == 1:
            hand_over()
        if number == 2:
            hand_over(("optimizer", "master"))
        for batch in step[rank]:
            losses.append(engine(batch))
            engine.backward(losses[-1])
            if number == 3:
                hand_over()
        engine.step()
    found["losses"] = [loss.item() for loss in losses]
    names = [name for name, _ in engine.model.named_parameters()]
    found["masters"] = {name: engine.read(name, "master") for name in names}
    found["exp_avg"] = {name: engine.read(name, "exp_avg") for name in names}
    engine.close()
    return found


def parameter_groups(engine: Engine) -> list[Any]:
    return [group.params for group in engine._driver.groups]


@pytest.mark.parametrize("options", cover({"stage": STAGES, "param": ["fp32", "bf16"]}))
def test_training_goes_on_bit_for_bit(ranks: WorkerPool, options: dict[str, Any]) -> None:
    plain, handed_over = (ranks(2).run(train, options["stage"], options["param"], each) for each in (False, True))
    for expected, found in zip(plain, handed_over, strict=True):
        assert found["empty"] == [0] * 3
        assert found["released"] == [0] * 3
        assert found["freed"] == [True] * 4
        assert found["same"] == [True] * 4
        assert found["losses"] == expected["losses"]
        for state in ("masters", "exp_avg"):
            assert all(torch.equal(value, expected[state][name]) for name, value in found[state].items())


def test_what_is_away_lies_in_host_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "CHUNK_BYTES", 4096)
    with LiveBytes() as live:
        engine = make_engine(0, "bf16")
        engine.train_step(batches_of(1)[0][0])
        before_bytes = live.live_bytes()
        live.reset_peak()
        freed_bytes = engine.offload_states()
        # Gradients are not kept after a step: that memory is not moved, but given up.
        assert live.live_bytes() == before_bytes - freed_bytes["grads"]
        engine.reload_states()
        assert live.live_bytes() == before_bytes - freed_bytes["grads"]
        assert live.peak_bytes() <= before_bytes + max(freed_bytes.values()) // 2 + 4096
    specs = engine.layout.groups
    assert freed_bytes["master"] == sum(group.padded_numel for group in specs) * 4
    assert freed_bytes["params"] == sum(group.padded_numel for group in specs) * 2


@pytest.mark.parametrize("chunk_bytes", [40, 4096])
def test_states_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(handover, "CHUNK_BYTES", chunk_bytes)
    plain, found = (train(0, 1, 0, "bf16", hands_over) for hands_over in (False, True))
    assert found["losses"] == plain["losses"]


# While states are away.


def test_training_is_refused() -> None:
    engine = make_engine(2)
    batches = batches_of(1)[0][0]
    loss = engine(batches[0])
    engine.offload_states()
    match = r"optimizer, master, grads, params are offloaded; call engine\.reload_states\(\) first"
    for use in (
        lambda: engine.train_step(batches),
        lambda: engine.backward(loss),
        lambda: engine.step(),
        lambda: engine.zero_grad(),
        lambda: engine.eval_step(batches),
        lambda: engine.read("positions"),
        lambda: engine.write("positions", 1.0),
        lambda: engine.gathered().__enter__(),
        lambda: engine.offload_states(),
    ):
        with pytest.raises(RuntimeError, match=match):
            use()
    engine.reload_states()
    engine.reload_states()
    engine.backward(loss)
    engine.backward(engine(batches[1]))
    assert engine.step().step == 1


def use_model(rank: int, world_size: int, stage: int) -> list[str]:
    """What is said to who touches parameters, or calls the model, behind the engine's back."""
    engine = make_engine(stage)
    engine.offload_states()
    said = []
    for use in (lambda: engine.model.positions * 2, lambda: engine.model(**batches_of(1)[0][0][0])):
        with pytest.raises(ReleasedParameterError) as raised:
            use()
        said.append(str(raised.value))
    engine.reload_states()
    engine.train_step(batches_of(world_size)[0][rank])
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_guard_themselves(ranks: WorkerPool, stage: int) -> None:
    for touched, called in ranks(2).run(use_model, stage):
        assert touched == "parameter positions is offloaded; call engine.reload_states() first"
        assert "offloaded; call engine.reload_states() first" in called


def evaluate(rank: int, world_size: int) -> tuple[float, float]:
    engine = make_engine(3, "bf16")
    batches = batches_of(world_size)[0][rank]
    before = engine.eval_step(batches).loss
    with engine.offloaded(("optimizer", "master", "grads")):
        with engine.gathered() as model:
            model(**batches[0])
        return before, engine.eval_step(batches).loss


def test_a_model_whose_parameters_stay_can_be_evaluated(ranks: WorkerPool) -> None:
    for before, offloaded in ranks(2).run(evaluate):
        assert before == offloaded


def offload_gathered(rank: int, world_size: int) -> str:
    engine = make_engine(3)
    with engine.gathered(), pytest.raises(RuntimeError) as raised:
        engine.offload_states()
    engine.train_step(batches_of(world_size)[0][rank])
    return str(raised.value)


def test_gathered_parameters_are_not_offloaded(ranks: WorkerPool) -> None:
    for said in ranks(2).run(offload_gathered):
        assert said == "states cannot be offloaded inside engine.gathered(); leave it first"


def test_unknown_states_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no state 'optimiser'; there are optimizer, master, grads, params"):
        make_engine(0).offload_states(("optimiser",))


def close_offloaded(rank: int, world_size: int, stage: int) -> bool:
    expected = CASES["transformer"].build(torch.float32)
    engine = make_engine(stage)
    engine.offload_states()
    engine.close()
    pairs = zip(engine.model.parameters(), expected.parameters(), strict=True)
    return all(type(a) is nn.Parameter and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("stage", [0, 3])
def test_closing_brings_the_model_back(ranks: WorkerPool, stage: int) -> None:
    assert ranks(2).run(close_offloaded, stage) == [True, True]


def test_restoring_goes_on_where_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(0)
    engine.train_step(batches_of(1)[0][0])
    expected = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    engine.offload_states()
    resize, num_calls = Ledger.resize, 0

    def run_out(ledger: Ledger, tensor: Any, num_bytes: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            raise torch.OutOfMemoryError("no room")
        resize(ledger, tensor, num_bytes)

    monkeypatch.setattr(Ledger, "resize", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        engine.reload_states()
    with pytest.raises(RuntimeError, match="are offloaded"):
        engine.train_step(batches_of(1)[0][0])
    engine.reload_states()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in engine.model.named_parameters())
    engine.train_step(batches_of(1)[1][0])


def test_nothing_is_lost_where_host_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(0)
    engine.train_step(batches_of(1)[0][0])
    write, num_calls = handover.HostTape.write, 0

    def run_out(tape: handover.HostTape, source: torch.Tensor) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            raise MemoryError
        write(tape, source)

    before = device_bytes(engine)
    monkeypatch.setattr(handover.HostTape, "write", run_out)
    with pytest.raises(MemoryError):
        engine.offload_states()
    assert device_bytes(engine) == before
    assert engine.train_step(batches_of(1)[1][0]).step == 2
