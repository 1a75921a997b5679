"""Run the commands `shardwise checkpoint show | verify | diff | export`.

The exit code is 2 for what the user must fix first, 1 for a checkpoint that is damaged or a disk that fails; `diff` has
the codes of diff(1). Only what reads tensors imports torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from rich.console import RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from shardwise.cli.command import FILE, Choice, as_written
from shardwise.config.resolve import Dtype
from shardwise.report.console import Terminal, refuse, write_line

if TYPE_CHECKING:
    from shardwise.checkpoint.hf.packer import Weights
    from shardwise.checkpoint.offline import Progress as Report


_PIPE_WIDTH = 1000
_step = click.option("--step", type=int, metavar="N", help="this one of several; the newest by default")


class _Guarded(click.Group):
    """Turn what a command raises into a line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a damaged checkpoint and a failing disk give 1, or 2 from `diff`, and what is wrong 2."""
        from shardwise.checkpoint.manifest import CheckpointError, DamagedError

        try:
            return super().invoke(ctx)
        except CheckpointError as error:
            # Its cause is what the system refused, if it did.
            is_damage = isinstance(error, DamagedError) or isinstance(error.__cause__, OSError)
            return refuse(error, 1 if is_damage and ctx.invoked_subcommand != "diff" else 2)
        except BrokenPipeError:
            raise
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            return _say(f"{where}{error.strerror or error}", 2 if ctx.invoked_subcommand == "diff" else 1)


def _say(message: object, exit_code: int) -> int:
    write_line(f"shardwise: {message}", to_stderr=True)
    return exit_code


@click.group(
    cls=_Guarded,
    epilog=as_written("""
examples:
  shardwise checkpoint show runs/a              what there is, what the newest holds
  shardwise checkpoint verify runs/a            check every byte of the newest
  shardwise checkpoint diff runs/a runs/b       how the newest of each differ
  shardwise checkpoint export runs/a my-model   a Hugging Face folder of its weights
"""),
)
def checkpoint() -> None:
    """Look at checkpoints, check, compare and export them.

    A checkpoint is a folder such as step-00000100. Where a folder of several or of a run is given, the newest is
    meant.
    """


@checkpoint.command(
    epilog=as_written("""
examples:
  shardwise checkpoint show runs/a                      all, the newest in detail
  shardwise checkpoint show runs/a --step 200           one in detail
  shardwise checkpoint show runs/a --tensors            with every tensor
  shardwise checkpoint show runs/a --tensors norm       with "norm" in the name
  shardwise checkpoint show runs/a --tensors '*.0.*'    that match
  shardwise checkpoint show runs/a --json               for other programs

exit code: 0; 1 if it is damaged; 2 if there is nothing to show
""")
)
@click.argument("path", type=FILE)
@_step
@click.option("--tensors", is_flag=False, flag_value="*", metavar="[PATTERN]", help="list tensors whose name matches")
@click.option("--json", "as_json", is_flag=True, help="print it as JSON")
def show(path: Path, step: int | None, tensors: str | None, as_json: bool) -> int:
    """Say what a checkpoint holds."""
    from shardwise.checkpoint import show
    from shardwise.checkpoint.commit import read_manifest
    from shardwise.checkpoint.find import find, is_root, root_of, survey

    path = root_of(path)
    folders = find(path, step)
    checkpoints = survey(path) if is_root(path) and step is None else []
    complete = [
        (checkpoint.folder, checkpoint.manifest) for checkpoint in checkpoints if checkpoint.manifest is not None
    ]
    if checkpoints and not complete:
        _print(show.render_root(path, checkpoints))
        newest = checkpoints[0]
        why = f"the newest, {newest.folder.name}: {newest.damage}"
        return _say(f"{path} has no whole checkpoint; of {why}; copy it again from where it was saved", 1)
    folder, manifest = complete[0] if checkpoints else (folders[0], read_manifest(folders[0]))
    matching = show.matching(manifest.tensors, tensors) if tensors is not None else []
    if as_json:
        detail = show.to_json(folder, manifest, matching)
        print(
            json.dumps(show.root_to_json(path, checkpoints) | {"newest": detail} if checkpoints else detail, indent=2)
        )
        return 0
    if checkpoints and not matching:
        _print(show.render_root(path, checkpoints), "")
    _print(show.render_checkpoint(folder, manifest))
    if matching:
        _print(show.render_tensors(matching))
    return 0


@checkpoint.command(epilog="exit code: 0 if it is whole, 1 if it is damaged, 2 if there is none")
@click.argument("path", type=FILE)
@_step
def verify(path: Path, step: int | None) -> int:
    """Read every byte of a checkpoint and say what is damaged."""
    from shardwise.checkpoint.find import find

    folder = find(path, step)[0]
    with _bar("reading") as report:
        from shardwise.checkpoint.offline import verify
        from shardwise.checkpoint.show import render_verification

        start_s = time.monotonic()
        damage = verify(folder, report)
    _print(render_verification(folder, damage, time.monotonic() - start_s))
    return 1 if damage.damages else 0


@checkpoint.command(
    epilog=as_written("""
