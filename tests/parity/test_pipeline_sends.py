"""What stages send to each other: as few messages as there are values, each a few calls from its action to torch."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise
from harness.pool import WorkerPool
from harness.tensor import make_case, step_batches
from harness.training import make_config
from shardwise import initialize

LIBRARY = Path(shardwise.__file__).parent
EXECUTOR = LIBRARY / "pipeline" / "executor.py"
NUM_MICRO_BATCHES = 3


def paths_of_sends(rank: int, world_size: int, schedule: str, virtual_stages: int) -> list[list[str]]:
    """The calls from the handler of an action to each message of the second step."""
    case, pipeline = make_case("deep"), {"schedule": schedule, "virtual_stages": virtual_stages}
    config = make_config(NUM_MICRO_BATCHES, {"mesh": {"pp": 2}, "pipeline": pipeline})
    batch, paths, isend = step_batches(case, 0, 1, 1)[0], [], dist.isend

    def note(*args: object, **kwargs: object) -> object:
        frames = [frame for frame in traceback.extract_stack() if LIBRARY in Path(frame.filename).parents]
        begun = [index for index, frame in enumerate(frames) if frame.name == "execute"]
        if begun and Path(frames[begun[0] + 1].filename) == EXECUTOR:
            paths.append([f"{each.filename}:{each.name}" for each in frames[begun[0] + 1 :]])
        return isend(*args, **kwargs)

    with initialize(case.build(torch.float64, seed=rank), config, loss_fn=case.loss) as engine:
        engine.train_step([batch] * NUM_MICRO_BATCHES)
        with mock.patch.object(dist, "isend", note):
            engine.train_step([batch] * NUM_MICRO_BATCHES)
    return paths


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved", 2)])
def test_a_value_is_one_message_a_few_calls_away(ranks: WorkerPool, schedule: str, virtual_stages: int) -> None:
    """Of the boundaries of two ranks each rank sends, for each micro-batch, either the value or its gradient."""
    for paths in ranks(2).run(paths_of_sends, schedule, virtual_stages):
        assert len(paths) == NUM_MICRO_BATCHES * (2 * virtual_stages - 1)
        for path in paths:
            assert len(path) <= 6, path
            assert len({call.partition(":")[0] for call in path}) <= 4, path


def calls_around_blocks(rank: int, world_size: int, overrides: dict[str, object]) -> int:
    """The library's functions that the hooks and classes of this rank's blocks call in a later step."""
    case, calls = make_case("deep"), 0
    config = make_config(NUM_MICRO_BATCHES, {"mesh": {"pp": 2}, **overrides})
    batch = step_batches(case, 0, 1, 1)[0]

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        path = Path(frame.f_code.co_filename)
        calls += event == "call" and path.name in ("module_hooks.py", "apply.py") and LIBRARY in path.parents

    with initialize(case.build(torch.float64, seed=rank), config, loss_fn=case.loss) as engine:
        for _ in range(3):
            engine.train_step([batch] * NUM_MICRO_BATCHES)
        sys.setprofile(note)
        try:
            engine.train_step([batch] * NUM_MICRO_BATCHES)
        finally:
            sys.setprofile(None)
    return calls


def test_blocks_whose_parameters_are_whole_have_no_hooks(ranks: WorkerPool) -> None:
    whole = ranks(2).run(calls_around_blocks, {})
    hooked = ranks(2).run(calls_around_blocks, {"tiers": {"optimizer": "host"}})
    assert all(2 * few < many for few, many in zip(whole, hooked, strict=True)), (whole, hooked)
