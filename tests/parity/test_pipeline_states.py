"""States of all stages by name, from every rank of a pipeline; those that a rank does not hold too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.states import assert_same_bits, whole_states
from shardwise import Engine, initialize
from shardwise.checkpoint.commit import read_manifest, step_name

WIDTH = 4
FIRST, NORM, SECOND, LAST = "0.weight", "1.running_mean", "2.weight", "4.weight"  # of stages 0, 0, 1, 1


class Chain(nn.Sequential):
    """Layers with statistics of the batches they have seen; the last may have the weight of the first."""

    def __init__(self, is_tied: bool = False, first_is_frozen: bool = False) -> None:
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]
        super().__init__(*layers, nn.Linear(WIDTH, WIDTH, bias=False))
        if is_tied:
            self[4].weight = self[0].weight
        if first_is_frozen:
            self[0].requires_grad_(False)


def make_engine(mesh: dict[str, int], *, is_tied: bool = False, is_frozen: bool = False, **sections: Any) -> Engine:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Chain(is_tied, is_frozen)
    config = {
        "mesh": mesh,
        "batch": {"accumulation": 2},
        "optimizer": {"lr": 0.05},
        "run": {"device": "cpu", "timeout_s": 30.0},
        **({"pipeline": {"cut": ["2"]}} if mesh.get("pp", 1) > 1 else {}),
        **sections,
    }
    return initialize(model, config, loss_fn=lambda output, batch: output.double().square().mean())


def train(engine: Engine, num_steps: int = 2) -> None:
    index = engine.layout.mesh.data_index(engine.comm.rank)
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(10 * engine.num_steps + index)
        engine.train_step([torch.randn(6, WIDTH, generator=generator) for _ in range(2)])


def read_and_write(rank: int, world_size: int, mesh: dict[str, int], stage: int) -> Any:
    sections = {"precision": {"param": "bf16"}, "zero": {"stage": stage}}
    with make_engine(mesh, is_tied=True, is_frozen=False, **sections) as engine:
        early = engine.states_of(SECOND)
        train(engine)
        found = {}
        value = torch.arange(WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH) / 7
        for number, name in enumerate((FIRST, SECOND)):
            states = engine.states_of(name)
            found[name, "states"] = states
            engine.write(name, value + number, "exp_avg", from_rank=world_size - 1)
            engine.write(name, value if rank == 0 else None, from_rank=0)
            engine.write(name, 7.0, "step")
            found[name] = [engine.read(name, state).clone() for state in ("master", "exp_avg", "step")]
            found[name, "gradient"] = engine.read(name, "grad")
            found[name, "last"] = engine.read(name, "exp_avg", to_rank=world_size - 1)
        errors = [
            refusal_of(lambda: engine.read("2.wieght")),
            refusal_of(lambda: engine.read(FIRST, "exp_agv")),
            refusal_of(lambda: engine.read(SECOND, "exp_agv")),
            refusal_of(lambda: engine.write(SECOND, torch.zeros(3))),
            refusal_of(lambda: engine.write(SECOND, None, from_rank=1)),
            refusal_of(lambda: engine.write(FIRST, 1.0, "nothing")),
            refusal_of(lambda: engine.read(LAST, to_rank=world_size)),
        ]
        train(engine)  # nothing of it has left the ranks apart
        tied = torch.equal(engine.read(LAST, "master"), engine.read(FIRST, "master"))
        return early, found, errors, tied


@pytest.mark.parametrize(("mesh", "stage"), [({"pp": 2}, 0), ({"pp": 2, "dp_shard": 2}, 3)])
def test_states_of_every_stage_are_read_and_written_on_every_rank(
    ranks: WorkerPool, mesh: dict[str, int], stage: int
) -> None:
    num_ranks = 2 * mesh.get("dp_shard", 1)
    results = ranks(num_ranks).run(read_and_write, mesh, stage)
    value = torch.arange(WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH) / 7
    for rank, (early, found, errors, tied) in enumerate(results):
        assert early == ("param", "master", "grad")
        assert tied
        codes = ["unknown-parameter", "unknown-state", "unknown-state", "written-shape", "written-shape"]
        assert [code for code, _ in errors] == [*codes, "unknown-state", "rank-out-of-range"]
        assert errors[5:] == results[0][2][5:]
        assert errors[:3] == results[0][2][:3]
        assert f"rank {rank} gave (3,)" in errors[3][1]
        assert all(value in errors[4][1] for value in (SECOND, "(4, 4)", "rank 1"))
        for number, name in enumerate((FIRST, SECOND)):
            assert found[name, "states"] == ("param", "master", "grad", "step", "exp_avg", "exp_avg_sq")
            master, average, step = found[name]
            assert torch.equal(master, value.float())
            assert torch.equal(average, (value + number).float())
            assert step == 7.0
            assert found[name, "gradient"] is None
            last = found[name, "last"]
            assert (last is not None) == (rank == num_ranks - 1)
            assert last is None or torch.equal(last, average)
    messages = [message for _, message in results[0][2]]
    assert "2.weight" in messages[0]
    assert all("'exp_agv'; there are param, master, grad, step" in message for message in messages[1:3])
    assert "'nothing'" in messages[5]
    assert f"to_rank={num_ranks}" in messages[6]


def write_where_frozen(rank: int, world_size: int) -> Tensor | None:
    """The first rank's own parameters are frozen and of bf16; the second's have masters of fp32."""
    with make_engine({"pp": 2}, is_frozen=True, precision={"param": "bf16"}) as engine:
        value = torch.full((WIDTH, WIDTH), 1 / 3)
        engine.write(SECOND, value if rank == 0 else None, from_rank=0)
        return engine.read(SECOND, "master")


def test_a_value_from_a_rank_whose_parameters_are_narrow_is_not_rounded(ranks: WorkerPool) -> None:
    for value in ranks(2).run(write_where_frozen):
        assert torch.equal(value, torch.full((WIDTH, WIDTH), 1 / 3))


def write_gathered(rank: int, world_size: int, mesh: dict[str, int], stage: int) -> Any:
    with make_engine(mesh, is_tied=True, zero={"stage": stage}, precision={"param": "bf16"}) as engine:
        train(engine, 1)
        names = [name for name, _ in engine.model.named_parameters()]
        before = {name: engine.read(name, "master") for name in names}
        with engine.gathered(write=True), torch.no_grad():
            for name in (FIRST, SECOND):
                parameter = engine.model.get_parameter(name)
                if not parameter.is_meta:
                    parameter.fill_(rank + 1)
            absent = [name for name in names if engine.model.get_parameter(name).is_meta]
            said = refusal_of(lambda: engine.model.get_parameter(absent[0]).add_(1)) if absent else ("", "")
        after = {name: engine.read(name, "master") for name in names}
        held = (
            [engine.model.get_parameter(name).detach().clone() for name in names if name == FIRST] if stage < 3 else []
        )
        train(engine, 1)
        return before, after, absent, said, held


@pytest.mark.parametrize(("mesh", "stage"), [({"pp": 2, "dp_shard": 2}, 1), ({"pp": 2, "dp_shard": 2}, 3)])
def test_what_the_first_rank_of_a_stage_writes_is_everybodys(
    ranks: WorkerPool, mesh: dict[str, int], stage: int
) -> None:
    for rank, (before, after, absent, said, held) in enumerate(ranks(4).run(write_gathered, mesh, stage)):
        assert (FIRST in absent, SECOND in absent) == (False, rank < 2)  # the tied one is on both stages
        assert said[0] == "parameter-used-off-stage"
        assert bool((after[FIRST] == 1).all())
        assert bool((after[SECOND] == 3).all())
        assert all(bool((each == 1).all()) for each in held)
        unchanged = before.keys() - {FIRST, SECOND}
        assert_same_bits(
            {(each, ""): after[each] for each in unchanged}, {(each, ""): before[each] for each in unchanged}
        )


def offload(rank: int, world_size: int, target: str, folder: Path) -> Any:
    with make_engine({"pp": 2, "dp_shard": 2}, is_tied=True, zero={"stage": 3}) as engine:
        train(engine)
        before = whole_states(engine)
        path = folder if target == "nvme" else None
        with engine.offloaded(to=target, path=path) as freed_bytes:
            said = [refusal_of(lambda: engine.read(SECOND)), refusal_of(lambda: train(engine, 1))]
        after = whole_states(engine)
        engine.offload(["optimizer"], target, path=path)
        evaluated = engine.eval_step([torch.ones(2, WIDTH)] * 2).loss
        engine.reload()
        train(engine, 1)
        wrong = refusal_of(lambda: engine.offload(to="host", path=folder))
        return before, after, dict(freed_bytes), said, evaluated, wrong


@pytest.mark.parametrize("target", ["host", "nvme"])
def test_a_pipeline_hands_its_memory_over(ranks: WorkerPool, tmp_path: Path, target: str) -> None:
    results = ranks(4).run(offload, target, tmp_path)
    for before, after, freed_bytes, said, evaluated, wrong in results:
        assert_same_bits(after, before)
        assert min(freed_bytes["optimizer"], freed_bytes["params"]) > 0
        assert [code for code, _ in said] == ["states-offloaded"] * 2
        assert evaluated == results[0][4]
        assert wrong[0] == "release-path-for-host"


STATISTICS = ("1.running_mean", "1.running_var", "3.running_mean", "3.running_var", "3.num_batches_tracked")


def statistics(engine: Engine) -> dict[str, Tensor]:
    buffers = dict(engine.model.named_buffers())
    return {name: buffers[name].clone() for name in STATISTICS}


def save_statistics(rank: int, world_size: int, root: Path) -> dict[str, Tensor]:
    with make_engine({"pp": 2, "dp_shard": 2}) as engine:
        train(engine)
        engine.save(root)
        engine.export_weights(root / "exported")
        return statistics(engine)


def load_statistics(rank: int, world_size: int, root: Path, mesh: dict[str, int]) -> dict[str, Tensor]:
    with make_engine(mesh) as engine:
        engine.load(root)
        return statistics(engine)


def import_statistics(rank: int, world_size: int, root: Path) -> dict[str, Tensor]:
    with make_engine({"pp": 2}) as engine:
        engine.import_weights(root / "exported")
        return statistics(engine)


def test_statistics_are_those_of_the_stage_that_has_seen_the_batches(ranks: WorkerPool, tmp_path: Path) -> None:
    saved = ranks(4).run(save_statistics, tmp_path)
    first_to_run = {name: saved[0 if name[0] == "1" else 2][name] for name in STATISTICS}
    second_to_run = {name: saved[1 if name[0] == "1" else 3][name] for name in STATISTICS}
    assert not torch.equal(saved[0]["3.running_mean"], saved[2]["3.running_mean"])
    manifest = read_manifest(tmp_path / step_name(2))
    own = {tensor.name for tensor in manifest.tensors if tensor.kind == "rank" and "buffer" in tensor.name}
    assert own == {f"rank-{1 if name[0] == '1' else 3}/buffer.{name}" for name in STATISTICS if "running" in name}
    for mesh in ({}, {"pp": 2}, {"dp_shard": 4}):
        num_ranks = 4 if "dp_shard" in mesh else mesh.get("pp", 1)
        for rank, loaded in enumerate(ranks(num_ranks).run(load_statistics, tmp_path, mesh)):
            # Of the data rank of the same index, where there was one.
            of_data = second_to_run if "dp_shard" in mesh and rank == 1 else first_to_run
            assert all(torch.equal(loaded[name], value) for name, value in of_data.items()), mesh
    for rank, loaded in enumerate(ranks(4).run(load_statistics, tmp_path, {"pp": 2, "dp_shard": 2})):
        run_here = [name for name in STATISTICS if (name[0] == "1") == (rank < 2)]
        assert all(torch.equal(loaded[name], saved[rank][name]) for name in run_here), rank
    for loaded in ranks(2).run(import_statistics, tmp_path):
        assert all(torch.equal(loaded[name], value) for name, value in first_to_run.items())
