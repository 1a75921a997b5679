"""States released to host memory or in a file come back bit for bit, and memory is empty in between."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.combinations import cover
from harness.live_bytes import LiveBytes, storage_bytes
from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.refusals import refusal_of, refused
from harness.training import make_config
from harness.waiting import settled
from shardwise import Engine, initialize
from shardwise.offload.nvme import SwapError, SwapFile, SwapFolder
from shardwise.runtime.memory_tracker import Category, MemoryTracker
from shardwise.zero import memory_release as handover
from shardwise.zero import memory_release as tape

STAGES = [0, 1, 2, 3]
NUM_MICRO_BATCHES = 2


def make_engine(
    stage: int, param: str = "fp32", case_name: str = "transformer", tiers: Mapping[str, Any] | None = None
) -> Engine:
    case = CASES[case_name]
    sections = {"zero": {"stage": stage}, "precision": {"param": param}, "tiers": tiers or {}}
    config = make_config(NUM_MICRO_BATCHES, sections)
    return initialize(case.build(torch.float32), config, loss_fn=case.loss)


def batches_of(world_size: int, num_steps: int = 4) -> list[list[list[Any]]]:
    case = CASES["transformer"]
    return make_batches(case, num_steps=num_steps, world_size=world_size, num_micro_batches=NUM_MICRO_BATCHES)


def device_bytes(engine: Engine) -> int:
    """What the tracker knows of beside the model's buffers, once gloo's threads have let go of theirs."""

    def read() -> int:
        live = engine.memory.snapshot().live_bytes
        return sum(num_bytes for category, num_bytes in live.items() if category is not Category.OTHER)

    return settled(read)


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
    return list(engine.parts.sharding.groups)


@pytest.mark.quick(2)
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


def test_what_is_away_is_in_host_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "CHUNK_BYTES", 4096)
    with LiveBytes() as live:
        engine = make_engine(0, "bf16")
        engine.train_step(batches_of(1)[0][0])
        before_bytes = live.live_bytes()
        live.reset_peak()
        freed_bytes = engine.offload()
        # Gradients are not kept after a step: that memory is not moved, but given up.
        assert live.live_bytes() == before_bytes - freed_bytes["grads"]
        engine.reload()
        assert live.live_bytes() == before_bytes - freed_bytes["grads"]
        assert live.peak_bytes() <= before_bytes + max(freed_bytes.values()) // 2 + 4096
    specs = engine.layout.groups
    assert freed_bytes["master"] == sum(group.padded_numel for group in specs) * 4
    assert freed_bytes["params"] == sum(group.padded_numel for group in specs) * 2


@pytest.mark.parametrize("chunk_bytes", [40, 4096])
def test_states_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(tape, "CHUNK_BYTES", chunk_bytes)
    plain, found = (train(0, 1, 0, "bf16", hands_over) for hands_over in (False, True))
    assert found["losses"] == plain["losses"]


# While states are away.


def test_training_is_refused() -> None:
    engine = make_engine(2)
    batches = batches_of(1)[0][0]
    loss = engine(batches[0])
    engine.offload()
    for use in (
        lambda: engine.train_step(batches),
        lambda: engine.backward(loss),
        lambda: engine.step(),
        lambda: engine.zero_grad(),
        lambda: engine.eval_step(batches),
        lambda: engine.read("positions"),
        lambda: engine.write("positions", 1.0),
        lambda: engine.gathered().__enter__(),
        lambda: engine.offload(),
    ):
        with refused("states-offloaded", "optimizer, master, grads, params"):
            use()
    engine.reload()
    engine.reload()
    engine.backward(loss)
    engine.backward(engine(batches[1]))
    assert engine.step().step == 1


def use_model(rank: int, world_size: int, stage: int) -> list[tuple[str, str]]:
    """The codes and messages for a use of parameters, and of the model, that the engine does not see."""
    engine = make_engine(stage)
    engine.offload()
    uses = (lambda: engine.model.positions * 2, lambda: engine.model(**batches_of(1)[0][0][0]))
    refusals = [refusal_of(use) for use in uses]
    engine.reload()
    engine.train_step(batches_of(world_size)[0][rank])
    return refusals


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_guard_themselves(ranks: WorkerPool, stage: int) -> None:
    for touched, called in ranks(2).run(use_model, stage):
        assert (touched[0], called[0]) == ("states-offloaded", "states-offloaded")
        assert "positions" in touched[1]


def evaluate(rank: int, world_size: int) -> tuple[float, float]:
    engine = make_engine(3, "bf16")
    batches = batches_of(world_size)[0][rank]
    before = engine.eval_step(batches).loss
    with engine.offloaded(("optimizer", "master", "grads")):
        with engine.gathered() as model:
            model(**batches[0])
        return before, engine.eval_step(batches).loss


def use_what_a_script_keeps(rank: int, world_size: int, stage: int) -> tuple[set[str], bool, bool]:
    """The refusals of what is away, whether it comes back as it was, and whether it can be read after the end."""
    engine = make_engine(stage)
    engine.train_step(batches_of(world_size)[0][rank])
    views = [view for group in engine.optimizer.param_groups for view in group["params"]]
    kept = [*views, *engine.parts.sharded.kept_tensors()]
    before = [tensor.detach().clone() for tensor in kept]
    engine.offload()
    codes = {refusal_of(lambda tensor=tensor: tensor.sum())[0] for tensor in kept if tensor.dim()}
    assert all(repr(tensor) for tensor in kept)
    engine.reload()
    came_back = all(map(torch.equal, kept, before))
    engine.close()
    return codes, came_back, all(map(torch.equal, kept, before))


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_script_keeps_is_refused_while_it_is_away_and_read_after_the_end(ranks: WorkerPool, stage: int) -> None:
    """On a CPU a read of freed memory ends the process."""
    for found in ranks(2).run(use_what_a_script_keeps, stage):
        assert found == ({"states-offloaded"}, True, True)


def test_a_model_whose_parameters_stay_can_be_evaluated(ranks: WorkerPool) -> None:
    for before, offloaded in ranks(2).run(evaluate):
        assert before == offloaded


def offload_gathered(rank: int, world_size: int) -> str:
    engine = make_engine(3)
    with engine.gathered():
        code, _ = refusal_of(engine.offload)
    engine.train_step(batches_of(world_size)[0][rank])
    return code


def test_gathered_parameters_are_not_offloaded(ranks: WorkerPool) -> None:
    assert ranks(2).run(offload_gathered) == ["offload-inside-gathered"] * 2


def test_unknown_states_are_refused() -> None:
    with refused("unknown-release-state", "'optimiser'", "optimizer, master, grads, params"):
        make_engine(0).offload(("optimiser",))


def close_offloaded(rank: int, world_size: int, stage: int) -> bool:
    expected = CASES["transformer"].build(torch.float32)
    engine = make_engine(stage)
    engine.offload()
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
    engine.offload()
    resize, num_calls = MemoryTracker.resize, 0

    def run_out(tracker: MemoryTracker, tensor: Any, num_bytes: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            raise torch.OutOfMemoryError("no space")
        resize(tracker, tensor, num_bytes)

    monkeypatch.setattr(MemoryTracker, "resize", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        engine.reload()
    with refused("states-offloaded"):
        engine.train_step(batches_of(1)[0][0])
    engine.reload()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in engine.model.named_parameters())
    engine.train_step(batches_of(1)[1][0])


def test_nothing_is_lost_where_host_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(0)
    engine.train_step(batches_of(1)[0][0])
    write, num_calls = tape.HostSpillBuffer.write, 0

    def run_out(written: tape.HostSpillBuffer, source: torch.Tensor) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            raise MemoryError
        write(written, source)

    before = device_bytes(engine)
    monkeypatch.setattr(tape.HostSpillBuffer, "write", run_out)
    with pytest.raises(MemoryError):
        engine.offload()
    assert device_bytes(engine) == before
    assert engine.train_step(batches_of(1)[1][0]).step == 2


# Into files, and with tiers.

EVERYTHING = {"params": "host", "grads": "host", "optimizer": "host"}
TIERS = {
    "device": {},
    "host": EVERYTHING,
    "shares": {**EVERYTHING, "optimizer_on_device": 0.5, "params_on_device": 0.3},
    "optimizer on nvme": {**EVERYTHING, "optimizer": "nvme"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "device and nvme": {"optimizer": "nvme", "grads": "host"},
}


def host_bytes(engine: Engine) -> int:
    """Of states, and of buffers."""
    return sum(engine.tiers.memory.snapshot().live_bytes.values())


def train_with_tiers(
    rank: int, world_size: int, param: str, tiers: str, to: handover.Target | None, swap: Path
) -> dict[str, Any]:
    """Four steps; before each of the last three, and between the backwards of the last, states go to `to` and come."""
    where = {**TIERS[tiers], **({"nvme_path": str(swap / "own")} if "nvme" in tiers else {})}
    engine = make_engine(3, param, tiers=where)
    found: dict[str, Any] = {"left": [], "freed": [], "files": []}
    losses = []

    def hand_over(include: tuple[str, ...] | None = None) -> None:
        if to is None:
            return
        engine.tiers.wait_idle()
        engine.tiers.trim()
        engine.parts.resources.pool.trim()
        live_bytes = device_bytes(engine) + host_bytes(engine)
        with engine.offloaded(include, to, path=swap / "released" if to == "nvme" else None) as freed_bytes:
            left_bytes = device_bytes(engine), host_bytes(engine)
            if to == "nvme":
                found["freed"].append(sum(freed_bytes.values()) == live_bytes - sum(left_bytes))
            if include is None:
                found["left"].append(left_bytes if to == "nvme" else left_bytes[:1])
        found["files"] += list((swap / "released").iterdir()) if world_size == 1 and to == "nvme" else []

    for number, step in enumerate(batches_of(world_size)):
        if number > 0:
            hand_over(("optimizer", "master") if number == 2 else None)
        for batch in step[rank]:
            losses.append(engine(batch))
            engine.backward(losses[-1])
            if number == 3:
                hand_over()
        engine.step()
    names = [name for name, _ in engine.model.named_parameters()]
    states = [(name, state) for name in names for state in engine.states_of(name) if state != "grad"]
    found["losses"] = [loss.item() for loss in losses]
    found["states"] = {key: engine.read(*key) for key in states}
    engine.close()
    return found


@pytest.mark.parametrize("options", cover({"tiers": list(TIERS), "param": ["bf16", "fp32"], "to": ["nvme", "host"]}))
def test_training_goes_on_bit_for_bit_with_every_tier(
    ranks: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    num_ranks = 1 if options["param"] == "fp32" else 2
    plain, handed_over = (
        ranks(num_ranks).run(train_with_tiers, options["param"], tiers, to, tmp_path)
        for tiers, to in (("device", None), (options["tiers"], options["to"]))
    )
    for expected, found in zip(plain, handed_over, strict=True):
        assert found["left"] == [(0, 0) if options["to"] == "nvme" else (0,)] * 4
        assert all(found["freed"])
        assert not found["files"]
        assert found["losses"] == expected["losses"]
        assert found["states"].keys() == expected["states"].keys()
        assert all(torch.equal(value, expected["states"][key]) for key, value in found["states"].items())


@pytest.mark.parametrize("chunk_bytes", [4096, 12288])
def test_files_are_written_and_read_in_chunks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chunk_bytes: int
) -> None:
    monkeypatch.setattr(tape, "FILE_CHUNK_BYTES", chunk_bytes)
    sizes = []
    write = SwapFile.write

    def note(file: SwapFile, offset_bytes: int, source: torch.Tensor) -> Future[None]:
        sizes.append(source.numel())
        return write(file, offset_bytes, source)

    monkeypatch.setattr(SwapFile, "write", note)
    plain, found = (train_with_tiers(0, 1, "bf16", "host", to, tmp_path) for to in (None, "nvme"))
    assert found["losses"] == plain["losses"]
    assert max(sizes) == chunk_bytes
    assert len(sizes) > 20


def test_states_on_the_host_stay_unless_they_are_to_go() -> None:
    engine = make_engine(3, "bf16", tiers=EVERYTHING)
    engine.train_step(batches_of(1)[0][0])
    before_bytes = host_bytes(engine)
    with engine.offloaded(to="host") as freed_bytes:
        assert (freed_bytes["master"], freed_bytes["optimizer"]) == (0, 0)
        assert host_bytes(engine) <= before_bytes
    engine.close()


def evaluate_without_optimizer(rank: int, world_size: int, swap: Path) -> tuple[float, float, bool]:
    engine = make_engine(3, "bf16", tiers=EVERYTHING)
    batches = batches_of(world_size)[0][rank]
    engine.train_step(batches)
    before = engine.eval_step(batches).loss
    with engine.offloaded(("optimizer", "master", "grads"), "nvme", path=swap) as freed_bytes:
        with engine.gathered() as model:
            model(**batches[0])
        return before, engine.eval_step(batches).loss, min(freed_bytes.values()) > 0


def test_a_model_whose_parameters_stay_on_the_host_can_be_evaluated(ranks: WorkerPool, tmp_path: Path) -> None:
    for before, offloaded, has_freed in ranks(2).run(evaluate_without_optimizer, tmp_path):
        assert has_freed
        assert before == offloaded


def test_what_cannot_be_chosen_is_refused(tmp_path: Path) -> None:
    engine = make_engine(0)
    for to, path, code, value in (
        ("nvme", None, "no-swap-folder", "to='nvme'"),
        ("disk", None, "argument-choice", "to='disk'"),
        ("host", tmp_path, "release-path-for-host", "to='host'"),
    ):
        with refused(code, value):
            engine.offload(to=to, path=path)
    engine.train_step(batches_of(1)[0][0])


FAILURES = ["space", "write"]


def fail_to_offload(rank: int, world_size: int, what: str, swap: Path) -> tuple[str, str, bool, int, bool]:
    """Return code and message where the last rank's disk fails; whether bits and bytes stay, and training goes on."""
    engine = make_engine(3, "bf16", tiers=EVERYTHING)
    first, second, *_ = batches_of(world_size)
    engine.train_step(first[rank])
    before = {name: engine.read(name, "exp_avg") for name, _ in engine.model.named_parameters()}
    before_bytes = device_bytes(engine), host_bytes(engine)
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setattr(*failing(what))
        code, message = refusal_of(lambda: engine.offload(to="nvme", path=swap))
    gc.collect()  # the error's own frames
    after_bytes = device_bytes(engine), host_bytes(engine)
    is_same = all(torch.equal(engine.read(name, "exp_avg"), value) for name, value in before.items())
    step = engine.train_step(second[rank]).step
    return code, message, is_same, step, after_bytes <= before_bytes


