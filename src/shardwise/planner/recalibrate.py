"""Correct a machine's profile by what its training runs took.

Each run keeps what it measured, by part of its step (`prediction.json`). For each part, the speeds that it depends on
are scaled by the factor that brings the logarithms of predicted and measured seconds nearest together. Few runs move a
factor little, and it is at most 3 either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.resolve import Config, ConfigError
from shardwise.config.untrusted_files import read_json
from shardwise.planner.configs import job_of, strategy_of
from shardwise.planner.hardware import cluster_of
from shardwise.planner.profile import Profile
from shardwise.planner.step_time import TimeModel

PREDICTION_NAME: Final = "prediction.json"
"""The file that each run keeps in its folder."""

PARTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "compute": ("compute", "recompute", "tensor", "context", "experts"),
        "bubble": ("bubble",),
        "data": ("data",),
        "offload": ("offload",),
        "step": ("step",),
        "other": ("other",),
    }
)
"""The planner's parts, by the part of a timeline that contains them: what a block exchanges is part of its forward."""

# What is fitted to which parts. The loss is outside the blocks that a timeline sees.
_FITTED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"compute": ("compute", "other"), "data": ("data",), "offload": ("offload",), "step": ("step",)}
)
# Runs of no effect that each part is assumed to have besides, and the most that a factor may be: else something else is
# wrong. In a smaller share of a step the timeline's own cost is too large.
_PRIOR_RUNS, _MOST, _LEAST_SHARE, _NUM_ROUNDS = 0.25, math.log(3.0), 0.01, 3


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """Hold what a run stored: its resolved config, and what its steps took on rank 0, by `PARTS` too."""

    device: str
    world_size: int
    vocab_size: int
    config: Config
    parts: Mapping[str, float]
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Refit:
    """Hold a corrected profile.

    Attributes:
        factors: by which the seconds of each part were multiplied.
        before, after: the mean error of a step's time over the runs, as a share.
    """

    profile: Profile
    factors: Mapping[str, float]
    num_runs: int
    before: float
    after: float

    def __str__(self) -> str:
        runs, ranks = (
            f"{n} {what}{'s' * (n != 1)}" for n, what in ((self.num_runs, "run"), (self.profile.num_ranks, "rank"))
        )
        changed = ", ".join(f"{name} x {factor:.2f}" for name, factor in self.factors.items() if factor != 1.0)
        error = f"error of a step {100 * self.before:.1f} % before, {100 * self.after:.1f} % after"
        return f"{self.profile.device}, {ranks}: {runs}, {error}; {changed or 'nothing to correct'}"

    @property
    def is_changed(self) -> bool:
        """Say whether any factor changed."""
        return any(factor != 1.0 for factor in self.factors.values())


def by_part(parts: Mapping[str, float]) -> dict[str, float]:
    """Sum the planner's parts into those of a timeline."""
    return {name: sum(parts.get(each, 0.0) for each in names) for name, names in PARTS.items()}


def read_runs(folder: Path) -> tuple[StoredRun, ...]:
    """Read the timed runs in a folder, of any depth; others, and damaged files, are left out.

    Raises:
        ConfigError: there is none.
    """
    runs = tuple(run for path in sorted(folder.rglob(PREDICTION_NAME)) if (run := _read_run(path)) is not None)
    if not runs:
        raise ConfigError(
            "no-timed-run", f"{folder} holds no run that was timed; give a folder in which shardwise train has run"
        )
    return runs


