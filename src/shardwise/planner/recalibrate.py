"""Correct a machine's profile by what its training runs took.

Each run keeps what it measured, by part of its step (`prediction.json`). For each part, the speeds that it depends on
are scaled by the factor that brings the logarithms of predicted and measured seconds nearest together. Few runs move a
factor little, and it is at most 3 either way.

>>> run = StoredRun(device="cpu", world_size=1, vocab_size=64, config=Config(), parts={"compute": 2.0}, step_s=2.0)
>>> by_part({"compute": 1.0, "tensor": 0.5, "data": 0.25})["compute"]
1.5
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from shardwise.config.resolve import Config, ConfigError
from shardwise.config.untrusted_files import read_json
from shardwise.planner.configs import job_of, strategy_of
from shardwise.planner.hardware import cluster_of
from shardwise.planner.profile import AttentionTime, BlockTime, HeadTime, Profile
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
# Runs of no effect that each part is assumed to have besides: few runs move a profile little.
_PRIOR_RUNS: Final = 0.25
# No machine computes three times as fast as it was measured: something else is wrong then.
_MOST: Final = math.log(3.0)
# Share of a step; in a smaller part the timeline's own cost is too large a share.
_LEAST_SHARE: Final = 0.01
_NUM_ROUNDS: Final = 3

_Passes = TypeVar("_Passes", AttentionTime, BlockTime, HeadTime)


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """Hold what a run stored: its config, and what its steps took on rank 0.

    Attributes:
        vocab_size: of its data.
        config: resolved.
        parts: seconds of a step, by `PARTS`.
    """

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
        runs = "1 run" if self.num_runs == 1 else f"{self.num_runs} runs"
        changed = ", ".join(f"{name} x {factor:.2f}" for name, factor in self.factors.items() if factor != 1.0)
        error = f"error of a step {100 * self.before:.1f} % before, {100 * self.after:.1f} % after"
        ranks = "1 rank" if self.profile.num_ranks == 1 else f"{self.profile.num_ranks} ranks"
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
    runs = []
    for path in sorted(folder.rglob(PREDICTION_NAME)):
        run = _read_run(path)
        if run is not None:
            runs.append(run)
    if not runs:
        raise ConfigError(
            "no-timed-run", f"{folder} holds no run that was timed; give a folder in which shardwise train has run"
        )
    return tuple(runs)


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
    return replace(
        profile,
        matmuls=tuple(replace(each, seconds=compute * each.seconds) for each in profile.matmuls),
        attentions=tuple(_longer(each, compute) for each in profile.attentions),
        blocks=tuple(_longer(each, compute) for each in profile.blocks),
        heads=tuple(_longer(each, compute) for each in profile.heads),
        collectives=tuple(replace(each, seconds=data * each.seconds) for each in profile.collectives),
        stream_bytes_per_s=profile.stream_bytes_per_s / compute,
        call_s=profile.call_s * compute,
        step_bytes_per_s=profile.step_bytes_per_s / step,
        copies_bytes_per_s=tuple((way, speed / offload) for way, speed in profile.copies_bytes_per_s),
        disk_read_bytes_per_s=profile.disk_read_bytes_per_s / offload,
        disk_write_bytes_per_s=profile.disk_write_bytes_per_s / offload,
    )


def _longer(each: _Passes, factor: float) -> _Passes:
    return replace(each, forward_s=factor * each.forward_s, backward_s=factor * each.backward_s)
