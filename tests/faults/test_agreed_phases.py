"""In each phase that the ranks agree on, one of them raises, or does not come: the others name it, and its error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.time_outs import give_up_after
from harness.waiting import wait_until
from shardwise import Engine, initialize
from shardwise.checkpoint import writer
from shardwise.checkpoint.hf import exporter
from shardwise.comm.agreement import Agreement
from shardwise.comm.mesh import open_store

SHORT_S = 3.0  # ranks that show progress are not given up where the machine stalls for a while
NUM_RANKS = 3
FAILING = 1
Phase = Callable[[Engine, Path], object]
PHASES: dict[str, Phase] = {
    "begin": lambda engine, root: engine.save(root / "new"),
    "begin in the background": lambda engine, root: engine.save(root / "new", wait=False),
    "commit": lambda engine, root: engine.save(root / "new"),
    "load": lambda engine, root: engine.load(root / "old"),
    "export": lambda engine, root: engine.export_weights(root / "exported"),
}


class Noting(nn.Linear):
    """Has an extra state, so that a save and a load call it."""

    acts: ClassVar[dict[str, Callable[[], object]]] = {}

    def get_extra_state(self) -> int:
        self.acts.get("begin", int)()
        return 7

    def set_extra_state(self, state: Any) -> None:
        self.acts.get("load", int)()


def make_engine(optimizer: Any = None, timeout_s: float = 60.0) -> Engine:
    config = {"run": {"device": "cpu", "timeout_s": timeout_s}}
    return initialize(Noting(4, 4), config, loss_fn=lambda output, batch: output.square().mean(), optimizer=optimizer)


def act_of(rank: int, how: str, store: dist.Store) -> Callable[[], object]:
    """What the failing rank does: it raises, or is away until the others have given it up."""

    def act() -> None:
        if rank == FAILING and how == "raises":
            raise OSError("out of order")
        if rank == FAILING:
            wait_until(lambda: store.add("num_gone", 0) == NUM_RANKS - 1)

    return act


def go_through(rank: int, world_size: int, root: Path, phase: str, how: str) -> tuple[str, str]:
    store = open_store()
    assert store is not None
    act = act_of(rank, how, store)
    engine = make_engine()
    engine.save(root / "old")
    give_up_after(engine, SHORT_S)
    write, export = writer.write_state_shards, exporter.write_export

    def acting(name: str, then: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: [act() if phase == name else None, then(*args, **kwargs)][1]

    Noting.acts = {phase.split()[0]: act}
    with (
        patch.object(writer, "write_state_shards", acting("commit", write)),
        patch.object(exporter, "write_export", acting("export", export)),
    ):
        refusal = refusal_of(lambda: PHASES[phase](engine, root))
    Noting.acts = {}
    store.add("num_gone", int(rank != FAILING))
    dist.barrier()
    return refusal


@pytest.mark.quick(5)
@pytest.mark.parametrize("how", ["raises", "is absent"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_others_name_the_rank_that_fails(ranks: WorkerPool, tmp_path: Path, phase: str, how: str) -> None:
    refusals = ranks(NUM_RANKS).run(go_through, tmp_path, phase, how)
    assert len({refusals[0], refusals[2]}) == 1
    code, text = refusals[0]
    assert code == ("rank-failed" if how == "raises" else "rank-absent")
    assert f"rank {FAILING}" in text
    assert ("OSError: out of order" if how == "raises" else f"no progress for {SHORT_S:g} s") in text
    assert not list((tmp_path / "new").glob("step-*")), "nothing is committed, and nothing is left"


def start(rank: int, world_size: int, how: str) -> tuple[str, str]:
    store = open_store()
    assert store is not None
    act = act_of(rank, how, store)

    def make(groups: Any) -> torch.optim.Optimizer:
        act()
        return torch.optim.SGD(groups, lr=0.1)

    if how == "is absent":
        act()
    refusal = refusal_of(lambda: make_engine(make, SHORT_S).close())
    store.add("num_gone", int(rank != FAILING))
    return refusal


@pytest.mark.parametrize("how", ["raises", "is absent"])
def test_the_others_name_the_rank_that_fails_to_start(ranks: WorkerPool, how: str) -> None:
    refusals = ranks(NUM_RANKS).run(start, how)
    for code, text in refusals if how == "is absent" else (refusals[0], refusals[2]):
        assert code == "other-rank-start"
        assert f"rank {FAILING} " in text
        assert ("out of order" if how == "raises" else f"{SHORT_S:g} s") in text


def count_rounds(rank: int, world_size: int, root: Path) -> dict[str, int]:
    engine, nums = make_engine(), {}
    run = Agreement.run

    def counted(agreement: Agreement, *args: Any, **kwargs: Any) -> Any:
        nums[name] += 1
        return run(agreement, *args, **kwargs)

    with patch.object(Agreement, "run", counted):
        for name, wait in (("save", True), ("save in the background", False)):
            nums[name] = 0
            engine.save(root / name, wait=wait)
            engine.finish_saves()
    return nums


def test_a_save_takes_two_rounds(ranks: WorkerPool, tmp_path: Path) -> None:
    assert ranks(2).run(count_rounds, tmp_path) == [{"save": 2, "save in the background": 2}] * 2
