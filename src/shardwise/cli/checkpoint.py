"""Runs the commands `shardwise checkpoint show | verify | diff | reshard | export | import`.

As in `shardwise.cli.main`, errors are one line and an exit code: 2 for what the user must fix first, 1 for a
checkpoint that is damaged or a disk that fails, 130 for Ctrl-C; `diff` has the codes of diff(1). Only what reads
tensors imports torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from shardwise.config.resolve import Dtype
from shardwise.config.untrusted_files import printable
from shardwise.report.console import Terminal, refuse

if TYPE_CHECKING:
    from shardwise.checkpoint.offline import Progress as Report


_PIPE_WIDTH = 1000
# The names of files have digits for so many.
_MAX_FILES = 99_999
_PATH_HELP = "a step folder, or the folder of several"
_STEP_HELP = "this one of several; the newest by default"
_OVERVIEW = """\
A checkpoint is a folder such as step-00000100. Where a folder of several is
given, the newest is meant.

examples:
  shardwise checkpoint show runs/a          what there is, what the newest holds
  shardwise checkpoint verify runs/a        check every byte of the newest
  shardwise checkpoint diff runs/a runs/b   how the newest of each differ
  shardwise checkpoint reshard runs/a /mnt/b --files 1
"""
_SHOW_EXAMPLES = """\
examples:
  shardwise checkpoint show runs/a                      all, the newest in detail
  shardwise checkpoint show runs/a --step 200           one in detail
  shardwise checkpoint show runs/a --tensors            with every tensor
  shardwise checkpoint show runs/a --tensors norm       with "norm" in the name
  shardwise checkpoint show runs/a --tensors '*.0.*'    that match
  shardwise checkpoint show runs/a --json               for other programs

exit code: 0; 1 if it is damaged; 2 if there is nothing to show
"""
_VERIFY_EXAMPLES = """\
examples:
  shardwise checkpoint verify runs/a
  shardwise checkpoint verify runs/a/step-00000100

exit code: 0 if it is whole, 1 if it is damaged, 2 if there is none
"""
_DIFF_EXAMPLES = """\
The layouts that wrote them may differ. Values are compared bit for bit.

examples:
  shardwise checkpoint diff runs/a/step-00000100 runs/b/step-00000100
  shardwise checkpoint diff runs/a runs/b --weights    no optimizer, no config

exit code: 0 if they are equal, 1 if they differ, 2 for trouble
"""
_RESHARD_EXAMPLES = """\
Any layout loads any checkpoint as it is: this is for a file system that wants
fewer or smaller files, or for whole tensors. What one rank alone has, such as
the state of its generators, goes into the first file.

examples:
  shardwise checkpoint reshard runs/a /mnt/b --files 64
  shardwise checkpoint reshard runs/a /mnt/b --files 8 --step 200
  shardwise checkpoint reshard runs/a /mnt/b --files 1    tensors whole, under
                                                          their plain names

exit code: 0; 1 if it is damaged or the disk fails; 2 if it cannot be done so
"""
_EXPORT_EXAMPLES = """\
from_pretrained of transformers loads the folder, vLLM and others serve it. The
layout that has saved the checkpoint does not matter, nor does its optimizer.

examples:
  shardwise checkpoint export runs/a my-model
  shardwise checkpoint export runs/a/step-00000100 my-model --dtype fp32
  shardwise checkpoint export runs/a my-model --hf-config base/config.json
  shardwise checkpoint export runs/a my-model --tokenizer base

exit code: 0; 1 if it is damaged or the disk fails; 2 if it cannot be done so
"""
_IMPORT_EXAMPLES = """\
engine.load takes the checkpoint under any layout; engine.import_weights takes
the folder as it is, without this command.

examples:
  shardwise checkpoint import base-model runs/base
  shardwise checkpoint import base-model runs/base --decoder    for the model
                                                   that `shardwise train` has

exit code: 0; 1 if it is damaged or the disk fails; 2 if it cannot be done so
"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `checkpoint` to the commands of `shardwise`."""
    parser = _command(commands, "checkpoint", "look at checkpoints, check, compare and rewrite them", _OVERVIEW)
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_show(actions)
    _add_verify(actions)
    _add_diff(actions)
    _add_reshard(actions)
    _add_export(actions)
    _add_import(actions)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str, epilog: str
) -> argparse.ArgumentParser:
    description = f"{what[0].upper()}{what[1:]}."
    style = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=what, description=description, epilog=epilog, formatter_class=style)


