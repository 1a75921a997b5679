"""Where a loader is, saved with a checkpoint: it goes on exactly, twice in a row, and on other ranks or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.pool import WorkerPool
from harness.refusals import refused
from shardwise import Engine, initialize, stream_loader
from shardwise.checkpoint.data_position import decoded, encoded
from shardwise.checkpoint.manifest import CheckpointError

GLOBAL_SIZE = 8


class Numbers:
    """A stream of as many numbers; a later pass has others."""

    def __init__(self, num: int = 1000) -> None:
        self.num, self.epoch = num, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number + 10_000 * self.epoch)]) for number in range(self.num))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class RankLoader:
    """A loader as those of one rank are: it knows how many batches this rank has taken, and random numbers."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.generator = torch.Generator().manual_seed(first)

    def take(self) -> torch.Tensor:
        self.next += 1
        return torch.tensor([[self.next + torch.rand((), generator=self.generator).item()]])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, 0: (self.generator.get_state(), np.arange(2), b"\x00x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]
        self.generator.set_state(state[0][0])


def make(micro_size: int = 2) -> Engine:
    config = {
        "zero": {"stage": 3},
        "optimizer": {"name": "sgd", "lr": 1e-9},
        "batch": {"global_size": GLOBAL_SIZE, "micro_size": micro_size},
        "run": {"device": "cpu"},
    }
    return initialize(nn.Linear(1, 1), config, loss_fn=lambda output, batch: output.square().mean())


def take(rank: int, world_size: int, folder: str, num_steps: int, num_numbers: int = 1000) -> list[list[float]]:
    """Go on where the folder says, take steps and save; this rank's numbers of each step."""
    with make() as engine:
        loader = stream_loader(engine, Numbers(num_numbers))
        if any(Path(folder).glob("step-*")):
            engine.load(folder, data=loader)
        seen: list[list[float]] = []
        while len(seen) < num_steps:
            for batches in loader:
                seen.append([value for batch in batches for value in batch.flatten().tolist()])
                engine.train_step(batches)
                if len(seen) == num_steps:
                    break
        engine.save(folder, data=loader)
        return seen


def test_a_stream_resumed_twice_is_exact_on_other_numbers_of_ranks(ranks: WorkerPool, tmp_path: Path) -> None:
    steps: list[list[float]] = []
    for num_ranks, num_steps in ((2, 3), (1, 2), (4, 2), (2, 1)):
        by_rank = ranks(num_ranks).run(take, str(tmp_path), num_steps)
        steps += [sorted(chain.from_iterable(parts)) for parts in zip(*by_rank, strict=True)]
    assert steps == [[float(GLOBAL_SIZE * step + at) for at in range(GLOBAL_SIZE)] for step in range(8)]


def test_a_stream_goes_on_in_its_next_pass(ranks: WorkerPool, tmp_path: Path) -> None:
    """Of 20 samples a pass has two batches of 8; a save at its end goes on in the next one."""
    steps: list[list[float]] = []
    for num_ranks, num_steps in ((2, 1), (1, 2), (2, 2)):
        by_rank = ranks(num_ranks).run(take, str(tmp_path), num_steps, 20)
        steps += [sorted(chain.from_iterable(parts)) for parts in zip(*by_rank, strict=True)]
    assert [step[0] for step in steps] == [0.0, 8.0, 10_000.0, 10_008.0, 20_000.0]


def go_on(rank: int, world_size: int, folder: str, num_steps: int) -> list[float]:
    with make(micro_size=1) as engine:
        loader = RankLoader(100 * engine.layout.mesh.data_index(rank))
        if any(Path(folder).glob("step-*")):
            engine.load(folder, data=loader)
        taken = []
        for _ in range(num_steps):
            batches = [loader.take() for _ in range(engine.config.batch.accumulation or 1)]
            taken += [batch.item() for batch in batches]
            engine.train_step(batches)
        engine.save(folder, data=loader)
        return taken


def test_each_data_rank_has_its_own_state(ranks: WorkerPool, tmp_path: Path) -> None:
    whole = ranks(2).run(go_on, str(tmp_path / "whole"), 4)
    parts = [ranks(2).run(go_on, str(tmp_path / "parts"), number) for number in (2, 1, 1)]
    assert [[number for part in parts for number in part[rank]] for rank in range(2)] == whole
    assert whole[0] != whole[1]


def test_a_state_of_one_rank_is_refused_on_other_numbers_of_ranks(ranks: WorkerPool, tmp_path: Path) -> None:
    ranks(2).run(go_on, str(tmp_path), 1)
    with make() as engine:
        before = engine.read("weight")
        with refused("data-position-ranks", "RankLoader", "2 data ranks"):
            engine.load(tmp_path, data=RankLoader(0))
        assert torch.equal(engine.read("weight"), before)
        assert engine.num_steps == 0
        assert engine.load(tmp_path).step == 1


def test_refusals(tmp_path: Path) -> None:
    with make() as engine:
        engine.train_step([torch.ones(2, 1)] * 4)
        with refused("wrong-argument", "data=", "state_dict"):
            engine.save(tmp_path, data=[])
        with refused("position-of-weights", "weights"):
            engine.save(tmp_path, contents="weights", data=RankLoader(0))
        odd = RankLoader(0)
        odd.next = {1, 2}
        with refused("loader-state-not-plain", "state['next']", "set"):
            engine.save(tmp_path, data=odd)
        assert not list(tmp_path.glob("step-*"))
        engine.save(tmp_path)
        with refused("no-data-position", "data="):
            engine.load(tmp_path, data=RankLoader(0))
        with refused("stream-begins-once", "list_iterator"):
            stream_loader(engine, iter([1]))
        short = stream_loader(engine, Numbers(4))
        short.load_state_dict({"num_samples": 8, "epoch": 0})
        with refused("stream-too-short", "4", "8"):
            next(iter(short))


PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4)
)