examples:
  shardwise checkpoint diff runs/a/step-00000100 runs/b/step-00000100
  shardwise checkpoint diff runs/a runs/b --weights    no optimizer, no config

exit code: 0 if they are equal, 1 if they differ, 2 for trouble
""")
)
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--weights", is_flag=True, help="compare only the values of parameters and buffers")
@click.option("--all", "is_whole", is_flag=True, help="list all that differs, not the first 20 of each kind")
def diff(a: Path, b: Path, weights: bool, is_whole: bool) -> int:
    """Say how two checkpoints differ.

    The layouts that wrote them may differ. Values are compared bit for bit.
    """
    from shardwise.checkpoint.find import find

    first, second = find(a)[0], find(b)[0]
    with _bar("comparing") as report:
        from shardwise.checkpoint.compare import compare
        from shardwise.checkpoint.show import render_difference

        difference = compare(first, second, weights, report)
    _print(render_difference(first, second, difference, is_whole))
    return 1 if difference else 0


@checkpoint.command(
    epilog=as_written("""
examples:
  shardwise checkpoint export runs/a my-model
  shardwise checkpoint export runs/a/step-00000100 my-model --dtype fp32
  shardwise checkpoint export runs/a my-model --hf-config base/config.json
  shardwise checkpoint export runs/a my-model --tokenizer base
  shardwise checkpoint export runs/a my-model --weights int4

exit code: 0; 1 if it is damaged or the disk fails; 2 if it cannot be done so
""")
)
@click.argument("source", type=FILE)
@click.argument("folder", type=FILE)
@click.option("--dtype", type=Choice(get_args(Dtype)), help="of the weights; by default the run's parameters'")
@click.option("--weights", type=Choice(["int8", "int4"]), help="pack the linear layers in so many bits")
@click.option("--hf-config", type=FILE, help="the config.json to put there; by default the checkpoint's own")
@click.option("--tokenizer", type=FILE, metavar="FOLDER", help="whose tokenizer to put there; by default the run's own")
@_step
def export(
    source: Path,
    folder: Path,
    dtype: Dtype | None,
    weights: Weights | None,
    hf_config: Path | None,
    tokenizer: Path | None,
    step: int | None,
) -> int:
    """Write the weights of a checkpoint as a Hugging Face folder.

    from_pretrained of transformers loads the folder, vLLM and others serve it. The layout that has saved the checkpoint
    does not matter, nor does its optimizer.
    """
    newest = _newest_whole(source, step)
    with _bar("writing") as report:
        from shardwise.checkpoint.convert import export_checkpoint, export_packed
        from shardwise.checkpoint.show import render_exported

        start_s = time.monotonic()
        of_run = newest.absolute().parent.parent / "tokenizer"  # as shardwise train leaves it
        tokenizer = tokenizer or (of_run if of_run.is_dir() else None)
        write = partial(export_packed, weights=weights) if weights else export_checkpoint
        exported = write(newest, folder, dtype=dtype, hf_config=hf_config, tokenizer=tokenizer, progress=report)
    _print(render_exported(newest, exported, time.monotonic() - start_s))
    if tokenizer is None:
        _print("no tokenizer is beside them, as the checkpoint is in no run's folder; --tokenizer FOLDER adds one")
    return 0


def _newest_whole(path: Path, step: int | None) -> Path:
    """Return the newest whole checkpoint at `path`; print a line on stderr where newer ones are damaged."""
    from shardwise.checkpoint.find import find, newest_whole

    source, _ = newest_whole(path, step)
    if (newest := find(path, step)[0]) != source:
        write_line(f"shardwise: {newest.name} is damaged (see checkpoint verify); taking {source.name}", to_stderr=True)
    return source


def _print(*blocks: RenderableType) -> None:
    console = Terminal(highlight=False, markup=False)
    if not console.is_terminal:
        # A program that reads a pipe reads whole lines, so they are not wrapped.
        console = Terminal(highlight=False, markup=False, width=_PIPE_WIDTH)
    for block in blocks:
        console.print(block)


@contextmanager
def _bar(what: str) -> Iterator[Report]:
    """Show a bar with bytes and rate on stderr, if that is a terminal; remove it when the command ends."""
    console = Terminal(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=None)
        yield lambda num_done_bytes, num_bytes: bars.update(task, completed=num_done_bytes, total=num_bytes)
