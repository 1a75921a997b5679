"""Run the command `shardwise verify`: it compares a layout, on a scaled-down model, with one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from shardwise.cli.command import FILE, Count, as_written, be_rank, settings, split
from shardwise.config.errors import ConfigError
from shardwise.config.untrusted_files import UntrustedFileError, read_json
from shardwise.report.console import Terminal, progress

if TYPE_CHECKING:
    from shardwise.verify.compare import TrainingDifference
    from shardwise.verify.job import VerifyJob
    from shardwise.verify.run import VerifyOutcome


@click.command(
    epilog=as_written("""
examples:
  shardwise verify my.toml                                 the ranks that the mesh says
  shardwise verify my.toml --world-size 512 mesh.pp=16
  shardwise verify my.toml --model meta-llama/config.json  a Hugging Face model in place of the config's

exit code: 0 equal, 1 different or a rank failed, 2 the config cannot be
""")
)
@settings()
@click.option("--world-size", type=Count(1), help="ranks of the run, where the mesh leaves that open")
@click.option("--model", type=FILE, help="a Hugging Face folder or config.json")
@click.option("--steps", type=Count(1), default=3, help="optimizer steps to train")
@click.option("--processes", type=Count(1), default=16, help="processes at most")
@click.option("--be-rank", "rank_folder", type=FILE, hidden=True)
def verify(
    settings: Sequence[str],
    world_size: int | None,
    model: Path | None,
    steps: int,
    processes: int,
    rank_folder: Path | None,
) -> int:
    """Prove that a config's layout trains as one process does, without its machines.

    The config's layout is checked at its own size, then folded to at most 16 processes of this machine: every axis of
    several ranks keeps several. A small copy of the model is trained in float64, on these and in one plain process.
    """
    if rank_folder is not None:
        from shardwise.verify.run import be_rank as train_as_rank

        be_rank(lambda env: train_as_rank(env, rank_folder))
    console = Terminal(highlight=False)
    with progress("laying the run out at its own size"):
        from shardwise.train.setup import job_config
        from shardwise.verify.job import make_job
        from shardwise.verify.run import verify as run_verify

        config = job_config(*split(settings))
        source = model or config.model.path
        values = None if source is None else read_model(Path(source).expanduser())
        job = make_job(config, world_size, huggingface=values, num_steps=steps, most_processes=processes)
    console.print(describe(job))
    with progress("training") as say:
        # The ranks need no GPU.
        outcome = run_verify(job, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, announce=say)
    console.print(conclude(job, outcome))
    return outcome.exit_code


def read_model(path: Path) -> dict[str, Any]:
    """Read the values of a Hugging Face `config.json`, or of the one in a folder.

    Raises:
        ConfigError: there is none, or it is no table of keys.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = read_json(file, "give a Hugging Face config.json")
    except UntrustedFileError as error:
        raise ConfigError(error.code, f"--model: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            "model-config-not-a-table", f"--model {file} is no table of keys; give a Hugging Face config.json"
        )
    return values


def describe(job: VerifyJob) -> Table:
    """Describe what is trained in place of the run."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    config, mesh = job.config, job.config.mesh
    axes = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "cp": mesh.cp, "tp": mesh.tp}
    sizes = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size != 1)
    processes = "1 process" if job.world_size == 1 else f"{job.world_size} processes"
    schedule = f", {config.pipeline.schedule}" if mesh.pp > 1 else ""
    rows = [
        ("layout", f"{processes}{' = ' if sizes else ''}{sizes}, ZeRO-{config.zero.stage}{schedule}"),
        ("folded", ", ".join(job.folded) or "nothing"),
        ("shrunk", ", ".join(job.shrunk) or "nothing"),
        ("replaced", ", ".join(job.replaced)),
    ]
    for label, text in rows:
        if text:
            grid.add_row(label, Text(text))
    return grid


def conclude(job: VerifyJob, outcome: VerifyOutcome) -> Text:
    """Describe the outcome in a few lines."""
    difference, steps = outcome.difference, f"{job.num_steps} step{'s' if job.num_steps > 1 else ''}"
    if outcome.exit_code == 0:
        line = f"{steps} in {outcome.elapsed_s:.1f} s, largest error {outcome.error:.1e} of 1e-9 allowed"
        return Text.assemble(("equal", "bold green"), f": losses, gradients and parameters, {line}")
    if difference is None:
        why = "stopped" if outcome.folder is None else f"the small run failed; its logs are in {outcome.folder}"
        return Text.assemble(("nothing is proved", "bold red"), f": {why}")
    return Text("\n").join(_difference(difference, outcome))


def _difference(found: TrainingDifference, outcome: VerifyOutcome) -> list[Text]:
    actual, expected = found.values
    by = f"by {found.error:.1e} of the largest value ({actual:.6g} where one process has {expected:.6g})"
    if not found.names:
        return [Text.assemble(("different", "bold red"), f": the {found.what} of step {found.step}, {by}")]
    first, last = found.names[0], found.names[-1]
    lines = [
        Text.assemble(("different", "bold red"), f": the {found.what} of ", (first, "bold"), f" in step {found.step}"),
        Text(f"  held by {outcome.holders[0]}; it differs {by}"),
    ]
    if len(found.names) > 1:
        where = f"the last, at which a backward begins, is {last}, held by {outcome.holders[1]}"
        lines.append(Text(f"  {len(found.names)} tensors differ; {where}"))
    return lines