@given(
    st.recursive(
        PLAIN,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text("_a", max_size=4) | st.integers(0, 3), inner, max_size=3)
        ),
    )
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = decoded(encoded(value))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.bool])
def test_tensors_come_back_as_they_were(dtype: torch.dtype) -> None:
    for value in (torch.ones(2, 3).to(dtype), torch.zeros(0).to(dtype), torch.ones(()).to(dtype)):
        found = decoded(encoded({"x": value}))["x"]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found, value)
    with pytest.raises(CheckpointError):
        decoded({"__tensor__": ["load", [1], {"__bytes__": ""}]})


def test_torchdata_goes_on_where_it_was(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        generator = torch.Generator().manual_seed(3)
        data = [torch.tensor([float(number)]) for number in range(40)]
        return stateful.StatefulDataLoader(data, batch_size=2, shuffle=True, generator=generator)

    def run(folder: Path | None, source: Path | None, num_steps: int) -> list[float]:
        with make() as engine:
            data, taken = loader(), []
            if source is not None:
                engine.load(source, data=data)
            batches = iter(data)
            for _ in range(num_steps):
                batch = [next(batches) for _ in range(4)]
                taken += torch.cat(batch).flatten().tolist()
                engine.train_step(batch)
            if folder is not None:
                engine.save(folder, data=data)
            return taken

    whole = run(None, None, 5)
    first = run(tmp_path, None, 2)
    second = run(tmp_path, tmp_path, 2)
    assert first + second + run(None, tmp_path, 1) == whole


def test_a_stream_of_hugging_face_goes_on_where_it_was(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def run(source: Path | None, num_steps: int) -> list[float]:
        rows = datasets.Dataset.from_dict({"x": [float(number) for number in range(64)]})
        stream = rows.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=7)
        with make() as engine:
            data = stream_loader(engine, stream, collate_fn=lambda rows: torch.tensor([[row["x"]] for row in rows]))
            if source is not None:
                engine.load(source, data=data)
            taken = []
            for batches in data:
                taken += torch.cat(batches).flatten().tolist()
                engine.train_step(batches)
                num_steps -= 1
                if not num_steps:
                    break
            if source != tmp_path / "4":
                engine.save(tmp_path / str(engine.num_steps), data=data)
            return taken

    whole = run(None, 6)
    first, second, third = run(None, 2), run(tmp_path / "2", 2), run(tmp_path / "4", 2)
    assert first + second + third == whole
