"""Runs the commands of `shardwise`: train, verify, plan, run, doctor and the others that `shardwise --help` lists.

It reads arguments and the environment, and turns errors into one line and an exit code: 2 for what the user can fix in
the config, 1 for a run that failed, 128 + n for signal n. torch is imported by the commands that need it, so that
`shardwise --help` answers at once.

>>> main(["config"])  # doctest: +ELLIPSIS
# What `shardwise train` uses ...
"""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rich.console import Console

from shardwise import __version__
from shardwise.cli.as_deepspeed import add_commands as add_as_deepspeed_commands
from shardwise.cli.attention import add_command as add_attention_command
from shardwise.cli.checkpoint import add_commands as add_checkpoint_commands
from shardwise.cli.convert import add_command as add_convert_command
from shardwise.cli.launch import add_command as add_launch_command
from shardwise.cli.plan import add_command as add_plan_command
from shardwise.cli.report import add_command as add_report_command
from shardwise.cli.timeline import add_command as add_timeline_command
from shardwise.cli.verify import add_command as add_verify_command
from shardwise.config.errors import with_code
from shardwise.config.resolve import Config, ConfigError, all_keys
from shardwise.launch.environment import RankEnv, cache_folder, detect, lone_rank
from shardwise.launch.local import default_num_ranks, launch_local
from shardwise.launch.signals import StopFlag, exit_with_parent, install_stop_signal
from shardwise.report.console import Terminal, refuse

