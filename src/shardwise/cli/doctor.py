"""Run the command `shardwise doctor`: it looks at this machine and measures it, for people and for the planner."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from shardwise.cli.command import Count, Folder, be_rank, settings, split
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.launch.environment import cache_folder
from shardwise.launch.local import default_num_ranks
from shardwise.report.console import Terminal, progress, write_line


@click.command(epilog="exit code: 0, or 1 where a finding is an error")
@settings()
@click.option("--quick", is_flag=True, help="look only, measure nothing")
@click.option("--json", "as_json", is_flag=True, help="print all of it as JSON")
@click.option("--calibrate", is_flag=True, help="measure this machine for the planner, in 5 minutes; with --quick in 1")
@click.option("--num-procs", type=Count(1), help="ranks that --calibrate lets work at once (default: as for train)")
@click.option("--dir", "folder", type=Folder(), help="whose disk is measured (default: run.dir)")
@click.option("--nvme-path", type=Folder(), help="the folder for states on NVMe (default: tiers.nvme_path)")
@click.option("--be-calibrator", nargs=4, hidden=True)
def doctor(settings: Sequence[str], folder: Path | None, nvme_path: Path | None, **given: Any) -> int:
    """Say what this machine can do, what is wrong with it and how to fix that, in about 15 seconds."""
    if given["be_calibrator"] is not None:
        from shardwise.doctor.calibrate import be_calibrator

        rows, device_kind, disk, extent = given["be_calibrator"]
        be_rank(lambda env: be_calibrator(env, Path(rows), device_kind, Path(disk), extent))
    if given["calibrate"]:
        return _calibrate(settings, nvme_path or folder, given["num_procs"], given["quick"], given["as_json"])
    if given["num_procs"] is not None:
        raise ConfigError("flag-of-calibrate", "--num-procs is of --calibrate; add it, or leave --num-procs out")
    with progress("starting torch") as announce:
        from shardwise.doctor import diagnose, read_swap
        from shardwise.train.setup import job_config

        config = job_config(*split(settings)) if settings else None
        diagnosis = diagnose(
            os.environ,
            folder or Path((config or Config()).run.dir),
            swap=read_swap(nvme_path, config),
            quick=given["quick"],
            announce=announce,
        )
    if given["as_json"]:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        from shardwise.doctor.show import render

        Terminal(highlight=False).print(render(diagnosis))
    return diagnosis.exit_code


def _calibrate(settings: Sequence[str], disk: Path | None, num_procs: int | None, is_quick: bool, as_json: bool) -> int:
    """Measure with as many ranks as a job would have, and keep the profile where the planner looks for it."""
    cache = cache_folder(os.environ)
    # To find this out after minutes of measuring would be late.
    folder = next(parent for parent in (cache, *cache.parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            "profile-not-writable", f"the profile cannot be kept in {cache}; set XDG_CACHE_HOME to a writable folder"
        )
    with progress("starting torch") as announce:
        from shardwise.doctor.calibrate import LIMIT_S, calibrate
        from shardwise.doctor.show import render_profile
        from shardwise.doctor.system_info import read_disk
        from shardwise.planner.profile import write_profile
        from shardwise.runtime.device import choose_kind
        from shardwise.train.setup import job_config

        config = job_config(*split(settings))
        num_ranks = num_procs or config.run.num_procs or default_num_ranks(config.run.device)
        limit_words = "about a minute" if is_quick else f"at most {LIMIT_S / 60:.0f} minutes"
        announce(f"measuring {num_ranks} ranks at work at once, {limit_words}")
        disk = disk or Path(config.tiers.nvme_path or ".")
        read_disk(disk)  # refuses what is no folder before minutes of measuring
        profile, failure = calibrate(choose_kind(config.run.device).name, num_ranks, os.environ, disk, quick=is_quick)
    if failure is not None and not profile.matmuls:
        write_line(f"shardwise: the machine was not measured: {failure}", to_stderr=True)
        return 1
    path = write_profile(profile, cache)
    if as_json:
        print(profile.to_json(), end="")
        return 0
    console = Terminal(highlight=False)
    console.print(render_profile(profile))
    if failure is not None:
        console.print(f"not all was measured: {failure}", style="yellow")
    console.print(f"written to {path}; shardwise plan reads it", soft_wrap=True)
    return 0
