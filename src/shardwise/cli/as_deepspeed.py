"""Runs the commands `run --as-deepspeed` and `as-deepspeed`: a script that imports deepspeed gets this library."""

from __future__ import annotations

import argparse
import os
import shlex

from shardwise.config.resolve import ConfigError
from shardwise.launch.as_deepspeed import deepspeed_environment
from shardwise.report.console import refuse

_EXAMPLES = """\
examples:
  shardwise run --as-deepspeed -- accelerate launch --use_deepspeed train.py
  shardwise run --as-deepspeed -- deepspeed --num_gpus 8 train.py --deepspeed_config ds.json
  eval "$(shardwise as-deepspeed)"                    the same for all that this shell starts
"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` and `as-deepspeed` to the commands of `shardwise`."""
    run = commands.add_parser(
        "run",
        help="run a command whose scripts import deepspeed, and get this library",
        description="Run a command; scripts in it that import deepspeed get this library.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--as-deepspeed", action="store_true", required=True, help="answer to the name deepspeed")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments")
    run.set_defaults(run=_run)
    shell = commands.add_parser("as-deepspeed", help="print what makes a shell's scripts get this library as deepspeed")
    shell.set_defaults(run=_print_exports)


def _run(arguments: argparse.Namespace) -> int:
    """Become the command: its signals and its exit code are its own."""
    command = arguments.command[arguments.command[:1] == ["--"] :]
    if not command:
        return refuse(ConfigError("no-command", "no command was given; write shardwise run --as-deepspeed -- COMMAND"))
    environ = {**os.environ, **deepspeed_environment(os.environ)}
    try:
        os.execvpe(command[0], command, environ)
    except FileNotFoundError:
        return refuse(ConfigError("program-not-found", f"{command[0]} is no program on PATH; give its whole path"))
    except PermissionError:
        return refuse(
            ConfigError("program-not-executable", f"{command[0]} cannot be run; name its interpreter before it")
        )


def _print_exports(arguments: argparse.Namespace) -> int:
    for name, value in deepspeed_environment(os.environ).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0
