"""Find out what this machine has, how fast it is, what is wrong with it and how to fix that (`shardwise doctor`).

`system_info` looks, `calibrate` measures, also for the planner, `checks` judges, `show` prints.

    diagnosis = diagnose(os.environ, Path("runs"))
    print(json.dumps(diagnosis.to_dict()))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.config.resolve import Config
from shardwise.doctor.calibrate import Measurements, glance
from shardwise.doctor.checks import Finding, list_findings
from shardwise.doctor.system_info import DiskInfo, SystemInfo, gather_facts, read_disk
from shardwise.launch.local import default_num_ranks
from shardwise.offload.disk_bench import SwapSpeed, measure_swap
from shardwise.runtime.memory_tracker import first_line
from shardwise.train.setup import check_job

__all__ = ["Diagnosis", "diagnose", "read_swap"]

SCHEMA = 2
Announce = Callable[[str], None]


@dataclass(frozen=True)
class Diagnosis:
    """Holds a machine's facts, measurements and findings; `measurements` is None where nothing was measured."""

    facts: SystemInfo
    measurements: Measurements | None
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """Return 1 where something is wrong, else 0; warnings and notes do not count."""
        return int(any(finding.level == "error" for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `schema` changes when a key is removed or changes its meaning."""
        return {"schema": SCHEMA, **asdict(self)}


def diagnose(
    environ: Mapping[str, str],
    folder: Path,
    *,
    swap: DiskInfo | None = None,
    quick: bool = False,
    announce: Announce = lambda doing: None,
) -> Diagnosis:
    """Look at this machine, measure it and say what is wrong.

    Args:
        swap: what `read_swap` found about the folder for states on NVMe; None without one.
        announce: called with a few words before each probe.
    """
    announce("looking at the machine")
    facts = gather_facts(environ, folder, swap)
    measurements = None if quick else _measure(facts, environ, announce)
    return Diagnosis(facts, measurements, tuple(list_findings(facts, measurements)))


def read_swap(nvme_path: Path | None, config: Config | None) -> DiskInfo | None:
    """Look at the folder that would store a job's states on NVMe; return None where no state would be stored there.

    Args:
        nvme_path: the folder; None takes the config's.
        config: the job's config, from which the space that it needs follows; None where there is none.

    Raises:
        ConfigError: the config is wrong, as for a run.
    """
    needed_bytes = None
    if config is not None:
        num_ranks = config.run.num_procs or default_num_ranks(config.run.device)
        _, layout = check_job(config, num_ranks)
        needed_bytes = num_ranks * sum(layout.bytes_at_rest(tier="nvme").values()) or None
        if needed_bytes is not None and nvme_path is None and config.tiers.nvme_path is not None:
            nvme_path = Path(config.tiers.nvme_path)
    return None if nvme_path is None else replace(read_disk(nvme_path), needed_bytes=needed_bytes)


def _measure(facts: SystemInfo, environ: Mapping[str, str], announce: Announce) -> Measurements:
    num_ranks = facts.num_train_ranks
    probe = f"with {num_ranks} rank{'s' if num_ranks > 1 else ''} at work at once"
    announce(f"measuring {probe}")
    ranks, failure = glance("cuda" if facts.gpus else "cpu", num_ranks, environ)
    failures = {} if failure is None else {probe: failure}
    speeds: dict[str, SwapSpeed] = {}
    for name, disk in (("disk", facts.disk), ("swap", facts.swap)):
        if disk is not None and disk.writable:
            announce(f"measuring {disk.path}")
            try:
                speeds[name] = measure_swap(Path(disk.path))
            except (RuntimeError, OSError) as error:
                failures[disk.path] = first_line(error)
    return Measurements(ranks, failures=failures, **speeds)
