"""From a hook to torch's collective few calls pass, through few files: the path that a reader follows."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise
from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import initialize

LIBRARY = Path(shardwise.__file__).parent
# Frames of the library's own that stand between a hook and torch: the first is the hook's.
HOOKS = {LIBRARY / "runtime" / "module_hooks.py"}
Calls = tuple[str, ...]


def path_to_here() -> Calls | None:
    """Return the calls of the library from the latest hook to the caller of torch; None where no hook called."""
    frames = [frame for frame in traceback.extract_stack() if LIBRARY in Path(frame.filename).parents]
    hooked = [index for index, frame in enumerate(frames) if Path(frame.filename) in HOOKS]
    if not hooked:
        return None
    return tuple(f"{Path(each.filename).relative_to(LIBRARY)}:{each.name}" for each in frames[hooked[-1] :])


@contextmanager
def noted(functions: tuple[str, ...]) -> Iterator[set[Calls]]:
    """Collect the paths of the calls of functions of torch.distributed inside the context."""
    paths: set[Calls] = set()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            path = path_to_here()
            if path is not None:
                paths.add(path)
            return function(*args, **kwargs)

        return note

    with mock.patch.multiple(dist, **{name: noting(getattr(dist, name)) for name in functions}):
        yield paths


def find_paths(rank: int, world_size: int, stage: int) -> tuple[set[Calls], set[Calls]]:
    """Return the paths to the gathers and to the reductions of two steps."""
    case, config = CASES["transformer"], make_config(2, {"zero": {"stage": stage}})
    batches = make_batches(case, num_steps=1, world_size=world_size, num_micro_batches=2)[0][rank]
    with (
        initialize(case.build(torch.float64), config, loss_fn=case.loss) as engine,
        noted(("isend", "irecv")) as gathers,
        noted(("all_to_all_single",)) as reductions,
    ):
        for _ in range(2):
            engine.train_step(batches)
    return gathers, reductions


@pytest.mark.parametrize("stage", [2, 3])
def test_gathers_and_reductions_are_a_few_calls_away_from_their_hooks(ranks: WorkerPool, stage: int) -> None:
    for gathers, reductions in ranks(2).run(find_paths, stage):
        assert reductions
        assert bool(gathers) == (stage == 3)
        for path in gathers | reductions:
            print(" -> ".join(path))
            assert len(path) <= 5, path
            assert len({call.partition(":")[0] for call in path[1:]}) <= 3, path  # after the hook
