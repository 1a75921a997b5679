"""Hold what all commands share: the settings argument, kinds of values, and examples that are printed as written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import click
from click.shell_completion import CompletionItem

from shardwise.config.errors import ConfigError, with_code
from shardwise.config.resolve import Config, all_keys
from shardwise.launch.environment import RankEnv, detect, lone_rank
from shardwise.report.console import Terminal, progress, write_line

FILE: Final = click.Path(path_type=Path)
_MAX_COUNT: Final = 2**40
_MAX_AMOUNT: Final = 1e18


class Choice(click.Choice[str]):
    """Takes one of several words, and offers the one that a wrong word is most like."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return what click says, and the nearest word."""
        near = get_close_matches(str(value).lower(), [str(choice) for choice in self.choices], n=1)
        return super().get_invalid_choice_message(value, ctx) + (f" Did you mean {near[0]}?" if near else "")


class Count(click.IntRange):
    """Read a count that a calculation can take."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number > _MAX_COUNT:
            self.fail(f"{str(value)[:40]} is more than {_MAX_COUNT:,}.", param, ctx)
        return number


class Amount(click.FloatRange):
    """Read a finite number: nan is within all bounds of click's, and 1e999 is infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not number <= _MAX_AMOUNT:
            self.fail(f"{str(value)[:40]} is no number up to {_MAX_AMOUNT:g}.", param, ctx)
        return number


class Seconds(click.types.FloatParamType):
    """Read a duration; the help of a flag does not name its bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not 0 <= number <= _MAX_AMOUNT:
            self.fail(f"{str(value)[:40]} is no duration in seconds.", param, ctx)
        return number


class Folder(click.ParamType):
    """Reads the path of a folder, which need not be there yet; what is there must be a folder."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        nearest = next((parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent)), path)
        if not nearest.is_dir():
            self.fail(f"{nearest} is not a folder.", param, ctx)
        return path


class OutputFile(click.ParamType):
    """Read the path of a file to write; refuse one that cannot be written, before the work whose result it holds."""

    name = "file"

    def __init__(self, *, takes_dash: bool = False) -> None:
        self.takes_dash = takes_dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path, flag = Path(value), param.opts[0] if param is not None else "it"
        if str(path) == "-" and self.takes_dash:
            return path
        target = path if path.exists() else path.parent
        if str(path) == "-" or path.is_dir() or not os.access(target, os.W_OK):
            raise ConfigError("output-not-writable", f"{flag} {path} names no file that can be written; give another")
        return path


def as_written(text: str) -> str:
    r"""Mark each paragraph of a help text so that click does not wrap it.

    >>> as_written("a\n\nb")
    '\x08\na\n\n\x08\nb'
    """
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip("\n").split("\n\n"))


def _complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    keys = [CompletionItem(f"{key}=") for key in all_keys() if key.startswith(incomplete)]
    return [*keys, CompletionItem(incomplete, type="file")]


def settings(metavar: str = "[CONFIG.TOML] [KEY=VALUE]...") -> Any:
    """Return the argument that takes a config file and keys to set; a shell completes both."""
    return click.argument("settings", nargs=-1, metavar=metavar, shell_complete=_complete)


def split(settings: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the config file, if there is one, and the assignments.

    >>> split(["my.toml", "mesh.tp=2"])
    ('my.toml', ['mesh.tp=2'])
    """
    files = [text for text in settings if "=" not in text]
    if missing := next((text for text in files if text in all_keys()), None):
        raise ConfigError("setting-without-value", f"{missing} has no value; write {missing}=...")
    if len(files) > 1:
        raise ConfigError(
            "two-config-files",
            f"{' and '.join(files)} are two config files; give one, and settings as section.key=value",
        )
    return (files[0] if files else None), [text for text in settings if "=" in text]


def show_dry_run(
    config: Config, world_size: int, ranks: Sequence[int] | Literal["stages"] = (0,), limit_s: float = 30.0
) -> int:
    """Simulate `ranks` of the job of a `config` on `world_size` ranks, print what they hold and send, and return 0.

    After `limit_s` seconds the planner estimates what they hold.
    """
    from shardwise.verify.dry_run import dry_run, render

    with progress("reading the config") as announce:
        run = dry_run(config, world_size, ranks, announce, limit_s)
    Terminal().print(render(run))
    return 0


def be_rank(work: Callable[[RankEnv], None]) -> NoReturn:
    """Do a rank's work and end this process; what fails it is a line on stderr, which the launcher shows."""
    from shardwise.comm.collectives import CommError
    from shardwise.launch.process_group import LaunchError, leave

    try:
        work(detect(os.environ) or lone_rank())
    except (ConfigError, LaunchError, CommError) as error:
        write_line(with_code(error), to_stderr=True)
        leave(2 if isinstance(error, ConfigError) else 1)
    leave(0)
