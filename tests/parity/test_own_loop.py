"""A loop of the user's own: rows that no layout changes, the files of `shardwise train`, slow ranks by name."""

import gzip
import io
import itertools
import json
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import shardwise
from harness.refusals import refused
from shardwise.train.loaders import EngineDataLoader

NUM_ROWS, GLOBAL_SIZE = 26, 8


# Each row is its own number.
ROWS = [torch.full((4,), float(index)) for index in range(NUM_ROWS)]


class Sleepy(nn.Module):
    """A model that sleeps in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.num_left = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_left -= 1
        if self.num_left == 0:
            time.sleep(0.7)
        return self.inner(x)


def make_engine(world_size: int, **sections) -> shardwise.Engine:
    config = {"batch": {"micro_size": 2, "global_size": GLOBAL_SIZE}, "run": {"device": "cpu", "timeout_s": 60.0}}
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    torch.manual_seed(0)
    return shardwise.initialize(Sleepy(), config, loss_fn=lambda out, batch: (out.square().sum(), out.numel()))


def read_rows(rank: int, world_size: int, num_steps: int, state: dict | None, mesh: dict, workers: int) -> tuple:
    """The rows of each step on this rank, and the position after them."""
    engine = make_engine(world_size, mesh=mesh)
    loader = shardwise.data_loader(engine, ROWS, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    seen: list[list[list[float]]] = []
    while len(seen) < num_steps:
        for batches in loader:
            seen.append([batch[:, 0].tolist() for batch in batches])
            if len(seen) == num_steps:
                break
    engine.close()
    return seen, loader.state_dict()


def global_batches(ranks: list[tuple]) -> list[list[float]]:
    """The rows of each step over all ranks, in the order of the global batch."""
    steps = zip(*(seen for seen, _ in ranks), strict=True)
    return [[row for micro in zip(*step, strict=True) for rows in micro for row in rows] for step in steps]


def test_any_number_of_ranks_sees_the_same_global_batches(ranks):
    (one,), two, four = (ranks(n).run(read_rows, 7, None, {}, 0) for n in (1, 2, 4))
    expected = global_batches([one])
    assert global_batches(two) == global_batches(four) == expected
    rows = [row for step in expected for row in step]
    assert sorted(rows[:NUM_ROWS]) == sorted(rows[NUM_ROWS : 2 * NUM_ROWS]) == list(range(NUM_ROWS)), "two whole passes"
    assert rows[:NUM_ROWS] != rows[NUM_ROWS : 2 * NUM_ROWS], "each in its own order"


def test_a_run_goes_on_in_the_midst_of_a_pass_on_another_number_of_ranks(ranks):
    (whole,) = ranks(1).run(read_rows, 8, None, {}, 0)
    begun = ranks(2).run(read_rows, 2, None, {}, 0)
    (middle,) = ranks(1).run(read_rows, 3, begun[0][1], {}, 0)
    again = ranks(4).run(read_rows, 3, middle[1], {}, 0)
    assert global_batches(begun) + global_batches([middle]) + global_batches(again) == global_batches([whole])
    assert again[0][1] == whole[1]


@pytest.mark.quick(2)
@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_ranks_that_compute_together_get_the_same_rows(ranks, axis):
    class OfTwo:
        """What a loader reads of an engine; the models of these axes are not what is tested."""

        def __init__(self, rank: int) -> None:
            self.config = shardwise.Config.from_dict(
                {"batch": {"micro_size": 2, "global_size": 8}, "mesh": {axis: 2}}
            ).resolve(4)
            from shardwise.layout.mesh_shape import MeshShape

            self.layout = type("Layout", (), {"mesh": MeshShape.from_config(self.config.mesh)})
            self.comm = type("Comm", (), {"rank": rank})

    seen = [[batch.tolist() for batch in next(iter(EngineDataLoader(OfTwo(rank), ROWS, 0, {})))] for rank in range(4)]
    peers = {rank: OfTwo(0).layout.mesh.ranks_along((axis,), rank) for rank in range(4)}
    assert all(seen[rank] == seen[peer] for rank in range(4) for peer in peers[rank])
    assert len({str(each) for each in seen}) == 2


def test_workers_change_no_row():
    assert read_rows(0, 1, 4, None, {}, 2) == read_rows(0, 1, 4, None, {}, 0)


def test_what_a_loader_refuses():
    engine = make_engine(1)
    with refused("dataset-below-batch", "8", "5"):
        shardwise.data_loader(engine, list(range(5)))
    with refused("loader-option-taken", "batch_size"):
        shardwise.data_loader(engine, ROWS, batch_size=3)
    with refused("wrong-argument", "dataset", "generator"):
        shardwise.data_loader(engine, (row for row in range(9)))
    loader = shardwise.data_loader(engine, ROWS)
    with refused("position-of-other-data", "num_rows=9", "26"):
        loader.load_state_dict(loader.state_dict() | {"num_rows": 9})
    ordered = shardwise.data_loader(engine, ROWS, shuffle=False)
    with refused("position-of-other-data", "seed"):
        ordered.load_state_dict(loader.state_dict())
    assert len(ordered) == 3
    first = next(iter(ordered))
    assert [row for batch in first for row in batch[:, 0].tolist()] == list(range(8))
    engine.close()


def train_own(rank: int, world_size: int, folder: str, num_steps: int, slow: str) -> tuple[str, list[str]]:
    """A loop of 14 steps, in which rank 1 sleeps once; what it shows, and what the watch of this rank found."""
    engine = make_engine(world_size, zero={"stage": 3}, run={"profile_steps": [4, 5]})
    shown = io.StringIO()
    calls = itertools.count()

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        if next(calls) == 23 and slow == "data" and rank == 1:  # two micro-batches a step: in step 12
            time.sleep(0.7)
        return torch.stack(rows)

    with shardwise.progress(engine, num_steps, folder, console=Console(file=shown, width=100)) as run:
        for batches in run.steps(shardwise.data_loader(engine, ROWS, collate_fn=collate)):
            if slow == "forward" and rank == 1:
                engine.model.num_left = 2 if engine.num_steps == 11 else -1
            result = engine.train_step(batches)
            eval_loss = engine.eval_step(batches).loss if result.step % 5 == 0 else None
            run.log(result, eval_loss=eval_loss, values={"reward": result.step / 16})
    steps = engine.num_steps
    engine.close()
    return shown.getvalue(), steps


@pytest.mark.parametrize("slow", ["data", "forward"])
def test_a_loop_is_shown_and_kept_and_its_slow_rank_is_named(ranks, tmp_path, slow):
    (shown, steps), (silent, _) = ranks(2).run(train_own, str(tmp_path / "run"), 14, slow)
    assert steps == 14
    assert silent == ""
    assert "step 14/14" in shown
    assert "held-out loss" in shown
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert [line["step"] for line in lines if "eval_loss" in line] == [5, 10]
    assert [line["step"] for line in lines if "peak_bytes" in line] == [1, 2]
    assert lines[3]["values"] == {"reward": 0.25}
    assert "reward 0.8750" in shown
    found = [line["slow"] for line in lines if line.get("slow", {}).get("extra_s", 0) > 0.5]
    assert [(each["rank"], each["part"]) for each in found] == [(1, slow)]
    assert f"rank 1, {found[0]['extra_s'] * 1000:.0f} ms longer in {slow}" in shown
    memory = json.loads((folder / "memory.json").read_text())
    assert (memory["step"], len(memory["ranks"])) == (2, 2)
    assert all(held["optimizer"] > 0 for held in memory["ranks"])
    assert memory["limit_bytes"] > sum(memory["ranks"][0].values())
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["world_size"] == 2
    assert len(environment["hosts"]) == 1
    assert environment["versions"]["torch"] == torch.__version__
    wire = json.loads((folder / "wire.json").read_text())
    sent = {(each["axis"], each["op"]): each["bytes"] for each in wire["axes"]}
    assert wire["steps"] == 13
    assert sent["dp_shard", "all_gather"] > 20 * 4, "the weights, which the other rank has half of"
    assert (folder / "report.html").stat().st_size > 50_000
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((folder / "profile" / f"rank-{rank}.pt.trace.json.gz").read_bytes()))
        assert len([event for event in trace["traceEvents"] if event.get("name") == "aten::linear"]) > 0
    assert shardwise.Config.from_json((folder / "config.json").read_text()).zero.stage == 3


def test_a_folder_of_another_run_is_refused_and_a_loaded_engine_goes_on(tmp_path):
    engine = make_engine(1)
    loader = shardwise.data_loader(engine, ROWS)
    console = Console(file=io.StringIO())
    with shardwise.progress(engine, 3, tmp_path / "run", console=console) as run:
        for batches in run.steps(loader):
            run.log(engine.train_step(batches))
    engine.save(tmp_path / "checkpoints", extra=loader.state_dict())
    engine.close()
    engine = make_engine(1)
    with refused("folder-of-another-run", "run"):
        shardwise.progress(engine, 3, tmp_path / "run")
    loader = shardwise.data_loader(engine, ROWS)
    loader.load_state_dict(engine.load(tmp_path / "checkpoints").extra)
    with shardwise.progress(engine, 5, tmp_path / "run", console=console) as run:
        for batches in run.steps(loader):
            run.log(engine.train_step(batches))
    lines = (Path(tmp_path) / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    engine.close()


def test_a_loop_without_a_folder_or_of_a_few_batches_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = make_engine(1)
    shown = io.StringIO()
    batches = [[torch.ones(2, 4)] * 4] * 3
    with shardwise.progress(engine, 100, console=Console(file=shown)) as run:
        for step in run.steps(iter(batches)):
            run.log(engine.train_step(step))
    assert engine.num_steps == 3
    assert list(tmp_path.iterdir()) == []
    engine.close()