def refit(profile: Profile, runs: Sequence[StoredRun]) -> Refit:
    """Correct a profile by runs on its machine; runs with other numbers of ranks count only where there are no others.

    Raises:
        ConfigError: none of the runs is of this device.
    """
    own = [run for run in runs if run.device == profile.device]
    own = [run for run in own if run.world_size == profile.num_ranks] or own
    if not own:
        raise ConfigError(
            "no-run-of-device", f"no run was on {profile.device}; give runs of the machine whose profile it is"
        )
    logs = dict.fromkeys(_FITTED, 0.0)
    fitted = profile
    for _ in range(_NUM_ROUNDS):
        predicted = [_predicted(fitted, run) for run in own]
        for name in _FITTED:
            logs[name] = max(-_MOST, min(_MOST, logs[name] + _correction(name, own, predicted)))
        fitted = scaled(profile, logs)
    logs = {name: each * len(own) / (len(own) + _PRIOR_RUNS) for name, each in logs.items()}
    fitted = scaled(profile, logs)
    before, after = _error(profile, own), _error(fitted, own)
    if after >= before:
        fitted, after, logs = profile, before, dict.fromkeys(_FITTED, 0.0)
    factors = {name: math.exp(each) for name, each in logs.items()}
    return Refit(profile=fitted, factors=factors, num_runs=len(own), before=before, after=after)


def _read_run(path: Path) -> StoredRun | None:
    try:
        values = read_json(path, "")
        measured = values["measured"]
        if not measured or not measured["step_s"]:
            return None
        return StoredRun(
            device=values["device"],
            world_size=values["world_size"],
            vocab_size=values["vocab_size"],
            config=Config.from_dict(values["config"]),
            parts=measured["parts"],
            step_s=measured["step_s"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _predicted(profile: Profile, run: StoredRun) -> dict[str, float]:
    job = job_of(run.config, cluster_of(profile, run.world_size))
    job = replace(job, shape=replace(job.shape, vocab_size=run.vocab_size))
    return by_part(TimeModel(job).estimate(strategy_of(run.config, run.world_size)).parts)


def _correction(name: str, runs: Sequence[StoredRun], predicted: Sequence[Mapping[str, float]]) -> float:
    """Return the mean logarithm of measured over predicted seconds, runs weighted by the part's share of their step."""
    total = weights = 0.0
    for run, parts in zip(runs, predicted, strict=True):
        found_s, said_s = (sum(each.get(part, 0.0) for part in _FITTED[name]) for each in (run.parts, parts))
        weight = min(found_s, said_s) / run.step_s
        if weight >= _LEAST_SHARE:
            total += weight * math.log(found_s / said_s)
            weights += weight
    return total / weights if weights else 0.0


def _error(profile: Profile, runs: Sequence[StoredRun]) -> float:
    logs = [abs(math.log(sum(_predicted(profile, run).values()) / run.step_s)) for run in runs]
    return math.expm1(sum(logs) / len(logs))


def scaled(profile: Profile, logs: Mapping[str, float]) -> Profile:
    """Return the profile with the seconds of each part multiplied by the exponential of its entry in `logs`."""
    compute, data, offload, step = (math.exp(logs[name]) for name in ("compute", "data", "offload", "step"))

    def longer(rows: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
        """Multiply all seconds of a table's rows."""
        return tuple(
            replace(row, **{each.name: factor * getattr(row, each.name) for each in fields(row) if _is_time(each.name)})
            for row in rows
        )

    return replace(
        profile,
        matmuls=longer(profile.matmuls, compute),
        attentions=longer(profile.attentions, compute),
        blocks=longer(profile.blocks, compute),
        heads=longer(profile.heads, compute),
        collectives=longer(profile.collectives, data),
        stream_bytes_per_s=profile.stream_bytes_per_s / compute,
        call_s=profile.call_s * compute,
        step_bytes_per_s=profile.step_bytes_per_s / step,
        copies_bytes_per_s=tuple((way, speed / offload) for way, speed in profile.copies_bytes_per_s),
        disk_read_bytes_per_s=profile.disk_read_bytes_per_s / offload,
        disk_write_bytes_per_s=profile.disk_write_bytes_per_s / offload,
    )


def _is_time(name: str) -> bool:
    return name == "seconds" or name.endswith("_s")
