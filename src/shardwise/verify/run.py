"""Runs a verification: the reference here, the layout's ranks as processes of this machine, then the comparison."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardwise.config import ConfigError
from shardwise.launch.local import launch_local
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import AXES, PIPELINE_AXES, Coordinate
from shardwise.verify.compare import Difference, Trace, first_difference, largest_error
from shardwise.verify.job import VerifyJob, small_layout
from shardwise.verify.rank import JOB_NAME, TRACE_NAME
from shardwise.verify.reference import train_reference

RANK_ARGV: Final = ("-m", "shardwise.cli", "verify", "--be-rank")
_STOPPED: Final = tuple(128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_NOT_PIPELINE: Final = tuple(axis for axis in AXES if axis not in PIPELINE_AXES)


@dataclass(frozen=True)
class Outcome:
    """What a verification found.

    Attributes:
        exit_code: 0 equal, 1 different; otherwise that of the ranks, which did not come to their end.
        difference: the first; None where there is none, or no result.
        holders: the stages and ranks that hold its first and its last tensor.
        error: the largest of all.
        elapsed_s: from start to end.
        folder: of the ranks' logs; None where there is nothing to find in them.
    """

    exit_code: int
    difference: Difference | None = None
    holders: tuple[str, str] = ("", "")
    error: float = 0.0
    elapsed_s: float = 0.0
    folder: Path | None = None


def verify(
    job: VerifyJob,
    environ: Mapping[str, str],
    *,
    announce: Callable[[str], None] = lambda doing: None,
    argv: Sequence[str] = RANK_ARGV,
) -> Outcome:
    """Train on both sides and compare; call it on the main thread, since it handles signals meanwhile.

    Args:
        job: what to train.
        environ: what the processes inherit.
        announce: told what is done.
        argv: of a rank, behind the interpreter; gets the folder.

    Raises:
        ConfigError: the small run has no layout, or one process cannot train it either.
    """
    start_s = time.perf_counter()
    layout = small_layout(job)
    announce("training in one process")
    expected = _train_reference(job)
    folder = Path(tempfile.mkdtemp(prefix="shardwise-verify-"))
    keeps_logs = False
    try:
        (folder / JOB_NAME).write_text(job.to_json(), encoding="utf-8")
        announce(f"training on {job.world_size} processes")
        exit_code = launch_local(
            [*argv, str(folder)], job.world_size, folder, threads_per_rank=1, environ=environ, grace_s=2.0
        )
        if exit_code != 0:
            keeps_logs = exit_code not in _STOPPED
            return Outcome(exit_code, folder=folder if keeps_logs else None)
        actual = Trace.load(folder / TRACE_NAME)
    finally:
        if not keeps_logs:
            shutil.rmtree(folder, ignore_errors=True)
    return judge(layout, actual, expected, time.perf_counter() - start_s)


def _train_reference(job: VerifyJob) -> Trace:
    try:
        return train_reference(job)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"one plain process cannot train the small copy, so there is nothing to compare with ({reason}); "
            "see in docs/verify.md which models can be scaled down"
        ) from error


def judge(layout: Layout, actual: Trace, expected: Trace, elapsed_s: float) -> Outcome:
    """Compare the two sides.

    Args:
        layout: of the small run.
        actual: of its ranks.
        expected: of one process.
        elapsed_s: for both.
    """
    found = first_difference(actual, expected)
    if found is None:
        return Outcome(0, error=largest_error(actual, expected), elapsed_s=elapsed_s)
    names = found.names or ("", "")
    holders = (_holders(layout, names[0]), _holders(layout, names[-1]))
    return Outcome(1, found, holders, found.error, elapsed_s)


def _holders(layout: Layout, name: str) -> str:
    """The stages and ranks of a parameter.

    Returns:
        Such as `stage 1, ranks 4 to 7`; without a pipeline, `all ranks`.
    """
    pipeline = layout.pipeline
    if pipeline is None or name not in pipeline.stages_of:
        return "all ranks"
    stages = pipeline.stages_of[name]
    ranks = [
        rank
        for index in pipeline.holders(stages)
        for rank in layout.mesh.ranks_along(_NOT_PIPELINE, layout.mesh.rank_of(Coordinate(pp=index)))
    ]
    noun = "stage" if len(stages) == 1 else "stages"
    return f"{noun} {', '.join(map(str, stages))}, {_rank_text(sorted(ranks))}"


def _rank_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
