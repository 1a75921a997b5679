"""Measures what fewer bits cost in quality: a small model trains with and without them, once for each of some seeds.

The model is the preset `tiny`, on the config's data. Everything else that a layout changes is left out, since no layout
changes the numbers: states and parameters are encoded in one process too. Gradients are encoded only where several
ranks sum them, so then both trainings run on `NUM_RANKS` processes of this machine, a sequence a step on each.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ResolvedConfig
from shardwise.launch.environment import RankEnv
from shardwise.launch.local import launch_local
from shardwise.launch.process_group import LaunchError, start_process_group
from shardwise.train.loop import build_trainer
from shardwise.train.prepare import PreparedData
from shardwise.train.setup import job_config, prepare_job_data, resolve_job
from shardwise.verify.run import RANK_ARGV

NUM_RANKS: Final = 4
JOB_NAME: Final = "quality.json"
_LOSS_NAME: Final = "loss.json"
# The keys of the section `precision` that may encode something, and their values that do not.
_EXACT: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "states": ("master",),
        "gather": ("param",),
        "reduce": ("param", "fp32"),
        "reduce_feedback": (False,),
        "linears": ("keep",),
    }
)


@dataclass(frozen=True)
class Quality:
    """Holds the held-out losses, in nats a token, by seed.

    Attributes:
        codecs: the keys of `precision` that encode something, each with its value.
        seeds: of weights and order of the data.
        exact, encoded: the losses without the codecs, and with them.
    """

    codecs: tuple[str, ...]
    seeds: tuple[int, ...]
    exact: tuple[float, ...]
    encoded: tuple[float, ...]
    num_steps: int

    @property
    def shares(self) -> tuple[float, ...]:
        """Return by how much of itself the loss of each seed is higher with fewer bits."""
        return tuple(encoded / exact - 1 for encoded, exact in zip(self.encoded, self.exact, strict=True))


def measure_quality(
    config: Config,
    seeds: Sequence[int],
    num_steps: int,
    announce: Callable[[str], None] = lambda doing: None,
    environ: Mapping[str, str] | None = None,
) -> Quality:
    """Train with and without the codecs of a config, and return the held-out losses.

    Call it on the main thread where gradients are encoded, since it then handles signals.

    Args:
        config: whose `precision` and `data` are taken.
        seeds: one training of each kind for each.
        announce: called with a few words before each training.
        environ: the environment that processes inherit; None for this process's.

    Raises:
        ConfigError: the config encodes nothing.
        LaunchError: a process failed.
    """
    precision = config.precision
    encoded = [
        f"precision.{key}={str(getattr(precision, key)).lower()}"
        for key, exact in _EXACT.items()
        if getattr(precision, key) not in exact
    ]
    if not encoded:
        raise ConfigError(
            "nothing-encoded",
            f"precision.states={precision.states}, precision.gather={precision.gather} and precision.reduce="
            f"{precision.reduce} encode nothing; set one of them to int8 to see what it costs",
        )
    num_ranks = 1 if precision.reduce in _EXACT["reduce"] else NUM_RANKS
    base = [f"data.{key}={getattr(config.data, key)}" for key in ("path", "text_key") if getattr(config.data, key)]
    base += [f"precision.param={precision.param}"] if precision.param else []
    if num_ranks > 1:
        base += ["run.device=cpu", "batch.micro_size=1"]
    losses: dict[str, list[float]] = {"without": [], "with": []}
    data: PreparedData | None = None
    for number, seed in enumerate(seeds, 1):
        for side, values in losses.items():
            keys = [f"run.steps={num_steps}", f"run.seed={seed}", *base, *(encoded if side == "with" else ())]
            job = resolve_job(job_config(None, keys), num_ranks, num_ranks)
            data = data or prepare_job_data(job)
            announce(f"training {side} {' '.join(encoded)}, seed {number} of {len(seeds)}")
            values.append(_held_out_loss(job, data) if num_ranks == 1 else _loss_of_ranks(job, num_ranks, environ))
    return Quality(tuple(encoded), tuple(seeds), tuple(losses["without"]), tuple(losses["with"]), num_steps)


def _held_out_loss(config: ResolvedConfig, data: PreparedData) -> float:
    trainer = build_trainer(config, data)
    loss = math.nan
    try:
        for record in trainer.steps(lambda: False, lambda doing: None):  # the last step is evaluated
            loss = loss if record.eval_loss is None else record.eval_loss
    finally:
        trainer.engine.close(keep_values=False)
    return loss


def _loss_of_ranks(config: ResolvedConfig, num_ranks: int, environ: Mapping[str, str] | None) -> float:
    """Train on processes of this machine; their logs stay where one fails."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-quality-"))
    (folder / JOB_NAME).write_text(config.model_dump_json(), encoding="utf-8")
    exit_code = launch_local(
        [*RANK_ARGV, str(folder)], num_ranks, folder, threads_per_rank=1, environ=environ, grace_s=2.0
    )
    if exit_code != 0:
        raise LaunchError("quality-rank-failed", f"a rank ended with code {exit_code}; its log is in {folder}")
    loss = json.loads((folder / _LOSS_NAME).read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    return float(loss)


def be_rank(env: RankEnv, folder: Path) -> None:
    """Run as one of the ranks of a training; rank 0 writes the loss into the folder.

    Raises:
        LaunchError: the ranks did not meet.
        CommError: a collective failed or hung.
    """
    torch.set_num_threads(1)
    config = ResolvedConfig.from_dict(json.loads((folder / JOB_NAME).read_text(encoding="utf-8")))
    start_process_group(env, "cpu", config.run.timeout_s)
    loss = _held_out_loss(config, prepare_job_data(config))
    if env.rank == 0:
        (folder / _LOSS_NAME).write_text(json.dumps(loss), encoding="utf-8")


def render(quality: Quality) -> RenderableType:
    """Draw the losses by seed, and what fewer bits cost beside what another seed costs."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("seed", "exact", "encoded", "higher by"):
        table.add_column(name, justify="right")
    rows = zip(quality.seeds, quality.exact, quality.encoded, quality.shares, strict=True)
    for seed, exact, encoded, share in rows:
        table.add_row(f"{seed}", f"{exact:.4f}", f"{encoded:.4f}", f"{share:+.2%}")
    mean = statistics.fmean(quality.shares)
    spread = (max(quality.exact) - min(quality.exact)) / statistics.fmean(quality.exact)
    sentence = f"{' '.join(quality.codecs)} changes the held-out loss by {mean:+.2%}"
    line = f"{sentence} after {quality.num_steps:,} steps; another seed changes it by up to {spread:.2%}"
    return Group(table, Text(line))
