"""Gathers what only all ranks together know of a run: whose memory is fullest, and which rank the others waited for.

Every rank makes a `RankWatch` and calls it after each step. What it finds is a value; rank 0 also keeps `memory.json`
and `environment.json` in the run's folder.

>>> memory = RanksMemory(step=2, limit_bytes=100, ranks=({"parameters": 30}, {"parameters": 30, "activations": 50}))
>>> memory.fullest, memory.share
(1, 0.8)
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from shardwise.comm.collectives import ScalarSum
from shardwise.comm.merged import exchange_texts
from shardwise.config.written_files import write_whole
from shardwise.engine.engine import Engine
from shardwise.launch.host import machine_name, usable_bytes
from shardwise.report.page import installed
from shardwise.runtime.device import device_name, kind_of, numbers_on, total_bytes
from shardwise.runtime.format import format_s
from shardwise.runtime.timeline import WAIT

MEMORY_NAME: Final = "memory.json"
ENVIRONMENT_NAME: Final = "environment.json"
SLOW_FACTOR: Final = 2.0
LEAST_EXCESS_S: Final = 0.1  # short steps scatter by more than their length
_NUM_RECENT: Final = 20
_NUM_BEFORE: Final = 5
# What a share of the lost time explains it.
_EXPLAINS: Final = 0.5
# What a rank does before its step begins, such as to save or to evaluate.
BETWEEN: Final = "what it did before this step"
_VERSIONS: Final = ("shardwise", "torch", "numpy", "transformers", "accelerate", "peft", "datasets")

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class RanksMemory:
    """Holds the memory of all ranks at their peaks within one step.

    Attributes:
        limit_bytes: what the device of a rank has, or its share of the host's memory; None where it is not known.
        ranks: bytes by category of each rank.
    """

    step: int
    limit_bytes: int | None
    ranks: tuple[Mapping[str, int], ...]

    @property
    def fullest(self) -> int:
        """Return the rank that holds most."""
        return max(range(len(self.ranks)), key=self.total_bytes)

    @property
    def share(self) -> float | None:
        """Return how much of its limit the fullest rank holds."""
        return None if not self.limit_bytes else self.total_bytes(self.fullest) / self.limit_bytes

    def total_bytes(self, rank: int) -> int:
        """Return all that one rank holds."""
        return sum(self.ranks[rank].values())


@dataclass(frozen=True)
class SlowStep:
    """Says which rank the others waited for in a step that took long, and in which part of it.

    Attributes:
        step_s: seconds that it took on the slowest rank.
        rank: that the others waited for; None where all of them were slow, or the communication was.
        part: "data", "forward", "backward", "step", "other", "communication", or `BETWEEN`.
        extra_s: seconds that the part took longer than it does as a rule.
    """

    step: int
    step_s: float
    median_s: float
    num_ranks: int
    rank: int | None
    part: str
    extra_s: float

    def __str__(self) -> str:
        took = f"step {self.step} took {format_s(self.step_s)}, {self.step_s / self.median_s:.1f} x the median"
        if self.rank is not None and self.num_ranks > 1:
            return f"{took}: waited for rank {self.rank}, {format_s(self.extra_s)} longer in {self.part}"
        who = "" if self.num_ranks == 1 else "all ranks "
        return f"{took}: {who}{format_s(self.extra_s)} longer in {self.part}"

    def to_dict(self) -> dict[str, Any]:
        """Return what a line of metrics keeps of it."""
        return {"rank": self.rank, "part": self.part, "extra_s": self.extra_s, "median_s": self.median_s}


@dataclass(frozen=True)
class StepFacts:
    """Holds what `RankWatch.see` found; None where there is nothing to say."""

    memory: RanksMemory | None = None
    slow: SlowStep | None = None


class RankWatch:
    """Compares the ranks after each step; every rank makes it, and calls it after the same steps.

    Args:
        folder: of the run, in which rank 0 writes; None writes nothing.
    """

    def __init__(self, engine: Engine, folder: Path | None = None) -> None:
        self._engine = engine
        self._folder = folder if engine.comm.rank == 0 else None
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._recent_parts: deque[Mapping[str, float]] = deque(maxlen=_NUM_RECENT)
        self._unread: tuple[int, dict[str, float], ScalarSum] | None = None  # of the last step
        hosts = [json.loads(text) for text in self._exchange([machine_name(), socket.gethostname()], "hosts")]
        num_local = sum(host[0] == hosts[engine.comm.rank][0] for host in hosts)
        self._limit_bytes = device_limit_bytes(engine.device, num_local)
        if self._folder is not None:
            device = engine.device
            versions = {"python": platform.python_version()} | {name: installed(name) for name in _VERSIONS}
            values = {
                "versions": {name: version for name, version in versions.items() if version is not None},
                "device": device_name(device),
                "world_size": engine.comm.world_size,
                "hosts": list(dict.fromkeys(name for _, name in hosts)),
                "command": list(sys.argv),
            }
            with suppress(OSError, ValueError, KeyError):  # `note_command` may have kept none
                values["command"] = json.loads((self._folder / ENVIRONMENT_NAME).read_text())["command"]
            self._write(ENVIRONMENT_NAME, values)

    def see(self, step: int, step_s: float, peak_bytes: Mapping[str, int] | None) -> StepFacts:
        """Compare the ranks after a step.

        Args:
            step_s: seconds that it took on this rank.
            peak_bytes: this rank's memory by category; None where the step was not metered, which slows it.
        """
        if peak_bytes is None:
            return StepFacts(slow=self._find_slow(step, step_s))
        gathered = [json.loads(text) for text in self._exchange([dict(peak_bytes), self._limit_bytes], "memory")]
        limits = [limit for _, limit in gathered if limit is not None]
        memory = RanksMemory(step, min(limits, default=None), tuple(rank_bytes for rank_bytes, _ in gathered))
        self._write(MEMORY_NAME, {"step": step, "limit_bytes": memory.limit_bytes, "ranks": list(memory.ranks)})
        return StepFacts(memory=memory)

    def _find_slow(self, step: int, step_s: float) -> SlowStep | None:
        """Agree on how long the step took, so that all ranks decide equally, and compare them where that was long.

        On a GPU what is found is that of the step before: to read the numbers of this one now, the host would wait
        until the GPU has nothing to do.
        """
        comm = self._engine.comm
        parts = dict(self._engine.parts.timeline.clock.parts_s)
        parts["data"] = max(0.0, step_s - sum(parts.values()))  # what comes before and between the passes
        seen = step, parts, comm.start_max_of_scalars(numbers_on(comm.device, [step_s]), "time of the step")
        if comm.waits_on_host:
            return self._judge(*seen)
        before, self._unread = self._unread, seen
        return None if before is None else self._judge(*before)

    def _judge(self, step: int, parts: dict[str, float], longest: ScalarSum) -> SlowStep | None:
        """Say whether a step was slow, and which rank the others waited for."""
        (longest_s,) = longest.read()
        slow = None
        if len(self._recent_s) >= _NUM_BEFORE:
            usual_s = median(self._recent_s)
            if longest_s > SLOW_FACTOR * usual_s and longest_s - usual_s > LEAST_EXCESS_S:
                usual = {name: median(recent.get(name, 0.0) for recent in self._recent_parts) for name in parts}
                extra = {name: seconds - usual[name] for name, seconds in parts.items()}
                extras = [json.loads(text) for text in self._exchange(extra, "slow step")]
                slow = explain_slow(step, longest_s, usual_s, extras)
                if self._engine.comm.rank in (0, slow.rank):
                    log.info("%s", slow)
        self._recent_s.append(longest_s)
        self._recent_parts.append(parts)
        return slow

    def _exchange(self, value: Any, name: str) -> list[str]:
        """Return the JSON of every rank's value, of this rank alone where the others are simulated."""
        comm, text = self._engine.comm, json.dumps(value)
        return [text] * comm.world_size if comm.is_simulated else exchange_texts(comm, text, name)

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a file; a run goes on without it."""
        if self._folder is not None:
            try:
                write_whole(self._folder / name, json.dumps(values, indent=1) + "\n")
            except OSError as error:
                log.warning("%s is not written: %s", self._folder / name, error.strerror)


def explain_slow(step: int, step_s: float, median_s: float, extras: Sequence[Mapping[str, float]]) -> SlowStep:
    """Say which rank the others waited for: the one whose own work took longest beyond what it takes as a rule.

    >>> usual = {"data": 0.0, "forward": 0.01, "wait": 0.8}
    >>> explain_slow(57, 1.2, 0.4, [usual, {"data": 0.8, "forward": 0.0, "wait": -0.1}]).rank
    1
    >>> print(explain_slow(57, 1.2, 0.4, [usual, usual]))
    step 57 took 1.20 s, 3.0 x the median: all ranks 800 ms longer in communication
    >>> print(explain_slow(57, 1.2, 0.4, [usual, usual | {"wait": 0.0}]))
    step 57 took 1.20 s, 3.0 x the median: waited for rank 1, 800 ms longer in what it did before this step

    Args:
        extras: of each rank, seconds by part beyond the median of that part.
    """
    work = [{name: extra_s for name, extra_s in extra.items() if name != WAIT} for extra in extras]
    sums = [sum(parts.values()) for parts in work]
    rank = max(range(len(sums)), key=sums.__getitem__)
    if sums[rank] < _EXPLAINS * (step_s - median_s):
        waits = [max(extra.get(WAIT, 0.0), 0.0) for extra in extras]
        if min(waits) >= _EXPLAINS * max(waits):
            return SlowStep(step, step_s, median_s, len(extras), None, "communication", min(waits))
        late = min(range(len(waits)), key=waits.__getitem__)  # it came late, so that it waited least
        return SlowStep(step, step_s, median_s, len(extras), late, BETWEEN, max(waits) - waits[late])
    slowest_part = max(work[rank], key=work[rank].__getitem__)
    is_everywhere = len(extras) > 1 and min(sums) > _EXPLAINS * sums[rank]
    return SlowStep(
        step, step_s, median_s, len(extras), None if is_everywhere else rank, slowest_part, work[rank][slowest_part]
    )


def device_limit_bytes(device: torch.device, num_local_ranks: int) -> int | None:
    """Return the memory that one rank may fill: a GPU's, or its share of the host's, which `num_local_ranks` share."""
    if device.type == "meta":
        return None
    return usable_bytes() // num_local_ranks if kind_of(device).is_cpu else total_bytes(device)


def note_command(folder: Path) -> None:
    """Keep the command of this process for the ranks that it starts, whose own command says little."""
    with suppress(OSError):  # a run does without
        write_whole(folder / ENVIRONMENT_NAME, json.dumps({"command": sys.argv}) + "\n")