def failing(what: str) -> tuple[type, str, Any]:
    def lack_space(folder: SwapFolder, name: str, num_bytes: int) -> SwapFile:
        raise SwapError("disk-full", f"cannot allocate {num_bytes} bytes: No space left on device")

    def fail(file: SwapFile, offset_bytes: int, source: torch.Tensor) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(SwapError("disk-full", "cannot write: No space left on device"))
        return future

    return (SwapFolder, "allocate", lack_space) if what == "space" else (SwapFile, "write", fail)


@pytest.mark.parametrize("what", FAILURES)
def test_a_full_disk_leaves_everything_as_it_was(ranks: WorkerPool, tmp_path: Path, what: str) -> None:
    first, last = ranks(2).run(fail_to_offload, what, tmp_path)
    assert (first[0], last[0]) == ("other-rank-offload", "disk-full")
    assert last[1].endswith("No space left on device")
    assert first[2:] == last[2:] == (True, 2, True)
    assert not list(tmp_path.iterdir())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def watch_resident(rank: int, world_size: int, tiers: Mapping[str, Any], swap: Path) -> tuple[int, list[int]]:
    """What is said to be freed, and the process's bytes with all states, twice while they are away, and after."""
    config = make_config(1, {"zero": {"stage": 3}, "precision": {"param": "fp32"}, "tiers": tiers})
    model = nn.Linear(2048, 2048, bias=False)
    engine = initialize(model, config, loss_fn=lambda output, batch: output.square().mean())
    engine.train_step([torch.ones(1, 2048)])
    engine.tiers.wait_idle()
    found = [resident_bytes()]
    first_bytes = 0
    for _ in range(2):
        with engine.offloaded(to="nvme", path=swap) as freed_bytes:
            first_bytes = first_bytes or sum(freed_bytes.values())
            found.append(resident_bytes())
    found.append(resident_bytes())
    engine.close()
    return first_bytes, found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("tiers", ["device", "host"])
def test_memory_goes_back_to_the_system(ranks: WorkerPool, tmp_path: Path, tiers: str) -> None:
    ((freed_bytes, (full, away, again, back)),) = ranks(1).run(watch_resident, TIERS[tiers], tmp_path)
    num_bytes, slack_bytes = 2048 * 2048 * 4, 8 * 2**20
    assert freed_bytes >= 4 * num_bytes
    assert full - away > freed_bytes - slack_bytes
    assert abs(again - away) < slack_bytes
    assert 3 * num_bytes - slack_bytes < back - again < freed_bytes + slack_bytes