def _add_show(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = _command(actions, "show", "say what a checkpoint holds", _SHOW_EXAMPLES)
    show.usage = f"{show.prog} [-h] [--step N] [--tensors [PATTERN]] [--json] PATH"
    show.add_argument("path", nargs="?", type=Path, metavar="PATH", help=_PATH_HELP)
    show.add_argument("--step", type=int, metavar="N", help=_STEP_HELP)
    show.add_argument(
        "--tensors", nargs="?", const="*", metavar="PATTERN", help="list tensors; those whose name matches"
    )
    show.add_argument("--json", action="store_true", help="print it as JSON")
    show.set_defaults(run=_guarded(_show), refuse=show.error)


def _add_verify(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = _command(actions, "verify", "read every byte of a checkpoint and say what is damaged", _VERIFY_EXAMPLES)
    verify.add_argument("path", type=Path, metavar="PATH", help=_PATH_HELP)
    verify.add_argument("--step", type=int, metavar="N", help=_STEP_HELP)
    verify.set_defaults(run=_guarded(_verify))


def _add_diff(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = _command(actions, "diff", "say how two checkpoints differ", _DIFF_EXAMPLES)
    diff.add_argument("a", type=Path, metavar="A", help=_PATH_HELP)
    diff.add_argument("b", type=Path, metavar="B", help="another")
    diff.add_argument("--weights", action="store_true", help="compare only the values of parameters and buffers")
    diff.add_argument("--all", action="store_true", help="list all that differs, not the first 20 of each kind")
    diff.set_defaults(run=_guarded(_diff, damaged_code=2))


def _add_reshard(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    reshard = _command(actions, "reshard", "write a checkpoint again with more or fewer files", _RESHARD_EXAMPLES)
    reshard.add_argument("source", type=Path, metavar="SRC", help=_PATH_HELP)
    reshard.add_argument("root", type=Path, metavar="DST", help="the folder in which the step's folder is made")
    reshard.add_argument(
        "--files", type=int, required=True, metavar="N", help="over which the tensors are spread evenly"
    )
    reshard.add_argument("--step", type=int, metavar="N", help="this one of several; the newest whole one by default")
    reshard.set_defaults(run=_guarded(_reshard))


def _add_export(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = _command(actions, "export", "write the weights of a checkpoint as a Hugging Face folder", _EXPORT_EXAMPLES)
    export.add_argument("source", type=Path, metavar="SRC", help=_PATH_HELP)
    export.add_argument("folder", type=Path, metavar="DST", help="the folder to be: not there yet, or empty")
    export.add_argument(
        "--dtype", choices=get_args(Dtype), help="of the weights; by default that of the run's parameters"
    )
    export.add_argument(
        "--hf-config", type=Path, metavar="FILE", help="the config.json to put there; by default the checkpoint's own"
    )
    export.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="whose tokenizer to put there; by default the run's own"
    )
    export.add_argument("--step", type=int, metavar="N", help="this one of several; the newest whole one by default")
    export.set_defaults(run=_guarded(_export))


def _add_import(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    import_ = _command(actions, "import", "write a Hugging Face folder as a checkpoint of weights", _IMPORT_EXAMPLES)
    import_.add_argument("folder", type=Path, metavar="HF_FOLDER", help="with model.safetensors, or its index")
    import_.add_argument("root", type=Path, metavar="DST", help="the folder in which step-00000000 is made")
    import_.add_argument("--files", type=int, default=1, metavar="N", help="over which the tensors are spread evenly")
    import_.add_argument("--decoder", action="store_true", help="name tensors as the decoder of `shardwise train` does")
    import_.set_defaults(run=_guarded(_import))


def _guarded(
    command: Callable[[argparse.Namespace], int], damaged_code: int = 1
) -> Callable[[argparse.Namespace], int]:
    """Turn what a command raises into a line and an exit code."""

    def run(arguments: argparse.Namespace) -> int:
        from shardwise.checkpoint.manifest import CheckpointError, DamagedError

        try:
            return command(arguments)
        except DamagedError as error:
            return refuse(error, damaged_code)
        except CheckpointError as error:
            # Its cause is what the system refused, if it did.
            return refuse(error, damaged_code if isinstance(error.__cause__, OSError) else 2)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            return _say(f"{where}{error.strerror or error}", damaged_code)
        except KeyboardInterrupt:
            return _say("stopped by Ctrl-C", 130)

    return run


def _say(message: object, exit_code: int) -> int:
    print(f"shardwise: {printable(str(message))}", file=sys.stderr)
    return exit_code


def _show(arguments: argparse.Namespace) -> int:
    from shardwise.checkpoint import show
    from shardwise.checkpoint.commit import read_manifest
    from shardwise.checkpoint.find import find, is_root, survey

    path, pattern = arguments.path, arguments.tensors
    if path is None and pattern is not None and Path(pattern).exists():
        # In `show --tensors PATH` argparse takes the path for the pattern.
        path, pattern = Path(pattern), "*"
    if path is None:
        arguments.refuse("the following arguments are required: PATH")
    folders = find(path, arguments.step)
    found = survey(path) if is_root(path) and arguments.step is None else []
    whole = [(each.folder, each.manifest) for each in found if each.manifest is not None]
    if found and not whole:
        _print(show.render_root(path, found))
        newest = found[0]
        why = f"the newest, {newest.folder.name}: {newest.damage}"
        return _say(f"{path} has no whole checkpoint; of {why}; copy it again from where it was saved", 1)
    folder, manifest = whole[0] if found else (folders[0], read_manifest(folders[0]))
    tensors = show.matching(manifest.tensors, pattern) if pattern is not None else []
    if arguments.json:
        detail = show.to_json(folder, manifest, tensors)
        print(json.dumps(show.root_to_json(path, found) | {"newest": detail} if found else detail, indent=2))
        return 0
    if found and not tensors:
        _print(show.render_root(path, found), "")
    _print(show.render_checkpoint(folder, manifest))
    if tensors:
        _print(show.render_tensors(tensors))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from shardwise.checkpoint.find import find

    folder = find(arguments.path, arguments.step)[0]
    with _bar("reading") as report:
        from shardwise.checkpoint.offline import verify
        from shardwise.checkpoint.show import render_verification

        start_s = time.monotonic()
        found = verify(folder, report)
    _print(render_verification(folder, found, time.monotonic() - start_s))
    return 1 if found.damages else 0


def _diff(arguments: argparse.Namespace) -> int:
    from shardwise.checkpoint.find import find

    a, b = find(arguments.a)[0], find(arguments.b)[0]
    with _bar("comparing") as report:
        from shardwise.checkpoint.compare import compare
        from shardwise.checkpoint.show import render_difference

        found = compare(a, b, arguments.weights, report)
    _print(render_difference(a, b, found, arguments.all))
    return 1 if found else 0


def _reshard(arguments: argparse.Namespace) -> int:
    _check_files(arguments.files)
    source = _newest_whole(arguments.source, arguments.step)
    with _bar("writing") as report:
        from shardwise.checkpoint.offline import reshard
        from shardwise.checkpoint.show import render_resharded

        start_s = time.monotonic()
        folder, files = reshard(source, arguments.root, arguments.files, report)
    _print(render_resharded(source, folder, files, time.monotonic() - start_s))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    source = _newest_whole(arguments.source, arguments.step)
    with _bar("writing") as report:
        from shardwise.checkpoint.convert import export_checkpoint
        from shardwise.checkpoint.show import render_exported

        start_s = time.monotonic()
        dtype, hf_config = arguments.dtype, arguments.hf_config
        of_run = source.absolute().parent.parent / "tokenizer"  # as shardwise train leaves it
        tokenizer = arguments.tokenizer or (of_run if of_run.is_dir() else None)
        exported = export_checkpoint(
            source, arguments.folder, dtype=dtype, hf_config=hf_config, tokenizer=tokenizer, progress=report
        )
    _print(render_exported(source, exported, time.monotonic() - start_s))
    if tokenizer is None:
        _print("no tokenizer is beside them, as the checkpoint is in no run's folder; --tokenizer FOLDER adds one")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    _check_files(arguments.files)
    with _bar("writing") as report:
        from shardwise.checkpoint.convert import import_folder
        from shardwise.checkpoint.show import render_resharded

        start_s, is_decoder = time.monotonic(), arguments.decoder
        folder, files = import_folder(
            arguments.folder, arguments.root, arguments.files, is_decoder=is_decoder, progress=report
        )
    _print(render_resharded(arguments.folder, folder, files, time.monotonic() - start_s))
    return 0


def _newest_whole(path: Path, step: int | None) -> Path:
    """Return the newest whole checkpoint at `path`; print a line on stderr where newer ones are damaged."""
    from shardwise.checkpoint.find import find, newest_whole

    source, _ = newest_whole(path, step)
    if (newest := find(path, step)[0]) != source:
        print(f"shardwise: {newest.name} is damaged (see checkpoint verify); taking {source.name}", file=sys.stderr)
    return source


def _check_files(num_files: int) -> None:
    from shardwise.checkpoint.manifest import CheckpointError

    if not 1 <= num_files <= _MAX_FILES:
        raise CheckpointError(
            "num-files", f"--files {num_files} is no number of files; give one from 1 to {_MAX_FILES}"
        )


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
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=None)
        yield lambda num_done_bytes, num_bytes: bars.update(task, completed=num_done_bytes, total=num_bytes)