_BYTES_AT_REST = 2 + 4 + 12
_TRAIN_EXAMPLES = f"""\
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
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a rank of a run does not return."""
    arguments = parse_arguments(argv)
    if arguments is None:
        return 2
    for stream in (sys.stdout, sys.stderr):
        # A sample may hold any character, and a terminal may not know it.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        exit_code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads, such as `head`, has seen enough
        _silence(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _silence(sys.stdout)
        print(f"shardwise: cannot write {error.filename or 'the answer'}: {error.strerror}", file=sys.stderr)
        return 1
    return exit_code


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace | None:
    """Parse a command line and run nothing; without a command print the help and return None."""
    parser = _parser()
    arguments, extra = parser.parse_known_args(argv)
    # argparse would say so before it says which flag is unknown.
    if not hasattr(arguments, "run"):
        parser.print_help(sys.stderr)
        return None
    # argparse does not take up positional arguments again after an option.
    if extra and not hasattr(arguments, "settings"):
        parser.error(f"{' '.join(extra)} is more than the command takes")
    if extra:
        arguments.settings += extra
    return arguments


def _silence(stream: TextIO) -> None:
    """Let what a stream could not write go nowhere, or Python tries once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command in one line, with the nearest right word."""

    def error(self, message: str) -> NoReturn:
        if "invalid choice:" in message:
            word, *choices = re.findall(r"'([^']*)'", message)
            message = f"{word} is none of {', '.join(choices)}{_nearest(word, choices)}"
        where = "" if message.endswith(("?", "--help")) else f"; see {self.prog} --help"
        print(f"shardwise: {message}{where}", file=sys.stderr)
        sys.exit(2)

    def refuse_unknown(self, flag: str, following: Sequence[str]) -> NoReturn:
        """Refuse a flag that this command does not have; it may be meant as a key of the config."""
        name, separator, value = flag.partition("=")
        usage = self.format_usage()
        if not separator:
            value = next((text for text in following[:1] if not text.startswith("-")), "...")
        leaf = name.lstrip("-").replace("-", "_")
        keys = [key for key in all_keys() if leaf in (key, key.rpartition(".")[2])] if "key=value" in usage else []
        hint = f"; did you mean {' or '.join(f'{key}={value}' for key in keys)}?" if keys else ""
        hint = hint or _nearest(name, re.findall(r"--[a-z-]+", usage))
        self.error(f"{self.prog.removeprefix('shardwise ')} has no flag {name}{hint}")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse as argparse does, but refuse unknown flags here, where the known ones are."""
        known, extra = super().parse_known_args(args, namespace)
        for text in extra:
            if text.startswith("-"):
                given = list(args or ())
                self.refuse_unknown(text, given[given.index(text) + 1 :] if text in given else ())
        return known, extra


def _nearest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _parser() -> argparse.ArgumentParser:
    description = "Train PyTorch models too large for the machines at hand."
    parser: argparse.ArgumentParser = _Parser(prog="shardwise", description=description)
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_train_command(commands)
    add_verify_command(commands, _split, os.environ)
    add_checkpoint_commands(commands)
    add_plan_command(commands, _split, os.environ)
    add_timeline_command(commands, _split)
    add_report_command(commands, os.environ)
    add_attention_command(commands, _split)
    add_as_deepspeed_commands(commands)
    add_convert_command(commands)
    add_launch_command(commands)
    config = commands.add_parser("config", help="print every key with its meaning and default, as TOML")
    config.add_argument("--markdown", action="store_true", help="print the reference page docs/config.md instead")
    config.add_argument("settings", nargs="*", metavar="config.toml | key=value", help="as for train")
    config.set_defaults(run=_config)
    commands.add_parser("presets", help="list the models that train knows by name").set_defaults(run=_presets)
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can do, what is wrong with it and how to fix that",
        description="Look at this machine and measure it, in about 15 seconds; say what is wrong and how to fix it.",
        epilog="exit code: 0, or 1 where a finding is an error",
    )
    doctor.add_argument("--quick", action="store_true", help="look only, measure nothing")
    doctor.add_argument("--json", action="store_true", help="print all of it as JSON")
    doctor.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine for the planner, in at most 5 minutes; with --quick roughly, in one",
    )
    doctor.add_argument(
        "--num-procs", type=int, help="ranks that --calibrate lets work at once (default: as for train)"
    )
    doctor.add_argument("settings", nargs="*", metavar="config.toml | key=value", help="a job to look at, as for train")
    doctor.add_argument("--dir", type=Path, help="whose disk is measured (default: run.dir)")
    doctor.add_argument("--nvme-path", type=Path, help="the folder for states on NVMe (default: tiers.nvme_path)")
    # How the doctor starts the processes between which it measures collectives: a launcher, and its ranks.
    doctor.add_argument("--launch-calibrators", nargs=5, help=argparse.SUPPRESS)
    doctor.add_argument("--be-calibrator", nargs=4, help=argparse.SUPPRESS)
    doctor.set_defaults(run=_doctor)
    return parser


def _add_train_command(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a decoder on text, or fine-tune a Hugging Face model",
        description="Train a decoder on text, or fine-tune a Hugging Face model on text or chats; on every GPU there "
        "is, or on two CPU processes.",
        epilog=_TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("settings", nargs="*", metavar="config.toml | key=value", help="a TOML file, and keys to set")
    train.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder to fine-tune (model.path)")
    train.add_argument("--lora", action="store_const", const=16, help="train adapters of rank 16 (lora.rank)")
    train.add_argument("--data", metavar="PATH", help="text, JSONL, Parquet, or a folder of these (data.path)")
    train.add_argument("--dry-run", action="store_true", help="say what a rank would hold and send; start nothing")
    train.add_argument("--world-size", type=int, metavar="N", help="ranks of the dry run; none is started")
    train.add_argument(
        "--resume", metavar="auto | PATH", help="go on from the newest whole checkpoint of this run, or of a folder"
    )
    train.add_argument("--prepared", nargs=2, type=Path, help=argparse.SUPPRESS)
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    exit_with_parent(os.environ)
    try:
        if arguments.dry_run:
            return _dry_run(arguments)
        if arguments.world_size is not None:
            raise ConfigError(
                "flag-of-dry-run", f"--world-size {arguments.world_size} is of a dry run; add --dry-run or leave it out"
            )
        env = detect(os.environ)
        if env is None and arguments.prepared is None:
            return _start(arguments)
    except ConfigError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("shardwise: stopped by Ctrl-C before training began", file=sys.stderr)
        return 130
    # Before torch is imported, which takes a second or two: Ctrl-C is to be heard from the start.
    stop = install_stop_signal()
    env = replace(env or lone_rank(), cache=cache_folder(os.environ))
    exit_code = _be_rank(arguments, env, stop)
    from shardwise.launch.process_group import leave

    return leave(exit_code)


def _start(arguments: argparse.Namespace) -> int:
    from shardwise.launch.local import default_num_ranks
    from shardwise.train.resume import keep_global_batch
    from shardwise.train.run import start

    console = Console()
    config, resume = _job(arguments, console)
    if resume is not None:
        config = keep_global_batch(config, config.run.num_procs or default_num_ranks(config.run.device))
    return start(config, console, resume)


def _job(arguments: argparse.Namespace, console: Console | None) -> tuple[Config, Path | None]:
    """Return the config of the run, and the checkpoint that it goes on from; on the console, that there is none."""
    from shardwise.train.setup import job_config

    path, assignments = _split(arguments.settings)
    flags = {"model.path": arguments.model, "lora.rank": arguments.lora, "data.path": arguments.data}
    assignments = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None] + assignments
    if arguments.resume is None:
        return job_config(path, assignments), None
    from shardwise.train.resume import auto_place, resumed_job

    config, source = resumed_job(path, assignments, arguments.resume)
    if source is None and console is not None:
        line = f"no checkpoint in {auto_place(config)} yet; the run starts afresh"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return config, source


def _dry_run(arguments: argparse.Namespace) -> int:
    from shardwise.train.resume import keep_global_batch
    from shardwise.verify.dry_run import dry_run, dry_run_size, render

    config, resume = _job(arguments, None)
    num_ranks = dry_run_size(config, arguments.world_size)
    if resume is not None:
        config = keep_global_batch(config, num_ranks)
    with Console(stderr=True).status("reading the config") as status:
        run = dry_run(config, num_ranks, announce=status.update)
    Terminal().print(render(run))
    return 0


def _be_rank(arguments: argparse.Namespace, env: RankEnv, stop: StopFlag) -> int:
    from shardwise.launch.process_group import LaunchError
    from shardwise.train.resume import keep_global_batch
    from shardwise.train.run import join, run_prepared
    from shardwise.train.setup import resolve_job

    console = Console()
    try:
        if arguments.prepared is not None:
            folder, shard_path = arguments.prepared
            past = None if arguments.resume is None else Path(arguments.resume)
            return run_prepared(folder, shard_path, env, stop, console, past)
        try:
            config, resume = _job(arguments, console if env.rank == 0 else None)
            if resume is not None:
                config = keep_global_batch(config, env.world_size)
            config = resolve_job(config, env.world_size, num_local_ranks=env.local_world_size)
        except ConfigError as error:
            # All ranks of a machine find the same mistake: one of them says so.
            return refuse(error) if env.local_rank == 0 else 2
        return join(config, env, stop, console, resume)
    except ConfigError as error:
        return refuse(error)
    except LaunchError as error:
        return refuse(error, 1)
    except KeyboardInterrupt:
        return 130


def _config(arguments: argparse.Namespace) -> int:
    from shardwise.config.reference import describe_key, reference_page
    from shardwise.train.setup import job_config

    path, assignments = _split(arguments.settings)
    try:
        config = job_config(path, assignments)
    except ConfigError as error:
        return refuse(error)
    if arguments.markdown:
        print(reference_page())
        return 0
    print("# What `shardwise train` uses on this machine; keys without a value follow from the others.")
    for name, section in config.model_dump(mode="json").items():
        print(f"\n[{name}]")
        for key, value in section.items():
            print("\n".join(f"# {line}" for line in textwrap.wrap(describe_key(f"{name}.{key}"), width=100)))
            print(f"# {key} =" if value is None else f"{key} = {_toml(value)}")
    return 0


def _presets(arguments: argparse.Namespace) -> int:
    from shardwise.models import PRESETS, num_params
    from shardwise.runtime.format import format_count

    rows: list[tuple[str, ...]] = [("preset", "params", "layers", "hidden", "heads", "ffn", "vocab", "context", "GiB")]
    for name, shape in PRESETS.items():
        sizes = (shape.ffn_size, shape.vocab_size, shape.max_seq_len)
        rows.append(
            (
                name,
                format_count(num_params(shape)),
                f"{shape.num_layers}",
                f"{shape.hidden_size:,}",
                f"{shape.num_heads}/{shape.num_kv_heads}",
                *(f"{size:,}" for size in sizes),
                f"{_BYTES_AT_REST * num_params(shape) / 2**30:,.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        columns = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *columns]))
    print("\nheads: of queries / of keys and values")
    print("GiB: at extra over all ranks of ZeRO-3, 18 bytes a parameter: bf16, fp32 gradients and master, Adam")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    exit_with_parent(os.environ)
    if arguments.launch_calibrators is not None:
        return _launch_calibrators(*arguments.launch_calibrators)
    if arguments.be_calibrator is not None:
        return _be_calibrator(*arguments.be_calibrator)
    if arguments.calibrate:
        return _calibrate(arguments)
    try:
        with Console(stderr=True).status("starting torch") as status:
            from shardwise.doctor import diagnose, read_swap
            from shardwise.train.setup import job_config

            config = job_config(*_split(arguments.settings)) if arguments.settings else None
            diagnosis = diagnose(
                os.environ,
                arguments.dir or Path((config or Config()).run.dir),
                swap=read_swap(arguments.nvme_path, config),
                quick=arguments.quick,
                announce=lambda doing: status.update(doing),
            )
    except ConfigError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("shardwise: stopped by Ctrl-C", file=sys.stderr)
        return 130
    if arguments.json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        from shardwise.doctor.show import render

        Terminal(highlight=False).print(render(diagnosis))
    return diagnosis.exit_code


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure with as many ranks as a job would have, and keep the profile where the planner looks for it."""
    try:
        _refuse_unwritable(cache_folder(os.environ))
        with Console(stderr=True).status("starting torch") as status:
            from shardwise.doctor.calibrate import LIMIT_S, calibrate
            from shardwise.doctor.show import render_profile
            from shardwise.planner.profile import write_profile
            from shardwise.train.setup import device_kind, job_config

            config = job_config(*_split(arguments.settings))
            num_ranks = arguments.num_procs or config.run.num_procs or default_num_ranks(config.run.device)
            disk = arguments.nvme_path or arguments.dir or Path(config.tiers.nvme_path or ".")
            limit_words = "about a minute" if arguments.quick else f"at most {LIMIT_S / 60:.0f} minutes"
            status.update(f"measuring {num_ranks} ranks at work at once, {limit_words}")
            profile, failure = calibrate(device_kind(config), num_ranks, os.environ, disk, quick=arguments.quick)
        if failure is not None and not profile.matmuls:
            print(f"shardwise: the machine was not measured: {failure}", file=sys.stderr)
            return 1
        path = write_profile(profile, cache_folder(os.environ))
    except ConfigError as error:
        return refuse(error)
    except OSError as error:
        return refuse(
            ConfigError(
                "profile-not-writable", f"the profile cannot be kept: {error}; set XDG_CACHE_HOME to a writable folder"
            )
        )
    except KeyboardInterrupt:
        print("shardwise: stopped by Ctrl-C; no profile was written", file=sys.stderr)
        return 130
    if arguments.json:
        print(profile.to_json(), end="")
        return 0
    console = Terminal(highlight=False)
    console.print(render_profile(profile))
    if failure is not None:
        console.print(f"not all was measured: {failure}", style="yellow")
    console.print(f"written to {path}; shardwise plan reads it", soft_wrap=True)
    return 0


def _refuse_unwritable(folder: Path) -> None:
    """Find this out before minutes of measuring, not after them."""
    place = next(each for each in (folder, *folder.parents) if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(
            "profile-not-writable", f"the profile cannot be kept in {folder}; set XDG_CACHE_HOME to a writable folder"
        )


def _launch_calibrators(folder: str, device_kind: str, num_ranks: str, disk: str, extent: str) -> int:
    argv = ["-m", "shardwise.cli", "doctor", "--be-calibrator", folder, device_kind, disk, extent]
    return launch_local(argv, int(num_ranks), Path(folder), grace_s=1.0, failure_grace_s=1.0)


def _be_calibrator(folder: str, device_kind: str, disk: str, extent: str) -> int:
    from shardwise.comm.collectives import CommError
    from shardwise.doctor.calibrate import be_calibrator
    from shardwise.launch.process_group import LaunchError, leave

    env = detect(os.environ) or lone_rank()
    try:
        be_calibrator(env, Path(folder), "cuda" if device_kind == "cuda" else "cpu", Path(disk), extent)
    except (ConfigError, LaunchError, CommError) as error:
        print(with_code(error), file=sys.stderr)
        leave(1)
    leave(0)


def _split(settings: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the config file, if there is one, and the assignments."""
    files = [text for text in settings if "=" not in text]
    if missing := next((text for text in files if text in all_keys()), None):
        raise ConfigError("setting-without-value", f"{missing} has no value; write {missing}=...")
    if len(files) > 1:
        raise ConfigError(
            "two-config-files",
            f"{' and '.join(files)} are two config files; give one, and settings as section.key=value",
        )
    return (files[0] if files else None), [text for text in settings if "=" in text]


def _toml(value: object) -> str:
    """Return a value as TOML writes it; for strings, numbers, booleans and lists of these that is how JSON does."""
    return json.dumps(value, ensure_ascii=False)
