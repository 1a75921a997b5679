"""Run the command `shardwise train`: it starts the ranks of a run, is one of them, or simulates them."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

import click
from rich.console import Console

from shardwise.cli.command import Count, as_written, settings, show_dry_run, split
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.launch.environment import RankEnv, cache_folder, detect, lone_rank
from shardwise.launch.signals import StopFlag, install_stop_signal
from shardwise.report.console import LastingStream, Terminal, progress, refuse


@click.command(
    epilog=as_written(f"""
keys are section.key; `shardwise config` prints each with its meaning. Sections:
{textwrap.fill(", ".join(Config.model_fields), width=76, initial_indent="  ", subsequent_indent="  ")}

examples:
  shardwise train                                     the tiny preset on Python's own source, about two minutes
  shardwise train --data book.txt run.steps=1000      a text file, a folder or JSONL
  shardwise train --model llama --data chats.jsonl    fine-tunes a Hugging Face folder; --lora trains adapters
  shardwise train zero.stage=3 batch.global_size=64   any key of `shardwise config`
  shardwise train my.toml optimizer.lr=1e-3           a file, and what differs from it
  shardwise train runs/a/config.json                  what a run had, once more
  shardwise train my.toml --dry-run --world-size 512  what each of 512 ranks would hold and send, in seconds
  shardwise train my.toml --resume auto               goes on from the last checkpoint, on however many ranks
  torchrun --nproc-per-node 8 -m shardwise train      joins the ranks there are; so does srun
""")
)
@settings()
@click.option("--model", metavar="FOLDER", help="a Hugging Face folder to fine-tune (model.path)")
@click.option("--lora", is_flag=True, help="train adapters of rank 16 (lora.rank)")
@click.option("--data", metavar="PATH", help="text, JSONL, Parquet, or a folder of these (data.path)")
@click.option("--dry-run", is_flag=True, help="say what a rank would hold and send; start nothing")
@click.option("--world-size", type=Count(1), help="ranks of the dry run; none is started")
@click.option(
    "--resume",
    metavar="auto|PATH",
    help="go on from the newest whole checkpoint: of a run or a folder; auto: of checkpoint.path, or without it of the "
    "last run of this name (run.name, else the model's) in run.dir; where there is none, start afresh",
)
@click.option("--prepared", nargs=2, type=Path, hidden=True)
def train(
    settings: Sequence[str],
    model: str | None,
    lora: bool,
    data: str | None,
    dry_run: bool,
    world_size: int | None,
    resume: str | None,
    prepared: tuple[Path, Path] | None,
) -> int:
    """Train a decoder on text, or fine-tune a Hugging Face model on text or chats.

    It uses every GPU there is, or two CPU processes.
    """
    path, assignments = split(settings)
    flags = {"model.path": model, "lora.rank": 16 if lora else None, "data.path": data}
    settings_given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None] + assignments
    if dry_run:
        return _dry_run(path, settings_given, resume, world_size)
    if world_size is not None:
        raise ConfigError(
            "flag-of-dry-run", f"--world-size {world_size} is of a dry run; add --dry-run or leave it out"
        )
    env = detect(os.environ)
    if env is None and prepared is None:
        return _start(path, settings_given, resume)
    # Before torch is imported, which takes a second or two: Ctrl-C is to be heard from the start.
    stop = install_stop_signal()
    env = replace(env or lone_rank(), cache=cache_folder(os.environ))
    exit_code = _be_rank(env, stop, (path, settings_given, resume), prepared)
    from shardwise.launch.process_group import leave

    return leave(exit_code)


def _job(
    path: str | None, assignments: Sequence[str], resume: str | None, console: Console | None
) -> tuple[Config, Path | None]:
    """Return the config of the run, and the checkpoint that it goes on from; on the console, that there is none."""
    from shardwise.train.checkpoints import auto_place, resumed_job
    from shardwise.train.setup import job_config

    if resume is None:
        return job_config(path, assignments), None
    config, source = resumed_job(path, assignments, resume)
    if source is None and console is not None:
        line = f"--resume auto: {auto_place(config)}; the run starts afresh"
        console.print(line, highlight=False, soft_wrap=True)
    return config, source


def _start(path: str | None, assignments: Sequence[str], resume: str | None) -> int:
    from shardwise.launch.local import default_num_ranks
    from shardwise.train.checkpoints import keep_global_batch
    from shardwise.train.run import start

    console = Terminal()
    with progress("reading the config"):
        config, source = _job(path, assignments, resume, console)
    if source is not None:
        config = keep_global_batch(config, config.run.num_procs or default_num_ranks(config.run.device))
    return start(config, console, source)


def _dry_run(path: str | None, assignments: Sequence[str], resume: str | None, world_size: int | None) -> int:
    with progress("starting torch"):  # seconds
        from shardwise.train.checkpoints import keep_global_batch
        from shardwise.verify.dry_run import dry_run_size

        config, source = _job(path, assignments, resume, None)
    num_ranks = dry_run_size(config, world_size)
    return show_dry_run(config if source is None else keep_global_batch(config, num_ranks), num_ranks)


def _be_rank(
    env: RankEnv,
    stop: StopFlag,
    asked: tuple[str | None, Sequence[str], str | None],
    prepared: tuple[Path, Path] | None,
) -> int:
    from shardwise.launch.process_group import LaunchError
    from shardwise.train.checkpoints import keep_global_batch
    from shardwise.train.run import config_of, join
    from shardwise.train.setup import resolve_job

    console = Terminal(file=cast(TextIO, LastingStream(sys.stdout)))
    try:
        if prepared is not None:
            resume = None if asked[2] is None else Path(asked[2])
            return join(config_of(prepared[0]), env, stop, console, resume, prepared)
        try:
            config, source = _job(*asked, console if env.rank == 0 else None)
            if source is not None:
                config = keep_global_batch(config, env.world_size)
            config = resolve_job(config, env.world_size, num_local_ranks=env.local_world_size)
        except ConfigError as error:
            # All ranks of a machine find the same mistake: one of them says so.
            return refuse(error) if env.local_rank == 0 else 2
        return join(config, env, stop, console, source)
    except ConfigError as error:
        return refuse(error)
    except LaunchError as error:
        return refuse(error, 1)
    except KeyboardInterrupt:
        return 130
