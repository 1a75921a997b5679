"""Finds out what this machine has, how fast it is, what is wrong with it and how to fix that (`shardwise doctor`).

`system_info` looks, `measure` and `collective_bench` take times, `checks` judges, `show` prints; `diagnose` does all of
that but print. `calibrate` and `kernel_bench` measure the machine for the planner.

    diagnosis = diagnose(os.environ, Path("runs"))
    print(json.dumps(diagnosis.to_dict()))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.config.resolve import Config
from shardwise.doctor.checks import Finding, list_findings
from shardwise.doctor.collective_bench import DeviceKind, measure_collectives
from shardwise.doctor.measure import (
    MATMUL_DTYPES,
    CollectiveSpeed,
    CopySpeed,
    MatmulSpeed,
    Measurements,
    ProbeFailure,
    measure_device_copies,
    measure_disk,
    measure_host_copy,
    measure_matmul,
)
from shardwise.doctor.system_info import SwapInfo, SystemInfo, gather_facts, read_disk
from shardwise.launch.local import default_num_ranks
from shardwise.offload.disk_bench import measure_swap
from shardwise.runtime.memory_tracker import first_line
from shardwise.train.setup import check_job

__all__ = ["Diagnosis", "SwapInfo", "diagnose", "read_swap"]

SCHEMA = 1
_GPU_BUDGET_S = 0.5

Result = TypeVar("Result")
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
        values = asdict(self)
        for finding in values["findings"]:
            finding["cure"] = finding.pop("fix")
        return {"schema": SCHEMA, **values}


def diagnose(
    environ: Mapping[str, str],
    folder: Path,
    *,
    swap: SwapInfo | None = None,
    quick: bool = False,
    announce: Announce = lambda doing: None,
) -> Diagnosis:
    """Look at this machine, measure it and say what is wrong.

    Args:
        environ: the process's environment.
        folder: the folder of the runs.
        swap: what `read_swap` found about the folder for states on NVMe; None without one.
        quick: measure nothing.
        announce: called with a few words before each probe.
    """
    announce("looking at the machine")
    facts = gather_facts(environ, folder, swap)
    measurements = None if quick else _measure(facts, environ, announce)
    return Diagnosis(facts, measurements, tuple(list_findings(facts, measurements)))


def read_swap(nvme_path: Path | None, config: Config | None) -> SwapInfo | None:
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
    return None if nvme_path is None else SwapInfo(read_disk(nvme_path), needed_bytes)


class _Probes:
    """Runs probes one after another, and keeps going when one fails."""

    def __init__(self, announce: Announce) -> None:
        self.failures: list[ProbeFailure] = []
        self._announce = announce

    def run(self, name: str, probe: Callable[[], Result]) -> Result | None:
        self._announce(f"measuring {name}")
        try:
            return probe()
        except (RuntimeError, OSError, MemoryError) as error:
            self.failures.append(ProbeFailure(name, first_line(error)))
            return None


def _measure(facts: SystemInfo, environ: Mapping[str, str], announce: Announce) -> Measurements:
    probes = _Probes(announce)
    matmuls: list[MatmulSpeed] = []
    copies: list[CopySpeed] = []
    for device, budget_s in _devices(len(facts.gpus)):
        for dtype in MATMUL_DTYPES:
            name = f"matmul in {str(dtype).removeprefix('torch.')} on {device}"
            matmul = probes.run(name, partial(measure_matmul, device, dtype, budget_s))
            matmuls += [matmul] if matmul else []
        if device.type == "cuda":
            copies += probes.run(f"copies to {device}", partial(measure_device_copies, device, budget_s / 2)) or []
    host_copy = probes.run("copies in the host's memory", measure_host_copy)
    disk = probes.run("disk", partial(measure_disk, Path(facts.disk.path))) if facts.disk.writable else None
    swap_disk = facts.swap.disk if facts.swap is not None else None
    swap = None
    if swap_disk is not None and swap_disk.writable:
        swap = probes.run("swap files", partial(measure_swap, Path(swap_disk.path)))
    collectives: list[CollectiveSpeed] = []
    for backend, device_kind, num_ranks in _groups(facts):
        name = f"{backend} between {num_ranks} processes"
        announce(f"measuring {name}")
        found, failure = measure_collectives(device_kind, num_ranks, environ)
        collectives += found
        probes.failures += [ProbeFailure(name, failure)] if failure else []
    copies += [host_copy] if host_copy else []
    return Measurements(tuple(matmuls), tuple(copies), tuple(collectives), disk, tuple(probes.failures), swap)


def _devices(num_gpus: int) -> Iterator[tuple[torch.device, float]]:
    """Yield the devices that compute, and the seconds to spend on each dtype's matrix products."""
    for index in range(num_gpus):
        yield torch.device("cuda", index), max(0.1, _GPU_BUDGET_S / num_gpus)
    yield torch.device("cpu"), 0.5


def _groups(facts: SystemInfo) -> Iterator[tuple[str, DeviceKind, int]]:
    if facts.software.has_gloo:
        yield "gloo", "cpu", 2
    if len(facts.gpus) > 1 and facts.software.has_nccl:
        yield "nccl", "cuda", len(facts.gpus)
