"""Run the commands of `shardwise`: train, verify, plan, run, doctor and the others that `shardwise --help` lists.

It reads arguments and the environment, and turns errors into one line and an exit code: 2 for what the user can fix in
the config, 1 for a run that failed, 128 + n for signal n. torch is imported by the commands that need it, so that
`shardwise --help` answers at once.

>>> main(["config"])  # doctest: +ELLIPSIS
# What `shardwise train` uses ...
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Final, TextIO

import click
from click.shell_completion import get_completion_class, shell_complete

from shardwise import __version__
from shardwise.cli.checkpoint import checkpoint
from shardwise.cli.command import Choice, as_written, settings, split
from shardwise.cli.convert import convert
from shardwise.cli.doctor import doctor
from shardwise.cli.launch import launch
from shardwise.cli.plan import plan
from shardwise.cli.report import report
from shardwise.cli.timeline import timeline
from shardwise.cli.train import train
from shardwise.cli.verify import verify
from shardwise.config.errors import ConfigError, OneLineError, system_code
from shardwise.config.other_tools import setting_of
from shardwise.config.resolve import all_keys, describe_key, reference_tables
from shardwise.launch.as_deepspeed import deepspeed_environment
from shardwise.launch.signals import exit_with_parent
from shardwise.report.console import refuse
from shardwise.schedule import ScheduleError

_BYTES_AT_REST: Final = 2 + 4 + 12
_COMPLETE: Final = "_SHARDWISE_COMPLETE"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a rank of a run does not return."""
    if _COMPLETE in os.environ:
        return shell_complete(cli, {}, "shardwise", _COMPLETE, os.environ[_COMPLETE])
    for stream in (sys.stdout, sys.stderr):
        # A sample may hold any character, and a terminal may not know it.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    exit_with_parent(os.environ)
    try:
        with cli.make_context("shardwise", list(sys.argv[1:] if argv is None else argv)) as context:
            exit_code: int = cli.invoke(context) or 0
        sys.stdout.flush()
        return exit_code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        return _refuse_usage(error)
    except (OneLineError, ScheduleError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("shardwise: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who reads, such as `head`, has seen enough
        _silence(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        if error.filename is None:
            _silence(sys.stdout)
        said = f"{error.filename or 'the answer'}: {error.strerror}"
        return refuse(OneLineError(system_code(error, "file-unusable"), said), 1)


def _refuse_usage(error: click.UsageError) -> int:
    """Print in a line, with a code, what is wrong with a command; an unknown flag may be meant as a config's key."""
    message, path = error.format_message(), error.ctx.command_path if error.ctx is not None else "shardwise"
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        leaf = error.option_name.lstrip("-").replace("-", "_")
        takes_keys = any(param.name == "settings" for param in error.ctx.command.params)
        keys = [f"{key}=..." for key in all_keys() if takes_keys and leaf in (key, key.rpartition(".")[2])]
        keys = keys or [setting for setting in [setting_of(leaf)] if takes_keys and setting]
        message = f"{error.message} Did you mean {' or '.join(keys)}?" if keys else message
    stop = "" if message.endswith((".", "?")) else "."
    return refuse(OneLineError(_usage_code(error), f"{' '.join(message.split())}{stop} See {path} --help"))


def _usage_code(error: click.UsageError) -> str:
    """Return the code of what click refuses, by the class of its error and the kind of the parameter."""
    is_argument = isinstance(getattr(error, "param", None), click.Argument)
    if isinstance(error, click.NoSuchOption):
        return "unknown-option"
    if isinstance(error, click.MissingParameter):
        return "missing-argument" if is_argument else "missing-option"
    if isinstance(error, click.BadParameter):
        return "argument-value" if is_argument else "option-value"
    if isinstance(error, click.BadOptionUsage):
        return "option-use"
    if error.ctx is not None and isinstance(error.ctx.command, click.Group):
        return "unknown-command"
    return "unexpected-argument"


def _silence(stream: TextIO) -> None:
    """Let what a stream could not write go nowhere, or Python tries once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _InOrder(click.Group):
    """List commands in the order in which they were added: what most people need comes first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
)
@click.version_option(__version__, message="shardwise %(version)s")
def cli() -> None:
    """Train PyTorch models too large for the machines at hand."""


@click.command()
@click.option("--markdown", is_flag=True, help="print tables instead: values, default of the library, meaning")
@settings()
def config(markdown: bool, settings: Sequence[str]) -> None:
    """Print every key with its meaning and default, as TOML."""
    from shardwise.train.setup import job_config

    used = job_config(*split(settings))
    if markdown:
        print(reference_tables())
        return
    print("# What `shardwise train` uses on this machine; keys without a value follow from the others.")
    for name, section in used.model_dump(mode="json").items():
        print(f"\n[{name}]")
        for key, value in section.items():
            print("\n".join(f"# {line}" for line in textwrap.wrap(describe_key(f"{name}.{key}"), width=100)))
            # TOML writes strings, numbers, booleans and lists of these as JSON does.
            print(f"# {key} =" if value is None else f"{key} = {json.dumps(value, ensure_ascii=False)}")


@click.command()
def presets() -> None:
    """List the models that train knows by name."""
    from shardwise.models import PRESETS, num_params
    from shardwise.runtime.format import format_count

    rows: list[tuple[str, ...]] = [("preset", "params", "layers", "hidden", "heads", "ffn", "vocab", "context", "GiB")]
    for name, shape in PRESETS.items():
        heads, gib = f"{shape.num_heads}/{shape.num_kv_heads}", _BYTES_AT_REST * num_params(shape) / 2**30
        experts = f"{shape.num_experts} x " * (shape.num_experts > 0)
        ffn = f"{experts}{shape.size_of_expert:,}"
        sizes = (ffn, f"{shape.vocab_size:,}", f"{shape.max_seq_len:,}")
        width = f"{shape.hidden_size:,}"
        rows.append((name, format_count(num_params(shape)), f"{shape.num_layers}", width, heads, *sizes, f"{gib:,.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        columns = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *columns]))
    print("\nheads: of queries / of keys and values")
    print("ffn: inner width, of each of so many experts")
    print("GiB: at extra over all ranks of ZeRO-3, 18 bytes a parameter: bf16, fp32 gradients and master, Adam")


@click.command(
    epilog=as_written("""
examples:
  shardwise run --as-deepspeed -- accelerate launch --use_deepspeed train.py
  shardwise run --as-deepspeed -- deepspeed --num_gpus 8 train.py --deepspeed_config ds.json
  eval "$(shardwise as-deepspeed)"                    the same for all that this shell starts
""")
)
@click.option("--as-deepspeed", is_flag=True, required=True, help="answer to the name deepspeed")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...", required=True)
def run(as_deepspeed: bool, command: Sequence[str]) -> None:
    """Run a command whose scripts import deepspeed, and get this library."""
    try:
        os.execvpe(command[0], tuple(command), {**os.environ, **deepspeed_environment(os.environ)})
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError("program-not-usable", f"{command[0]}: {error.strerror}; give its whole path") from None


@click.command("as-deepspeed")
def as_deepspeed() -> None:
    """Print what makes a shell's scripts get this library as deepspeed."""
    for name, value in deepspeed_environment(os.environ).items():
        print(f"export {name}={shlex.quote(value)}")


@click.command(epilog=as_written('example:\n  eval "$(shardwise completion bash)"     in ~/.bashrc'))
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete commands, flags and keys."""
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    print(completion_class(cli, {}, "shardwise", _COMPLETE).source())


for _each in (train, plan, verify, checkpoint, report, doctor, launch, config, presets, timeline):
    cli.add_command(_each)
for _each in (convert, run, as_deepspeed, completion):
    cli.add_command(_each)
