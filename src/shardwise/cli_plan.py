"""The command `shardwise plan`: so far its dry run, which simulates ranks of a job and says what they hold and send.

Nothing is started. As in `shardwise.cli`, errors are one line and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from shardwise.config import ConfigError

if TYPE_CHECKING:
    from shardwise.train.dry_run import Choice

_EXAMPLES = """\
Without --ranks one rank of each place in the pipeline is simulated: of up to 8 places all, of more the first, the
second, the middle and the last.

examples:
  shardwise plan --dry-run my.toml --world-size 512
  shardwise plan --dry-run my.toml --world-size 512 mesh.pp=8 mesh.tp=8 pipeline.schedule=zb-h1
  shardwise plan --dry-run my.toml --ranks worst       all of the rank with the highest peak
  shardwise plan --dry-run my.toml --ranks 0,1,64      these ranks
"""

Split = Callable[[Sequence[str]], tuple[str | None, list[str]]]
"""From a command's settings to its config file, if there is one, and the assignments."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], split: Split) -> None:
    """Add `plan` to the commands of `shardwise`."""
    parser = commands.add_parser(
        "plan",
        help="say what the ranks of a job would hold and send",
        description="Simulate ranks of a job, one of every pipeline stage, and say what they hold and send.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", metavar="config.toml | key=value", help="as for train")
    parser.add_argument("--dry-run", action="store_true", help="simulate the config as it is; start nothing")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks of the job (default: what the mesh says)")
    parser.add_argument("--ranks", metavar="0,1,... | worst | stages", help="which ranks to simulate")
    parser.set_defaults(run=partial(_plan, split=split))


def _plan(arguments: argparse.Namespace, split: Split) -> int:
    try:
        if not arguments.dry_run:
            raise ConfigError(
                "shardwise plan does not search for a layout yet; add --dry-run to simulate a config's own"
            )
        ranks = parse_ranks(arguments.ranks)
        # torch takes seconds to import.
        from shardwise.train.dry_run import dry_run, dry_run_size, render
        from shardwise.train.job import job_config

        config = job_config(*split(arguments.settings))
        with Console(stderr=True).status("reading the config") as status:
            run = dry_run(config, dry_run_size(config, arguments.world_size), ranks, status.update)
    except ConfigError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("shardwise: stopped by Ctrl-C", file=sys.stderr)
        return 130
    Console().print(render(run))
    return 0


def parse_ranks(text: str | None) -> list[int] | Choice | None:
    """What `--ranks` says.

    >>> parse_ranks("0,8, 16"), parse_ranks("worst"), parse_ranks(None)
    ([0, 8, 16], 'worst', None)

    Raises:
        ConfigError: it is something else.
    """
    if text is None:
        return None
    if text == "worst":
        return "worst"
    if text == "stages":
        return "stages"
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--ranks {text} names no ranks; give numbers such as 0,8,16, or worst, or stages")
    return [int(part) for part in parts]
